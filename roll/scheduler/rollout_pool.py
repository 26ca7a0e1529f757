"""The controller's side of the rollout workers: sends groups as leases and receives results; tokens stay on the workers.

Invariants: only this module and the scheduler change sample states and the ledger; each lease is on one worker; each
sample that is being generated has one slot on one engine, released when its response ends or it is requeued; messages
are per sample, never per token. When a rollout worker dies, its leases restart on other workers while tries are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.cluster import Cluster
from roll.cluster.errors import CallTimedOut, RemoteError, WorkerDied
from roll.data.sample import Sample
from roll.ledger.log import Transition
from roll.rollout.lifecycle import ENDS, Lifecycle
from roll.rollout.messages import EngineAssignment, Lease, SampleCommand, SampleResult, WorkerCommand
from roll.rollout.worker import RolloutWorker
from roll.scheduler.router import Router, SlotReservation
from roll.scheduler.token_registry import TokenRegistry

T = TypeVar("T")

_RELEASE_S = 10.0
"""How long a cancelled lease waits until its worker has released its tokens."""


class WorkerLost(Exception):
    """The rollout worker of a lease died, and the tokens it held are lost."""


@dataclass(eq=False)
class _InFlightLease:
    """An in-flight lease."""

    worker: int
    samples: dict[str, Sample]
    lifecycle: Lifecycle
    failure: asyncio.Future[None]
    """Set to what ends the lease from here: its worker is lost, or its samples get no slot."""
    reservation: SlotReservation
    """Slots of the lease; samples that got a slot again later have their own reservation in `reassigned`."""
    reassigned: dict[str, SlotReservation] = field(default_factory=dict)
    without_slot: set[str] = field(default_factory=set)
    """Samples whose slot was released."""
    scoring: set[str] = field(default_factory=set)
    """Samples that are being scored."""
    reserving: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Requeued samples, each with the task that waits for its slot."""


