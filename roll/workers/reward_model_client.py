"""A reward worker's client of the reward model and judge roles.

Invariants: an accepted question ends in an answer, in `ScoreTimeout` or in `ValueError`. Its deadline starts when it is
sent to a worker, and again when the worker has sent it back because the role is offloaded; time in which this process is
blocked does not count. If a worker dies, the question is retried for up to `retry_s`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from roll.cluster import Cluster
from roll.cluster.errors import RemoteError, WorkerError
from roll.data.task import Message
from roll.reward.model_reward import JudgeSampling, ScoreTimeout
from roll.reward.stats import Latency, RoleStats
from roll.workers.judge import JudgeWorker
from roll.workers.reward_model import RewardModelWorker

A = TypeVar("A")

SCORED_AT_ONCE = 64
"""Conversations in flight at a reward model, over all reward workers: enough to fill its micro-batches."""
_POLL_S = 0.5
_WAIT_S = (0.1, 5.0)
"""First and longest wait before a question is retried after a worker died."""


@dataclass(frozen=True)
class RewardModelClient:
    """The clusters of these roles, None for those that a run does not have. The client is sent to the reward workers."""

    reward_model: Cluster[RewardModelWorker] | None = None
    judge: Cluster[JudgeWorker] | None = None

    @property
    def clusters(self) -> list[Cluster[RewardModelWorker] | Cluster[JudgeWorker]]:
        return [cluster for cluster in (self.reward_model, self.judge) if cluster is not None]

    def snapshot(self) -> RewardModelClient:
        """The client as it is sent to reward workers: its handles keep pointing to the current worker processes. A
        question to a dead one fails at once, and is retried after the new handles have been sent."""
        reward_model, judge = self.reward_model, self.judge
        return RewardModelClient(reward_model and reward_model.snapshot(), judge and judge.snapshot())


NO_SCORERS = RewardModelClient()


class _Queue:
    """The queue of questions for a role: their total in-flight size is at most `most`; a larger question runs alone."""

    def __init__(self) -> None:
        self.max_in_flight = 1
        self.stats = RoleStats()
        self._in_flight: dict[int, int] = {}
        """Size of the in-flight questions per worker."""
        self._waiting = 0
        self._changed = asyncio.Condition()

    def resize(self, workers: int, max_in_flight: int) -> None:
        self.max_in_flight = max(max_in_flight, 1)
        self._in_flight = {rank: self._in_flight.get(rank, 0) for rank in range(workers)}

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[int]:
        """Waits until a question of that size fits; yields the rank of the least loaded worker."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        self._waiting += 1
        self.stats = replace(self.stats, most_waiting=max(self.stats.most_waiting, self._waiting))
        try:
            async with self._changed:
                # waits: every question with the role ends by its deadline
                await self._changed.wait_for(lambda: self._fits(size))
                rank = min(self._in_flight, key=self._in_flight.__getitem__)
                self._in_flight[rank] += size
        finally:
            self._waiting -= 1
        began = loop.time()
        try:
            yield rank
            took = Latency(1, loop.time() - began)
            waited = Latency(1, began - arrived)
            self.stats = replace(self.stats, answers=self.stats.answers + took, waits=self.stats.waits + waited)
        finally:
            if rank in self._in_flight:  # else the worker was retired in the meantime
                self._in_flight[rank] -= size
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        in_flight = sum(self._in_flight.values())
        return not in_flight or in_flight + size <= self.max_in_flight

    def count_unanswered(self) -> None:
        self.stats = replace(self.stats, unanswered=self.stats.unanswered + 1)

    def take_stats(self) -> RoleStats:
        stats, self.stats = self.stats, RoleStats(most_waiting=self._waiting)
        return stats


