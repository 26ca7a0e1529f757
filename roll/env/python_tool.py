"""`python`: a question to be answered with the help of programs that run in the sandbox.

The agent writes a program, sees its output, and continues until it answers:

    agent         ```python
                  print(sum(n for n in range(1000) if n % 7 == 0))
                  ```
    environment   71071
    agent         <answer>71071</answer>
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from roll.env.actions import Action, Invalid, Tool, parse
from roll.env.base import Environment, Step
from roll.env.resolve import register
from roll.sandbox import LEVELS, Level, Limits, Program, ProgramResult, best, run_blocking

Form: TypeAlias = Literal["fence", "json"]
Kind: TypeAlias = Literal["arithmetic", "sum", "primes", "digits", "sequence", "calendar"]

TOOL = Tool("python", "code", "Run a Python program and see what it prints.")
_MAX_PARSED_CHARS = 1 << 17
"""Longer programs are not parsed for their last line: parsing takes some 300 bytes of memory per character."""
_NO_ACTION = "There is neither a program nor <answer>…</answer> in what you said."


@register("python")
class PythonTool(Environment):
    """A question whose answer is a number: one of `kinds`, chosen by the seed, or the given `question` and `answer`.

    Every turn is a program, in a fenced block or, with `form` `json`, a call of the tool `python`; or the answer, between
    `<answer>` and `</answer>`, which ends the episode: a right one is worth 1. The episode also ends after `turns` turns.
    A turn that is neither costs `invalid_penalty`, and a program that fails `error_penalty`. Programs share no state;
    each may take `seconds` and `memory_mb`; `output_chars` of its output are shown. `sandbox` is the minimum isolation
    level; with `memory_counted` the kernel must account the memory of programs.
    """

    def __init__(
        self,
        kinds: Sequence[Kind] = get_args(Kind),
        question: str = "",
        answer: float | str | None = None,
        form: Form = "fence",
        turns: int = 4,
        invalid_penalty: float = 0.0,
        error_penalty: float = 0.0,
        seconds: float = 5.0,
        memory_mb: int = 512,
        output_chars: int = 2000,
        sandbox: Level = "plain",
        memory_counted: bool = False,
    ) -> None:
        unknown = [kind for kind in kinds if kind not in QUESTIONS]
        if unknown or not kinds:
            raise ValueError(f"python: kinds is {list(kinds)}: choose from {', '.join(QUESTIONS)}")
        if form not in get_args(Form):
            raise ValueError(f"python: form is {form!r}: write {' or '.join(get_args(Form))}")
        if sandbox not in LEVELS:
            raise ValueError(f"python: sandbox is {sandbox!r}: write {' or '.join(reversed(LEVELS))}")
        if bool(question) != (answer is not None):
            raise ValueError("python: a question needs an answer, and an answer a question")
        if answer is not None and _number(str(answer)) is None:
            raise ValueError(f"python: the answer is {answer!r}, which is not a number")
        if turns < 1 or seconds <= 0 or memory_mb < 1 or output_chars < 1:
            raise ValueError("python: turns, seconds, memory_mb and output_chars must be above 0")
        self._kinds, self._fixed_question = list(kinds), (question, answer)
        self._form, self._turns = form, turns
        self._penalties = invalid_penalty, error_penalty
        self._limits = Limits(wall_s=seconds, cpu_s=max(1, round(seconds)), memory_mb=memory_mb)
        self._output_chars = output_chars
        self._weakest = sandbox, memory_counted
        self._answer = Decimal(0)
        self._invalid = self._failed = 0

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [TOOL.schema] if self._form == "json" else []

    def reset(self, seed: int) -> str:
        best(*self._weakest)  # reports what is missing before the first turn
        question, answer = self._fixed_question
        if answer is None:
            rng = random.Random(f"python/{seed}")
            question, answer = QUESTIONS[rng.choice(self._kinds)](rng)
        self._answer = _number(str(answer)) or Decimal(0)
        how = (
            "in a ```python block"
            if self._form == "fence"
            else f"by calling the tool `{TOOL.name}` with `{TOOL.argument}`"
        )
        return (
            f"{question}\n\nYou may run Python programs {how}; you are shown what they print. "
            f"Give the answer as <answer>number</answer>. You have {self._turns} turns."
        )

    def step(self, action: str) -> Step:
        self._turns -= 1
        answer = parse(action, "answer")
        if isinstance(answer, Action):
            right = _number(answer.text) == self._answer
            return Step("Right." if right else "Wrong.", float(right), terminated=True, info=self._facts(right))
        program = self._program(action)
        if program is None:
            self._invalid += 1
            return self._next_step(_NO_ACTION, 0.0 - self._penalties[0])
        outcome = run_blocking(Program(shows_last(program)), self._limits, best(*self._weakest))
        self._failed += not outcome.ok
        return self._next_step(self._describe_result(outcome), 0.0 if outcome.ok else 0.0 - self._penalties[1])

    def _program(self, action: str) -> str | None:
        if self._form == "json":
            call = parse(action, "json", tool=TOOL)
            return None if isinstance(call, Invalid) else call.text
        _, opened, rest = action.rpartition("```python")
        if opened:
            return rest.partition("```")[0].strip() or None
        blocks = action.split("```")[1::2]
        return blocks[-1].strip() or None if blocks else None

    def _next_step(self, observation: str, reward: float) -> Step:
        if not self._turns:
            return Step(f"{observation}\nYou have no turns left.", reward, terminated=True, info=self._facts())
        return Step(f"{observation}\nTurns left: {self._turns}.", reward, info=self._facts())

    def _facts(self, success: bool = False) -> dict[str, float]:
        return {"success": float(success), "invalid": float(self._invalid), "failed_programs": float(self._failed)}

    def _describe_result(self, outcome: ProgramResult) -> str:
        reasons = {
            "timeout": f"It was stopped: it took more than {self._limits.wall_s:g} s.",
            "memory": f"It was stopped: it took more than {self._limits.memory_mb} MB of memory.",
            "output": "It was stopped: it printed too much.",
            "disk": "It was stopped: it wrote too much.",
            "killed": "It was stopped.",
        }
        text = _shorten(outcome.stdout.rstrip(), self._output_chars)
        if not outcome.ok:
            error = outcome.stderr.rstrip()[-self._output_chars :] if outcome.kind == "failed" else reasons[outcome.kind]
            text = f"{text}\n{error}".strip()
        return text or "It printed nothing."


def shows_last(source: str) -> str:
    """The program; if its last line is a bare expression, its value is printed, as in a notebook."""
    if len(source) > _MAX_PARSED_CHARS:
        return source
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    if not body or not isinstance(body[-1], ast.Expr):
        return source
    last = body[-1]
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    before = b"".join([*lines[: last.lineno - 1], lines[last.lineno - 1][: last.col_offset]]).decode()
    return f"{before}print(_) if (_ := ({ast.get_source_segment(source, last)})) is not None else None"


def _shorten(text: str, limit: int) -> str:
    """The beginning and the end of a text that is too long."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} more characters …\n{text[len(text) - half :]}"


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _arithmetic(rng: random.Random) -> tuple[str, int]:
    a, b, c = rng.randint(100, 9999), rng.randint(100, 9999), rng.randint(10, 99999)
    return f"What is {a} × {b} − {c}?", a * b - c


