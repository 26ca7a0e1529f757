"""`math`: the text's answer is mathematically equal to the task's (math-verify)."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roll.data.task import Response, Task
from roll.reward.extract import (
    final_statement,
    first_sentence,
    last_box,
    last_tag,
    marked_answer,
    stated_answer,
    strip_thinking,
)
from roll.reward.math_text import (
    LONGEST,
    bare_base,
    equation_sides,
    expand_text_commands,
    expression_in,
    has_words,
    is_computed,
    is_letters,
    lists_several,
    tidy,
    without_joining_words,
    without_text_commands,
    without_unit,
    words,
)
from roll.reward.numbers import plain_number
from roll.reward.numerals import Numeral, read_number

_DECIMAL_PLACES = 6
"""Decimal places in which numbers must agree, as in math-verify: 0.333333 is a third, 0.33 is not."""
_POWER_TOWER = re.compile(r"\d[\s})]{0,3}(?:(?:\^|\*\*)[\s{(]{0,3}\d{1,9}[\s})]{0,3}){3}|!\s?\)?\s?!")
"""A power of a power of a power, or a factorial of a factorial: computing one may use all memory before the timeout. It
is right only if the gold answer is written the same."""
_MAX_SIDES = 4
"""Maximum number of sides of an equation."""


@dataclass(frozen=True)
class Math:
    """1 if the answer that the text states (in a tag, a box, after `####`, in its final statement, or in its last line)
    equals the task's LaTeX answer, else 0."""

    boxed: bool = False
    """Whether only a boxed answer counts."""
    step_s: int = 2
    """Timeout in seconds for each of the three steps (parsing the answer, parsing the text, comparing). An honest answer
    takes about 50 ms; one that cannot be compared in this time is a wrong answer, not a broken grader."""
    deterministic = True

    def __post_init__(self) -> None:
        if self.step_s < 1:
            raise ValueError(f"step_s is {self.step_s}, but takes a whole number ≥ 1")

    def __call__(self, task: Task, response: Response) -> float:
        gold = _gold_answer(task)
        if not _is_plain(gold) and not _parsed(gold, self.step_s):
            raise ValueError(f"{_answer(task)}, is not something math-verify can read: {_ADVICE}")
        attempt = attempt_in(response.text, self.boxed)
        return float(bool(attempt) and _equal(gold, attempt or "", self.step_s))

    def answer_of(self, task: Task, response: Response) -> str | None:
        """The normalised answer: `0.5` and `\\frac12` are the same, `x(x+1)` and `x^2+x` are not. If math-verify cannot
        parse it, its text."""
        attempt = attempt_in(response.text, self.boxed)
        if not attempt:
            return None
        value = equation_sides(attempt)[-1]
        number = _number(value)
        if number is not None and number.value is not None:
            return plain_number(number.value / (100 if number.percent else 1))
        if is_letters(value):
            return words(value)
        parsed = _parse(value, self.step_s)
        return _written(parsed[0]) if parsed else "".join(value.split())

    def warm_up(self) -> None:
        """Imports what the first verdict would have to import."""
        self(Task.ask("warm-up", "", r"\sqrt{8}"), Response(r"\boxed{2\sqrt{2}}", 1, "stop"))

    def check_answer(self, task: Task) -> bool:
        """Checks numbers and words here. For other answers, only judging can tell whether math-verify can parse them."""
        return _is_plain(_gold_answer(task))

    def model_answer(self, task: Task) -> str:
        """A response that is right if any is."""
        return rf"\boxed{{{_gold_answer(task)}}}"


_ADVICE = "write a number or LaTeX, without words beside it, such as 9, \\frac{1}{2}, x^2+1, (1, 2) or \\text{Monday}"


def attempt_in(text: str, boxed: bool = False) -> str | None:
    """The expression that a text gives as its answer, in tidy LaTeX, or None."""
    shown = strip_thinking(text)
    if shown is None:
        return None
    if boxed:
        tag = last_tag(shown, "answer")
        box = last_box(shown if tag is None else tag)
        return None if box is None or len(box) > LONGEST else tidy(box)
    found = stated_answer(shown)
    if found is None:
        return expression_in(_last_line(shown))
    inner = final_statement(expand_text_commands(found.text))
    if inner is not None or found.source == "statement":
        return expression_in(first_sentence((inner or found).text))
    if found.source != "box":
        return expression_in(found.text)
    return tidy(found.text) if len(found.text) <= LONGEST else None


