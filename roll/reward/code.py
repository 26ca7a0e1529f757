"""`code`: the program in the text passes the task's tests, which run in the sandbox.

The program never shares a process with the expected results: outputs and results are compared here, and tests that are
code run in a sandbox of their own. So it gains nothing by ending early, by printing what a test would print, by changing
`assert` or `==`, or by searching its memory and files: it has to give the right answers.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from roll.data.task import Response, Task
from roll.reward.code_tests import AssertTest, CallTest, CodeTest, CodeTests, InOut, tests_of
from roll.reward.extract import strip_thinking
from roll.sandbox import Level, Limits, Program, Sandbox, best, run_blocking
from roll.sandbox.calls import CallReturned, FunctionCall, call_all, check_all

Credit: TypeAlias = Literal["all", "share"]
Block: TypeAlias = Literal["last", "first", "all", "text"]

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Code:
    """The value of the program in the text: 1 if it passes all tests, else 0; or the share of tests that it passes."""

    credit: Credit = "all"
    """`all`: all tests or nothing. `share`: the share of tests passed."""
    block: Block = "last"
    """Which fenced block of the text, without its thinking, is the program: `last`, `first`, or `all`, concatenated. A
    text without blocks is the program itself; with `text`, every text is."""
    seconds: float = 4.0
    """CPU seconds per program; its wall time may be twice that, so that a busy machine fails no program. Each input is a
    separate program; all calls of a response, and all its assertions, are one."""
    total_s: float = 8.0
    """Seconds for all tests of one response; tests not begun by then have failed. Keep `reward.deadline_s` above it."""
    memory_mb: int = 512
    """Memory of one program."""
    tolerance: float = 0.0
    """Relative tolerance of numbers, also in outputs."""
    sandbox: Level = "plain"
    """The minimum sandbox level: `plain`, `namespaces` or `bubblewrap`. On a machine that has only a weaker one the run
    stops."""
    memory_counted: bool = False
    """Whether the run stops if the kernel does not account the memory of programs."""

    def __post_init__(self) -> None:
        for name, kind in (("credit", Credit), ("block", Block), ("sandbox", Level)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but takes {' or '.join(get_args(kind))}")
        for name in ("seconds", "total_s", "memory_mb"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0")
        if self.tolerance < 0:
            raise ValueError(f"tolerance is {self.tolerance}, but must be 0 or above")

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        tests = tests_of(task)
        source = program_in(strip_thinking(response.text) or "", self.block)
        passed = self.run_tests(source, tests) if source.strip() else [False] * len(tests.tests)
        share = sum(passed) / len(passed)
        return {"reward": float(all(passed)) if self.credit == "all" else share, "tests_passed": share}

    def warm_up(self) -> None:
        """Detects the sandbox, which the first verdict would have to do."""
        self._sandbox()

    def _sandbox(self) -> Sandbox:
        return best(self.sandbox, self.memory_counted)

    def check_answer(self, task: Task) -> bool:
        """Always checks: raises `ValueError` if the task has no tests that can be read."""
        return bool(tests_of(task).tests)

    def run_tests(self, source: str, tests: CodeTests, sandbox: Sandbox | None = None) -> list[bool]:
        """Per test, whether the program passes it. If only all of them count, the first failure ends it."""
        runner = _Trial(self, tests.with_prefix(source), tests.setup, sandbox or self._sandbox())
        passed: list[bool] = []
        for batch in _batches(tests.tests):
            if self.credit == "all" and not all(passed):
                break
            passed += runner.run(batch)
        return passed + [False] * (len(tests.tests) - len(passed))


@dataclass
class _Trial:
    """Runs a program through its tests."""

    code: Code
    source: str
    setup: str
    sandbox: Sandbox

    def __post_init__(self) -> None:
        self._deadline_s = time.monotonic() + self.code.total_s

    def run(self, batch: Sequence[CodeTest]) -> list[bool]:
        wall_s = min(2 * self.code.seconds, self._deadline_s - time.monotonic())
        if wall_s <= 0:
            return [False] * len(batch)
        limits = Limits(wall_s=wall_s, cpu_s=math.ceil(self.code.seconds), memory_mb=self.code.memory_mb)
        calls = [test for test in batch if isinstance(test, CallTest)]
        if calls:
            return self._calls(calls, limits)
        asserts = [test for test in batch if isinstance(test, AssertTest)]
        if asserts:
            return self._asserts(asserts, limits)
        return [self._in_out(test, limits) for test in batch if isinstance(test, InOut)]

    def _in_out(self, test: InOut, limits: Limits) -> bool:
        outcome = run_blocking(Program(self.source, test.stdin.encode()), limits, self.sandbox)
        return outcome.ok and same_output(test.stdout, outcome.stdout, self.code.tolerance)

    def _calls(self, tests: Sequence[CallTest], limits: Limits) -> list[bool]:
        calls = [FunctionCall(test.name, test.arguments, test.keywords, test.apps_style) for test in tests]
        results, _ = call_all(self.sandbox, self.source, calls, limits)
        return [
            isinstance(result, CallReturned) and self._is_right(test, result.value)
            for test, result in zip(tests, results, strict=True)
        ]

    def _is_right(self, test: CallTest, got: Any) -> bool:
        in_a_list = test.apps_style and isinstance(test.result, list | tuple) and len(test.result) == 1
        expected = [test.result, test.result[0]] if in_a_list else [test.result]
        return any(same(each, got, self.code.tolerance, test.exact) for each in expected)

    def _asserts(self, tests: Sequence[AssertTest], limits: Limits) -> list[bool]:
        names = list(dict.fromkeys(name for test in tests for name in test.names))
        texts = [test.text for test in tests]
        failures, _ = check_all(self.sandbox, self.source, self.setup, texts, names, limits)
        return [not failure for failure in failures]


def program_in(text: str, block: Block = "last") -> str:
    """The program in a text. A block that is not closed extends to the end."""
    blocks = [found[1] for found in _FENCE.finditer(text)] if block != "text" else []
    if not blocks:
        return text
    if block == "all":
        return "\n".join(blocks)
    return blocks[-1] if block == "last" else blocks[0]


def same_output(expected: str, got: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs are equal up to spaces at line ends and empty lines at the end; with a tolerance, words that
    are numbers may differ by that much."""
    left, right = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, got))
    if left == right or not tolerance:
        return left == right
    if len(left) != len(right):
        return False
    words = [(a.split(), b.split()) for a, b in zip(left, right, strict=True)]
    return all(len(a) == len(b) and all(map(lambda x, y: _same_word(x, y, tolerance), a, b)) for a, b in words)


