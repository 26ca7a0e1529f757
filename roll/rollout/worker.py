"""The rollout worker: drives leased samples through engines, environments and graders, and stores their tokens.

Invariants: a lease is reported done once, unless it is cancelled; the tokens of its samples stay in this process until
`release`, and trainers fetch them from here; the size of reports to the controller does not depend on response lengths.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeAlias

from roll.cluster import Cluster, Dispatch, Worker, WorkerPlacement, dispatch
from roll.config.schema import Config
from roll.data.batch import token_block
from roll.data.remote_columns import ColumnBlock
from roll.data.sample import Sample
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
    SampleCommand,
    SampleResult,
    WorkerCommand,
)
from roll.rollout.runner import Backends, EngineAssignments, SampleRunner
from roll.rollout.sample_rows import rows_of
from roll.rollout.transcript import Transcript, transcript_of
from roll.run import RunFolder, Transition, write_samples
from roll.workers.env import EnvWorker
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker

REQUEUE_S = 60.0
"""How long `requeue_generating` waits for the engines to abort requests."""

Report: TypeAlias = Callable[[Transition], None]


def _report_nothing(transition: Transition) -> None:
    """For samples that nobody waits for."""


@dataclass
class _HeldLease:
    """A lease: its key, its samples, and whom their transitions are reported to."""

    key: str
    samples: list[Sample]
    report: Report = _report_nothing
    dropped: dict[str, str] = field(default_factory=dict)
    """Reasons of the samples that the controller has dropped."""


class _Reports:
    """Passes on each transition of a sample to the report of its lease."""

    def __init__(self) -> None:
        self.of_sample: dict[str, Report] = {}

    def append(self, transition: Transition) -> None:
        self.of_sample.get(transition.sample, _report_nothing)(transition)

    def remove(self, lease: _HeldLease) -> None:
        for sample in lease.samples:
            if self.of_sample.get(sample.id) is lease.report:  # else it is in another lease now
                del self.of_sample[sample.id]


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
        self._reports = _Reports()
        self._lifecycle = Lifecycle(self._reports)
        self._assignments = EngineAssignments()
        self._engine_client: EngineClient | None = None
        self._runner: SampleRunner | None = None
        self._leases: dict[str, _HeldLease] = {}
        self._samples: dict[str, Sample] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task of each running sample."""
        self._run_folder = None if run is None else RunFolder(run)
        self._part = None if placement.world_size == 1 else placement.rank

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

    @dispatch(Dispatch.ONE, batched=True)
    async def run(self, report: Report, message: Lease) -> list[SampleResult]:
        """Runs the samples of a lease until they are judged: reports each transition, and returns the results. The tokens
        stay here until `release`. Cancelling this coroutine ends and releases the samples."""
        lease = self._hold(message, report)
        try:
            await structured_gather(self._run_sample(lease, sample) for sample in lease.samples)
        except BaseException:
            self.release([lease.key])
            raise
        self._reports.remove(lease)
        return [_result_of(sample) for sample in lease.samples]

    @dispatch(Dispatch.ONE, batched=True)
    def execute(self, command: WorkerCommand) -> None:
        """Executes a command: an engine assignment for a waiting sample, or a sample command."""
        if command.sample not in self._samples:
            return
        if isinstance(command, EngineAssignment):
            self._assignments.assign(command)
        elif isinstance(command, SampleCommand):
            self._execute_sample_command(command)

    def _hold(self, message: Lease, report: Report) -> _HeldLease:
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
        lease = self._leases[message.key] = _HeldLease(message.key, samples, report)
        for sample in samples:
            self._samples[sample.id] = sample
            self._reports.of_sample[sample.id] = report
            self._assignments.assign(EngineAssignment(sample.id, message.engine, message.version))
        return lease

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
        here = [final for final in final_states if final.sample in self._samples]  # a former process had the others
        rows = rows_of([self._samples[final.sample] for final in here], here)
        write_samples(self._run_folder, step, rows, part=self._part)

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
        """Removes leases with their samples; unknown keys are ignored."""
        for lease in [self._leases.pop(key) for key in keys if key in self._leases]:
            self._reports.remove(lease)
            for sample in lease.samples:
                if self._samples.get(sample.id) is sample:  # else it is in another lease now
                    del self._samples[sample.id]
                    self._assignments.remove(sample.id)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        # waits: they were cancelled
        await asyncio.gather(*tasks, return_exceptions=True)
        self.release(list(self._leases))

    async def _run_sample(self, lease: _HeldLease, sample: Sample) -> None:
        runner, task = self._runner, asyncio.current_task()
        assert runner is not None, "a rollout worker is connected before it takes leases"
        assert task is not None
        self._tasks[sample.id] = task
        try:
            await runner.run(sample, lease.samples)
        except asyncio.CancelledError:
            if sample.id not in lease.dropped or task.cancelling() > 1:  # not by the drop alone
                raise
            task.uncancel()
            self._lifecycle.move(sample, "dropped", lease.dropped[sample.id])
        finally:
            if self._tasks.get(sample.id) is task:
                del self._tasks[sample.id]


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