def _last_line(text: str) -> str:
    """The last line with a digit or a formula, otherwise the last non-empty line."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" \t*_`#")]
    candidates = (
        line for line in reversed(lines) if any(c.isdigit() or c in "$\\" or c.isnumeric() for c in line.strip("\\[]"))
    )
    return next(candidates, lines[-1] if lines else "")


def _gold_answer(task: Task) -> str:
    """The task's answer in tidy LaTeX; raises `ValueError` if there is none, or none that a response could equal."""
    if task.answer is None or isinstance(task.answer, bool):
        raise ValueError(f"task {task.id!r} has no answer to compare with")
    text = str(task.answer)
    found = marked_answer(text)
    gold = tidy(found.text if found else text)
    if not gold:
        raise ValueError(f"{_answer(task)}, is empty: {_ADVICE}")
    if not _is_plain(gold) and has_words(without_text_commands(gold)):
        raise ValueError(f"{_answer(task)}, has words beside the mathematics, which no answer would equal: {_ADVICE}")
    return gold


def _answer(task: Task) -> str:
    return f"the answer of task {task.id!r}, {task.answer!r}"


def _is_plain(gold: str) -> bool:
    """Whether an answer can be compared without math-verify: a number, or words."""
    return _number(gold) is not None or is_letters(gold)


@functools.lru_cache(maxsize=4096)
def _number(text: str) -> Numeral | None:
    return read_number(text) or read_number(without_unit(text))


def _equal(gold: str, attempt: str, step_s: int) -> bool:
    if is_letters(gold):
        return words(gold) == words(attempt)
    number = _number(gold)
    if number is not None:
        found = _number(attempt)
        if found is not None:
            return _equal_numbers(number, found)
        attempt = without_unit(attempt)
        if not is_computed(equation_sides(attempt)[-1]):
            return False
    elif not has_words(expand_text_commands(gold)):
        attempt = _without_word(attempt)
    if "".join(attempt.split()) == "".join(gold.split()):
        return True
    if _POWER_TOWER.search(attempt):
        return False
    if re.search(r"\d\s?_", attempt):  # the base of a numeral, which math-verify does not parse
        return bare_base(gold) == bare_base(attempt)
    if _has_extra_words(gold, attempt) or (lists_several(attempt) and not _may_be_several(gold)):
        return False
    gold_sides, attempt_sides = equation_sides(gold), equation_sides(attempt)
    if len(gold_sides) > 1:
        return _verify(gold, attempt, step_s)
    return len(attempt_sides) <= _MAX_SIDES and all(
        _verify(gold_sides[0], side, step_s) for side in reversed(attempt_sides)
    )


def _equal_numbers(gold: Numeral, found: Numeral) -> bool:
    """Whether two numbers are equal. 50% is one half; if the gold has a percent sign, it may be left out."""
    assert gold.value is not None
    assert found.value is not None
    if gold.percent and not found.percent and gold.value == found.value:
        return True
    gold_value, found_value = gold.value / (100 if gold.percent else 1), found.value / (100 if found.percent else 1)
    if gold_value == found_value or (gold_value.denominator == found_value.denominator == 1):
        return gold_value == found_value
    is_close = abs(gold_value - found_value) * 1000 <= abs(gold_value)  # 0 is not 2e-7
    return is_close and round(gold_value, _DECIMAL_PLACES) == round(found_value, _DECIMAL_PLACES)


def _has_extra_words(gold: str, attempt: str) -> bool:
    """Whether there are words besides the mathematics: of a language, or marked as text where the gold has no text."""
    return has_words(without_text_commands(attempt)) or (
        has_words(without_joining_words(attempt)) and not has_words(expand_text_commands(gold))
    )


def _without_word(attempt: str) -> str:
    """Removes a separate unit: from `5\\sqrt{2} cm`, but not from `2ab`."""
    head = without_unit(attempt)
    return head if attempt[len(head) :].startswith((" ", "\\")) and has_words(attempt[len(head) :]) else attempt


def _may_be_several(gold: str) -> bool:
    return lists_several(gold) or any(
        mark in gold for mark in ("(", "[", "\\{", "\\pm", "\\cup", "\\begin", "<", ">", "\\le", "\\ge")
    )


def _written(expression: Any) -> str:
    if getattr(expression, "is_Float", False) or getattr(expression, "is_Rational", False):
        return plain_number(Fraction(str(expression)))
    return str(expression)


def _verify(gold: str, attempt: str, step_s: int) -> bool:
    verifier = _math_verify()
    return bool(verifier.verify(_parsed(gold, step_s), _parse(attempt, step_s), timeout_seconds=step_s))


@functools.cache
def _math_verify() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every timeout, with the whole text
    return math_verify


def _parse(text: str, step_s: int) -> list[Any]:
    parsed: list[Any] = _math_verify().parse(rf"\boxed{{{text}}}", parsing_timeout=step_s, fallback_mode="no_fallback")
    return parsed


_parsed = functools.lru_cache(maxsize=1024)(_parse)
"""Cached, for gold answers, which are compared with many attempts."""
