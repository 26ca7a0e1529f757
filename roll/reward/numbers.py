"""`number`: the last number of the text is the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from roll.data.task import Response, Task

# A minus is a sign unless it follows a digit, a word, a closing bracket or another dash: "3-5" ends in 5, "= -5" in -5.
# A point belongs to a number only between digits, or before them at a word's start: "It is 5." ends in 5.
_NUMBER = re.compile(
    r"""(?P<sign>(?<![\w)\]}.%–-])[-\N{MINUS SIGN}])?
        (?:\\?[$€£¥])?
        (?P<digits>
            (?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]) | [0-9]+) (?:\.[0-9]+)?
            | (?<![\w.])\.[0-9]+
        )""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Number:
    """1 if the last number in the text is the task's answer, else 0. `1,234`, `$1234` and `1234.0` are the same."""

    tolerance: float = 0.0
    """How far off a right number may be."""
    relative: float = 0.0
    """How far off it may be as a share of the answer; the larger of the two holds."""
    deterministic = True
    quick = True

    def __post_init__(self) -> None:
        for name, value in (("tolerance", self.tolerance), ("relative", self.relative)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value:g}, but takes a number ≥ 0")

    def __call__(self, task: Task, response: Response) -> float:
        answer = _answer(task)
        found = last_number(response.text)
        if found is None:
            return 0.0
        if not (self.tolerance or self.relative):
            return float(found == answer)
        allowed = max(Decimal(str(self.tolerance)), Decimal(str(self.relative)) * abs(answer))
        return float(abs(found - answer) <= allowed)

    def answer_of(self, task: Task, response: Response) -> str | None:
        """The last number, written without what does not change it: `1,234.50` is `1234.5`."""
        found = last_number(response.text)
        return None if found is None else plain_number(found)


def last_number(text: str) -> Decimal | None:
    """The last number written in the text, or None."""
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    if not end:
        return None
    *_, last = _NUMBER.finditer(text[:end].rsplit(None, 1)[-1])  # no number goes over several words
    value = Decimal(last["digits"].replace(",", ""))
    return value.copy_negate() if last["sign"] else value


def plain_number(value: Decimal) -> str:
    """Equal numbers as equal strings."""
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def _answer(task: Task) -> Decimal:
    if not isinstance(task.answer, bool):
        try:
            value = Decimal(str(task.answer).strip())
            if value.is_finite():
                return value
        except InvalidOperation:
            found = last_number(task.answer) if isinstance(task.answer, str) else None
            if found is not None:
                return found
    raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, is not a number")
