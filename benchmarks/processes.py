"""The scheduler beside a barrier with real processes: two engines on the CPU, the tiny model, forced lengths.

Every sample's length is forced, log-normal with a long tail, by a hash of its name; rewards likewise, so that a good
third of the groups has no signal. The same samples go through the same engines, rollout workers and graders twice:

- **scheduler**: `RolloutScheduler.next_rollout`, on-policy: a dropped group is replaced at once;
- **barrier**: all groups of a round are carried to the last verdict, then filtered; what is missing makes the next round.

`real_over_barrier` is the ratio of the medians over the steps. Only generation and judging are timed: training is the
same for both.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.cluster import Cluster, Place
from roll.cluster.ray_executor import RayExecutor
from roll.config.schema import Config
from roll.data.sample import Group, Sample
from roll.data.task import Response, Task
from roll.engine.request import Sampling
from roll.reward import RewardSource
from roll.rollout.filters import no_signal
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.order import Epochs
from roll.rollout.pool import RolloutPool
from roll.rollout.router import Router
from roll.rollout.runner import SampleRunner
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.worker import RolloutWorker
from roll.workers.infer import InferWorker
from roll.workers.publish import publish
from roll.workers.reward import RewardWorker
from roll.workers.train import TrainWorker

ENGINES = 2


def uniform(*key: object) -> float:
    text = "/".join(map(str, key)).encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) + 0.5) / 2**56


def length_of(sample: str, longest: int) -> int:
    """Log-normal about a task's own mean; one in a hundred is as long as allowed."""
    group = sample.partition(".")[0]
    z = 0.5 * NormalDist().inv_cdf(uniform("task", group)) + 0.87 * NormalDist().inv_cdf(uniform("own", sample))
    return min(max(int(math.exp(z * 0.9) * longest / 12), 4), longest)


class ForcedRunner(SampleRunner):
    """Responses end at their forced length and nowhere else."""

    def sampling_of(self, sample: Sample) -> Sampling:
        whole = super().sampling_of(sample)
        return replace(whole, max_new_tokens=length_of(sample.id, whole.max_new_tokens), stop_ids=())


class ForcedWorker(RolloutWorker):
    RUNNER = ForcedRunner


def reward(task: Task, response: Response) -> float:
    """Solved by chance: some tasks nearly always, some nearly never."""
    chance = min(max(0.5 + 1.1 * (uniform("chance", task.id) - 0.5) * 2, 0.0), 1.0)
    return float(uniform("solved", response.text) < chance)


class Crew:
    """The roles, without training."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.executor = RayExecutor(config.ray)

    async def start(self) -> None:
        config, executor = self.config, self.executor
        executor.connect()
        places = {
            role: [Place(role, rank, count, threads=1) for rank in range(count)]
            for role, count in (("actor_train", 1), ("actor_infer", ENGINES), ("reward", 1), ("rollout", 1))
        }
        executor.reserve([place for some in places.values() for place in some])
        source = RewardSource.of(reward)
        self.rewards = await Cluster.start(
            executor, lambda place: RewardWorker(place, config.reward, source), places["reward"]
        )
        await self.rewards.call(RewardWorker.start)
        self.actor = await Cluster.start(executor, lambda place: TrainWorker(place, config), places["actor_train"])
        self.engines = await Cluster.start(executor, lambda place: InferWorker(place, config), places["actor_infer"])
        self.rollouts = await Cluster.start(executor, lambda place: ForcedWorker(place, config, None), places["rollout"])
        await publish(self.actor, self.engines, 0)
        await self.rollouts.call(RolloutWorker.connect, self.engines, self.rewards)
        self.router = Router(ENGINES, max_running=config.rollout.max_running)
        self.pool = RolloutPool(self.rollouts, self.router)


async def scheduled(crew: Crew, tasks: list[Task], steps: int) -> list[float]:
    scheduler = RolloutScheduler(Epochs(tasks, 0), crew.pool, Lifecycle(None), crew.config.rollout, no_signal)
    seconds = []
    for step in range(steps):
        began_s = time.monotonic()
        rollout = await scheduler.next_rollout()
        seconds.append(time.monotonic() - began_s)
        scheduler.trained(rollout, step + 1)
        await crew.pool.tokens.forget(rollout.samples)
    return seconds


async def in_rounds(crew: Crew, tasks: list[Task], steps: int) -> list[float]:
    """The same groups, a round at a time."""
    rollout, order, life = crew.config.rollout, Epochs(tasks, 0), Lifecycle(None)
    wanted, index, seconds = rollout.groups_per_step, 0, []
    for _ in range(steps):
        began_s, kept, tried = time.monotonic(), 0, 0
        while missing := min(wanted - kept, int(wanted * (1 + rollout.max_replacements)) - tried):
            groups = []
            for _ in range(missing):
                task = order.next().task
                samples = [Sample(f"{index}.{i}", task, index, rollout.temperature) for i in range(rollout.group_size)]
                groups.append(Group(index, task, samples))
                index += 1
                for sample in samples:
                    life.move(sample, "queued")
            await asyncio.gather(*(crew.pool.run(str(g.index), g.samples, life, order=g.index) for g in groups))
            kept += sum(no_signal(group) is None for group in groups)
            tried += missing
            await crew.pool.tokens.forget([sample for group in groups for sample in group.samples])
        seconds.append(time.monotonic() - began_s)
    return seconds


async def measured(args: argparse.Namespace) -> dict[str, float]:
    rollout = {
        "groups_per_step": args.groups,
        "group_size": 8,
        "max_new_tokens": args.longest,
        "max_running": 32,
        "max_replacements": 2.0,
    }
    crew = Crew(Config.model_validate({"model": "tiny", "executor": "ray", "threads": 1, "rollout": rollout}))
    tasks = [Task.ask(str(number), str(number % 10), str(number % 10)) for number in range(10_000)]
    try:
        await crew.start()
        await scheduled(crew, tasks, 1)  # everything is warm then
        ours, theirs = await scheduled(crew, tasks, args.steps), await in_rounds(crew, tasks, args.steps)
    finally:
        await crew.executor.close()
    for name, seconds in (("scheduler", ours), ("barrier", theirs)):
        print(f"{name:12}{statistics.median(seconds):8.2f} s a step   " + " ".join(f"{s:.2f}" for s in seconds))
    return {
        "scheduler_s": statistics.median(ours),
        "barrier_s": statistics.median(theirs),
        "real_over_barrier": statistics.median(theirs) / statistics.median(ours),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--groups", type=int, default=24, help="groups a step, of 8 samples")
    options.add_argument("--longest", type=int, default=600, help="tokens of the longest responses")
    args = options.parse_args()
    report(asyncio.run(measured(args)), args.json)


if __name__ == "__main__":
    main()
