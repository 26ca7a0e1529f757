"""A rollout worker with simulated engines, graders and environments: the counterpart of the real scheduler.

It takes the same commands as real ones and reports like them. Callbacks move samples from state to state, so that the
measured cost next to it is the controller's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from roll.cluster import Worker, WorkerPlacement
from roll.data.remote_columns import ColumnBlock, RemoteRef
from roll.ledger.log import Transition
from roll.rollout.messages import (
    BufferedGroup,
    EngineAssignment,
    FinalState,
    Lease,
    Report,
    SampleCommand,
    SampleResult,
    WorkerCommand,
)
from roll.simulation.engine import SimEngine
from roll.simulation.graders import SimGraderPool
from roll.simulation.workload import Episode, Workload

POLL_S = 5.0
GATHER_S = 0.25


@dataclass
class _Held:
    lease: Lease
    left: int
    outcomes: list[SampleResult] = field(default_factory=list)


class _Sample:
    __slots__ = (
        "drawn",
        "ended",
        "engine",
        "episode",
        "held",
        "id",
        "ids",
        "newest",
        "oldest",
        "state",
        "timer",
        "turn",
        "version",
    )

    def __init__(self, id: str, held: _Held, episode: Episode) -> None:
        self.id = id
        self.held = held
        self.episode = episode
        self.engine = held.lease.engine
        """Below 0: it lost its engine while its environment was acting."""
        self.version = held.lease.version
        self.oldest: int | None = None
        """Version that engines served when it began."""
        self.newest = held.lease.version
        self.ended = ""
        """Why its response was stopped early."""
        self.turn = 0
        self.drawn = 0
        """Tokens of this turn, sampled by engines that it has left."""
        self.state = "queued"
        self.timer: asyncio.TimerHandle | None = None


class SimRollouts(Worker):
    """Has the methods of `RolloutWorker` that a controller calls by name."""

    poll_s = POLL_S
    """How long `report` waits before it returns without news."""

    def __init__(
        self, place: WorkerPlacement, workload: Workload, engines: Sequence[SimEngine], graders: SimGraderPool
    ) -> None:
        super().__init__(place)
        self.version = 0
        self._loop = asyncio.get_running_loop()
        self._workload = workload
        self._engines = engines
        self._graders = graders
        self._held: dict[str, _Held] = {}
        self._home: dict[str, str] = {}
        """The lease of every sample whose tokens are here, or will be."""
        self._running: dict[str, _Sample] = {}
        self._report = Report()
        self._news, self._urgent = asyncio.Event(), asyncio.Event()

    def take(self, orders: Sequence[WorkerCommand]) -> None:
        for order in orders:
            if isinstance(order, Lease):
                held = self._held[order.key] = _Held(order, len(order.samples))
                for id in order.samples:
                    self._home[id] = order.key
                    sample = self._running[id] = _Sample(id, held, self._workload.episode(id))
                    self._generate(sample)
            elif (found := self._running.get(order.sample)) is not None:
                if not isinstance(order, EngineAssignment):
                    self._stop(found, order)
                elif found.state == "queued":
                    found.engine, found.version = order.engine, order.version
                    self._generate(found)

    def _stop(self, sample: _Sample, stop: SampleCommand) -> None:
        if stop.how == "requeue":
            self._displace(sample, stop.reason)
        elif stop.how == "drop":
            del self._running[sample.id]
            self._drop(sample)
            self._move(sample, "dropped", stop.reason)
            self._urgent.set()
            self._account(sample)
        elif sample.id in self._engines[sample.engine]:
            self._engines[sample.engine].abort(sample.id)
            sample.ended = stop.reason
            self._drawn(sample.id, 0)

    def _generate(self, sample: _Sample) -> None:
        turn = sample.episode.turns[sample.turn]
        if sample.engine < 0:
            self._queue(sample, "its engine was taken away meanwhile")
            return
        if sample.oldest is None:
            sample.oldest = self.version
        self._move(sample, "generating", "", engine=sample.engine, worker=self.placement.rank, version=sample.version)
        engine = self._engines[sample.engine]
        if not engine.alive:
            self._displace(sample, f"engine died: actor_infer[{sample.engine}]", lost_engine=sample.engine)
            return
        engine.submit(
            sample.id,
            turn.prompt_tokens + sample.drawn,
            turn.new_tokens - sample.drawn,
            self._drawn,
            prefix=sample.episode.prefix,
        )

    def _drawn(self, id: str, tokens: int) -> None:
        sample = self._running[id]
        sample.newest = self.version
        sample.drawn = 0
        turn = sample.episode.turns[sample.turn]
        sample.turn += 1
        if turn.environment_s or (not sample.ended and sample.turn < len(sample.episode.turns)):
            self._move(sample, "acting", "", turn=sample.turn)
            sample.timer = self._loop.call_later(turn.environment_s, self._acted, sample)
        else:
            self._score(sample)

    def _acted(self, sample: _Sample) -> None:
        if sample.turn < len(sample.episode.turns):
            self._generate(sample)
        else:
            self._score(sample)

    def _score(self, sample: _Sample) -> None:
        versions = [sample.oldest, sample.newest]
        self._move(sample, "scoring", sample.ended, tokens=sample.episode.new_tokens, finish="stop", versions=versions)
        if sample.episode.grade_s:
            self._graders.submit(sample.id, sample.episode.grade_s, self._scored)
        else:
            self._scored(sample.id)

    def _scored(self, id: str) -> None:
        sample = self._running.pop(id)
        self._move(sample, "scored", "", reward=sample.episode.reward)
        self._account(sample)

    def _account(self, sample: _Sample, kills: int = 0) -> None:
        """Counts a finished sample; the last one of a lease completes the lease."""
        held = sample.held
        held.outcomes.append(self._outcome(sample, kills))
        held.left -= 1
        if not held.left:
            self._report.outcomes.extend(held.outcomes)
            self._report.done.append(held.lease.key)
            self._urgent.set()

    def _outcome(self, sample: _Sample, kills: int) -> SampleResult:
        episode, turns, tries = sample.episode, sample.turn, sample.held.lease.tries
        if sample.state == "dropped":
            return SampleResult(sample.id, 0.0, {}, 0, 0, None, turns=turns, tries=tries)
        reward = episode.reward if sample.state == "scored" else 0.0
        versions = sample.oldest, sample.newest
        return SampleResult(
            sample.id, reward, {}, episode.tokens, episode.new_tokens, "stop", *versions, turns, tries, kills
        )

    def _displace(self, sample: _Sample, reason: str, **info: int) -> None:
        if sample.state not in ("generating", "paused"):
            return
        engine = self._engines[sample.engine]
        if sample.id in engine:
            sample.drawn += engine.abort(sample.id)
        self._queue(sample, reason, **info)

    def _queue(self, sample: _Sample, reason: str, **info: int) -> None:
        """Requeues a sample with its tokens, to wait for an engine slot; a sample with a complete turn continues."""
        if sample.drawn >= sample.episode.turns[sample.turn].new_tokens:
            self._drawn(sample.id, 0)
            return
        self._move(sample, "queued", reason, **info)
        self._urgent.set()

    def engine_died(self, engine: int, drawn: dict[str, int]) -> None:
        """An engine died: requeues its samples with the tokens that were sampled."""
        for id, tokens in drawn.items():
            if (sample := self._running.get(id)) is not None:
                sample.drawn += tokens
                self._queue(sample, f"engine died: actor_infer[{engine}]", lost_engine=engine)

    def die(self) -> None:
        """The worker dies: everything it held, and its unsent reports, are lost."""
        for sample in self._running.values():
            self._drop(sample)
        self._running.clear()
        self._held.clear()
        self._home.clear()
        self._report = Report()

    def _drop(self, sample: _Sample) -> None:
        if sample.timer is not None:
            sample.timer.cancel()
        if sample.id in self._engines[sample.engine]:
            self._engines[sample.engine].abort(sample.id)
        if sample.state == "scoring":
            self._graders.cancel(sample.id)

    def _move(self, sample: _Sample, state: str, reason: str, **info: object) -> None:
        sample.state = state
        self._report.moves.append(Transition(sample.id, state, reason, self._loop.time(), info))
        self._news.set()

    async def report(self) -> Report:
        with suppress(TimeoutError):
            if not self._news.is_set():
                await asyncio.wait_for(self._news.wait(), self.poll_s)
            if not self._urgent.is_set():
                await asyncio.wait_for(self._urgent.wait(), GATHER_S)
        report, self._report = self._report, Report()
        self._news.clear()
        self._urgent.clear()
        return report

    def pause(self) -> None:
        for sample in self._running.values():
            if sample.state == "generating":
                self._move(sample, "paused", "")

    def resume(self) -> None:
        for sample in self._running.values():
            if sample.state == "paused":
                self._move(sample, "generating", "")

    def displace(self, reason: str, engine: int | None = None) -> None:
        for sample in list(self._running.values()):
            if engine not in (None, sample.engine):
                continue
            if sample.state == "acting":
                sample.engine = -1
            else:
                self._displace(sample, reason)

    def cancel(self, keys: Sequence[str]) -> None:
        gone = [id for key in keys if key in self._held for id in self._held[key].lease.samples]
        for id in gone:
            if (sample := self._running.get(id)) is not None and sample.held.lease.key in keys:
                self._drop(self._running.pop(id))
        self.release(keys)
        report = self._report
        report.moves = [move for move in report.moves if move.sample not in gone]
        report.outcomes = [outcome for outcome in report.outcomes if outcome.sample not in gone]
        report.done = [key for key in report.done if key not in keys]

    def release(self, keys: Sequence[str]) -> None:
        for key in keys:
            if (held := self._held.pop(key, None)) is not None:
                for id in held.lease.samples:
                    if self._home.get(id) == key:
                        del self._home[id]

    def columns(self, blocks: Sequence[Sequence[str]], mask_below: int = 0) -> list[ColumnBlock]:
        for id in (id for block in blocks for id in block):
            if id not in self._home:
                raise KeyError(id)
        return [ColumnBlock(RemoteRef(None)) for _ in blocks]

    def write(self, step: int, fates: Sequence[FinalState]) -> None:
        """Stores nothing."""

    def save(self, folder: Path, samples: Sequence[str]) -> None:
        here = [sample for sample in samples if sample in self._home]
        (folder / f"part-{self.placement.rank}.json").write_text(json.dumps(here))

    def load(self, folder: Path, part: int, groups: Sequence[BufferedGroup]) -> list[str]:
        file = folder / f"part-{part}.json"
        saved = set(json.loads(file.read_text())) if file.is_file() else set()
        whole = [group for group in groups if saved.issuperset(group.scored)]
        for group in whole:
            ids = tuple(sorted(id for id in saved if id.startswith(f"{group.group}.")))
            lease = Lease(group.lease, -1, group.task, group.group, 1.0, ids)
            self._held[group.lease] = _Held(lease, 0)
            self._home.update((id, group.lease) for id in ids)
        return [group.lease for group in whole]
