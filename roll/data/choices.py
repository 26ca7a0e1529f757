"""The choices of a multiple-choice task, in every form in which datasets publish them, and which one an answer names.

Invariants: choices have an order and one letter each. The letters are the published labels if those are single letters,
otherwise A, B, C … in order; a table's tasks have their choices as `{letter: text}`.

Example: `{"text": ["ice", "fog"], "label": ["1", "2"]}` has the letters A and B; the answer `2` is its label 2, so B.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
AnswerIs: TypeAlias = Literal["", "label", "index", "number", "text", "key"]
"""How an answer names a choice: by label, by position counted from 0 or from 1, by text, or by label or index but never
by text; empty: the first that fits."""
_TEXTS, _LABELS = ("text", "texts"), ("label", "labels")
_SHAPES = "a list of texts, {text: [...], label: [...]}, a list of {label, text}, or {label: text}"


@dataclass(frozen=True)
class Choices:
    """Choices in their order."""

    labels: tuple[str, ...]
    """As published, without brackets and full stops; letters if none were published."""
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("there are no choices")
        if len(self.labels) != len(self.texts):
            raise ValueError(f"there are {len(self.texts)} choices, but {len(self.labels)} labels")
        if len(self.texts) > len(ALPHABET):
            raise ValueError(f"there are {len(self.texts)} choices, but there can be {len(ALPHABET)}")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"two choices have the same label: {', '.join(self.labels)}")

    @classmethod
    def of(cls, published: Any) -> Choices:
        """Choices in any of the published forms, or in one of them as JSON text; `ValueError` says what is wrong."""
        value = _parse(published) if isinstance(published, str) else published
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, Mapping):
            texts, labels = _first(value, _TEXTS), _first(value, _LABELS)
            if _is_list(texts) and _is_list(labels):
                return cls(tuple(map(_label, labels)), tuple(map(_text, texts)))
            return cls.labelled_by({str(label): text for label, text in value.items()})
        if not _is_list(value):
            raise ValueError(f"{published!r:.80} is not {_SHAPES}")
        if value and all(isinstance(item, Mapping) for item in value):
            texts = [_first(item, _TEXTS) for item in value]
            labels = [_first(item, _LABELS) for item in value]
            if any(text is None for text in texts):
                raise ValueError(f"{published!r:.80} is not {_SHAPES}")
            if all(label is not None for label in labels):
                return cls(tuple(map(_label, labels)), tuple(map(_text, texts)))
            return cls.unlabelled(texts)
        return cls.unlabelled(value)

    @classmethod
    def unlabelled(cls, texts: Sequence[Any]) -> Choices:
        """Texts, which get the first letters of the alphabet."""
        return cls(tuple(ALPHABET[: len(texts)]), tuple(map(_text, texts)))

    @classmethod
    def labelled_by(cls, texts: Mapping[str, Any]) -> Choices:
        """Texts by their labels; a label without a text (null) is none of the choices."""
        present = {label: text for label, text in texts.items() if text is not None}
        return cls(tuple(map(_label, present)), tuple(map(_text, present.values())))

    @property
    def letters(self) -> str:
        """The letter of each choice, by which a response names it."""
        are_letters = all(len(label) == 1 and label in ALPHABET for label in self.labels)
        return "".join(self.labels) if are_letters else ALPHABET[: len(self.labels)]

    @property
    def by_letter(self) -> dict[str, str]:
        return dict(zip(self.letters, self.texts, strict=True))

    def __str__(self) -> str:
        """One choice per line, as in a prompt: `A. ice`."""
        return "\n".join(f"{letter}. {text}" for letter, text in self.by_letter.items())

    def position(self, answer: Any, by: AnswerIs = "") -> int:
        """The position of the choice that an answer names; raises `ValueError` if it names none.

        Unless `by` says how, an answer is tried as a label first, so `3` is the third of the labels `1 2 3 4`, and `B`
        the second of texts without labels. Then a number is tried as a position, counted from 0, and as a text; a text is
        tried as the text of a choice, and as a position.
        """
        if answer is None:
            raise ValueError("the answer is null, which names no choice")
        readings = {"label": self._by_label, "index": self._by_index, "number": self._by_number, "text": self._by_text}
        if by:
            order = ["label", "index"] if by == "key" else [by]
        elif isinstance(answer, int | float) and not isinstance(answer, bool):
            order = ["label", "index", "text"]
        else:
            order = ["label", "text", "index"]
        for reading in order:
            found = readings[reading](answer)
            if found is not None:
                return found
        named = f" by its {by}" if by else ""
        have = ", ".join(f"{label} ({text!r:.30})" for label, text in zip(self.labels, self.texts, strict=True))
        raise ValueError(f"the answer {answer!r:.60} names none of the choices{named}: {have}")

    def shuffled(self, seed: str) -> tuple[Choices, tuple[int, ...]]:
        """The choices in an order that depends only on the seed and their texts, with new letters; and their former
        positions."""
        order = sorted(range(len(self.texts)), key=lambda position: self.texts[position])
        random.Random(f"{seed}\n{sorted(self.texts)}").shuffle(order)
        return Choices.unlabelled([self.texts[position] for position in order]), tuple(order)

    def _by_label(self, answer: Any) -> int | None:
        label = _label(answer)
        return self.labels.index(label) if label in self.labels else None

    def _by_index(self, answer: Any) -> int | None:
        index = _integer(answer)
        return index if index is not None and 0 <= index < len(self.texts) else None

    def _by_number(self, answer: Any) -> int | None:
        number = _integer(answer)
        return number - 1 if number is not None and 1 <= number <= len(self.texts) else None

    def _by_text(self, answer: Any) -> int | None:
        text = _text(answer)
        return self.texts.index(text) if text in self.texts else None


def _label(value: Any) -> str:
    """`(b)`, `B.` and `b` are the label B; 3 and 3.0 are the label 3."""
    whole = _integer(value)
    text = str(value if whole is None else whole).strip()
    bare = text.strip("()[].: ")
    return (bare.upper() if len(bare) == 1 else bare) or text


def _text(value: Any) -> str:
    if value is None or isinstance(value, Mapping | list | tuple):
        raise ValueError(f"{value!r:.80} is not the text of a choice")
    return str(value).strip()


def _integer(value: Any) -> int | None:
    """A whole number, however written: 3, 3.0, `3`."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None
    return int(number) if number is not None and number.is_integer() and abs(number) < 1e6 else None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "tolist")


def _first(value: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((value[key] for key in keys if key in value), None)


def _parse(text: str) -> Any:
    """The value of text that is JSON, or a Python list or dictionary. In an array as NumPy prints it (`['ice' 'fog']`),
    Python would concatenate the texts."""
    joined = re.search(r"""['"]\s+['"]""", text)
    for read in (json.loads,) if joined else (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, Mapping | list | tuple):
            return value
    raise ValueError(f"{text!r:.80} is not {_SHAPES}")
