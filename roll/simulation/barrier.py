"""The barrier baseline of a scheduler: the same samples on the same engines, one whole phase after the other.

A round generates all samples of its groups, waits for the last one (with environments: for the last episode), then grades
them all, then filters. The next round has as many groups as were dropped, until the step has its groups or may try no
more. Then it trains, then publishes, and only then the next step begins.

Within a round nothing is held back: groups are distributed over the engines by the fewest samples, each engine has its
own queue and batches continuously, and the prompts of siblings and the turns of a conversation hit the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from roll.simulation.clock import run
from roll.simulation.engine import SimEngine
from roll.simulation.graders import SimGraderPool
from roll.simulation.prefixes import Prefix
from roll.simulation.workload import Episode, EpisodeTurn, StepGroups, Workload


@dataclass(frozen=True)
class BarrierStep:
    groups: StepGroups
    rounds: int
    generate_s: float
    grade_s: float
    train_s: float
    publish_s: float

    @property
    def seconds(self) -> float:
        return self.generate_s + self.grade_s + self.train_s + self.publish_s


@dataclass(frozen=True)
class BarrierRun:
    steps: tuple[BarrierStep, ...]
    seconds: float
    utilisation: float
    """Share of the engines' slots that were in use, over the whole time."""
    decoded_tokens: int
    recomputed_tokens: int
    preemptions: int


def run_barrier(workload: Workload, steps: int) -> BarrierRun:
    return run(_run(workload, steps))


async def _run(workload: Workload, steps: int) -> BarrierRun:
    barrier = _Barrier(workload)
    done = tuple([await barrier.step() for _ in range(steps)])
    seconds = asyncio.get_running_loop().time()
    stats = [engine.stats for engine in barrier.engines]
    return BarrierRun(
        steps=done,
        seconds=seconds,
        utilisation=sum(s.running_s for s in stats) / (workload.engine.max_running * len(stats) * seconds),
        decoded_tokens=sum(s.decoded_tokens for s in stats),
        recomputed_tokens=sum(s.recomputed_tokens for s in stats),
        preemptions=sum(s.preemptions for s in stats),
    )


class _Barrier:
    def __init__(self, workload: Workload) -> None:
        self._loop = asyncio.get_running_loop()
        self._workload = workload
        self._next_group = 0
        self._graders = SimGraderPool(self._loop, max(workload.graders, 1))
        self.engines = [SimEngine(self._loop, workload.engine) for _ in range(workload.engines)]

    async def step(self) -> BarrierStep:
        workload = self._workload
        tried: list[int] = []
        kept: list[int] = []
        rounds, generate_s, grade_s = 0, 0.0, 0.0
        while missing := min(workload.groups_per_step - len(kept), workload.most_groups_per_step - len(tried)):
            groups = range(self._next_group, self._next_group + missing)
            self._next_group += missing
            episodes = {group: [workload.episode(sample) for sample in workload.samples_of(group)] for group in groups}
            generate_s += await self._timed(self._generate(list(episodes.values())))
            grade_s += await self._timed(self._grade([episode for group in episodes.values() for episode in group]))
            tried += groups
            kept += [group for group in groups if len({episode.reward for episode in episodes[group]}) > 1]
            rounds += 1
        train_s = workload.train_s(kept)
        await asyncio.sleep(train_s)
        await self._publish()
        done = StepGroups(tuple(tried), tuple(kept))
        return BarrierStep(done, rounds, generate_s, grade_s, train_s, workload.publish_s)

    async def _timed(self, stage: Awaitable[None]) -> float:
        began_s = self._loop.time()
        await stage
        return self._loop.time() - began_s

    async def _generate(self, groups: Sequence[Sequence[Episode]]) -> None:
        dealt = [0] * len(self.engines)
        playing = []
        for group in groups:
            engine = dealt.index(min(dealt))
            dealt[engine] += len(group)
            playing += [self._play(self.engines[engine], episode) for episode in group]
        await asyncio.gather(*playing)

    async def _play(self, engine: SimEngine, episode: Episode) -> None:
        for number, turn in enumerate(episode.turns):
            await self._draw(engine, f"{episode.sample}/{number}", turn, episode.prefix)
            if turn.environment_s:
                await asyncio.sleep(turn.environment_s)

    async def _draw(self, engine: SimEngine, id: str, turn: EpisodeTurn, prefix: Prefix) -> None:
        drawn: asyncio.Future[int] = self._loop.create_future()
        engine.submit(id, turn.prompt_tokens, turn.new_tokens, lambda _, tokens: drawn.set_result(tokens), prefix=prefix)
        await drawn

    async def _grade(self, episodes: Sequence[Episode]) -> None:
        await asyncio.gather(*[self._graded(episode) for episode in episodes if episode.grade_s])

    async def _graded(self, episode: Episode) -> None:
        graded: asyncio.Future[str] = self._loop.create_future()
        self._graders.submit(episode.sample, episode.grade_s, graded.set_result)
        await graded

    async def _publish(self) -> None:
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(self._workload.publish_s)
        for engine in self.engines:
            engine.resume()
