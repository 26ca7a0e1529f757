"""`exact` and `fuzzy`: the text is the answer, or is like it.

A task's answer is text, a number, or a list of answers of which any will do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from roll.data.task import Response, Task
from roll.reward.extract import Place, check_place, extract, plain
from roll.reward.time_limit import patiently


@dataclass(frozen=True)
class Exact:
    """1 if the answer that the text states is the task's, else 0; a text that states none is the answer as a whole. White
    space around it, and how much of it stands between words, does not matter."""

    find: Place = "stated"
    """Where the answer stands: `stated` (the first of tag, box, `####` and final statement that there is, else all of the
    text), `text` (all of it), `last_line`, `boxed`, `answer` (the last `<answer>…</answer>`)."""
    pattern: str | None = None
    """Regular expression whose last match there, or its first group, is the answer."""
    ignore_case: bool = False
    """Whether capital letters are the same as small ones."""
    ignore_punctuation: bool = False
    """Whether what is no letter, digit or space is left out."""
    deterministic = True

    def __post_init__(self) -> None:
        check_place(self.find, self.pattern)

    @property
    def quick(self) -> bool:
        """Unless a pattern decides how long it takes."""
        return self.pattern is None

    def __call__(self, task: Task, response: Response) -> float:
        answers = self._answers(task)
        return float(any(found in answers for found in self._found(response)))

    def answer_of(self, task: Task, response: Response) -> str | None:
        """What stands where the answer is looked for, without what does not matter."""
        return next(iter(self._found(response)), None)

    def _found(self, response: Response) -> list[str]:
        found = extract(response.text, self.find, self.pattern)
        return [plain(each, self.ignore_case, self.ignore_punctuation) for each in found]

    def check_answer(self, task: Task) -> bool:
        """Always checks: `ValueError` if there is no answer, or nothing is left of it to compare."""
        return bool(_comparable(task, self._answers(task)))

    def _answers(self, task: Task) -> list[str]:
        return [plain(answer, self.ignore_case, self.ignore_punctuation) for answer in answers_of(task)]


@dataclass(frozen=True)
class Fuzzy:
    """How like the task's answer the text is, from 0 to 1; of several answers, the likest."""

    by: Literal["words", "characters"] = "words"
    """`words`: F1 of the words in common, in any order. `characters`: share of the characters that match in order."""
    threshold: float = 0.0
    """Likeness below this is 0."""
    all_or_nothing: bool = False
    """Whether likeness at or above the threshold is 1."""
    find: Place = "stated"
    """As in `exact`."""
    pattern: str | None = None
    """As in `exact`."""
    ignore_case: bool = True
    """Whether capital letters are the same as small ones."""
    ignore_punctuation: bool = True
    """Whether what is no letter, digit or space is left out."""
    deterministic = True

    def __post_init__(self) -> None:
        check_place(self.find, self.pattern)
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold:g}, but takes a number from 0 to 1")
        if self.all_or_nothing and not self.threshold:
            raise ValueError("all_or_nothing is true, but threshold is 0, which everything reaches: write a threshold")

    def __call__(self, task: Task, response: Response) -> float:
        answers = self._answers(task)
        found = extract(response.text, self.find, self.pattern)
        texts = [plain(each, self.ignore_case, self.ignore_punctuation) for each in found]
        measure = likeness_by_words if self.by == "words" else likeness_by_characters
        likeness = max((measure(answer, text) for answer in answers for text in texts), default=0.0)
        if likeness < self.threshold:
            return 0.0
        return 1.0 if self.all_or_nothing else likeness

    def check_answer(self, task: Task) -> bool:
        """Always checks: `ValueError` if there is no answer, or nothing is left of it to compare."""
        return bool(_comparable(task, self._answers(task)))

    def _answers(self, task: Task) -> list[str]:
        return [plain(answer, self.ignore_case, self.ignore_punctuation) for answer in answers_of(task)]


def answers_of(task: Task) -> list[str]:
    """The task's answers as text."""
    answers = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    if not answers or any(answer is None for answer in answers):
        raise ValueError(f"task {task.id!r} has no answer to compare with")
    return [str(answer) for answer in answers]


def _comparable(task: Task, answers: list[str]) -> list[str]:
    """Answers as they are compared; an empty one would reward saying nothing, and a text of signs has nothing left when
    punctuation is ignored."""
    for given, left in zip(answers_of(task), answers, strict=True):
        if not given.strip():
            raise ValueError(f"the answer of task {task.id!r}, {given!r}, is empty: write what is right, or skip the row")
        if not left:
            raise ValueError(
                f"the answer of task {task.id!r}, {given!r}, has no letter or digit, but ignore_punctuation is true: "
                "write ignore_punctuation: false"
            )
    return answers


def likeness_by_words(a: str, b: str) -> float:
    """F1 of two bags of words; two texts without words are alike."""
    left, right = Counter(a.split()), Counter(b.split())
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 1.0


def likeness_by_characters(a: str, b: str) -> float:
    """Twice the matching characters over all characters (difflib); 0 for texts that take too long to compare."""
    return patiently(SequenceMatcher(None, a, b, autojunk=False).ratio, 0.0)
