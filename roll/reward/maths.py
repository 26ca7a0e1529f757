"""`math`: the text's answer equals the task's as mathematics (math-verify)."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roll.data.task import Response, Task

# Openings of a box, escaped characters and braces: enough to follow the nesting.
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


@dataclass(frozen=True)
class Math:
    """1 if the text's last `\\boxed{}` (without one, the text's answer) equals the task's LaTeX answer, else 0."""

    boxed: bool = False
    """Whether only a boxed answer counts."""
    step_s: int = 2
    """Seconds each of the three steps (reading the answer, reading the text, comparing) may take. An honest answer takes
    about 50 ms; one that cannot be compared in this time is a wrong answer, not a broken grader."""
    deterministic = True

    def __post_init__(self) -> None:
        if self.step_s < 1:
            raise ValueError(f"step_s is {self.step_s}, but takes a whole number ≥ 1")

    def __call__(self, task: Task, response: Response) -> float:
        if task.answer is None:
            raise ValueError(f"task {task.id!r} has no answer to compare with")
        gold = _parse_gold(str(task.answer), self.step_s)
        if not gold:
            raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, is not something math-verify can read")
        attempt = self._attempt(response)
        return float(attempt is not None and _math_verify().verify(gold, attempt, timeout_seconds=self.step_s))

    def answer_of(self, task: Task, response: Response) -> str | None:
        """The answer as sympy writes it, decimals as fractions: `0.5` and `\\frac12` are the same, `x(x+1)` and `x^2+x`
        are not. Of what sympy cannot read, its text."""
        attempt = self._attempt(response)
        return _written(attempt[0]) if attempt else None

    def _attempt(self, response: Response) -> list[Any] | None:
        """What math-verify reads in a text; None if only a box counts and there is none."""
        box = last_box(response.text)
        if box is None and self.boxed:
            return None
        text = response.text if box is None else f"\\boxed{{{box}}}"
        parsed: list[Any] = _math_verify().parse(text, parsing_timeout=self.step_s)
        return parsed

    def warm_up(self) -> None:
        """Loads what the first verdict would have to."""
        self(Task.ask("warm-up", "", r"\frac{1}{2}"), Response(r"\boxed{0.5}", 1, "stop"))


def last_box(text: str) -> str | None:
    """What the last closed `\\boxed{}` of the text holds, the innermost if they nest, or None."""
    opened: list[int | None] = []  # where each open brace's content starts, if the brace is a box's
    start, end = -1, -1
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            content = opened.pop()
            if content is not None and content > start:
                start, end = content, match.start()
    return text[start:end] if start >= 0 else None


def _written(answer: Any) -> str:
    if isinstance(answer, str):
        return " ".join(answer.split())
    return str(Fraction(str(answer)) if getattr(answer, "is_Float", False) else answer)


@functools.cache
def _math_verify() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every time-out, with the whole text
    return math_verify


@functools.lru_cache(maxsize=1024)
def _parse_gold(answer: str, step_s: int) -> list[Any]:
    box = last_box(answer)
    parsed: list[Any] = _math_verify().parse(f"\\boxed{{{answer if box is None else box}}}", parsing_timeout=step_s)
    return parsed
