"""Two weeks of simulated training with a failure every hour: memory, ledger lag and step time stay flat.

The real scheduler, router, pool, order and ledger (on disk) train on a virtual clock against simulated engines, graders
and rollout workers. Every hour something fails, in turn: an engine is killed, one hangs, a rollout worker is killed, the
graders are gone, the trainer dies (the run goes back to its last checkpoint), the controller is killed (everything is
started again, from the last checkpoint and the ledger as it was on disk). The work is small, 2 engines, 8 groups of 4
samples and some minutes per step, so that the two weeks take a few minutes of real time.

For each simulated day: steps, the mean seconds of a step (virtual, with what failures cost), the controller's real
milliseconds per step and per restart (which checks the ledger), resident memory, the most records that were not on disk
at a step's end, and at its last step what is open: leases, seats on engines, wants (samples without a seat), homes
(samples whose tokens are kept) and the tokens' samples at the workers. At the end, whether the ledger balances
(`roll/simulation/balance.py`).

`rss_growth`, `step_time_growth` and `controller_time_growth` are the last day over the first. Nothing is asserted.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data.task import Task
from roll.scheduler.task_sampler import BaseSampler, EpochSampler, SolveRateSampler
from roll.simulation import balance
from roll.simulation.clock import run
from roll.simulation.cluster import SimCluster
from roll.simulation.lengths import Lengths, LogNormal, Solving
from roll.simulation.spec import EngineSpec
from roll.simulation.training import TrainerDied, Training
from roll.simulation.workload import Workload

DAY_S, HOUR_S = 86_400.0, 3_600.0
CHECKPOINT_EVERY = 3
BACK_S, HANG_S = 120.0, 60.0
TASKS = 300

WORK = Workload(
    name="soak",
    engines=2,
    engine=EngineSpec(
        base_s=0.08,
        per_sequence_s=0.0003,
        per_cached_token_s=4e-7,
        prefill_tokens_per_s=3_000.0,
        max_running=16,
        kv_tokens=64_000,
        reserve_tokens=640,
    ),
    groups_per_step=8,
    group_size=4,
    prompts=Lengths(mean_tokens=200, sigma=0.5, alike=1.0, max_tokens=1_024, min_tokens=32),
    responses=Lengths(mean_tokens=2_000, sigma=0.9, alike=0.5, max_tokens=8_192, min_tokens=16),
    solving=Solving(bias=0.5, spread=1.3, by_length=0.5),
    grading=LogNormal(mean=5.0, sigma=0.8),
    graders=4,
    train_tokens_per_s=200.0,
    publish_s=10.0,
)


@dataclass
class Day:
    steps_s: list[float] = field(default_factory=list)
    real_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    lag: int = 0
    rss_mib: float = 0.0
    open: Counter[str] = field(default_factory=Counter)


class Soak:
    """What always holds: a fault comes every hour, wherever the step is, and the run goes on."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.days: list[Day] = []
        self.faults: Counter[str] = Counter()
        self.steps = 0
        """Finished, also those that were undone later."""
        self._restarts_s: list[float] = []
        """Of the step that goes on: real seconds in which the controller was started again."""
        self._loop = asyncio.get_running_loop()
        self._next_s = HOUR_S
        self._number = 0
        self._kinds = cycle(self._acts())

    def _acts(self) -> dict[str, Callable[[], None]]:
        """What fails while a step goes on; `controller` is more than that."""
        training = self.training

        def lose_trainer() -> None:
            training.trainer_died = "train" if self._number % 4 < 2 else "publish"

        return {
            "engine killed": lambda: training.world.kill_engine(self._number % WORK.engines, BACK_S),
            "engine hung": lambda: training.world.hang_engine(self._number % WORK.engines, HANG_S, BACK_S),
            "rollout worker killed": lambda: training.world.kill_worker(
                self._number % len(training.world.handles), BACK_S
            ),
            "graders gone": lambda: training.world.stop_graders(BACK_S),
            "trainer died": lose_trainer,
            "controller killed": lambda: None,
        }

    async def run(self, days: float) -> None:
        acts = self._acts()
        await self.training.begin()
        began_s, began = self._loop.time(), time.process_time()
        while self._loop.time() < days * DAY_S:
            step = asyncio.create_task(self.training.make_step())
            while not step.done():
                await asyncio.wait([step], timeout=max(self._next_s - self._loop.time(), 0.0))
                if self._loop.time() >= self._next_s:
                    await self._fail(acts)
            if await self._finished(step):
                now_s, now = self._loop.time(), time.process_time()
                self._note(now_s - began_s, now - began - sum(self._restarts_s))
                began_s, began = now_s, now
        await self.training.stop()

    async def _fail(self, acts: dict[str, Callable[[], None]]) -> None:
        kind = next(self._kinds)
        self._next_s += HOUR_S
        self._number += 1
        self.faults[kind] += 1
        acts[kind]()
        if kind == "controller killed":
            await self._restart(0.7)

    async def _restart(self, written: float) -> None:
        """Everything again, from the last checkpoint and so much of the ledger as had reached the disk. A ledger that is
        opened is checked from end to end."""
        began = time.process_time()
        await self.training.kill(written)
        await self.training.begin()
        self._restarts_s.append(time.process_time() - began)

    async def _finished(self, step: asyncio.Task[None]) -> bool:
        """Whether a step was made; what it died of is mended."""
        try:
            await step
        except asyncio.CancelledError:
            return False  # with its controller
        except TrainerDied:
            await self.training.lose_trainer()
            return False
        except RunError:
            self.faults["a step without samples"] += 1
            await self._restart(1.0)
            return False
        if self.training.step % CHECKPOINT_EVERY == 0:
            await self.training.save()
        return True

    def _note(self, step_s: float, real_s: float) -> None:
        number = int(self._loop.time() // DAY_S)
        while len(self.days) <= number:
            self.days.append(Day())
        day = self.days[number]
        self.steps += 1
        day.steps_s.append(step_s)
        day.real_s.append(real_s)
        day.restarts_s += self._restarts_s
        self._restarts_s = []
        day.lag = max(day.lag, self.training.lag)
        day.rss_mib = rss_mib()
        day.open = open_objects(self.training.world)


def open_objects(world: SimCluster) -> Counter[str]:
    pool, router = world.pool, world.router
    return Counter(
        leases=len(pool._in_flight),
        seats=sum(router.running(engine) for engine in range(len(world.engines))),
        wants=router.waiting,
        homes=len(pool.tokens._locations),
        tokens=sum(len(rollouts.resident_samples) for rollouts in world.rollouts),
    )


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def make_training(path: Path, staleness: int) -> Training:
    config = RolloutConfig.model_validate(
        {
            "groups_per_step": WORK.groups_per_step,
            "group_size": WORK.group_size,
            "max_new_tokens": WORK.responses.max_tokens,
            "max_staleness": staleness,
            "oversample": 0.25 if staleness else 0.0,
            "tries": 10,
        }
    )
    tasks = [Task(f"t{number}", ()) for number in range(TASKS)]

    def make_order() -> BaseSampler:
        return SolveRateSampler(EpochSampler(tasks, 0), 0)

    def make_world() -> SimCluster:
        return SimCluster(WORK, workers=2, tries=config.max_attempts, max_scoring=16, way_s=0.002, report_s=60.0)

    return Training(path, tasks, config, make_order, make_world)


def balances(training: Training) -> list[str]:
    story = balance.SampleStory.read(training.path)
    order = training.scheduler.state()["order"]
    return [
        *balance.invalid_paths(story),
        *balance.too_old(story, training.config.max_staleness, masked=False),
        *balance.unbalanced(story, training.draws, balance.held_by(order)),
        *balance.wrong_epochs(training.draws, order, [task.id for task in training.tasks]),
    ]


def show(number: int, day: Day) -> None:
    lasted = f"{len(day.steps_s):6} {fmean(day.steps_s):8.1f} s {1000 * fmean(day.real_s):8.1f} ms"
    again = f"{1000 * fmean(day.restarts_s or [0.0]):6.0f} ms"
    things = " ".join(f"{day.open[name]:7}" for name in ("leases", "seats", "wants", "homes", "tokens"))
    print(f"{number + 1:4} {lasted} {again} {day.rss_mib:7.1f} MiB {day.lag:6} {things}", flush=True)


async def soak(path: Path, days: float, staleness: int) -> dict[str, Any]:
    soaked = Soak(make_training(path, staleness))
    began = time.monotonic()
    await soaked.run(days)
    print(" day  steps       step   controller   restart        rss    lag  leases   seats   wants   homes  tokens")
    for number, day in enumerate(soaked.days):
        show(number, day)
    first, last = soaked.days[0], soaked.days[-1]
    wrong = balances(soaked.training)
    for line in wrong[:20]:
        print(line)
    return {
        "days": days,
        "steps": soaked.steps,
        "trained": soaked.training.step,
        "faults": sum(soaked.faults.values()),
        "faults_by_kind": dict(soaked.faults),
        "rss_growth": last.rss_mib / first.rss_mib,
        "step_time_growth": fmean(last.steps_s) / fmean(first.steps_s),
        "controller_time_growth": fmean(last.real_s) / fmean(first.real_s),
        "ledger_lag": max(day.lag for day in soaked.days),
        "ledger_bytes": path.stat().st_size,  # noqa: ASYNC240
        "balanced": not wrong,
        "real_s": time.monotonic() - began,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--days", type=float, default=14.0, help="simulated days")
    options.add_argument("--staleness", type=int, default=1)
    options.add_argument("--dir", default=None, help="where to write the ledger (default: the temporary folder)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        result = run(soak(Path(folder) / "ledger.log", args.days, args.staleness))
    report(result, args.json)


if __name__ == "__main__":
    main()