def same(expected: Any, got: Any, tolerance: float = 0.0, exact: bool = False) -> bool:
    """Whether two plain values are equal; numbers may differ by the tolerance, and unless `exact`, a tuple equals a
    list."""
    if exact and not tolerance:
        return bool(expected == got)
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        alike = not exact or isinstance(got, type(expected))  # a named tuple is a tuple
        return alike and len(expected) == len(got) and all(
            same(a, b, tolerance, exact) for a, b in zip(expected, got, strict=True)
        )  # fmt: skip
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same(expected[key], got[key], tolerance, exact) for key in expected)
    if tolerance and _is_number(expected) and _is_number(got):
        return _is_close(expected, got, tolerance)
    return bool(expected == got)


def _is_close(expected: Any, got: Any, tolerance: float) -> bool:
    """Whether two numbers of any size differ by at most the tolerance."""
    try:
        return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer that no float can represent
        if isinstance(expected, float) or isinstance(got, float):
            return False
        over, under = tolerance.as_integer_ratio()
        return bool(abs(expected - got) * under <= over * max(abs(expected), abs(got), 1))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same_word(left: str, right: str, tolerance: float) -> bool:
    if left == right:
        return True
    try:
        expected, got = float(left), float(right)
    except ValueError:
        return False
    return math.isfinite(expected) and math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)


def _batches(tests: Sequence[CodeTest]) -> list[list[CodeTest]]:
    """Adjacent tests of one kind that can share a process; each input has a process of its own."""
    batches: list[list[CodeTest]] = []
    for test in tests:
        if batches and type(batches[-1][-1]) is type(test) and not isinstance(test, InOut):
            batches[-1].append(test)
        else:
            batches.append([test])
    return batches
