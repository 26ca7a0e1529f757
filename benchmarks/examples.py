"""Minutes, CPU minutes and memory of every example, as a table in Markdown.

    python benchmarks/examples.py                                  all of them: hours
    python benchmarks/examples.py tiny maths algorithms/ppo        some
    python benchmarks/examples.py quickstart --steps 3             the first steps, and an estimate of the whole run

CPU minutes are those of all processes of a run and change little with what else the machine does; minutes are wall time
and do. Memory is the largest sum of the processes' PSS (pages that processes share count once), read every
two seconds.
An example that begins with the result of another one needs that one's run in the folder (`runs/sft` for sft_then_rl):
name both, or use `--folder` with a folder where it ran before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll import load_config

EXAMPLES = Path(__file__).parent.parent / "examples"
FIRST = {"reward_model": "reward_model.py"}
"""Scripts that an example needs before it, by its name."""
ORDER = ("sft", "sft_then_rl", "imitation/demonstrations", "imitation/play", "imitation/dagger")
"""Examples that begin where others ended come after them."""


@dataclass
class Usage:
    """What a process and its descendants have used so far."""

    cpu_s: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Row:
    """A run of an example. `whole_cpu_minutes` estimates all planned steps where fewer were trained; `before` and
    `after` are held-out rewards."""

    name: str
    steps: int
    steps_planned: int
    minutes: float
    cpu_minutes: float
    whole_cpu_minutes: float
    peak_gib: float
    before: float | None
    after: float | None


class Meter(threading.Thread):
    """Looks every two seconds at a process and all that descend from it."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.usage, self._root, self._ended = Usage(), psutil.Process(pid), threading.Event()
        self._cpu_s: dict[tuple[int, float], float] = {}

    def run(self) -> None:
        while not self._ended.wait(2.0):
            self.look()

    def look(self) -> float:
        """Seconds of CPU time up to now."""
        memory = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return self.usage.cpu_s
        for process in processes:
            try:
                times = process.cpu_times()
                self._cpu_s[process.pid, process.create_time()] = times.user + times.system
                memory += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.usage.cpu_s = sum(self._cpu_s.values())
        self.usage.peak_bytes = max(self.usage.peak_bytes, memory)
        return self.usage.cpu_s

    def end(self) -> Usage:
        self._ended.set()
        self.join()
        return self.usage


def names() -> list[str]:
    """All examples, by their paths without the ending; those that need others after them."""
    found = sorted(str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.yaml"))
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else -1)


def measure(name: str, folder: Path, threads: int, steps: int | None) -> Row:
    """Trains an example in `folder`: all its steps, or the first `steps` of reinforcement learning."""
    if name in FIRST and not (folder / "runs" / "liking").is_dir():
        subprocess.run([sys.executable, str(EXAMPLES / FIRST[name])], cwd=folder, check=True, stdout=sys.stderr)
    config = load_config(EXAMPLES / f"{name}.yaml")
    shorter = steps is not None and config.pipeline == "rlvr" and steps < config.train.steps
    overrides = [f"train.steps={steps}", "eval.every=0"] if shorter else []
    command = [
        sys.executable,
        "-m",
        "roll.cli",
        "train",
        str(EXAMPLES / f"{name}.yaml"),
        f"threads={threads}",
        *overrides,
    ]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--plain", "--restart"], cwd=folder, stdout=subprocess.PIPE, text=True)
    meter = Meter(process.pid)
    meter.start()
    evaluation, after_step = [0.0, 0.0], []  # CPU seconds when these lines were printed; the first step begins after them
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name}: {line}", end="", file=sys.stderr, flush=True)
        if line.startswith("step 0:"):
            evaluation[1] = meter.look()
            after_step.append(evaluation[1])
        elif line.startswith("step ") and "/" in line.split()[1]:
            after_step.append(meter.look())
        elif line.startswith("evaluating") and not after_step:
            evaluation[0] = meter.look()
    if process.wait() != 0:
        raise SystemExit(f"{name} ended with status {process.returncode}")
    minutes, usage = (time.perf_counter() - started) / 60, meter.end()
    summary = json.loads((folder / config.run.dir / "summary.json").read_text())
    planned, trained = config.train.steps if shorter else summary["steps"], summary["steps"]
    missing_s = 0.0
    if shorter:
        warm = after_step[1:] if len(after_step) > 2 else after_step  # the first step takes longer, if there are others
        missing_s += (planned - trained) * (warm[-1] - warm[0]) / max(len(warm) - 1, 1)
        missing_s += (config.eval.every and (planned - 1) // config.eval.every) * (evaluation[1] - evaluation[0])
    return Row(
        name,
        trained,
        planned,
        minutes,
        usage.cpu_s / 60,
        (usage.cpu_s + missing_s) / 60,
        usage.peak_bytes / 2**30,
        *(summary.get(key) for key in ("reward_before", "reward_after")),
    )


def table(rows: list[Row]) -> str:
    """In Markdown; `~` marks an estimate."""
    lines = ["| example | steps | minutes | CPU minutes | peak GiB | held-out reward |", "| --- " * 6 + "|"]
    for row in rows:
        is_whole = row.steps == row.steps_planned
        steps = f"{row.steps}" if is_whole else f"{row.steps} of {row.steps_planned}"
        cpu = (
            f"{row.cpu_minutes:.1f}"
            if is_whole
            else f"{row.cpu_minutes:.1f}, all ~{row.whole_cpu_minutes:.{0 if row.whole_cpu_minutes >= 10 else 1}f}"
        )
        reward = "" if row.before is None or row.after is None else f"{row.before:.2f} → {row.after:.2f}"
        lines.append(f"| {row.name} | {steps} | {row.minutes:.1f} | {cpu} | {row.peak_gib:.1f} | {reward} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", help="examples, without .yaml (default: all)")
    options.add_argument("--steps", type=int, help="train only the first steps of reinforcement learning")
    options.add_argument("--folder", type=Path, help="where the runs are kept (default: nowhere)")
    options.add_argument("--results", type=Path, help="JSON lines: rows are appended, and the table has all of the file")
    args = options.parse_args()
    unknown = sorted({*args.names} - {*names()})
    if unknown:
        raise SystemExit(f"there is no example {unknown[0]!r}: write {', '.join(names())}")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.names or names():
            row = measure(name, folder.resolve(), args.threads, args.steps)
            rows.append(row)
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    if args.results is not None:
        newest = {row["name"]: Row(**row) for row in map(json.loads, args.results.read_text().splitlines())}
        rows = sorted(newest.values(), key=lambda row: row.name)
    if args.json:
        figures = ("steps", "steps_planned", "minutes", "cpu_minutes", "whole_cpu_minutes", "peak_gib", "before", "after")
        report({figure: {row.name: getattr(row, figure) for row in rows} for figure in figures}, as_json=True)
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
