"""The controller's side of the rollout workers: sends groups as leases and receives results; tokens stay on the workers.

Invariants: only this module and the scheduler change sample states and the ledger; each lease is on one worker; each
sample that is being generated has one slot on one engine, released when its response ends or it is requeued; messages
are per sample, never per token. When a rollout worker dies, its leases restart on other workers while tries are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from roll.cluster import Cluster
from roll.cluster.batched_channel import BatchedChannel
from roll.cluster.errors import CallTimedOut, RemoteError, WorkerDied
from roll.data.sample import Sample
from roll.ledger.log import Transition
from roll.rollout.lifecycle import ENDS, Lifecycle
from roll.rollout.messages import EngineAssignment, Lease, Report, SampleCommand, SampleResult, WorkerCommand
from roll.rollout.worker import RolloutWorker
from roll.scheduler.router import Router, SlotReservation
from roll.scheduler.token_registry import TokenRegistry


class WorkerLost(Exception):
    """The rollout worker of a lease died, and the tokens it held are lost."""


@dataclass(eq=False)
class _Out:
    """An in-flight lease."""

    worker: int
    samples: dict[str, Sample]
    lifecycle: Lifecycle
    done: asyncio.Future[None]
    ticket: SlotReservation
    """Slots of the lease; samples that got a slot again later have their own reservation in `moved`."""
    moved: dict[str, SlotReservation] = field(default_factory=dict)
    seatless: set[str] = field(default_factory=set)
    """Samples whose slot was released."""
    scoring: set[str] = field(default_factory=set)
    """Samples that are being scored."""
    seating: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Requeued samples, each with the task that waits for its slot."""


