"""Seconds from an edited reward function to the first finished training step.

What a researcher waits for after saving a file: starting Python, importing, loading the model, starting the workers and
graders, the evaluation before the first step, one step. Beside it the floor: a Python process that only imports torch and
what `transformers` needs for a causal model. CPU seconds are those of all processes of the run; where cores are shared,
they say more than wall seconds. Each figure is the least of the repeats; `evaluation` is a part of `cycle`.

`--peer FOLDER` measures another source tree of ROLL in the same run, by turns. With `--steps N` the runs end after N
steps; a setting such as `executor=ray` or `rollout.group_size=4` applies to all of them. `--keep-reward` leaves the
config's reward as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

REWARD = """
def judge(task, response):
    return float(response.text.strip() == str(task.answer)) * {weight}
"""
IMPORTS = "import torch; from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM"
HERE = Path(__file__).parent.parent
MARK = "ROLL_BENCHMARK_RUN"
"""This variable of the environment marks the processes of a run."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Seconds:
    wall: float
    cpu: float

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(frozen=True)
class Cycle:
    whole: Seconds
    evaluation: Seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of every run")
    options.add_argument("--config", default=str(HERE / "examples" / "tiny.yaml"))
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--steps", type=int, default=1, help="until this step has finished")
    options.add_argument("--peer", type=Path, help="another source tree of ROLL")
    options.add_argument("--keep-reward", action="store_true", help="the config's reward, not an edited one")
    args = options.parse_args()
    trees = {"": HERE, **({"peer_": args.peer.resolve()} if args.peer else {})}
    cycles: dict[str, list[Cycle]] = {name: [] for name in trees}
    floors: list[Seconds] = []
    config = str(Path(args.config).resolve())
    settings = [f"threads={args.threads}", "eval.every=0", "rollout.filter=none", *args.settings]
    for i in range(args.repeats):
        floors.append(import_seconds())
        for name, tree in trees.items():
            weight = None if args.keep_reward else i + 1
            cycles[name].append(cycle_seconds(tree, config, settings, args.steps, weight))
    floor = least(floors)
    result: dict[str, object] = {"config": args.config, "steps": args.steps, **figures("imports", floor)}
    for name, those in cycles.items():
        whole = least([cycle.whole for cycle in those])
        result |= figures(f"{name}cycle", whole)
        result |= figures(f"{name}evaluation", least([cycle.evaluation for cycle in those]))
        result |= figures(f"{name}over_imports", whole - floor)
    report(result, args.json)


def figures(name: str, seconds: Seconds) -> dict[str, float]:
    return {f"{name}_s": seconds.wall, f"{name}_cpu_s": seconds.cpu}


def least(of: list[Seconds]) -> Seconds:
    return Seconds(min(each.wall for each in of), min(each.cpu for each in of))


def cycle_seconds(tree: Path, config: str, settings: list[str], steps: int, weight: int | None) -> Cycle:
    """Edits the reward and trains until this number of steps is recorded."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder) / "reward.py"
        if weight is not None:
            reward.write_text(REWARD.format(weight=weight))
            settings = [*settings, f"reward={reward}:judge"]
        command = [sys.executable, "-m", "roll.cli", "train", config, f"run.dir={folder}/run", *settings]
        started_s = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--plain", "--restart"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,  # `-m` imports from there first
            env={**os.environ, "PYTHONPATH": str(tree), MARK: mark},
        )

        def now() -> Seconds:
            return Seconds(time.perf_counter() - started_s, cpu_seconds(mark))

        assert process.stdout is not None
        evaluating = evaluated = Seconds(0.0, 0.0)
        try:
            for line in process.stdout:
                if line.startswith("evaluating"):
                    evaluating = now()
                elif line.startswith("step 0:"):
                    evaluated = now()
                elif line.startswith(f"step {steps}/"):
                    return Cycle(now(), evaluated - evaluating)
            raise SystemExit(f"the run ended before step {steps}, with status {process.wait()}")
        finally:
            process.terminate()  # a second signal would leave Ray's processes
            process.stdout.read()
            process.wait()


def cpu_seconds(mark: str) -> float:
    """CPU seconds of all live processes with this mark, and of those they have waited for."""
    return sum(_cpu_seconds(folder) for folder in Path("/proc").iterdir() if _is_marked(folder, mark))


def _is_marked(folder: Path, mark: str) -> bool:
    try:
        return folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False


def _cpu_seconds(folder: Path) -> float:
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def import_seconds() -> Seconds:
    mark, started_s = uuid.uuid4().hex, time.perf_counter()
    program = f"{IMPORTS}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seconds = Seconds(time.perf_counter() - started_s, cpu_seconds(mark))
        process.communicate("\n")
    return seconds


if __name__ == "__main__":
    main()
