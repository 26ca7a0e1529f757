"""`choice`: the letter of the right answer in a multiple-choice task."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace

from roll.data.choices import ALPHABET, Choices
from roll.data.task import Response, Task
from roll.reward.extract import marked_answer, strip_thinking

_WRAP = r"(?:[\s*_$(\[{\"'`]|\\text|\\mathrm|\\textbf|\\boxed|\\\(){0,8}"
"""What may surround a letter: brackets, quotes, emphasis, LaTeX. Bounded, so that searches end."""
_AFTER = r"(?![\w])(?!['’](?:s|m|d|ll|ve|re)\b)"

_BETWEEN = re.compile(r"[\s*_]{0,4}(?:,|/|&|;|,?\s{0,2}\bor\b|,?\s{0,2}\band\b)[\s*_]{0,4}", re.IGNORECASE)
_ANSWER_INTRODUCED = re.compile(
    r"\b(?:answer|choice|option)s?\b(?:\s{1,4}(?:is|are|was)\b[\s:]{0,4}|[\s*_]{0,4}[:=])", re.IGNORECASE
)
_DENIED_BEFORE = re.compile(
    r"""(?:\b(?:can)?not|n['’]t|\bnever|\bneither|\bnor|\bexcept(?:\sfor)?|\b(?:any|every)thing\sbut|\ball\sbut|\bnone\sof|[¬!])
    (?:\s(?:be|the|an?))?(?:\s(?:answer|option|choice|letter))?[\s*_$(\[{"'`]{0,4}$""",
    re.VERBOSE | re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[)\]}*_\"'`$]{0,4}\s{1,2}(?:is|was)(?:n['’]t|\s(?:not|wrong|incorrect|false)\b)", re.IGNORECASE
)
_JOINING = frozenset(
    ("or", "and", "both", "either", "maybe", "perhaps", "possibly", "alternatively", "also", "text", "lor")
)


@dataclass(frozen=True)
class Choice:
    """1 if the letter chosen is the task's answer, else 0.

    The answer is a letter, however written (`B`, `(b)`, `B.`). For tasks whose info has `choices`, in any form that
    `Choices` reads, it is the label of the right one, its position counted from 0, or its text: the first of these that
    exists. Choices whose labels are digits may be named by digit or by letter. The chosen letter is searched in this
    order, the last of a kind counts: an `<answer>` tag, a box, the text after `####`, a sentence such as `The answer is
    (B)`, a text or line that is a letter and its choice, a letter in brackets, a capital letter on its own; finally, if
    `texts` allows it, the text of exactly one choice. A tag, a box or `####` decides, whatever its content; if it names
    several letters, none is chosen.
    """

    letters: str = ""
    """The possible letters; empty: as many as the task's `choices`, or A to J without choices."""
    texts: bool = True
    """Whether the text of a choice counts like its letter."""
    deterministic = True

    def __post_init__(self) -> None:
        if self.letters and (not self.letters.isalpha() or len(set(self.letters.upper())) < len(self.letters)):
            raise ValueError(f"letters is {self.letters!r}, but takes letters, each once: ABCD")

    def __call__(self, task: Task, response: Response) -> float:
        letters, choices = self._letters_and_choices(task)
        return float(self._choose(response, letters, choices) == _answer(task, letters, choices))

    def answer_of(self, task: Task, response: Response) -> str | None:
        """The letter chosen."""
        return self._choose(response, *self._letters_and_choices(task))

    def _letters_and_choices(self, task: Task) -> tuple[str, Choices | None]:
        """The letters and the choices of a task."""
        choices = choices_of(task)
        return self.letters.upper() or (choices.letters if choices else ALPHABET[:10]), choices

    def _choose(self, response: Response, letters: str, choices: Choices | None) -> str | None:
        digits = _digits(choices)
        letter = chosen_letter(response.text, letters + digits)
        if letter is not None and letter in digits:
            letter = letters[digits.index(letter)]
        if letter is None and self.texts and choices:
            letter = _by_text(response.text, letters, choices.texts)
        return letter

    def check_answer(self, task: Task) -> bool:
        """Always checks: raises `ValueError` if the task's answer is none of its choices."""
        self(task, Response("", 0, "stop"))
        return True


def chosen_letter(text: str, letters: str = "ABCDEFGHIJ") -> str | None:
    """The letter that a text chooses, in upper case, or None."""
    shown = strip_thinking(text) or ""
    marked_place = marked_answer(shown)
    if marked_place is not None:
        return _only_letter(marked_place.text, letters)
    found = (
        _stated_letter(shown, letters)
        or _leading_letter(shown, letters)
        or _line_letter(shown, letters)
        or _standalone_letter(shown, letters)
    )
    return None if found is not None and _names_several(shown, letters) else found


def _only_letter(text: str, letters: str) -> str | None:
    """The letter in a tag or a box; None if it names several."""
    if _names_several(text, letters) or _lists(text, letters):
        return None
    return _leading_letter(text, letters) or _stated_letter(text, letters) or _standalone_letter(text, letters)


def _lists(text: str, letters: str) -> bool:
    """Whether the text is only several letters (`A B C D`, `A or maybe B`), or several choices with their letters (`A)
    Paris B) Rome`)."""
    labels = re.finditer(rf"(?<![\w'’-])([{letters}])[*_]{{0,2}}[).:\]][*_]{{0,2}}\s{{0,4}}\w", text)
    return _are_letters(text, letters) or len({label[1] for label in labels}) > 1


def _are_letters(text: str, letters: str) -> bool:
    words = re.findall(r"[^\W_]+", text)
    alone = {word.upper() for word in words if len(word) == 1 and word.upper() in letters}
    return len(alone) > 1 and all(len(word) == 1 or word.lower() in _JOINING for word in words)


def _is_denied(text: str, letter: re.Match[str]) -> bool:
    """Whether the text says that a letter is not the answer: `not A`, `(A) is wrong`."""
    before = text[max(0, letter.start(1) - 40) : letter.start(1)]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(text, letter.end(1)))


def _names_several(text: str, letters: str) -> bool:
    """Whether the text, or its last sentence that gives an answer, names several letters: `B or C`, `(A), (B)`."""
    letter_pattern = rf"{_WRAP}[{letters}](?!\w)[)\]}}*_\"'`$.]{{0,6}}"
    between = r"(?:\s{0,2}(?:,|/|&|;|\bor\b|\band\b)\s{0,2}){1,2}"
    several = re.compile(
        rf"\s{{0,4}}{letter_pattern}{between}{letter_pattern}\s{{0,4}}(?:[.,;\n]|\Z|or\b|and\b)", re.IGNORECASE
    )
    last = None
    for last in _ANSWER_INTRODUCED.finditer(text):  # noqa: B007 (the last one)
        pass
    if several.match(text) or _are_letters(text, letters):
        return True
    statement_text = "" if last is None else text[last.end() :]
    return bool(several.match(statement_text)) or _are_letters(statement_text.partition("\n")[0], letters)


def _leading_letter(text: str, letters: str) -> str | None:
    """The letter of `(b) Paris`, `B.` or `b`. A letter that begins a sentence (`A cat`) is not a choice."""
    match = re.match(rf"{_WRAP}([{letters}])(?:[\s*_)\]}}\"'`$.:,]*\Z|[*_]*[)\]}}.:]|\s*[-–:])", text, re.IGNORECASE)
    if match is None or _is_denied(text, match) or _lists(text, letters):
        return None
    return match[1].upper()


def _stated_letter(text: str, letters: str) -> str | None:
    """The last letter in `The answer is (B)`, `Answer: **B**` or `I choose option c.`; only if there is none, in `Option
    B holds`."""
    label, letter_pattern = r"(?:\s{1,4}(?:option|choice|letter|answer))?", rf"{_WRAP}([{letters}]){_AFTER}"
    verb = r"(?:\s{1,4}(?:is|was|(?:would|should|must|to)\s{1,4}be)\b[\s:]{0,4}|[\s*_]{0,4}[:=→-]{1,3})"
    chosen = rf"\b(?:(?:answer|choice|option)\b{verb}|(?:choose|pick|select)\b){label}{letter_pattern}"
    mentioned = rf"\b(?:answer|choice|option)\b{letter_pattern}"
    return _last_stated_letter(chosen, text) or _last_stated_letter(mentioned, text)


def _last_stated_letter(pattern: str, text: str) -> str | None:
    last = None
    for match in re.finditer(pattern, text, re.IGNORECASE):
        letter, before, after = match[1], text[match.start(1) - 1], text[match.end(1) : match.end(1) + 2]
        is_word = re.match(r"\s[\w]", after) and before not in "([{*\"'`"
        if not (is_word and (letter.islower() or letter == "I")) and not _is_denied(text, match):  # "the answer is a dog"
            last = letter.upper()
    return last


def _line_letter(text: str, letters: str) -> str | None:
    """The letter of the last line that is only a letter."""
    lines = (line for line in reversed(text.splitlines()) if line.strip())
    matches = (re.fullmatch(rf"{_WRAP}([{letters}])[\s*_)\]}}\"'`$.:,]*", line, re.IGNORECASE) for line in lines)
    return next((match[1].upper() for match in matches if match), None)


def _standalone_letter(text: str, letters: str) -> str | None:
    """The last letter in brackets; without one, the last capital letter that is a word and not an article or pronoun.
    None if it is one of several listed letters: `either A or B`."""
    bracketed = list(re.finditer(rf"[(\[]([{letters}])[)\]]", text, re.IGNORECASE))
    alone = rf"(?<![\w'’-])(?!(?:A|I)\s+(?!(?:or|and)\b)\w)([{letters}])(?![\w'’-])"
    found = [each for each in bracketed or re.finditer(alone, text) if not _is_denied(text, each)]
    if _lists(text, letters):  # a letter at the start of a choice's line does not choose it
        found = [each for each in found if not _labels(text, each)]
    if not found:
        return None
    if len(found) > 1 and _BETWEEN.fullmatch(text, found[-2].end(), found[-1].start()):
        return None if found[-2][1].upper() != found[-1][1].upper() else found[-1][1].upper()
    return found[-1][1].upper()


def _labels(text: str, letter: re.Match[str]) -> bool:
    """Whether a letter begins a line and its choice follows, as in a list of choices."""
    line = text[text.rfind("\n", 0, letter.start()) + 1 : letter.start(1)]
    return (
        not line.strip(" \t*_([-|") and re.match(r"[*_]{0,2}[).:\]][*_]{0,2}[ \t]*\w", text[letter.end(1) :]) is not None
    )


def _by_text(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """The letter of the only choice whose text occurs in the text, or in its tag or box."""
    shown = strip_thinking(text) or ""
    marked_place = marked_answer(shown)
    text = shown if marked_place is None else marked_place.text
    text_words, texts = _words(text), [_words(choice) for choice in choices]
    found = [
        letter for letter, words in zip(letters, texts, strict=False) if words.strip() and _mentions(text_words, words)
    ]
    return found[0] if len(found) == 1 else None


def _mentions(text: str, words: str) -> bool:
    """Whether the words occur and are not denied: `not Paris`, `it isn't Paris`."""
    return words in text and not any(f" {no}{words}" in text for no in ("not", "n t", "isn t", "never", "neither", "nor"))


def choices_of(task: Task) -> Choices | None:
    """The choices in the task's info; None if there are none."""
    published = task.info.get("choices")
    if published is None or (isinstance(published, Sized) and not len(published)):
        return None
    try:
        return Choices.of(published)
    except ValueError as error:
        raise ValueError(f"the choices of task {task.id!r} cannot be read: {error}") from error


def _answer(task: Task, letters: str, choices: Choices | None) -> str:
    """The letter of the right choice. A list of answers, such as `(A)` and `A`, must name one."""
    if isinstance(task.answer, list | tuple) and task.answer:
        named = {_answer(replace(task, answer=answer), letters, choices) for answer in task.answer}
        if len(named) == 1:
            return named.pop()
    if choices is not None:
        try:
            return letters[choices.position(task.answer)]
        except (ValueError, IndexError):
            pass
    letter = str(task.answer).strip().strip("()[].:").upper()
    if isinstance(task.answer, str) and len(letter) == 1 and letter in letters:
        return letter
    among = f"one of {letters}" + (", or one of its choices" if choices else "")
    raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, is not {among}")


def _digits(choices: Choices | None) -> str:
    """The labels of the choices if they are digits."""
    labels = choices.labels if choices else ()
    return "".join(labels) if all(len(label) == 1 and label.isdecimal() for label in labels) else ""


def _words(text: str) -> str:
    found = re.findall(r"[^\W_]+", text.casefold())
    return f" {' '.join(found)} "