class RolloutPool:
    def __init__(
        self,
        workers: Cluster[RolloutWorker],
        router: Router,
        *,
        tries: int = 1,
        scoring_most: int = 0,
        deadline_s: float = 1800.0,
    ) -> None:
        """`tries`: attempts at a sample whose rollout workers die. `scoring_most`: back-pressure limit; while this many
        samples or more are being scored, admission to the engines is paused; 0 for no limit."""
        self._workers = workers
        self._router = router
        self._tries = tries
        self._scoring_most = scoring_most
        self._deadline_s = deadline_s
        self.version = 0
        """Version of the weights that the engines serve."""
        self._full_s = 0.0
        self.moves = 0
        """Sample transitions so far: the watchdog checks that it keeps increasing."""
        self._full_since: float | None = None
        self._scoring = 0
        self._out: dict[str, _Out] = {}
        self._by_name: dict[str, _Out] = {}
        self._by_sample: dict[str, _Out] = {}
        self._inside = set(range(len(workers)))
        """Workers that accept leases."""
        self._joined = asyncio.Event()
        self._joined.set()
        self._loads = [0] * len(workers)
        """In-flight samples per worker."""
        self._leases = [0] * len(workers)
        self.tokens = TokenRegistry(workers, self._inside)
        self._lines = [self._channel(worker) for worker in range(len(workers))]
        self._seating: set[asyncio.Task[None]] = set()
        self.engine_trouble: Callable[[int, str], None] = lambda engine, reason: None
        """Called when a sample's engine died."""
        self.worker_trouble: Callable[[int, str], None] = lambda worker, reason: None
        """Called when a rollout worker died or did not answer in time."""

    async def run(
        self, key: str, samples: Sequence[Sample], lifecycle: Lifecycle, *, priority: int = 0, order: int | None = None
    ) -> None:
        """Runs queued samples of one task until they are judged. Cancelling this coroutine cancels the lease."""
        while True:
            ticket = await self._router.reserve(len(samples), priority=priority, fifo_key=order)
            try:
                await self._lease(key, samples, lifecycle, ticket)
                return
            except WorkerLost as lost:
                samples = [sample for sample in samples if sample.state != "dropped"]
                if not samples or not self.restart_samples(samples, lifecycle, str(lost)):
                    return

    def restart_samples(self, samples: Sequence[Sample], lifecycle: Lifecycle, reason: str) -> bool:
        """Requeues samples that were lost with a rollout worker. If no tries are left, they fail and it returns False."""
        again = max(sample.tries for sample in samples) < self._tries
        for sample in samples:
            if sample.state in ("kept", "scored"):
                lifecycle.move(sample, "queued", reason, **{"try": sample.tries + 1})
            elif sample.state != "failed":
                lifecycle.move(sample, "failed", reason)
            if again and sample.state == "failed":
                lifecycle.move(sample, "queued", reason, **{"try": sample.tries + 1})
            elif not again and sample.state == "queued":
                lifecycle.move(sample, "failed", reason)
            sample.tries += 1
            sample.oldest = sample.newest = sample.finish = None
            sample.tokens = sample.response_tokens = 0
        return again

    async def _lease(self, key: str, samples: Sequence[Sample], lifecycle: Lifecycle, ticket: SlotReservation) -> None:
        if key in self._out:
            self._router.release(ticket)
            raise ValueError(f"the lease {key!r} is out already")
        name = (
            key if samples[0].tries == 1 else f"{key}~{samples[0].tries}"
        )  # reports on an earlier try must not match this lease
        try:
            worker = await self._least_loaded()
        except BaseException:
            self._router.release(ticket)
            raise
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        out = self._out[key] = self._by_name[name] = _Out(
            worker, {sample.id: sample for sample in samples}, lifecycle, done, ticket
        )
        for sample in samples:
            self._by_sample[sample.id] = out
            sample.oldest = self.version
        self.tokens.register(samples, worker, name)
        self._loads[worker] += len(samples)
        self._leases[worker] += 1
        first = samples[0]
        lease = Lease(
            name,
            ticket.engine,
            first.task,
            first.group,
            first.temperature,
            tuple(out.samples),
            self.version,
            first.tries,
            next((sample.id for sample in samples if sample.greedy), None),
            first.votes,
            first.records,
        )
        try:
            self._lines[worker].post(lease)
            # waits: every state of a sample has a deadline, and the death of the worker ends it
            await done
        except asyncio.CancelledError:
            self.tokens.unregister(samples)
            if not self._lines[worker].take_back(lease):
                await self._lines[worker].arrived()
                await self._send(worker, [name])
            raise
        except BaseException:
            self.tokens.unregister(samples)
            raise
        finally:
            self._loads[worker] -= len(samples)
            self._leases[worker] -= 1
            self._settle(out)
            del self._out[key], self._by_name[name]
            for sample in samples:
                del self._by_sample[sample.id]

    async def _send(self, worker: int, keys: list[str]) -> None:
        with suppress(RemoteError):  # a dead worker has nothing to cancel
            await self._workers.call_rank(worker, RolloutWorker.cancel, keys)

    async def _least_loaded(self) -> int:
        async with asyncio.timeout(self._deadline_s):
            while not self._inside:
                await self._joined.wait()
        return min(sorted(self._inside), key=lambda worker: self._loads[worker])

    # Commands

    def stop(self, stop: SampleCommand) -> bool:
        """Sends a command for a sample to its worker. Returns False if the sample is in no in-flight lease."""
        out = self._by_sample.get(stop.sample)
        if out is None:
            return False
        self._lines[out.worker].post(stop)
        return True

    async def pause(self) -> None:
        """Moves all generating samples to `paused`."""
        await self._all(RolloutWorker.pause)

    async def resume(self) -> None:
        await self._all(RolloutWorker.resume)

    async def displace(self, reason: str, engine: int | None = None) -> None:
        """Requeues the samples that are generating on one engine, or on all; they resume from their prefix."""
        calls = (self._workers.call_rank(worker, RolloutWorker.displace, reason, engine) for worker in self._inside)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _all(self, method: object) -> None:
        calls = (self._workers.call_rank(worker, method) for worker in self._inside)  # type: ignore[call-overload]
        await asyncio.gather(*calls, return_exceptions=True)  # a dead worker has nothing to pause

    # Worker membership

    def lost(self, worker: int, reason: str) -> None:
        """A rollout worker died: its leases restart elsewhere."""
        self._inside.discard(worker)
        if not self._inside:
            self._joined.clear()
        self.tokens.worker_died(worker)
        self._fail(worker, WorkerLost(reason))

    def joined(self, worker: int) -> None:
        self._inside.add(worker)
        self._joined.set()

    def has(self, key: str) -> bool:
        """Whether a lease is in flight."""
        return key in self._out

    @property
    def busy(self) -> bool:
        """Whether any lease is in flight."""
        return bool(self._out)

    def take_full_s(self) -> float:
        """Seconds of grader back-pressure since the last call: admission was paused because too many samples were being
        scored."""
        if self._full_since is not None:
            now = asyncio.get_running_loop().time()
            self._full_s += now - self._full_since
            self._full_since = now
        seconds, self._full_s = self._full_s, 0.0
        return seconds

    def let_go(self, samples: Sequence[Sample]) -> None:
        """Releases the tokens of samples that restart, in the background."""
        task = asyncio.create_task(self.tokens.release(samples))
        self._seating.add(task)
        task.add_done_callback(self._seating.discard)

    # Reports of workers

    def _channel(self, worker: int) -> BatchedChannel[WorkerCommand, Report]:
        async def send(orders: list[WorkerCommand]) -> None:
            await self._workers.call_rank(worker, RolloutWorker.take, orders)

        async def ask() -> Report:
            return await self._workers.call_rank(worker, RolloutWorker.report)

        def fail(error: Exception) -> None:
            if isinstance(error, WorkerDied | CallTimedOut):
                self.lost(worker, f"rollout worker died: {error.worker}")
                self.worker_trouble(worker, str(error))
            else:
                self._fail(worker, error)

        return BatchedChannel(
            send,
            ask,
            take=self._take,
            fail=fail,
            busy=lambda: self._leases[worker] > 0,
        )

    def _take(self, report: Report) -> None:
        for move in report.moves:
            if (out := self._by_sample.get(move.sample)) is not None:  # else its lease was cancelled
                self._moved(out, out.samples[move.sample], move)
        for outcome in report.outcomes:
            if (out := self._by_sample.get(outcome.sample)) is not None:
                self._ended(out.samples[outcome.sample], outcome)
        for name in report.done:
            if (done := self._by_name.get(name)) is not None and not done.done.done():
                done.done.set_result(None)

    def _moved(self, out: _Out, sample: Sample, move: Transition) -> None:
        if sample.state == "dropped":  # by the controller, before the worker received the command
            return
        out.lifecycle.move(sample, move.state, move.reason, move.time_s, **move.info)  # type: ignore[arg-type]
        self.moves += 1
        if move.state == "scoring":
            out.scoring.add(sample.id)
            self._count_scoring(1)
        elif sample.id in out.scoring:
            out.scoring.discard(sample.id)
            self._count_scoring(-1)
        if move.state in ENDS and (seating := out.seating.pop(sample.id, None)) is not None:
            seating.cancel()
        if move.state == "queued":
            self._give_back(out, sample.id)
            if (engine := move.info.get("lost_engine")) is not None:
                self.engine_trouble(engine, move.reason)
            sample.tries = int(move.info.get("try", sample.tries))
            self._reassign(out, sample)
        elif move.state == "generating":
            if sample.id in out.seatless:  # its next turn, after its environment acted
                out.seatless.discard(sample.id)
                out.moved[sample.id] = self._router.take(move.info["engine"])
        elif move.state != "paused":
            self._give_back(out, sample.id)

    def _ended(self, sample: Sample, outcome: SampleResult) -> None:
        sample.reward, sample.parts, sample.answer = outcome.reward, outcome.parts, outcome.answer
        sample.tokens, sample.response_tokens = outcome.tokens, outcome.response_tokens
        sample.finish = outcome.finish
        sample.turns, sample.tries, sample.kills = outcome.turns, outcome.tries, outcome.kills
        sample.turn_rewards, sample.turn_states = outcome.turn_rewards, outcome.turn_states
        if outcome.oldest is not None:
            sample.oldest, sample.newest = outcome.oldest, outcome.newest
            self._router.learn(outcome.tokens)

    def _give_back(self, out: _Out, sample: str) -> None:
        """Releases the slot of a sample."""
        if sample in out.seatless:
            return
        out.seatless.add(sample)
        ticket = out.moved.pop(sample, None)
        self._router.release(ticket or out.ticket, 1)

    def _settle(self, out: _Out) -> None:
        """Releases all slots of a lease that has ended."""
        self._router.release(out.ticket)
        for ticket in out.moved.values():
            self._router.release(ticket)
        out.seatless.update(out.samples)
        self._count_scoring(-len(out.scoring))
        for seating in out.seating.values():
            seating.cancel()

    def _reassign(self, out: _Out, sample: Sample) -> None:
        if sample.id in out.seating:
            return
        task = out.seating[sample.id] = asyncio.create_task(self._assign(out, sample))
        self._seating.add(task)
        task.add_done_callback(self._seating.discard)

    async def _assign(self, out: _Out, sample: Sample) -> None:
        try:
            ticket = await self._router.reserve(1, priority=sample.priority, fifo_key=sample.group)
        except Exception as error:
            if not out.done.done():
                out.done.set_exception(error)
            return
        if self._by_sample.get(sample.id) is not out or out.seating.pop(sample.id, None) is None:
            self._router.release(ticket)
            return
        out.moved[sample.id] = ticket
        out.seatless.discard(sample.id)
        self._lines[out.worker].post(EngineAssignment(sample.id, ticket.engine, self.version))

    def _count_scoring(self, change: int) -> None:
        self._scoring += change
        if not self._scoring_most:
            return
        full, now = self._scoring >= self._scoring_most, asyncio.get_running_loop().time()
        if full and self._full_since is None:
            self._full_since = now
            self._router.pause_admission(True, "verdicts")
        elif not full and self._full_since is not None:
            self._full_s += now - self._full_since
            self._full_since = None
            self._router.pause_admission(False, "verdicts")

    def _fail(self, worker: int, error: Exception) -> None:
        for out in self._out.values():
            if out.worker == worker and not out.done.done():
                out.done.set_exception(error)
