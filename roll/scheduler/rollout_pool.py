"""The rollout workers as the controller sees them: groups go out as leases, outcomes come back, tokens stay there.

What always holds: the controller's books (states, ledger) change only here and in the scheduler; each lease is with one
worker; each sample that is being generated has one place on one engine, given back when its response ends, or when it is
taken off; what passes through is per sample, never per token. When a rollout worker dies, what it held starts anew
elsewhere, as long as tries are left.
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
    """The rollout worker of a lease is gone, and its tokens with it."""


@dataclass(eq=False)
class _Out:
    """A lease that is out."""

    worker: int
    samples: dict[str, Sample]
    lifecycle: Lifecycle
    done: asyncio.Future[None]
    ticket: SlotReservation
    """Of the whole lease; samples that were moved have tickets of their own."""
    moved: dict[str, SlotReservation] = field(default_factory=dict)
    seatless: set[str] = field(default_factory=set)
    """Samples whose place was given back."""
    scoring: set[str] = field(default_factory=set)
    """Samples that wait for verdicts."""
    seating: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Those that wait for a place of their own."""


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
        """`tries` of a sample whose rollout worker dies; `scoring_most`: samples that may wait for verdicts, 0 for any
        number; while there are more, no new ones begin."""
        self._workers = workers
        self._router = router
        self._tries = tries
        self._scoring_most = scoring_most
        self._deadline_s = deadline_s
        self.version = 0
        """Of the weights that engines serve."""
        self._full_s = 0.0
        self.moves = 0
        """Of samples so far: a watchdog sees whether it still rises."""
        self._full_since: float | None = None
        self._scoring = 0
        self._out: dict[str, _Out] = {}
        self._by_name: dict[str, _Out] = {}
        self._by_sample: dict[str, _Out] = {}
        self._inside = set(range(len(workers)))
        """Workers that take leases."""
        self._joined = asyncio.Event()
        self._joined.set()
        self._loads = [0] * len(workers)
        """Samples that are with each worker."""
        self._leases = [0] * len(workers)
        self.tokens = TokenRegistry(workers, self._inside)
        self._lines = [self._line(worker) for worker in range(len(workers))]
        self._seating: set[asyncio.Task[None]] = set()
        self.engine_trouble: Callable[[int, str], None] = lambda engine, reason: None
        """Told when a sample lost its engine."""
        self.worker_trouble: Callable[[int, str], None] = lambda worker, reason: None
        """Told when a rollout worker does not answer."""

    async def run(
        self, key: str, samples: Sequence[Sample], lifecycle: Lifecycle, *, priority: int = 0, order: int | None = None
    ) -> None:
        """Carries queued samples of one task to their verdicts. Cancelling it ends them where they are."""
        while True:
            ticket = await self._router.reserve(len(samples), priority=priority, order=order)
            try:
                await self._lease(key, samples, lifecycle, ticket)
                return
            except WorkerLost as lost:
                samples = [sample for sample in samples if sample.state != "dropped"]
                if not samples or not self.start_anew(samples, lifecycle, str(lost)):
                    return

    def start_anew(self, samples: Sequence[Sample], lifecycle: Lifecycle, reason: str) -> bool:
        """What was lost with a rollout worker is queued again; False when its tries are used up: it has failed then."""
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
        )  # what is said of an earlier try is not of this
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
            # waits: every stage of a sample has a deadline, and a lost worker ends it
            await done
        except asyncio.CancelledError:
            self.tokens.unregister(samples)
            if not self._lines[worker].take_back(lease):
                await self._lines[worker].arrived()
                await self._tell(worker, [name])
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

    async def _tell(self, worker: int, keys: list[str]) -> None:
        with suppress(RemoteError):  # then what it held is gone with it
            await self._workers.call_rank(worker, RolloutWorker.cancel, keys)

    async def _least_loaded(self) -> int:
        async with asyncio.timeout(self._deadline_s):
            while not self._inside:
                await self._joined.wait()
        return min(sorted(self._inside), key=lambda worker: self._loads[worker])

    # Interfering with samples

    def stop(self, stop: SampleCommand) -> bool:
        """Interferes with a sample that is out; False if it is not."""
        out = self._by_sample.get(stop.sample)
        if out is None:
            return False
        self._lines[out.worker].post(stop)
        return True

    async def pause(self) -> None:
        """The books show what is being generated as paused."""
        await self._all(RolloutWorker.pause)

    async def resume(self) -> None:
        await self._all(RolloutWorker.resume)

    async def displace(self, reason: str, engine: int | None = None) -> None:
        """Takes what is being generated off an engine, or off all: it gets places anew and goes on from its prefix."""
        calls = (self._workers.call_rank(worker, RolloutWorker.displace, reason, engine) for worker in self._inside)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _all(self, method: object) -> None:
        calls = (self._workers.call_rank(worker, method) for worker in self._inside)  # type: ignore[call-overload]
        await asyncio.gather(*calls, return_exceptions=True)  # a worker that is gone has nothing to pause

    # Workers that come and go

    def lost(self, worker: int, reason: str) -> None:
        """A rollout worker is gone: what it had starts anew."""
        self._inside.discard(worker)
        if not self._inside:
            self._joined.clear()
        self.tokens.worker_died(worker)
        self._fail(worker, WorkerLost(reason))

    def joined(self, worker: int) -> None:
        self._inside.add(worker)
        self._joined.set()

    def has(self, key: str) -> bool:
        """Whether a lease is out."""
        return key in self._out

    @property
    def busy(self) -> bool:
        """Whether any sample is with a worker."""
        return bool(self._out)

    def take_full_s(self) -> float:
        """Seconds, since it was asked last, for which nothing new began because too many verdicts were waited for."""
        if self._full_since is not None:
            now = asyncio.get_running_loop().time()
            self._full_s += now - self._full_since
            self._full_since = now
        seconds, self._full_s = self._full_s, 0.0
        return seconds

    def let_go(self, samples: Sequence[Sample]) -> None:
        """The tokens of these samples are not needed: they start anew."""
        task = asyncio.create_task(self.tokens.release(samples))
        self._seating.add(task)
        task.add_done_callback(self._seating.discard)

    # What workers say

    def _line(self, worker: int) -> BatchedChannel[WorkerCommand, Report]:
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
            if (out := self._by_sample.get(move.sample)) is not None:  # else it was cancelled
                self._moved(out, out.samples[move.sample], move)
        for outcome in report.outcomes:
            if (out := self._by_sample.get(outcome.sample)) is not None:
                self._ended(out.samples[outcome.sample], outcome)
        for name in report.done:
            if (done := self._by_name.get(name)) is not None and not done.done.done():
                done.done.set_result(None)

    def _moved(self, out: _Out, sample: Sample, move: Transition) -> None:
        if sample.state == "dropped":  # here, which the worker has not heard of yet
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
            self._seat_again(out, sample)
        elif move.state == "generating":
            if sample.id in out.seatless:  # back from its environment
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
        """The sample needs its place no more."""
        if sample in out.seatless:
            return
        out.seatless.add(sample)
        ticket = out.moved.pop(sample, None)
        self._router.release(ticket or out.ticket, 1)

    def _settle(self, out: _Out) -> None:
        """The lease is over: its places are free."""
        self._router.release(out.ticket)
        for ticket in out.moved.values():
            self._router.release(ticket)
        out.seatless.update(out.samples)
        self._count_scoring(-len(out.scoring))
        for seating in out.seating.values():
            seating.cancel()

    def _seat_again(self, out: _Out, sample: Sample) -> None:
        if sample.id in out.seating:
            return
        task = out.seating[sample.id] = asyncio.create_task(self._seat(out, sample))
        self._seating.add(task)
        task.add_done_callback(self._seating.discard)

    async def _seat(self, out: _Out, sample: Sample) -> None:
        try:
            ticket = await self._router.reserve(1, priority=sample.priority, order=sample.group)
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