class ScorerClients:
    """A reward worker's implementation of `roll.reward.model_reward.ScoreBackend` through roles."""

    def __init__(self, *, replies_at_once: int, clients: int, retry_s: float) -> None:
        """`replies_at_once`: replies that one judge generates at once; `clients`: reward workers that share the roles."""
        self._replies_at_once = replies_at_once
        self._clients = clients
        self._retry_s = retry_s
        self._scorers = RewardModelClient()
        self._queues = {"reward_model": _Queue(), "judge": _Queue()}
        self._cancelling: set[asyncio.Task[None]] = set()

    def connect(self, scorers: RewardModelClient) -> None:
        """Sets the roles' clusters, also after some of their workers were restarted."""
        self._scorers = scorers
        judges = len(scorers.judge) if scorers.judge is not None else 1
        self._queues["judge"].resize(judges, judges * self._replies_at_once // self._clients)
        self._queues["reward_model"].resize(1, SCORED_AT_ONCE // self._clients)

    async def score(self, messages: Sequence[Message], timeout_s: float) -> float:
        async def call(rank: int) -> float | None:
            cluster = _available_cluster(self._scorers.reward_model, "reward_model")
            return await cluster.call_rank(rank, RewardModelWorker.score, messages)

        async with self._queues["reward_model"].reserve(1) as rank:
            return await self._call_with_retry("reward_model", call, rank, timeout_s)

    async def replies(self, messages: Sequence[Message], sampling: JudgeSampling, timeout_s: float) -> list[str]:
        question = secrets.token_hex(8)

        async def call(rank: int) -> list[str] | None:
            cluster = _available_cluster(self._scorers.judge, "judge")
            return await cluster.call_rank(rank % len(cluster), JudgeWorker.replies, question, messages, sampling)

        async with self._queues["judge"].reserve(len(sampling.seeds)) as rank:
            try:
                return await self._call_with_retry("judge", call, rank, timeout_s)
            except (ScoreTimeout, asyncio.CancelledError):
                self._cancel_replies(rank, question)
                raise

    def take_stats(self) -> dict[str, RoleStats]:
        """Statistics of the run's roles since the last call."""
        present = [cluster.role for cluster in self._scorers.clusters]
        return {role: queue.take_stats() for role, queue in self._queues.items() if role in present}

    async def _call_with_retry(
        self, role: str, call: Callable[[int], Awaitable[A | None]], rank: int, timeout_s: float
    ) -> A:
        """Repeats a question while the worker is offloaded or dead; a timeout of the worker ends it."""
        loop = asyncio.get_running_loop()
        wait_s, end_s = _WAIT_S[0], loop.time() + self._retry_s
        while True:
            try:
                answer = await _with_timeout(call(rank), timeout_s)
            except WorkerError as error:  # the same question would fail the same way
                self._queues[role].count_unanswered()
                raise ScoreTimeout(str(error).splitlines()[0]) from error
            except RemoteError as error:
                if loop.time() > end_s:
                    self._queues[role].count_unanswered()
                    raise ScoreTimeout(str(error).splitlines()[0]) from None
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _WAIT_S[1])
            except TimeoutError:
                self._queues[role].count_unanswered()
                raise ScoreTimeout(f"the role {role} has not answered for {timeout_s:g} s") from None
            else:
                if answer is not None:
                    return answer

    def _cancel_replies(self, rank: int, question: str) -> None:
        """Has a judge abort the replies to a question that nobody waits for any longer."""

        async def cancel() -> None:
            with suppress(RemoteError):
                cluster = _available_cluster(self._scorers.judge, "judge")
                await cluster.call_rank(rank % len(cluster), JudgeWorker.cancel, question)

        task = asyncio.create_task(cancel())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)


def _available_cluster(cluster: Cluster[Any] | None, role: str) -> Cluster[Any]:
    if cluster is None:
        raise ScoreTimeout(f"this run has no role {role}")
    return cluster


async def _with_timeout(call: Awaitable[A], timeout_s: float) -> A:
    """The answer, or `TimeoutError`. Time in which this process was blocked does not count."""
    task, remaining_s = asyncio.ensure_future(call), timeout_s
    try:
        while remaining_s > 0 and not task.done():
            await asyncio.wait({task}, timeout=min(_POLL_S, remaining_s))
            remaining_s -= _POLL_S
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
