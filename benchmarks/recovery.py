"""How long a run takes to get over the death of a worker, beside starting the whole run again.

Three runs of the tiny model with a checkpoint every step, chosen by `--runs`: `roles` on Ray (two engines, two rollout
workers, a grader and an environment worker, a trainer), `sharded-local` and `sharded-ray` (a trainer of two ranks). One
worker is killed (SIGKILL) during a step. `recovery_s` is the time from the kill until the end of the first step that is
recorded after it, by kind of worker; a step that was undone because the trainer died counts when the run has repeated it.
`restart_s` is the same for the whole run: everything is killed, `roll train --resume` is started at once, and the first
step it adds ends. `of_restart` is the ratio. Both contain one usual step, whose time is given too.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.data.task import EnvSpec, Task
from roll.run import Metrics, RunFolder

ROOT = Path(__file__).parents[1]
SETTINGS = (
    f"tasks={Path(__file__).resolve()}:tasks",
    "threads=1",
    "train.steps=100000",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=32",
    "rollout.filter=none",
    "eval.every=0",
    "eval.samples=4",
    "run.checkpoint_every=1",
    "run.tensorboard=false",
    "fault_tolerance.restarts=100",
)
SHARDED = "roles.actor_train={strategy: sharded, replicas: 2}"
LIMIT_S = 300.0


@dataclass(frozen=True)
class Layout:
    settings: tuple[str, ...]
    kinds: dict[str, str]
    """The worker that is killed, by what it is."""


LAYOUTS = {
    "roles": Layout(
        ("executor=ray", "roles.actor_infer.replicas=2", "roles.rollout.replicas=2"),
        {
            "engine": "actor_infer-0",
            "grader": "reward-0",
            "environment": "env-0",
            "rollout worker": "rollout-0",
            "trainer": "actor_train-0",
        },
    ),
    "sharded-local": Layout(("executor=local", SHARDED), {"rank": "actor_train-1"}),
    "sharded-ray": Layout(("executor=ray", SHARDED), {"rank": "actor_train-1"}),
}


def tasks(split: str) -> Iterable[Task]:
    """Half of the tasks are judged by a grader, half are played in an environment."""
    for number in range(10):
        yield Task.ask(f"digit {number}", str(number), str(number))
        yield Task(f"turns {number}", (), environment=EnvSpec("echo_turns", number, {"turns": 2}))


class Run:
    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self.folder = RunFolder(folder)
        self._settings = settings
        self._output = folder.with_suffix(".txt")

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "roll.cli", "train", str(ROOT / "examples" / "tiny.yaml")]
        settings = [f"run.dir={self.folder.path}", *SETTINGS, *self._settings, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._output.open("ab") as file:
            self.process = subprocess.Popen(
                [*command, *settings], stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def ended(self) -> list[float]:
        """When each step on record ended."""
        if not self.folder.metrics_path.is_file():
            return []
        return [row["time_s"] for row in Metrics.read(self.folder.metrics_path) if "time/step_s" in row]

    def first_after(self, moment_s: float) -> float:
        """When the first step after a moment ended."""
        end_s = time.time() + LIMIT_S
        while time.time() < end_s:
            if later := [ended_s for ended_s in self.ended() if ended_s > moment_s]:
                return later[0]
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended: {self._output.read_text()[-3000:]}")
            time.sleep(0.05)
        raise TimeoutError(f"no step within {LIMIT_S} s: {self._output.read_text()[-3000:]}")

    def settle(self, steps: int = 3) -> float:
        """Waits for some undisturbed steps; the usual seconds of one."""
        moment_s = time.time()
        for _ in range(steps):
            moment_s = self.first_after(moment_s)
        latest = self.ended()[-steps:]
        return statistics.median(later - earlier for earlier, later in pairwise(latest))

    def settle_until(self, steps: int, seconds: float) -> None:
        """Waits for `seconds`, and then for `steps` undisturbed steps."""
        time.sleep(seconds)
        self.settle(steps)

    def kill(self, worker: str) -> float:
        """Kills a worker in the middle of a step; when."""
        time.sleep(0.2)
        log = (self.folder.path / "logs" / f"{worker}.log").read_text()
        moment_s = time.time()
        os.kill(int(re.findall(r" is process (\d+) on .*?is ready", log, re.DOTALL)[-1]), signal.SIGKILL)
        return moment_s

    def kill_all(self) -> float:
        moment_s = time.time()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        return moment_s

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)


def measure(layout: Layout, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds that a run takes to recover from each kind of kill, and to start again as a whole."""
    run = Run(folder, layout.settings)
    run.start()
    try:
        step_s = run.settle()
        found: dict[str, list[float]] = {kind: [] for kind in layout.kinds}
        for _ in range(repeats):
            for kind, worker in layout.kinds.items():
                run.settle_until(2, 20.0)  # so that every worker is back, and the trainer has its spares again
                moment_s = run.kill(worker)
                found[kind].append(run.first_after(moment_s) - moment_s)
        run.settle_until(2, 20.0)
        moment_s = run.kill_all()
        run.start("--resume")
        restart_s = run.first_after(moment_s) - moment_s
    finally:
        run.stop()
    recovery = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    shares = {kind: seconds / restart_s for kind, seconds in recovery.items()}
    return {"recovery_s": recovery, "of_restart": shares, "restart_s": restart_s, "usual_step_s": step_s}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=2, help="kills of each kind, of which the median is reported")
    options.add_argument("--runs", default=",".join(LAYOUTS), help=f"some of {','.join(LAYOUTS)} (default: all)")
    args = options.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in args.runs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(LAYOUTS[name], Path(folder) / "run", args.repeats)
        print(f"{name:16}{'recovery_s':>12}{'of_restart':>12}")
        for kind, seconds in found[name]["recovery_s"].items():
            print(f"{kind:16}{seconds:12.2f}{found[name]['of_restart'][kind]:12.2f}")
        print(f"{'whole run':16}{found[name]['restart_s']:12.2f}{1.0:12.2f}\n", flush=True)
    report(found, args.json)


if __name__ == "__main__":
    main()
