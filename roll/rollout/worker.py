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
from roll.rollout.early_stop import make_early_stop
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
REQUEUE_S = 60.0
"""How long `requeue_generating` waits for the engines to abort requests."""
GATHER_S = 0.25
"""How long `report` collects more transitions after the first one; a finished lease is reported at once."""


@dataclass
class _HeldLease:
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
        self.report.transitions.append(transition)
        self.has_report.set()
        if transition.state == "queued":  # the sample waits until the controller assigns an engine
            self.urgent.set()

    def discard(self, samples: set[str], keys: set[str]) -> None:
        report = self.report
        report.transitions = [transition for transition in report.transitions if transition.sample not in samples]
        report.results = [result for result in report.results if result.sample not in samples]
        report.done_leases = [key for key in report.done_leases if key not in keys]

    def take(self) -> Report:
        report, self.report = self.report, Report()
        self.has_report.clear()
        self.urgent.clear()
        return report


class RolloutWorker(Worker):
    RUNNER: ClassVar[type[SampleRunner]] = SampleRunner

    def __init__(self, placement: WorkerPlacement, config: Config, run: Path | None) -> None:
        super().__init__(placement)
        source = find_model(config.model.path)
        tokenizer = load_tokenizer(source, config.model)
        self._config = config
        self._stop_ids = stop_ids_of(tokenizer, source)
        self._renderer = ChatRenderer(tokenizer, self._stop_ids)
        self._context = config.roles.actor_infer.context_within(context_of(source))
        self._outbox = _Outbox()
        self._lifecycle = Lifecycle(self._outbox)
        self._assignments = EngineAssignments()
        self._engine_client: EngineClient | None = None
        self._runner: SampleRunner | None = None
        self._leases: dict[str, _HeldLease] = {}
        self._samples: dict[str, Sample] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task of each running sample."""
        self._run_folder = None if run is None else RunFolder(run)
        self._part = None if placement.world_size == 1 else placement.rank
        self._error: Exception | None = None

    @dispatch(Dispatch.ALL)
    def connect(
        self,
        engines: Cluster[InferWorker],
        rewards: Cluster[RewardWorker],
        environments: Cluster[EnvWorker] | None = None,
    ) -> None:
        """Sets the engines, Reward Workers and Environment Workers to use; called again after one was restarted."""
        backends = Backends(rewards, environments)
        if self._engine_client is not None and self._runner is not None:
            self._engine_client.reconnect(engines)
            self._runner.reconnect(backends)
            return
        # The random suffix keeps outputs for an earlier process of this worker apart.
        self._engine_client = EngineClient(engines, client=f"{self.placement.name}/{secrets.token_hex(4)}")
        self._runner = self.RUNNER(
            self._engine_client,
            backends,
            self._renderer,
            self._lifecycle,
            self._assignments,
            self._config,
            stop_ids=self._stop_ids,
            context=self._context,
            worker=self.placement.rank,
            early_stop=make_early_stop(self._config.rollout.early_stop, self._config.root),
        )

    @dispatch(Dispatch.ONE)
    def execute(self, commands: Sequence[WorkerCommand]) -> None:
        """Executes commands in order: leases to run, engine assignments for waiting samples, and sample commands."""
        for command in commands:
            if isinstance(command, Lease):
                self._start_lease(command)
            elif command.sample in self._samples:
                if isinstance(command, EngineAssignment):
                    self._assignments.assign(command)
                elif isinstance(command, SampleCommand):
                    self._execute_sample_command(command)

    def _start_lease(self, message: Lease) -> None:
        task, group, now = message.task, message.group, time.time()
        samples = [
            Sample(
                id,
                task,
                group,
                message.temperature,
                state="queued",
                records=message.records,
                tries=message.tries,
                votes=message.votes,
                entered_s=now,
            )
            for id in message.samples
        ]
        for sample in samples:
            if sample.id == message.greedy:
                sample.greedy, sample.records, sample.temperature = True, False, 0.0
        lease = self._leases[message.key] = _HeldLease(message.key, samples)
        for sample in samples:
            self._samples[sample.id] = sample
            self._assignments.assign(EngineAssignment(sample.id, message.engine, message.version))
        lease.running = asyncio.create_task(self._run_lease(lease))

    def _execute_sample_command(self, command: SampleCommand) -> None:
        runner = self._runner
        assert runner is not None, "a rollout worker is connected before it gets commands"
        if command.action != "drop":
            runner.stop(command)
        elif (task := self._tasks.get(command.sample)) is not None:
            lease = next(lease for lease in self._leases.values() if self._samples[command.sample] in lease.samples)
            if command.sample not in lease.dropped:
                lease.dropped[command.sample] = command.reason
                task.cancel()

    @dispatch(Dispatch.ALL)
    def pause(self) -> None:
        """Moves generating samples to `paused` while the engines receive new weights, until `resume`."""
        for sample in self._samples.values():
            if sample.state == "generating":
                self._lifecycle.move(sample, "paused")

    @dispatch(Dispatch.ALL)
    def resume(self) -> None:
        for sample in self._samples.values():
            if sample.state == "paused":
                self._lifecycle.move(sample, "generating")

    @dispatch(Dispatch.ALL)
    async def requeue_generating(self, reason: str, engine: int | None = None) -> None:
        """Requeues the samples that are generating on one engine, or on all engines; they keep their tokens and wait for
        new assignments. Returns once the engines have aborted them, or after `REQUEUE_S`."""
        assert self._runner is not None
        requeued: list[Sample] = []
        for sample in list(self._samples.values()):
            if engine not in (None, self._assignments.engine(sample.id)):
                continue
            if sample.state in ("generating", "paused"):
                requeued.append(sample)
                self._runner.stop(SampleCommand(sample.id, "requeue", reason))
            elif sample.state == "acting":
                self._assignments.revoke(sample.id)
        with suppress(TimeoutError):
            async with asyncio.timeout(REQUEUE_S):
                while any(self._runner.is_generating(sample) for sample in requeued):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    @dispatch(Dispatch.ONE)
    async def report(self) -> Report:
        """Everything since the last call. Long-polls: waits up to `POLL_S` for the first entry."""
        outbox = self._outbox
        with suppress(TimeoutError):
            await asyncio.wait_for(outbox.has_report.wait(), POLL_S)
            await asyncio.wait_for(outbox.urgent.wait(), GATHER_S)
        report = outbox.take()
        if self._error is not None:
            error, self._error = self._error, None
            for lease in self._leases.values():  # the error fails all leases of this worker on the controller
                if lease.running is not None:
                    lease.running.cancel()
            raise error
        return report

    @dispatch(Dispatch.ALL)
    async def cancel(self, keys: Sequence[str]) -> None:
        """Cancels leases and removes their samples; unknown keys are ignored."""
        for lease in [self._leases[key] for key in keys if key in self._leases]:
            if lease.running is not None:
                lease.running.cancel()
                # waits: it was cancelled
                await asyncio.gather(lease.running, return_exceptions=True)
        self.release(keys)

    @dispatch(Dispatch.ONE)
    def columns(self, blocks: Sequence[Sequence[str]], mask_below: int = 0) -> list[ColumnBlock]:
        """The token columns of samples, one block per list; tokens of versions before `mask_below` are masked out of the
        loss."""
        return [token_block([self._samples[sample] for sample in samples], mask_below) for samples in blocks]

    @dispatch(Dispatch.ONE)
    def texts(self, samples: Sequence[str]) -> list[str]:
        """The text of the samples' last responses."""
        responses = [self._samples[sample].response for sample in samples]
        return [response.text if response is not None else "" for response in responses]

    @dispatch(Dispatch.ONE)
    def transcripts(self, samples: Sequence[str]) -> list[Transcript]:
        """The transcripts of these samples."""
        decode = self._renderer.tokenizer.decode
        return [transcript_of(self._samples[sample], lambda ids: str(decode(ids.tolist()))) for sample in samples]

    @dispatch(Dispatch.ONE)
    def write(self, step: int, final_states: Sequence[FinalState]) -> None:
        """Writes this worker's samples of a step into the run's folder, as one part if there are several workers."""
        assert self._run_folder is not None, "a worker without a run's folder has nowhere to write samples"
        here = (
            final for final in final_states if final.sample in self._samples
        )  # samples of an earlier process are lost
        write_samples(
            self._run_folder, step, (_row(self._samples[final.sample], final) for final in here), part=self._part
        )

    @dispatch(Dispatch.ONE)
    def save(self, folder: Path, samples: Sequence[str]) -> None:
        """Writes samples with their tokens into a checkpoint's folder, as the part with this worker's rank."""
        write_part(
            folder,
            self.placement.rank,
            [self._samples[sample] for sample in samples if sample in self._samples],
        )

    @dispatch(Dispatch.ONE)
    def load(self, folder: Path, part: int, groups: Sequence[BufferedGroup]) -> list[str]:
        """Loads ready groups from a part of a checkpoint; returns the leases of those that are complete there."""
        found: dict[int, list[Sample]] = {group.group: [] for group in groups}
        for sample in read_part(folder, part, {group.group: group.task for group in groups}):
            found[sample.group].append(sample)
        complete = [group for group in groups if {*group.scored} <= {sample.id for sample in found[group.group]}]
        for group in complete:
            self._leases[group.lease] = _HeldLease(group.lease, found[group.group])
            self._samples.update((sample.id, sample) for sample in found[group.group])
        return [group.lease for group in complete]

    @dispatch(Dispatch.ONE)
    def release(self, keys: Sequence[str]) -> None:
        released = {key: lease for key in keys if (lease := self._leases.pop(key, None)) is not None}
        samples = {sample.id for lease in released.values() for sample in lease.samples}
        for sample in samples:
            self._samples.pop(sample, None)
            self._assignments.remove(sample)
        self._outbox.discard(samples, set(released))

    async def close(self) -> None:
        await self.cancel(list(self._leases))

    async def _run_lease(self, lease: _HeldLease) -> None:
        try:
            await structured_gather(self._run_sample(lease, sample) for sample in lease.samples)
        except Exception as error:  # the next `report` raises it on the controller
            self._error = self._error or error
            self._outbox.has_report.set()
        else:
            self._outbox.report.results.extend(map(_result_of, lease.samples))
            self._outbox.report.done_leases.append(lease.key)
            self._outbox.has_report.set()
        self._outbox.urgent.set()

    async def _run_sample(self, lease: _HeldLease, sample: Sample) -> None:
        runner, task = self._runner, asyncio.current_task()
        assert runner is not None, "a rollout worker is connected before it takes leases"
        assert task is not None
        self._tasks[sample.id] = task
        try:
            await runner.run(sample, lease.samples)
        except asyncio.CancelledError:
            if sample.id not in lease.dropped or (lease.running is not None and lease.running.cancelling()):
                raise
            task.uncancel()
            self._lifecycle.move(sample, "dropped", lease.dropped[sample.id])
        finally:
            del self._tasks[sample.id]
            if sample.state in ("queued", "failed", "dropped"):
                self._outbox.urgent.set()


def _result_of(sample: Sample) -> SampleResult:
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


def _row(sample: Sample, final: FinalState) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "task": sample.task.id,
        "domain": sample.task.domain,
        "group": sample.group,
        "state": final.state,
        "reason": final.reason,
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