def _sum(rng: random.Random) -> tuple[str, int]:
    divisor, maximum = rng.randint(3, 19), rng.randint(200, 5000)
    question = f"What is the sum of all whole numbers from 1 to {maximum} that are divisible by {divisor}?"
    return question, sum(range(divisor, maximum + 1, divisor))


def _primes(rng: random.Random) -> tuple[str, int]:
    low = rng.randint(2, 2000)
    high = low + rng.randint(50, 1000)
    primes = [n for n in range(low, high + 1) if all(n % d for d in range(2, int(n**0.5) + 1))]
    return f"How many prime numbers are there from {low} to {high}?", len(primes)


def _digits(rng: random.Random) -> tuple[str, int]:
    base, power = rng.randint(2, 30), rng.randint(10, 80)
    return f"What is the sum of the decimal digits of {base} to the power of {power}?", sum(map(int, str(base**power)))


def _sequence(rng: random.Random) -> tuple[str, int]:
    first, second, position, modulus = rng.randint(1, 9), rng.randint(1, 9), rng.randint(15, 200), rng.randint(50, 9999)
    before, now = first, second
    for _ in range(position - 2):
        before, now = now, before + now
    question = (
        f"A sequence begins with {first}, {second}, and every further number is the sum of the two before it. "
        f"What is the remainder of its {position}th number divided by {modulus}?"
    )
    return question, now % modulus


def _calendar(rng: random.Random) -> tuple[str, int]:
    start = date(rng.randint(1950, 2000), rng.randint(1, 12), rng.randint(1, 28))
    end = start + timedelta(days=rng.randint(100, 20000))
    return f"How many days are there from {start} to {end}, not counting the first?", (end - start).days


QUESTIONS: Mapping[Kind, Callable[[random.Random], tuple[str, int]]] = MappingProxyType(
    {
        "arithmetic": _arithmetic,
        "sum": _sum,
        "primes": _primes,
        "digits": _digits,
        "sequence": _sequence,
        "calendar": _calendar,
    }
)
"""By kind, the function that generates a question and its answer."""
