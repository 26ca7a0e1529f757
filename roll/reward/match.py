"""`exact` and `fuzzy`: the text equals the answer, or is similar to it.

A task's answer is a text, a number, or a list of alternative answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from roll.data.task import Response, Task
from roll.reward.extract import AnswerLocation, check_find, extract, normalise_text
from roll.reward.time_limit import with_time_limit


@dataclass(frozen=True)
class Exact:
    """1 if the answer that the text states is the task's, else 0; if the text states none, the whole text is the answer.
    Surrounding white space, and its amount between words, does not matter."""

    find: AnswerLocation = "stated"
    """Where the answer is: `stated` (the first of tag, box, `####` and final statement that exists, otherwise the whole
    text), `text` (all of it), `last_line`, `boxed`, `answer` (the last `<answer>…</answer>`)."""
    pattern: str | None = None
    """Regular expression whose last match there, or its first group, is the answer."""
    ignore_case: bool = False
    """Whether upper and lower case are equal."""
    ignore_punctuation: bool = False
    """Whether all characters but letters, digits and spaces are removed."""
    deterministic = True

    def __post_init__(self) -> None:
        check_find(self.find, self.pattern)

    @property
    def quick(self) -> bool:
        """True unless a pattern determines the time."""
        return self.pattern is None

    def __call__(self, task: Task, response: Response) -> float:
        answers = self._answers(task)
        return float(any(found in answers for found in self._normalised_texts(response)))

    def answer_of(self, task: Task, response: Response) -> str | None:
        """The normalised text at the answer's position."""
        return next(iter(self._normalised_texts(response)), None)

    def _normalised_texts(self, response: Response) -> list[str]:
        found = extract(response.text, self.find, self.pattern)
        return [normalise_text(each, self.ignore_case, self.ignore_punctuation) for each in found]

    def check_answer(self, task: Task) -> bool:
        """Always checks: raises `ValueError` if there is no answer, or nothing of it is left to compare."""
        return bool(_comparable(task, self._answers(task)))

    def _answers(self, task: Task) -> list[str]:
        return [normalise_text(answer, self.ignore_case, self.ignore_punctuation) for answer in answers_of(task)]


@dataclass(frozen=True)
class Fuzzy:
    """Similarity of the text to the task's answer, from 0 to 1; with several answers, the highest."""

    by: Literal["words", "characters"] = "words"
    """`words`: F1 of the words in common, in any order. `characters`: share of the characters that match in order."""
    threshold: float = 0.0
    """Lower similarity counts as 0."""
    all_or_nothing: bool = False
    """Whether similarity at or above the threshold counts as 1."""
    find: AnswerLocation = "stated"
    """As in `exact`."""
    pattern: str | None = None
    """As in `exact`."""
    ignore_case: bool = True
    """Whether upper and lower case are equal."""
    ignore_punctuation: bool = True
    """Whether all characters but letters, digits and spaces are removed."""
    deterministic = True

    def __post_init__(self) -> None:
        check_find(self.find, self.pattern)
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold:g}, but takes a number from 0 to 1")
        if self.all_or_nothing and not self.threshold:
            raise ValueError("all_or_nothing is true, but threshold is 0, which everything reaches: write a threshold")

    def __call__(self, task: Task, response: Response) -> float:
        answers = self._answers(task)
        found = extract(response.text, self.find, self.pattern)
        texts = [normalise_text(each, self.ignore_case, self.ignore_punctuation) for each in found]
        measure = likeness_by_words if self.by == "words" else likeness_by_characters
        likeness = max((measure(answer, text) for answer in answers for text in texts), default=0.0)
        if likeness < self.threshold:
            return 0.0
        return 1.0 if self.all_or_nothing else likeness

    def check_answer(self, task: Task) -> bool:
        """Always checks: raises `ValueError` if there is no answer, or nothing of it is left to compare."""
        return bool(_comparable(task, self._answers(task)))

    def _answers(self, task: Task) -> list[str]:
        return [normalise_text(answer, self.ignore_case, self.ignore_punctuation) for answer in answers_of(task)]


def answers_of(task: Task) -> list[str]:
    """The task's answers as text."""
    answers = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    if not answers or any(answer is None for answer in answers):
        raise ValueError(f"task {task.id!r} has no answer to compare with")
    return [str(answer) for answer in answers]


def _comparable(task: Task, answers: list[str]) -> list[str]:
    """The normalised answers, validated: an empty answer would reward saying nothing, and an answer of punctuation marks
    is empty if punctuation is ignored."""
    for given, normalised in zip(answers_of(task), answers, strict=True):
        if not given.strip():
            raise ValueError(f"the answer of task {task.id!r}, {given!r}, is empty: write what is right, or skip the row")
        if not normalised:
            raise ValueError(
                f"the answer of task {task.id!r}, {given!r}, has no letter or digit, but ignore_punctuation is true: "
                "write ignore_punctuation: false"
            )
    return answers


def likeness_by_words(a: str, b: str) -> float:
    """F1 of two bags of words; 1 for two texts without words."""
    left, right = Counter(a.split()), Counter(b.split())
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 1.0


def likeness_by_characters(a: str, b: str) -> float:
    """Twice the matching characters divided by all characters (difflib); 0 if the comparison takes too long."""
    return with_time_limit(SequenceMatcher(None, a, b, autojunk=False).ratio, 0.0)
