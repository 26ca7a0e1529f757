"""Executions a second in the sandbox, on each level that this machine has, beside what starting Python alone costs.

`floor` is `python -c pass`, by the same interpreter, without a sandbox. `calls` is the reward `code` on functions: one
execution. `asserts` is the same reward on tests that are code, which take two executions. All run on `--threads` threads.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.data.task import Task
from roll.reward.code import Code
from roll.reward.code_tests import tests_of
from roll.sandbox import Missing, Program, Sandbox, best, run_blocking, survey

PROGRAM = Program("print(sum(n * n for n in range(1000)))")
SOURCE = "def add(a, b):\n    return a + b\n"
CALLS = tests_of(Task("calls", (), info={"test_list": ["assert add(2, 3) == 5", "assert add(4, 4) == 8"]}))
ASSERTS = tests_of(Task("asserts", (), info={"test": "def check(f):\n    assert f(2, 3) == 5", "entry_point": "add"}))


def rate(act: Callable[[], None], threads: int, seconds: float) -> float:
    """How often a second it is done, `threads` at a time."""
    act()
    until = time.monotonic() + seconds

    def work() -> int:
        count = 0
        while time.monotonic() < until:
            act()
            count += 1
        return count

    began_s = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        counts = [pool.submit(work) for _ in range(threads)]
        return sum(count.result() for count in counts) / (time.monotonic() - began_s)


def start_python() -> None:
    subprocess.run([best().python.path, "-c", "pass"], check=True, timeout=60)


def measured(sandbox: Sandbox, threads: int, seconds: float) -> dict[str, float]:
    code = Code(seconds=30, total_s=60)

    def run() -> None:
        outcome = run_blocking(PROGRAM, sandbox=sandbox)
        assert outcome.stdout == "332833500\n", outcome

    def calls() -> None:
        assert all(code.passed(SOURCE, CALLS, sandbox))

    def asserts() -> None:
        assert all(code.passed(SOURCE, ASSERTS, sandbox))

    acts = {"executions": run, "calls": calls, "asserts": asserts}
    return {f"{sandbox.level}_{name}_per_s": rate(act, threads, seconds) for name, act in acts.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    args = options.parse_args()
    result: dict[str, Any] = {}
    for level in survey():
        if isinstance(level, Missing):
            print(f"no {level.level}: {level.why}", file=sys.stderr)
        else:
            result |= measured(level, args.threads, args.seconds)
    report({"floor_per_s": rate(start_python, args.threads, args.seconds), **result}, args.json)


if __name__ == "__main__":
    main()
