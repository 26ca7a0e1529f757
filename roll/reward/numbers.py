"""`number`: the number that the text gives as its answer is compared with the task's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from roll.data.task import Response, Task
from roll.reward.extract import first_sentence, marked_answer, stated_answer, strip_thinking
from roll.reward.numerals import LONGEST, last_two_numerals, plain_numerals, read_number, tail_with_digits

_LISTED = re.compile(r"[ \t]*(?:[,;&+*/-]|x|,?[ \t]*(?:or|and|to|nor|vs\.?))?[ \t(]*", re.IGNORECASE)
"""Text between numbers that are listed, or are parts of an expression."""
_WORKED_OUT = re.compile(r"[^,;|\n]*(?:[=≈→⇒]|[-=]>)[\s(]*")
"""Text between two numbers where the second is the result of the first: `3 + 4 = 7`."""
_DOUBTED = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|might|could|alternatively|also|either|through|vs|versus|aka|oder|ou)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Number:
    """1 if the number that the text gives as its answer is the task's, else 0: the last number in the stated answer (tag,
    box, `####`, final statement), or in the whole text if there is none."""

    tolerance: float = 0.0
    """Absolute tolerance."""
    relative: float = 0.0
    """Tolerance as a share of the answer; the larger of the two applies."""
    deterministic = True
    quick = True

    def __post_init__(self) -> None:
        for name, value in (("tolerance", self.tolerance), ("relative", self.relative)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value:g}, but takes a number ≥ 0")

    def __call__(self, task: Task, response: Response) -> float:
        answer = number_of(task)
        found = given_number(response.text)
        if found is None:
            return 0.0
        if not (self.tolerance or self.relative):
            return float(found == answer)
        allowed = max(Fraction(str(self.tolerance)), Fraction(str(self.relative)) * abs(answer))
        return float(abs(found - answer) <= allowed)

    def answer_of(self, task: Task, response: Response) -> str | None:
        """The number that the text gives, in canonical form: `1,234.50` is `1234.5`."""
        found = given_number(response.text)
        return None if found is None else plain_number(found)

    def check_answer(self, task: Task) -> bool:
        """Always checks: raises `ValueError` if the task's answer is not a number."""
        number_of(task)
        return True


def given_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer, or None."""
    shown = strip_thinking(text)
    if shown is None:
        return None
    found = stated_answer(shown)
    if found is None:
        return last_number(shown)
    if found.source == "statement":
        return last_number(first_sentence(found.text), _are_several)
    if found.text.rstrip(" .)`*$").endswith(("!", "?", "+", "-")):  # a factorial, a guess, an open range
        return None
    return last_number(re.sub(r"^-\s+(?=[\d.$])", "-", found.text), _are_several)


def _are_listed(between: str) -> bool:
    return _LISTED.fullmatch(between) is not None


def _are_several(between: str) -> bool:
    """Whether two numbers in one position are two answers: listed in any way, or with words of doubt between them. A
    sentence may contain other numbers, and an equation ends with its result."""
    if _WORKED_OUT.fullmatch(between):
        return False
    return _DOUBTED.search(between) is not None or _are_listed(between) or not re.search(r"[^\W\d_]{2}", between)


def last_number(text: str, several: Callable[[str], bool] = _are_listed) -> Fraction | None:
    """The last number in the text; None if there is none, if the last one only begins like a number (`3:30`), or if it is
    one of a list (`6, 7`, `6 or 7`) or of an unevaluated expression (`2 + 3`)."""
    plain = plain_numerals(tail_with_digits(text))
    before, last = last_two_numerals(plain)
    if last is None or last.value is None:
        return None
    if before is not None and several(plain[before.end : last.start]) and before.value != last.value:
        return None
    return last.value


def plain_number(value: Fraction) -> str:
    """Equal numbers as equal strings: a decimal if that is exact, otherwise a fraction."""
    places = next((places for places in range(1, LONGEST) if not 10**places % value.denominator), 0)
    if value.denominator == 1 or not places:
        return str(value)
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}}"
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def number_of(task: Task) -> Fraction:
    """The task's answer as a number."""
    answer = task.answer
    if answer is not None and not isinstance(answer, bool):
        value = _number_in(str(answer), isinstance(answer, str))
        if value is not None:
            return value
    raise ValueError(
        f"the answer of task {task.id!r}, {answer!r}, is not a number: write one such as 72, -1,234.5, 1/2 or 1.2e3 "
        "(with tasks from a table, answer_pattern takes it out of a longer text), or choose another reward, such as math"
    )


@functools.lru_cache(maxsize=4096)
def _number_in(answer: str, may_be_marked: bool) -> Fraction | None:
    """The number that an answer is; None if it is none. Cached, since all responses to a task are compared with it."""
    found = marked_answer(answer) if may_be_marked else None
    numeral = read_number(found.text if found else answer)
    return None if numeral is None else numeral.value
