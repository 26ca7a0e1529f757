"""The rewards that come with ROLL."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any

from roll.data.task import Response, Task
from roll.reward import reasoning_gym
from roll.reward.base import RewardFn

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

# Openings of a box, escaped characters and braces: enough to follow the nesting.
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)

# Far above what an honest answer takes (about 50 ms), and with all three steps still below the default deadline: an
# answer that cannot be compared in this time is a wrong answer, not a broken grader.
_MATH_STEP_S = 2


def number(task: Task, response: Response) -> float:
    """1 if the last number in the text is the task's answer, else 0. `1,234`, `$1234` and `1234.0` are the same."""
    answer = _answer_number(task)
    found = last_number(response.text)
    return float(found is not None and found == answer)


def math(task: Task, response: Response) -> float:
    """1 if the text's last `\\boxed{}` (without one, the text's answer) equals the task's LaTeX answer, else 0."""
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no answer to compare with")
    gold = _parse_gold(str(task.answer))
    if not gold:
        raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, is not something math-verify can read")
    box = last_box(response.text)
    verifier = _math_verify()
    attempt = verifier.parse(response.text if box is None else f"\\boxed{{{box}}}", parsing_timeout=_MATH_STEP_S)
    return float(verifier.verify(gold, attempt, timeout_seconds=_MATH_STEP_S))


BUILTINS: Mapping[str, RewardFn] = MappingProxyType(
    {"math": math, "number": number, "reasoning_gym": reasoning_gym.reasoning_gym}
)


def _warm_up_math() -> None:
    math(Task.ask("warm-up", "", r"\frac{1}{2}"), Response(r"\boxed{0.5}", 1, "stop"))


WARM_UPS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"math": _warm_up_math, "reasoning_gym": reasoning_gym.warm_up}
)
"""What a grader process does before its first job, so that no verdict's deadline pays for it."""


def last_number(text: str) -> Decimal | None:
    """The last number written in the text, or None."""
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    value = Decimal(last["digits"].replace(",", ""))
    return value.copy_negate() if last["sign"] else value


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


def _answer_number(task: Task) -> Decimal:
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


@functools.cache
def _math_verify() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every time-out, with the whole text
    return math_verify


@functools.lru_cache(maxsize=1024)
def _parse_gold(answer: str) -> list[Any]:
    box = last_box(answer)
    parsed: list[Any] = _math_verify().parse(f"\\boxed{{{answer if box is None else box}}}", parsing_timeout=_MATH_STEP_S)
    return parsed
