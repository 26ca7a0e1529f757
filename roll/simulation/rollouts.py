"""A rollout worker with simulated engines, graders and environments: the counterpart of the real scheduler.

It takes the same commands as real ones and reports like them. Callbacks move samples from state to state, so that the
measured cost next to it is the controller's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
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
    SampleCommand,
    SampleResult,
    WorkerCommand,
)
from roll.simulation.engine import SimEngine
from roll.simulation.graders import SimGraderPool
from roll.simulation.workload import Episode, Workload

Report = Callable[[Transition], None]


def _report_nothing(transition: Transition) -> None:
    """For samples that nobody waits for."""


@dataclass
class _LeaseProgress:
    lease: Lease
    remaining: int
    report: Report
    done: asyncio.Future[list[SampleResult]]
    results: list[SampleResult] = field(default_factory=list)


class _Sample:
    __slots__ = (
        "ended",
        "engine",
        "episode",
        "id",
        "ids",
        "newest",
        "oldest",
        "progress",
        "sampled_tokens",
        "state",
        "timer",
        "turn",
        "version",
    )

    def __init__(self, id: str, progress: _LeaseProgress, episode: Episode) -> None:
        self.id = id
        self.progress = progress
        self.episode = episode
        self.engine = progress.lease.engine
        """Below 0: it lost its engine while its environment was acting."""
        self.version = progress.lease.version
        self.oldest: int | None = None
        """Version that engines served when it began."""
        self.newest = progress.lease.version
        self.ended = ""
        """Why its response was stopped early."""
        self.turn = 0
        self.sampled_tokens = 0
        """Tokens of this turn, sampled by engines that it has left."""
        self.state = "queued"
        self.timer: asyncio.TimerHandle | None = None


class SimRollouts(Worker):
    """Has the methods of `RolloutWorker` that a controller calls by name."""

    def __init__(
        self, placement: WorkerPlacement, workload: Workload, engines: Sequence[SimEngine], graders: SimGraderPool
    ) -> None:
        super().__init__(placement)
        self.version = 0
        self._loop = asyncio.get_running_loop()
        self._workload = workload
        self._engines = engines
        self._graders = graders
        self._leases: dict[str, _LeaseProgress] = {}
        self._lease_of_sample: dict[str, str] = {}
        """The lease of every sample whose tokens are here, or will be."""
        self._running: dict[str, _Sample] = {}

    async def run(self, report: Report, lease: Lease) -> list[SampleResult]:
        progress = _LeaseProgress(lease, len(lease.samples), report, self._loop.create_future())
        self._leases[lease.key] = progress
        for id in lease.samples:
            self._lease_of_sample[id] = lease.key
            sample = self._running[id] = _Sample(id, progress, self._workload.episode(id))
            self._generate(sample)
        try:
            # waits: every state of a sample ends
            return await progress.done
        except asyncio.CancelledError:
            self._cancel(progress)
            raise

    def execute(self, command: WorkerCommand) -> None:
        if (found := self._running.get(command.sample)) is None:
            return
        if not isinstance(command, EngineAssignment):
            self._stop(found, command)
        elif found.state == "queued":
            found.engine, found.version = command.engine, command.version
            self._generate(found)

    def _stop(self, sample: _Sample, stop: SampleCommand) -> None:
        if stop.action == "requeue":
            self._displace(sample, stop.reason)
        elif stop.action == "drop":
            del self._running[sample.id]
            self._drop(sample)
            self._move(sample, "dropped", stop.reason)
            self._account(sample)
        elif sample.id in self._engines[sample.engine]:
            self._engines[sample.engine].abort(sample.id)
            sample.ended = stop.reason
            self._turn_finished(sample.id, 0)

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
            turn.prompt_tokens + sample.sampled_tokens,
            turn.new_tokens - sample.sampled_tokens,
            self._turn_finished,
            prefix=sample.episode.prefix,
        )

    def _turn_finished(self, id: str, tokens: int) -> None:
        sample = self._running[id]
        sample.newest = self.version
        sample.sampled_tokens = 0
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
        progress = sample.progress
        progress.results.append(self._outcome(sample, kills))
        progress.remaining -= 1
        if not progress.remaining and not progress.done.done():
            progress.done.set_result(progress.results)

    def _outcome(self, sample: _Sample, kills: int) -> SampleResult:
        episode, turns, tries = sample.episode, sample.turn, sample.progress.lease.tries
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
            sample.sampled_tokens += engine.abort(sample.id)
        self._queue(sample, reason, **info)

    def _queue(self, sample: _Sample, reason: str, **info: int) -> None:
        """Requeues a sample with its tokens, to wait for an engine slot; a sample with a complete turn continues."""
        if sample.sampled_tokens >= sample.episode.turns[sample.turn].new_tokens:
            self._turn_finished(sample.id, 0)
            return
        self._move(sample, "queued", reason, **info)

    def engine_died(self, engine: int, sampled_tokens: dict[str, int]) -> None:
        """An engine died: requeues its samples with the tokens that were sampled."""
        for id, tokens in sampled_tokens.items():
            if (sample := self._running.get(id)) is not None:
                sample.sampled_tokens += tokens
                self._queue(sample, f"engine died: actor_infer[{engine}]", lost_engine=engine)

    def die(self) -> None:
        """The worker dies: everything it held is lost."""
        for sample in self._running.values():
            self._drop(sample)
        self._running.clear()
        self._leases.clear()
        self._lease_of_sample.clear()

    def _drop(self, sample: _Sample) -> None:
        if sample.timer is not None:
            sample.timer.cancel()
        if sample.id in self._engines[sample.engine]:
            self._engines[sample.engine].abort(sample.id)
        if sample.state == "scoring":
            self._graders.cancel(sample.id)

    def _move(self, sample: _Sample, state: str, reason: str, **info: object) -> None:
        sample.state = state
        sample.progress.report(Transition(sample.id, state, reason, self._loop.time(), info))

    def pause(self) -> None:
        for sample in self._running.values():
            if sample.state == "generating":
                self._move(sample, "paused", "")

    def resume(self) -> None:
        for sample in self._running.values():
            if sample.state == "paused":
                self._move(sample, "generating", "")

    def requeue_generating(self, reason: str, engine: int | None = None) -> None:
        for sample in list(self._running.values()):
            if engine not in (None, sample.engine):
                continue
            if sample.state == "acting":
                sample.engine = -1
            else:
                self._displace(sample, reason)

    def _cancel(self, progress: _LeaseProgress) -> None:
        for id in progress.lease.samples:
            if (sample := self._running.get(id)) is not None and sample.progress is progress:
                self._drop(self._running.pop(id))
        if self._leases.get(progress.lease.key) is progress:
            self.release([progress.lease.key])

    def release(self, keys: Sequence[str]) -> None:
        for key in keys:
            if (progress := self._leases.pop(key, None)) is not None:
                for id in progress.lease.samples:
                    if self._lease_of_sample.get(id) == key:
                        del self._lease_of_sample[id]

    def columns(self, blocks: Sequence[Sequence[str]], mask_below: int = 0) -> list[ColumnBlock]:
        for id in (id for block in blocks for id in block):
            if id not in self._lease_of_sample:
                raise KeyError(id)
        return [ColumnBlock(RemoteRef(None)) for _ in blocks]

    def write(self, step: int, final_states: Sequence[FinalState]) -> None:
        """Stores nothing."""

    def save(self, folder: Path, samples: Sequence[str]) -> None:
        present = [sample for sample in samples if sample in self._lease_of_sample]
        (folder / f"part-{self.placement.rank}.json").write_text(json.dumps(present))

    def load(self, folder: Path, part: int, groups: Sequence[BufferedGroup]) -> list[str]:
        file = folder / f"part-{part}.json"
        saved = set(json.loads(file.read_text())) if file.is_file() else set()
        complete = [group for group in groups if saved.issuperset(group.scored)]
        for group in complete:
            ids = tuple(sorted(id for id in saved if id.startswith(f"{group.group}.")))
            lease = Lease(group.lease, -1, group.task, group.group, 1.0, ids)
            self._leases[group.lease] = _LeaseProgress(lease, 0, _report_nothing, self._loop.create_future())
            self._lease_of_sample.update((id, group.lease) for id in ids)
        return [group.lease for group in complete]
