"""Math with retries: a question, and after a wrong answer another try for a smaller reward."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from roll.config.errors import UserError
from roll.data.rows import json_lines
from roll.env.actions import ActingEnvironment, Action, Format, Invalid
from roll.env.base import Step
from roll.env.resolve import register

# A minus after a word, a digit or a bracket is a dash ("3-5" ends in 5); a point belongs to a number only before a digit.
_NUMBER = re.compile(r"(?<![\w)\].,])([-−]?)[$€£]?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?)(?![\d])|(\d+)(?!\d)")
_LONGEST = 40
"""Maximum number of characters of a number; a longer one is not an answer."""
_OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@register("maths_retries")
class MathRetry(ActingEnvironment):
    """Questions about numbers, answered by the last number in the text: calculations with `terms` numbers from `low` to
    `high` and the given `operations`, or the problems of a JSONL file `problems`, one per seed, with the columns
    `question` and `answer` (whose last number counts). A repeated question is asked only once.

    The agent has `tries` tries. A right answer is worth 1, multiplied by `decay` for every earlier try, and ends the
    episode; a text without a number counts as a try too."""

    def __init__(
        self,
        tries: int = 3,
        decay: float = 0.5,
        problems: str = "",
        question: str = "question",
        answer: str = "answer",
        low: int = 1,
        high: int = 20,
        terms: int = 2,
        operations: str = "+",
        format: Format = "free",
        invalid_penalty: float = 0.0,
    ) -> None:
        super().__init__(format, invalid_penalty, turns=tries)
        if tries < 1 or not 0 <= decay <= 1:
            raise ValueError(f"maths_retries: tries={tries}, decay={decay}: write 1 or more tries, a decay from 0 to 1")
        if low > high or terms < 2 or not operations or not set(operations) <= set(_OPERATIONS):
            raise ValueError(
                f"maths_retries: low={low}, high={high}, terms={terms}, operations={operations!r}: write low below high, "
                "2 or more terms, and operations from +-*"
            )
        self._tries, self._decay = tries, decay
        self._problems = _problems(problems, question, answer) if problems else ()
        self._numbers, self._terms, self._operations = (low, high), terms, operations
        self._question, self._answer = "", Fraction(0)
        self._wrong_answers: list[str] = []
        self._is_solved = False

    @property
    def episodes(self) -> int | None:
        return len(self._problems) if self._problems else None

    def begin(self, seed: int) -> str:
        if self._problems:
            if not 0 <= seed < len(self._problems):
                last = len(self._problems) - 1
                raise ValueError(f"maths_retries: the seed is {seed}, but the problems of this file are 0 to {last}")
            self._question, self._answer = self._problems[seed]
        else:
            self._question, self._answer = self._sum(random.Random(f"maths_retries/{seed}"))
        self._wrong_answers, self._is_solved = [], False
        tries = "one try" if self._tries == 1 else f"{self._tries} tries"
        return f"{self._question}\nYou have {tries}. End with the number, like this: {self.format_action('7')}"

    def act(self, action: Action) -> Step | Invalid:
        found = last_number(action.text)
        if found is None:
            return Invalid("there is no number in what you said.")
        self._is_solved = found == self._answer
        if self._is_solved:
            return Step("Right.", self._decay ** (self._turn - 1), terminated=True)
        self._wrong_answers.append(format_number(found))
        tries_left = self._tries - self._turn
        if not tries_left:
            return Step(f"{format_number(found)} is wrong: it was {format_number(self._answer)}.", terminated=True)
        return Step(f"{format_number(found)} is wrong. Think again. Tries left: {tries_left}.")

    def view(self) -> str:
        return self._question

    def state(self) -> str:
        return f"not {', '.join(sorted(set(self._wrong_answers)))}, {self._tries - self._turn} left"

    def extra_info(self) -> dict[str, float | str]:
        return {"tries": float(self._turn), "success": float(self._is_solved)}

    def read(self, text: str) -> str | Invalid:
        return text  # the last number of any text counts

    def expert(self) -> str:
        """The right answer."""
        return self.format_action(format_number(self._answer))

    def _sum(self, rng: random.Random) -> tuple[str, Fraction]:
        value = rng.randint(*self._numbers)
        text = str(value)
        for _ in range(self._terms - 1):
            operation, number = rng.choice(self._operations), rng.randint(*self._numbers)
            if operation == "*" and " " in text:
                text = f"({text})"
            text = f"{text} {operation} {number if number >= 0 else f'({number})'}"
            value = _OPERATIONS[operation](value, number)
        return f"What is {text}?", Fraction(value)


def last_number(text: str) -> Fraction | None:
    """The last number in the text: whole, decimal or a fraction; None if there is none."""
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007 (the last one)
        pass
    if last is None or len(last[0]) > _LONGEST:
        return None
    try:
        value = _fraction((last[2] or last[3]).replace(",", ""))
    except ZeroDivisionError:
        return None
    return -value if last[1] else value


def format_number(number: Fraction) -> str:
    """A number in its usual form: decimal if that is exact, otherwise a fraction."""
    if number.denominator == 1:
        return str(number.numerator)
    decimal = f"{float(number):.10g}"
    return decimal if Fraction(decimal) == number else str(number)


def _fraction(digits: str) -> Fraction:
    above, _, below = digits.partition("/")
    return Fraction(above) / (Fraction(below) if below else 1)


def _problems(path: str, question: str, answer: str) -> tuple[tuple[str, Fraction], ...]:
    """Questions and answers of a file, read once per process unless the file changes."""
    file = Path(path).expanduser()
    return _read(file, file.stat().st_mtime_ns if file.is_file() else 0, question, answer)


@lru_cache(maxsize=8)
def _read(file: Path, changed_ns: int, question: str, answer: str) -> tuple[tuple[str, Fraction], ...]:
    """Only the first occurrence of each question is kept."""
    found: dict[str, Fraction] = {}
    for number, row in json_lines(file, "maths_retries: problems"):
        missing = [column for column in (question, answer) if row.get(column) is None]
        value = None if missing else last_number(str(row[answer]))
        if value is None:
            what = f"there is no column {missing[0]!r}" if missing else f"there is no number in {answer!r}"
            raise UserError(f"maths_retries: {file}:{number}: {what}")
        found.setdefault(str(row[question]), value)
    if not found:
        raise UserError(f"maths_retries: {file} has no problems")
    return tuple(found.items())
