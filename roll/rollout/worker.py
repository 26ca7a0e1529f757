"""The rollout worker: drives leased samples through engines, environments and graders, and stores their tokens.

Invariants: a lease is reported done once, unless it is cancelled; the tokens of its samples stay in this process until
`release`, and trainers fetch them from here; the size of reports to the controller does not depend on response lengths.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from roll.cluster import Cluster, Dispatch, Worker, WorkerPlacement, dispatch
from roll.config.schema import Config
from roll.data.batch import token_block
from roll.data.remote_columns import ColumnBlock
from roll.data.sample import Sample
from roll.data.tokenlog import branches
from roll.model.chat import ChatRenderer
from roll.model.find import find_model
from roll.model.loading import context_of, load_tokenizer, stop_ids_of
from roll.process.structured_gather import structured_gather
from roll.rollout.buffer_checkpoint import read_part, write_part
from roll.rollout.early_stop import make_early_end
from roll.rollout.engine_client import EngineClient
from roll.rollout.lifecycle import Lifecycle
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
from roll.rollout.runner import Backends, EngineAssignments, SampleRunner
from roll.rollout.transcript import Transcript, transcript_of
from roll.run import RunFolder, Transition, write_samples
from roll.workers.env import EnvWorker
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker

POLL_S = 5.0
"""How long `report` waits before it returns an empty report."""
DISPLACE_S = 60.0
"""How long `displace` waits for the engines to abort requests."""
GATHER_S = 0.25
"""How long `report` collects more transitions after the first one; a finished lease is reported at once."""


@dataclass
class _Held:
    """A lease: its key, its samples and the task that runs them. Leases loaded from a checkpoint have no task."""

    key: str
    samples: list[Sample]
    running: asyncio.Task[None] | None = None
    dropped: dict[str, str] = field(default_factory=dict)
    """Reasons of the samples that the controller has dropped."""


@dataclass
class _Outbox:
    """Collects the next report."""

    report: Report = field(default_factory=Report)
    has_report: asyncio.Event = field(default_factory=asyncio.Event)
    urgent: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, transition: Transition) -> None:
        self.report.moves.append(transition)
        self.has_report.set()
        if transition.state == "queued":  # the sample waits until the controller assigns an engine
            self.urgent.set()

    def discard(self, samples: set[str], keys: set[str]) -> None:
        report = self.report
        report.moves = [move for move in report.moves if move.sample not in samples]
        report.outcomes = [outcome for outcome in report.outcomes if outcome.sample not in samples]
        report.done = [key for key in report.done if key not in keys]

    def take(self) -> Report:
        report, self.report = self.report, Report()
        self.has_report.clear()
        self.urgent.clear()
        return report


class RolloutWorker(Worker):
    RUNNER: ClassVar[type[SampleRunner]] = SampleRunner

    def __init__(self, place: WorkerPlacement, config: Config, run: Path | None) -> None:
        super().__init__(place)
        source = find_model(config.model.path)
        tokenizer = load_tokenizer(source, config.model)
        self._config = config
        self._stop_ids = stop_ids_of(tokenizer, source)
        self._renderer = ChatRenderer(tokenizer, self._stop_ids)
        self._context = config.roles.actor_infer.context_within(context_of(source))
        self._outbox = _Outbox()
        self._lifecycle = Lifecycle(self._outbox)
        self._seats = EngineAssignments()
        self._engine_client: EngineClient | None = None
        self._runner: SampleRunner | None = None
        self._held: dict[str, _Held] = {}
        self._samples_here: dict[str, Sample] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task of each running sample."""
        self._run = None if run is None else RunFolder(run)
        self._part = None if place.world_size == 1 else place.rank
        self._error: Exception | None = None

    @dispatch(Dispatch.ALL)
    def connect(
        self,
        engines: Cluster[InferWorker],
        rewards: Cluster[RewardWorker],
        environments: Cluster[EnvWorker] | None = None,
    ) -> None:
        """Sets the engines, Reward Workers and Environment Workers to use; called again after one was restarted."""
        helpers = Backends(rewards, environments)
        if self._engine_client is not None and self._runner is not None:
            self._engine_client.reconnect(engines)
            self._runner.reconnect(helpers)
            return
        # The random suffix keeps outputs for an earlier process of this worker apart.
        self._engine_client = EngineClient(engines, client=f"{self.placement.name}/{secrets.token_hex(4)}")
        self._runner = self.RUNNER(
            self._engine_client,
            helpers,
            self._renderer,
            self._lifecycle,
            self._seats,
            self._config,
            stop_ids=self._stop_ids,
            context=self._context,
            worker=self.placement.rank,
            early_stop=make_early_end(self._config.rollout.early_stop, self._config.root),
        )

    @dispatch(Dispatch.ONE)
    def take(self, orders: Sequence[WorkerCommand]) -> None:
        """Executes commands in order: leases to run, engine assignments for waiting samples, and sample commands."""
        for order in orders:
            if isinstance(order, Lease):
                self._begin(order)
            elif order.sample in self._samples_here:
                if isinstance(order, EngineAssignment):
                    self._seats.give(order)
                elif isinstance(order, SampleCommand):
                    self._stop(order)

    def _begin(self, lease: Lease) -> None:
        task, group, now = lease.task, lease.group, time.time()
        samples = [
            Sample(
                id,
                task,
                group,
                lease.temperature,
                state="queued",
                records=lease.records,
                tries=lease.tries,
                votes=lease.votes,
                entered_s=now,
            )
            for id in lease.samples
        ]
        for sample in samples:
            if sample.id == lease.greedy:
                sample.greedy, sample.records, sample.temperature = True, False, 0.0
        held = self._held[lease.key] = _Held(lease.key, samples)
        for sample in samples:
            self._samples_here[sample.id] = sample
            self._seats.give(EngineAssignment(sample.id, lease.engine, lease.version))
        held.running = asyncio.create_task(self._carry(held))

    def _stop(self, stop: SampleCommand) -> None:
        runner = self._runner
        assert runner is not None, "a rollout worker is connected before it is told anything"
        if stop.how != "drop":
            runner.stop(stop)
        elif (task := self._tasks.get(stop.sample)) is not None:
            held = next(held for held in self._held.values() if self._samples_here[stop.sample] in held.samples)
            if stop.sample not in held.dropped:
                held.dropped[stop.sample] = stop.reason
                task.cancel()

    @dispatch(Dispatch.ALL)
    def pause(self) -> None:
        """Moves generating samples to `paused` while the engines receive new weights, until `resume`."""
        for sample in self._samples_here.values():
            if sample.state == "generating":
                self._lifecycle.move(sample, "paused")

    @dispatch(Dispatch.ALL)
    def resume(self) -> None:
        for sample in self._samples_here.values():
            if sample.state == "paused":
                self._lifecycle.move(sample, "generating")

    @dispatch(Dispatch.ALL)
    async def displace(self, reason: str, engine: int | None = None) -> None:
        """Requeues the samples that are generating on one engine, or on all engines; they keep their tokens and wait for
        new assignments. Returns once the engines have aborted them, or after `DISPLACE_S`."""
        assert self._runner is not None
        moved: list[Sample] = []
        for sample in list(self._samples_here.values()):
            if engine not in (None, self._seats.engine(sample.id)):
                continue
            if sample.state in ("generating", "paused"):
                moved.append(sample)
                self._runner.stop(SampleCommand(sample.id, "requeue", reason))
            elif sample.state == "acting":
                self._seats.revoke(sample.id)
        with suppress(TimeoutError):
            async with asyncio.timeout(DISPLACE_S):
                while any(self._runner.is_generating(sample) for sample in moved):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    @dispatch(Dispatch.ONE)
    async def report(self) -> Report:
        """Everything since the last call. Long-polls: waits up to `POLL_S` for the first entry."""
        box = self._outbox
        with suppress(TimeoutError):
            await asyncio.wait_for(box.has_report.wait(), POLL_S)
            await asyncio.wait_for(box.urgent.wait(), GATHER_S)
        report = box.take()
        if self._error is not None:
            error, self._error = self._error, None
            for held in self._held.values():  # the error fails all leases of this worker on the controller
                if held.running is not None:
                    held.running.cancel()
            raise error
        return report

    @dispatch(Dispatch.ALL)
    async def cancel(self, keys: Sequence[str]) -> None:
        """Cancels leases and forgets their samples; unknown keys are ignored."""
        for held in [self._held[key] for key in keys if key in self._held]:
            if held.running is not None:
                held.running.cancel()
                # waits: it was cancelled
                await asyncio.gather(held.running, return_exceptions=True)
        self.release(keys)

    @dispatch(Dispatch.ONE)
    def columns(self, blocks: Sequence[Sequence[str]], mask_below: int = 0) -> list[ColumnBlock]:
        """The token columns of samples, one block per list; tokens of versions before `mask_below` are masked out of the
        loss."""
        return [token_block([self._samples_here[sample] for sample in samples], mask_below) for samples in blocks]

    @dispatch(Dispatch.ONE)
    def texts(self, samples: Sequence[str]) -> list[str]:
        """The text of the samples' last responses."""
        responses = [self._samples_here[sample].response for sample in samples]
        return [response.text if response is not None else "" for response in responses]

    @dispatch(Dispatch.ONE)
    def transcripts(self, samples: Sequence[str]) -> list[Transcript]:
        """The transcripts of these samples."""
        decode = self._renderer.tokenizer.decode
        return [transcript_of(self._samples_here[sample], lambda ids: str(decode(ids.tolist()))) for sample in samples]

    @dispatch(Dispatch.ONE)
    def write(self, step: int, fates: Sequence[FinalState]) -> None:
        """Writes this worker's samples of a step into the run's folder, as one part if there are several workers."""
        assert self._run is not None, "a worker without a run's folder has nowhere to write samples"
        here = (fate for fate in fates if fate.sample in self._samples_here)  # samples of an earlier process are lost
        write_samples(self._run, step, (_row(self._samples_here[fate.sample], fate) for fate in here), part=self._part)

    @dispatch(Dispatch.ONE)
    def save(self, folder: Path, samples: Sequence[str]) -> None:
        """Writes samples with their tokens into a checkpoint's folder, as the part with this worker's rank."""
        write_part(
            folder,
            self.placement.rank,
            [self._samples_here[sample] for sample in samples if sample in self._samples_here],
        )

    @dispatch(Dispatch.ONE)
    def load(self, folder: Path, part: int, groups: Sequence[BufferedGroup]) -> list[str]:
        """Loads ready groups from a part of a checkpoint; returns the leases of those that are complete there."""
        found: dict[int, list[Sample]] = {group.group: [] for group in groups}
        for sample in read_part(folder, part, {group.group: group.task for group in groups}):
            found[sample.group].append(sample)
        whole = [group for group in groups if {*group.scored} <= {sample.id for sample in found[group.group]}]
        for group in whole:
            self._held[group.lease] = _Held(group.lease, found[group.group])
            self._samples_here.update((sample.id, sample) for sample in found[group.group])
        return [group.lease for group in whole]

    @dispatch(Dispatch.ONE)
    def release(self, keys: Sequence[str]) -> None:
        gone = {key: held for key in keys if (held := self._held.pop(key, None)) is not None}
        samples = {sample.id for held in gone.values() for sample in held.samples}
        for sample in samples:
            self._samples_here.pop(sample, None)
            self._seats.mark_dead(sample)
        self._outbox.discard(samples, set(gone))

    async def close(self) -> None:
        await self.cancel(list(self._held))

    async def _carry(self, held: _Held) -> None:
        try:
            await structured_gather(self._carry_one(held, sample) for sample in held.samples)
        except Exception as error:  # the next `report` raises it on the controller
            self._error = self._error or error
            self._outbox.has_report.set()
        else:
            self._outbox.report.outcomes.extend(map(_outcome, held.samples))
            self._outbox.report.done.append(held.key)
            self._outbox.has_report.set()
        self._outbox.urgent.set()

    async def _carry_one(self, held: _Held, sample: Sample) -> None:
        runner, task = self._runner, asyncio.current_task()
        assert runner is not None, "a rollout worker is connected before it takes leases"
        assert task is not None
        self._tasks[sample.id] = task
        try:
            await runner.run(sample, held.samples)
        except asyncio.CancelledError:
            if sample.id not in held.dropped or (held.running is not None and held.running.cancelling()):
                raise
            task.uncancel()
            self._lifecycle.move(sample, "dropped", held.dropped[sample.id])
        finally:
            del self._tasks[sample.id]
            if sample.state in ("queued", "failed", "dropped"):
                self._outbox.urgent.set()


def _outcome(sample: Sample) -> SampleResult:
    return SampleResult(
        sample.id,
        sample.reward,
        sample.parts,
        sample.tokens,
        sample.response_tokens,
        sample.finish,
        sample.oldest,
        sample.newest,
        sample.turns,
        sample.tries,
        sample.kills,
        sample.turn_rewards,
        sample.turn_states,
        sample.answer,
    )


def _row(sample: Sample, fate: FinalState) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "task": sample.task.id,
        "domain": sample.task.domain,
        "group": sample.group,
        "state": fate.state,
        "reason": fate.reason,
        "question": sample.task.question,
        "answer": sample.task.answer,
        "response": sample.response.text if sample.response else None,
        "finish": sample.finish,
        "reward": sample.reward,
        "parts": sample.parts,
        "turns": sample.turns,
        "turn_rewards": sample.turn_rewards,
        "tries": sample.tries,
        "ids": sample.log.ids,
        "loss_mask": sample.log.loss_mask.astype(np.int32),
        "branches": [span.start for span in branches(sample.log.turn)],
        "logprobs": np.round(sample.log.behaviour.astype(np.float64), 6),
        "versions": sample.log.versions,
        "seconds": {state: round(seconds, 4) for state, seconds in sample.seconds.items()},
    }