class RolloutPool:
    def __init__(
        self,
        workers: Cluster[RolloutWorker],
        router: Router,
        *,
        tries: int = 1,
        max_scoring: int = 0,
        deadline_s: float = 1800.0,
    ) -> None:
        """`tries`: attempts at a sample whose rollout workers die. `max_scoring`: back-pressure limit; while this many
        samples or more are being scored, admission to the engines is paused; 0 for no limit."""
        self._workers = workers
        self._router = router
        self._tries = tries
        self._max_scoring = max_scoring
        self._deadline_s = deadline_s
        self.version = 0
        """Version of the weights that the engines serve."""
        self._backpressure_s = 0.0
        self.transitions = 0
        """Sample transitions so far: the watchdog checks that it keeps increasing."""
        self._backpressure_since_s: float | None = None
        self._scoring = 0
        self._in_flight: dict[str, _InFlightLease] = {}
        self._by_sample: dict[str, _InFlightLease] = {}
        self._live_workers = set(range(len(workers)))
        """Workers that accept leases."""
        self._worker_available = asyncio.Event()
        self._worker_available.set()
        self._loads = [0] * len(workers)
        """In-flight samples per worker."""
        self.tokens = TokenRegistry(workers, self._live_workers)
        self._background_tasks: set[asyncio.Task[Any]] = set()
        self.on_engine_died: Callable[[int, str], None] = lambda engine, reason: None
        """Called when a sample's engine died."""
        self.on_worker_died: Callable[[int, str], None] = lambda worker, reason: None
        """Called when a rollout worker died or did not answer in time."""

    async def run(
        self, key: str, samples: Sequence[Sample], lifecycle: Lifecycle, *, priority: int = 0, fifo_key: int | None = None
    ) -> None:
        """Runs queued samples of one task until they are judged. Cancelling this coroutine cancels the lease."""
        while True:
            reservation = await self._router.reserve(len(samples), priority=priority, fifo_key=fifo_key)
            try:
                await self._run_lease(key, samples, lifecycle, reservation)
                return
            except WorkerLost as error:
                samples = [sample for sample in samples if sample.state != "dropped"]
                if not samples or not self.restart_samples(samples, lifecycle, str(error)):
                    return

    def restart_samples(self, samples: Sequence[Sample], lifecycle: Lifecycle, reason: str) -> bool:
        """Requeues samples that were lost with a rollout worker. If no tries are left, they fail and it returns False."""
        can_retry = max(sample.tries for sample in samples) < self._tries
        for sample in samples:
            if sample.state in ("kept", "scored"):
                lifecycle.move(sample, "queued", reason, **{"try": sample.tries + 1})
            elif sample.state != "failed":
                lifecycle.move(sample, "failed", reason)
            if can_retry and sample.state == "failed":
                lifecycle.move(sample, "queued", reason, **{"try": sample.tries + 1})
            elif not can_retry and sample.state == "queued":
                lifecycle.move(sample, "failed", reason)
            sample.tries += 1
            sample.oldest = sample.newest = sample.finish = None
            sample.tokens = sample.response_tokens = 0
        return can_retry

    async def _run_lease(
        self, key: str, samples: Sequence[Sample], lifecycle: Lifecycle, reservation: SlotReservation
    ) -> None:
        if key in self._in_flight:
            self._router.release(reservation)
            raise ValueError(f"the lease {key!r} is in flight already")
        # A worker that did not answer may still hold an earlier try.
        name = key if samples[0].tries == 1 else f"{key}~{samples[0].tries}"
        try:
            worker = await self._least_loaded()
        except BaseException:
            self._router.release(reservation)
            raise
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failure.add_done_callback(_retrieve_error)
        by_id = {sample.id: sample for sample in samples}
        lease = self._in_flight[key] = _InFlightLease(worker, by_id, lifecycle, failure, reservation)
        for sample in samples:
            self._by_sample[sample.id] = lease
            sample.oldest = self.version
        self.tokens.register(samples, worker, name)
        self._loads[worker] += len(samples)
        first = samples[0]
        message = Lease(
            name,
            reservation.engine,
            first.task,
            first.group,
            first.temperature,
            tuple(lease.samples),
            self.version,
            first.tries,
            next((sample.id for sample in samples if sample.greedy), None),
            first.votes,
            first.records,
        )
        try:
            await self._run_on(worker, lease, message)
        except BaseException:
            self.tokens.unregister(samples)
            raise
        finally:
            self._loads[worker] -= len(samples)
            self._release_all_slots(lease)
            del self._in_flight[key]
            for sample in samples:
                del self._by_sample[sample.id]

    async def _run_on(self, worker: int, lease: _InFlightLease, message: Lease) -> None:
        """Returns when the worker has run the lease; if this coroutine is cancelled, when the worker has ended it."""

        def apply(transition: Transition) -> None:
            if self._by_sample.get(transition.sample) is lease:
                self._apply_transition(lease, lease.samples[transition.sample], transition)

        call = asyncio.create_task(self._workers.stream_rank(worker, RolloutWorker.run, apply, message))
        call.add_done_callback(_retrieve_error)
        ends: list[asyncio.Future[Any]] = [call, lease.failure]
        try:
            # waits: every state of a sample has a deadline, and the death of the worker ends it
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if lease.failure.done():
                lease.failure.result()
            for result in call.result():
                self._apply_result(lease.samples[result.sample], result)
        except asyncio.CancelledError:
            call.cancel()
            # waits: a cancelled call ends in bounded time
            await asyncio.wait({call})
            # It may have ended before it was cancelled, and then the worker keeps its tokens.
            await asyncio.wait({self._in_background(self._release(worker, message.key))}, timeout=_RELEASE_S)
            raise
        except (WorkerDied, CallTimedOut) as error:
            if error.worker != self._workers.placements[worker].name:
                raise
            reason = f"rollout worker died: {error.worker}"
            self.worker_lost(worker, reason)
            self.on_worker_died(worker, str(error))
            raise WorkerLost(reason) from error
        finally:
            call.cancel()

    async def _least_loaded(self) -> int:
        async with asyncio.timeout(self._deadline_s):
            while not self._live_workers:
                await self._worker_available.wait()
        return min(sorted(self._live_workers), key=lambda worker: self._loads[worker])

    # Commands

    def send_command(self, command: SampleCommand) -> bool:
        """Sends a command for a sample to its worker. Returns False if the sample is in no in-flight lease."""
        lease = self._by_sample.get(command.sample)
        if lease is None:
            return False
        self._command(lease.worker, command)
        return True

    def _command(self, worker: int, command: WorkerCommand) -> None:
        """Sends a command after the leases and commands that were sent to the worker before."""
        self._in_background(self._send(worker, command))

    async def _send(self, worker: int, command: WorkerCommand) -> None:
        with suppress(RemoteError):  # a dead worker has nothing to execute
            await self._workers.call_rank(worker, RolloutWorker.execute, command)

    async def _release(self, worker: int, lease: str) -> None:
        with suppress(RemoteError):  # a dead worker has nothing to release
            await self._workers.call_rank(worker, RolloutWorker.release, [lease])

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
        return task

    async def pause(self) -> None:
        """Moves all generating samples to `paused`."""
        await self._call_all(RolloutWorker.pause)

    async def resume(self) -> None:
        await self._call_all(RolloutWorker.resume)

    async def requeue_generating(self, reason: str, engine: int | None = None) -> None:
        """Requeues the samples that are generating on one engine, or on all; they resume from their prefix."""
        calls = (
            self._workers.call_rank(worker, RolloutWorker.requeue_generating, reason, engine)
            for worker in self._live_workers
        )
        await asyncio.gather(*calls, return_exceptions=True)

    async def _call_all(self, method: object) -> None:
        calls = (self._workers.call_rank(worker, method) for worker in self._live_workers)  # type: ignore[call-overload]
        await asyncio.gather(*calls, return_exceptions=True)  # a dead worker has nothing to pause

    # Worker membership

    def worker_lost(self, worker: int, reason: str) -> None:
        """A rollout worker died: its leases restart elsewhere."""
        self._live_workers.discard(worker)
        if not self._live_workers:
            self._worker_available.clear()
        self.tokens.worker_died(worker)
        self._fail(worker, WorkerLost(reason))

    def worker_joined(self, worker: int) -> None:
        self._live_workers.add(worker)
        self._worker_available.set()

    def has_lease(self, key: str) -> bool:
        """Whether a lease is in flight."""
        return key in self._in_flight

    @property
    def busy(self) -> bool:
        """Whether any lease is in flight."""
        return bool(self._in_flight)

    def take_backpressure_s(self) -> float:
        """Seconds of grader back-pressure since the last call: admission was paused because too many samples were being
        scored."""
        if self._backpressure_since_s is not None:
            now = asyncio.get_running_loop().time()
            self._backpressure_s += now - self._backpressure_since_s
            self._backpressure_since_s = now
        seconds, self._backpressure_s = self._backpressure_s, 0.0
        return seconds

    def release_tokens(self, samples: Sequence[Sample]) -> None:
        """Releases the tokens of samples that restart, in the background."""
        self._in_background(self.tokens.release(samples))

    # Reports of workers

    def _apply_transition(self, lease: _InFlightLease, sample: Sample, transition: Transition) -> None:
        if sample.state == "dropped":  # by the controller, before the worker received the command
            return
        lease.lifecycle.apply(sample, transition)
        self.transitions += 1
        if transition.state == "scoring":
            lease.scoring.add(sample.id)
            self._count_scoring(1)
        elif sample.id in lease.scoring:
            lease.scoring.discard(sample.id)
            self._count_scoring(-1)
        if transition.state in ENDS and (reserving := lease.reserving.pop(sample.id, None)) is not None:
            reserving.cancel()
        if transition.state == "queued":
            self._release_slot(lease, sample.id)
            if (engine := transition.info.get("lost_engine")) is not None:
                self.on_engine_died(engine, transition.reason)
            sample.tries = int(transition.info.get("try", sample.tries))
            self._start_reserving(lease, sample)
        elif transition.state == "generating":
            if sample.id in lease.without_slot:  # its next turn, after its environment acted
                lease.without_slot.discard(sample.id)
                lease.reassigned[sample.id] = self._router.reserve_on(transition.info["engine"])
        elif transition.state != "paused":
            self._release_slot(lease, sample.id)

    def _apply_result(self, sample: Sample, result: SampleResult) -> None:
        sample.reward, sample.parts, sample.answer = result.reward, result.parts, result.answer
        sample.tokens, sample.response_tokens = result.tokens, result.response_tokens
        sample.finish = result.finish
        sample.turns, sample.tries, sample.kills = result.turns, result.tries, result.kills
        sample.turn_rewards, sample.turn_states = result.turn_rewards, result.turn_states
        if result.oldest is not None:
            sample.oldest, sample.newest = result.oldest, result.newest
            self._router.observe_length(result.tokens)

    def _release_slot(self, lease: _InFlightLease, sample: str) -> None:
        """Releases the slot of a sample."""
        if sample in lease.without_slot:
            return
        lease.without_slot.add(sample)
        reservation = lease.reassigned.pop(sample, None)
        self._router.release(reservation or lease.reservation, 1)

    def _release_all_slots(self, lease: _InFlightLease) -> None:
        """Releases all slots of a lease that has ended."""
        self._router.release(lease.reservation)
        for reservation in lease.reassigned.values():
            self._router.release(reservation)
        lease.without_slot.update(lease.samples)
        self._count_scoring(-len(lease.scoring))
        for reserving in lease.reserving.values():
            reserving.cancel()

    def _start_reserving(self, lease: _InFlightLease, sample: Sample) -> None:
        if sample.id in lease.reserving:
            return
        lease.reserving[sample.id] = self._in_background(self._reserve_slot(lease, sample))

    async def _reserve_slot(self, lease: _InFlightLease, sample: Sample) -> None:
        try:
            reservation = await self._router.reserve(1, priority=sample.priority, fifo_key=sample.group)
        except Exception as error:
            if not lease.failure.done():
                lease.failure.set_exception(error)
            return
        if self._by_sample.get(sample.id) is not lease or lease.reserving.pop(sample.id, None) is None:
            self._router.release(reservation)
            return
        lease.reassigned[sample.id] = reservation
        lease.without_slot.discard(sample.id)
        self._command(lease.worker, EngineAssignment(sample.id, reservation.engine, self.version))

    def _count_scoring(self, change: int) -> None:
        self._scoring += change
        if not self._max_scoring:
            return
        is_full, now = self._scoring >= self._max_scoring, asyncio.get_running_loop().time()
        if is_full and self._backpressure_since_s is None:
            self._backpressure_since_s = now
            self._router.pause_admission(True, "verdicts")
        elif not is_full and self._backpressure_since_s is not None:
            self._backpressure_s += now - self._backpressure_since_s
            self._backpressure_since_s = None
            self._router.pause_admission(False, "verdicts")

    def _fail(self, worker: int, error: Exception) -> None:
        for lease in self._in_flight.values():
            if lease.worker == worker and not lease.failure.done():
                lease.failure.set_exception(error)


def _retrieve_error(call: asyncio.Future[Any]) -> None:
    """Retrieves the error of a call that nobody waits for any more, so that asyncio does not warn."""
    if not call.cancelled():
        call.exception()
