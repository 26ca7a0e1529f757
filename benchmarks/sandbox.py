"""Executions a second in the sandbox, on each level that this machine has, beside what starting Python alone costs.

`floor` is `python -c pass`, by the same interpreter, without a sandbox; `…_of_floor` is a rate over that one, which holds
on a busy machine too. `calls` is the reward `code` on functions: one execution. `asserts` is the same reward on tests
that are code, which take two executions. All run on `--threads` threads.

`--against FOLDER` compares with another checkout, such as `git worktree add FOLDER COMMIT`: both take turns, `--rounds`
times, each in a process of its own. Of every rate it prints the median here, there, and the median of the ratios.
"""

from __future__ import annotations

import json
import os
import statistics
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


def rates_of(folder: Path, threads: int, seconds: float) -> dict[str, float]:
    """What this benchmark measures of the ROLL in a folder, in a new process."""
    command = [sys.executable, __file__, "--json", "--threads", str(threads), "--seconds", str(seconds)]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in found.items() if name.endswith("_per_s")}


def compared(other: Path, rounds: int, threads: int, seconds: float) -> dict[str, float]:
    """Rates here and in another checkout, which take turns so that both see the same machine."""
    folders = {"here": Path(__file__).parent.parent, "there": other.resolve()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for number in range(rounds):
        for name in sorted(folders, reverse=bool(number % 2)):
            found[name].append(rates_of(folders[name], threads, seconds))
    result: dict[str, float] = {}
    for rate_name in found["here"][0]:
        here, there = ([rates[rate_name] for rates in found[name]] for name in ("here", "there"))
        result[f"{rate_name}_here"], result[f"{rate_name}_there"] = statistics.median(here), statistics.median(there)
        result[f"{rate_name}_ratio"] = statistics.median(a / b for a, b in zip(here, there, strict=True))
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    options.add_argument("--against", type=Path, help="another checkout to compare with")
    options.add_argument("--rounds", type=int, default=5, help="of a comparison")
    args = options.parse_args()
    if args.against is not None:
        report(compared(args.against, args.rounds, args.threads, args.seconds), args.json)
        return
    result: dict[str, Any] = {}
    for level in survey():
        if isinstance(level, Missing):
            print(f"no {level.level}: {level.why}", file=sys.stderr)
        else:
            result |= measured(level, args.threads, args.seconds)
    floor = rate(start_python, args.threads, args.seconds)
    of_floor = {name.replace("per_s", "of_floor"): value / floor for name, value in result.items()}
    report({"floor_per_s": floor, **result, **of_floor}, args.json)


if __name__ == "__main__":
    main()
