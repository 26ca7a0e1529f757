"""A reward worker's client of the reward model and judge roles.

Invariants: an accepted question ends in an answer, in `ScoreTimeout` or in `ValueError`. Its deadline starts when it is
sent to a worker, and again when the worker has sent it back because the role is offloaded; time in which this process is
blocked does not count. If a worker dies, the question is retried for up to `patience_s`.
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
_LOOK_S = 0.5
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

    def as_sent(self) -> RewardModelClient:
        """The client as it is sent to reward workers: its handles keep pointing to the current worker processes. A
        question to a dead one fails at once, and is retried after the new handles have been sent."""
        reward_model, judge = self.reward_model, self.judge
        return RewardModelClient(reward_model and reward_model.as_sent(), judge and judge.as_sent())


NO_SCORERS = RewardModelClient()


class _Queue:
    """The queue of questions for a role: their total in-flight size is at most `most`; a larger question runs alone."""

    def __init__(self) -> None:
        self.most = 1
        self.stats = RoleStats()
        self._busy: dict[int, int] = {}
        """Size of the in-flight questions per worker."""
        self._waiting = 0
        self._changed = asyncio.Condition()

    def resize(self, workers: int, most: int) -> None:
        self.most = max(most, 1)
        self._busy = {rank: self._busy.get(rank, 0) for rank in range(workers)}

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
                await self._changed.wait_for(lambda: self._free(size))
                rank = min(self._busy, key=self._busy.__getitem__)
                self._busy[rank] += size
        finally:
            self._waiting -= 1
        began = loop.time()
        try:
            yield rank
            took = Latency(1, loop.time() - began)
            waited = Latency(1, began - arrived)
            self.stats = replace(self.stats, answers=self.stats.answers + took, waits=self.stats.waits + waited)
        finally:
            if rank in self._busy:  # else the worker was retired in the meantime
                self._busy[rank] -= size
            async with self._changed:
                self._changed.notify_all()

    def _free(self, size: int) -> bool:
        busy = sum(self._busy.values())
        return not busy or busy + size <= self.most

    def missed(self) -> None:
        self.stats = replace(self.stats, unanswered=self.stats.unanswered + 1)

    def take(self) -> RoleStats:
        stats, self.stats = self.stats, RoleStats(most_waiting=self._waiting)
        return stats


class ScorerClients:
    """A reward worker's implementation of `roll.reward.model_reward.ScoreBackend` through roles."""

    def __init__(self, *, replies_at_once: int, askers: int, patience_s: float) -> None:
        """`replies_at_once`: replies that one judge generates at once; `askers`: reward workers that share the roles."""
        self._replies_at_once = replies_at_once
        self._askers = askers
        self._patience_s = patience_s
        self._scorers = RewardModelClient()
        self._queues = {"reward_model": _Queue(), "judge": _Queue()}
        self._leaving: set[asyncio.Task[None]] = set()

    def connect(self, scorers: RewardModelClient) -> None:
        """Sets the roles' clusters, also after some of their workers were restarted."""
        self._scorers = scorers
        judges = len(scorers.judge) if scorers.judge is not None else 1
        self._queues["judge"].resize(judges, judges * self._replies_at_once // self._askers)
        self._queues["reward_model"].resize(1, SCORED_AT_ONCE // self._askers)

    async def score(self, messages: Sequence[Message], timeout_s: float) -> float:
        async def ask(rank: int) -> float | None:
            cluster = _there(self._scorers.reward_model, "reward_model")
            return await cluster.call_rank(rank, RewardModelWorker.score, messages)

        async with self._queues["reward_model"].reserve(1) as rank:
            return await self._answer("reward_model", ask, rank, timeout_s)

    async def replies(self, messages: Sequence[Message], sampling: JudgeSampling, timeout_s: float) -> list[str]:
        question = secrets.token_hex(8)

        async def ask(rank: int) -> list[str] | None:
            cluster = _there(self._scorers.judge, "judge")
            return await cluster.call_rank(rank % len(cluster), JudgeWorker.replies, question, messages, sampling)

        async with self._queues["judge"].reserve(len(sampling.seeds)) as rank:
            try:
                return await self._answer("judge", ask, rank, timeout_s)
            except (ScoreTimeout, asyncio.CancelledError):
                self._leave(rank, question)
                raise

    def take_stats(self) -> dict[str, RoleStats]:
        """Statistics of the run's roles since the last call."""
        there = [cluster.role for cluster in self._scorers.clusters]
        return {role: queue.take() for role, queue in self._queues.items() if role in there}

    async def _answer(self, role: str, ask: Callable[[int], Awaitable[A | None]], rank: int, timeout_s: float) -> A:
        """Repeats a question while the worker is offloaded or dead; a timeout of the worker ends it."""
        loop = asyncio.get_running_loop()
        wait_s, end_s = _WAIT_S[0], loop.time() + self._patience_s
        while True:
            try:
                answer = await _within(ask(rank), timeout_s)
            except WorkerError as error:  # the same question would fail the same way
                self._queues[role].missed()
                raise ScoreTimeout(str(error).splitlines()[0]) from error
            except RemoteError as error:
                if loop.time() > end_s:
                    self._queues[role].missed()
                    raise ScoreTimeout(str(error).splitlines()[0]) from None
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _WAIT_S[1])
            except TimeoutError:
                self._queues[role].missed()
                raise ScoreTimeout(f"the role {role} has not answered for {timeout_s:g} s") from None
            else:
                if answer is not None:
                    return answer

    def _leave(self, rank: int, question: str) -> None:
        """Has a judge abort the replies to a question that was given up."""

        async def leave() -> None:
            with suppress(RemoteError):
                cluster = _there(self._scorers.judge, "judge")
                await cluster.call_rank(rank % len(cluster), JudgeWorker.cancel, question)

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _there(cluster: Cluster[Any] | None, role: str) -> Cluster[Any]:
    if cluster is None:
        raise ScoreTimeout(f"this run has no role {role}")
    return cluster


async def _within(call: Awaitable[A], timeout_s: float) -> A:
    """The answer, or `TimeoutError`. Time in which this process was blocked does not count."""
    task, left_s = asyncio.ensure_future(call), timeout_s
    try:
        while left_s > 0 and not task.done():
            await asyncio.wait({task}, timeout=min(_LOOK_S, left_s))
            left_s -= _LOOK_S
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
