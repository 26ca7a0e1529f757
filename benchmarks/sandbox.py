"""Executions a second in the sandbox, on each level that this machine has, beside what starting Python alone costs.

`floor` is `python -c pass`, by the same interpreter, without a sandbox; `…_of_floor` is a rate over that one, which holds
on a busy machine too. `calls` is the reward `code` on functions: one execution. `asserts` is the same reward on tests
that are code, which take two executions. All run on `--threads` threads.

`--against FOLDER` compares with another checkout, such as `git worktree add FOLDER COMMIT`: both take turns, `--rounds`
times, each in a process of its own. Of every rate it prints the median here, there, and the median of the ratios of
neighbouring turns. Short turns (`--seconds 1`) hold better on a busy machine.
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

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.data.task import Task
from roll.reward.code import Code
from roll.reward.code_tests import tests_of
from roll.sandbox import MissingLevel, Program, Sandbox, best, run_blocking, survey

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


def acts_of(sandbox: Sandbox) -> dict[str, Callable[[], None]]:
    """What is measured on a level."""
    code = Code(seconds=30, total_s=60)

    def run() -> None:
        outcome = run_blocking(PROGRAM, sandbox=sandbox)
        assert outcome.stdout == "332833500\n", outcome

    def calls() -> None:
        assert all(code.run_tests(SOURCE, CALLS, sandbox))

    def asserts() -> None:
        assert all(code.run_tests(SOURCE, ASSERTS, sandbox))

    acts = {"executions": run, "calls": calls, "asserts": asserts}
    return {f"{sandbox.level}_{name}_per_s": act for name, act in acts.items()}


def all_acts() -> dict[str, Callable[[], None]]:
    """On every level of this machine, and the floor."""
    acts: dict[str, Callable[[], None]] = {}
    for level in survey():
        if isinstance(level, MissingLevel):
            print(f"no {level.level}: {level.why}", file=sys.stderr)
        else:
            acts |= acts_of(level)
    return {**acts, "floor_per_s": start_python}


class Served:
    """This benchmark on the ROLL of some folder, in a process that measures when it is asked to."""

    def __init__(self, folder: Path, threads: int, seconds: float) -> None:
        command = [sys.executable, __file__, "--serve", "--threads", str(threads), "--seconds", str(seconds)]
        env = {**os.environ, "PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks, self._says = self._process.stdin, self._process.stdout
        self.names: list[str] = json.loads(self._says.readline())

    def rate(self, name: str) -> float:
        print(name, file=self._asks, flush=True)
        return float(self._says.readline())

    def close(self) -> None:
        self._asks.close()
        self._process.wait(timeout=60)


def serve(threads: int, seconds: float) -> None:
    """Measures what standard input names, line by line."""
    acts = all_acts()
    print(json.dumps(list(acts)), flush=True)
    for line in sys.stdin:
        print(rate(acts[line.strip()], threads, seconds), flush=True)


def compared(other: Path, rounds: int, threads: int, seconds: float) -> dict[str, float]:
    """Rates here and in another checkout, which take turns so that both see the same machine."""
    served = [Served(folder, threads, seconds) for folder in (Path(__file__).parent.parent, other.resolve())]
    found: dict[str, list[list[float]]] = {name: [[], []] for name in served[0].names}
    for number in range(rounds):
        for name in found:
            for which in (0, 1) if number % 2 else (1, 0):
                found[name][which].append(served[which].rate(name))
    for each in served:
        each.close()
    result: dict[str, float] = {}
    for name, (here, there) in found.items():
        result |= {f"{name}_here": statistics.median(here), f"{name}_there": statistics.median(there)}
        result[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(here, there, strict=True))
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    options.add_argument("--against", type=Path, help="another checkout to compare with")
    options.add_argument("--rounds", type=int, default=15, help="of a comparison")
    options.add_argument("--serve", action="store_true", help="measure what standard input names")
    args = options.parse_args()
    if args.serve:
        serve(args.threads, args.seconds)
    elif args.against is not None:
        report(compared(args.against, args.rounds, args.threads, args.seconds), args.json)
    else:
        rates = {name: rate(act, args.threads, args.seconds) for name, act in all_acts().items()}
        floor = rates.pop("floor_per_s")
        of_floor = {name.replace("per_s", "of_floor"): value / floor for name, value in rates.items()}
        report({"floor_per_s": floor, **rates, **of_floor}, args.json)


if __name__ == "__main__":
    main()
