"""Grader processes and the queue in front of them.

Every call of `score` ends: with a verdict, with a `ScoreFailure` of its own, or, if grader processes no longer start,
with a `RunError`. A process is idle, belongs to exactly one call, or is being replaced. A call waits only while every
process belongs to another call or is being replaced; both take bounded time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roll.config.errors import RunError
from roll.data.task import Response, Task
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.pool import ProcessPool
from roll.reward import ipc
from roll.reward.base import ScoreFailure, Verdict
from roll.reward.cache import VerdictCache
from roll.reward.fair_queue import FairQueue
from roll.reward.grader import Grader
from roll.reward.grader_main import judge_attempt
from roll.reward.model_reward import RoleScores
from roll.reward.reward_spec import RewardSpec
from roll.reward.stats import GraderStats, LatencySum
from roll.sandbox.cgroups import sweep

QUICK_CHARS = 8192
"""A `quick` reward judges texts up to this length in the caller's process, without a grader."""


class GraderPool:
    """Judges attempts in `workers` processes. The queue is fair across domains; within a domain it is first in, first
    out.

    If the reward function runs longer than `deadline_s`, or its process dies, the pool kills the process with all its
    children, starts another, and tries the job again, ahead of its domain's queue, up to `tries` times in all. An
    exception or an invalid result would repeat, so the job fails at once. The deadline starts when a process has the job.
    The function's output goes to the file `log`, of at most `log_bytes`, or to standard error. A function that allocates
    more than `memory_mb` on top of its process's initial memory gets a `MemoryError`; if memory stays short afterwards,
    the process is replaced. `cache` is the number of verdicts of deterministic rewards that are cached. Rewards that are
    `quick` judge short texts in this process: sending the job to a grader would take a hundred times as long as judging
    it.

    The processes end with the thread that runs the event loop, even if it is killed.

    Example with one worker and `tries=2`, jobs A (hangs) and B: A is killed, a new process starts, A is tried and killed
    again and fails with `deadline`; B gets the third process.
    """

    def __init__(
        self,
        source: RewardSpec,
        *,
        workers: int = 1,
        deadline_s: float = 10.0,
        tries: int = 2,
        memory_mb: int = 0,
        cache: int = 0,
        start_deadline_s: float = 60.0,
        log: Path | None = None,
        log_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._source = source
        self._quick = source.quick()
        self._deadline_s = deadline_s
        self._tries = tries
        self._memory_mb = memory_mb
        self._cache = VerdictCache(cache)
        self._start_deadline_s = start_deadline_s
        self._log = log
        self._log_bytes = log_bytes
        self._pool = ProcessPool("grader", workers, self._start_grader, self._assign, self._on_end)
        self._idle: deque[Grader] = deque()
        self._fair_queue: FairQueue[Grader] = FairQueue()
        self._counts: Counter[str] = Counter()
        self._latency: defaultdict[str, LatencySum] = defaultdict(LatencySum)
        self._verdicts = LatencySum()
        self._last_stats = GraderStats()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def processes(self) -> frozenset[Grader]:
        return self._pool.processes

    async def start(self) -> None:
        """Starts all processes and loads the reward function in each. Raises `UserError` if it cannot be loaded."""
        await self._pool.start()

    async def score(
        self, task: Task, response: Response, role_scores: RoleScores | None = None, *, votes: bool = False
    ) -> Verdict:
        """Judges an attempt. `role_scores` has the scores that model roles gave it; with `votes` the verdict includes the
        extracted answer. The call may be cancelled at any time without harm to the pool."""
        self._pool.raise_if_ended()
        quick = self._quick.get(self._source.key_of(task.domain))
        if quick is not None and len(response.text) <= QUICK_CHARS:
            return self._verdict(task, judge_attempt(quick, task, response, role_scores, votes)[0])
        job = pack(task, response, role_scores or {}, votes)
        if (cached := self._cached_verdict(job)) is not None:
            return cached
        for tries_left in reversed(range(self._tries)):
            grader = await self._acquire(task.domain, at_front=tries_left < self._tries - 1)
            try:
                if (
                    cached := self._cached_verdict(job)
                ) is not None:  # an identical sibling was judged while this one waited
                    return cached
                answer = await grader.ask(job, self._deadline_s)
            except ScoreFailure as failure:
                self._pool.raise_if_ended()
                self._counts[failure.kind] += 1
                if tries_left:
                    continue
                times = f" ({self._tries} tries)" if self._tries > 1 else ""
                raise ScoreFailure(failure.kind, f"{failure.reason}{times}") from None
            finally:
                self._release(grader, task.domain)
            verdict = self._verdict(task, answer)
            if isinstance(answer, ipc.GraderScored) and answer.deterministic:
                self._cache.put(job, verdict)
            return verdict
        raise AssertionError("tries is at least 1")

    def count_failure(self, failure: ScoreFailure) -> None:
        """Counts a verdict that failed before any grader had the job."""
        self._counts[failure.kind] += 1

    def stats(self) -> GraderStats:
        """Counts since the pool was created."""
        counts: dict[str, Any] = {**self._counts, "restarts": self._pool.restarts}
        latency = {name: total.so_far() for name, total in self._latency.items()}
        return GraderStats(**counts, verdicts=self._verdicts.so_far(), latency=latency)

    def take_stats(self) -> GraderStats:
        """Counts since the last call."""
        now = self.stats()
        since, self._last_stats = now - self._last_stats, now
        return since

    async def close(self) -> None:
        """Kills all processes and waits until they have ended. Waiting calls get a `RunError`. May be called again."""
        await self._pool.close()
        sweep()

    async def _acquire(self, domain: str, at_front: bool) -> Grader:
        """Takes a grader for one job: the longest idle one, or, if none is idle, the one that the fair queue assigns to
        the domain. With `at_front`, the job goes to the front of its domain's queue."""
        started = asyncio.get_running_loop().time()
        while True:
            self._pool.raise_if_ended()
            if self._idle:
                grader = self._idle.popleft()
                self._fair_queue.begin(domain)
            else:
                grader = await self._wait_in_queue(domain, at_front)
            if grader.usable:
                self._latency[f"{domain}/wait"].add(asyncio.get_running_loop().time() - started)
                return grader
            self._fair_queue.end(domain)
            self._pool.replace(grader)  # it died while idle: no job caused that
            at_front = True

    async def _wait_in_queue(self, domain: str, at_front: bool) -> Grader:
        waiter = self._fair_queue.enqueue(domain, at_front)
        try:
            # waits: every process belongs to a call with a deadline, or is being replaced in bounded time
            return await waiter
        except asyncio.CancelledError:
            # the grader was already assigned to this call
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result(), domain)
            raise

    def _release(self, grader: Grader, domain: str) -> None:
        self._fair_queue.end(domain)
        if grader.usable:
            self._assign(grader)
        else:
            self._pool.replace(grader)

    def _assign(self, grader: Grader) -> None:
        """Gives a free grader to the next job in the fair queue, or marks it idle."""
        if self._pool.ended:
            return
        following = self._fair_queue.pop()
        if following is None:
            self._idle.append(grader)
            return
        domain, waiter = following
        self._fair_queue.begin(domain)
        waiter.set_result(grader)

    async def _start_grader(self) -> Grader:
        return await Grader.start(self._source, self._start_deadline_s, self._log, self._memory_mb, self._log_bytes)

    def _on_end(self, error: RunError) -> None:
        """Makes every waiting call fail with the error."""
        self._idle.clear()
        for waiter in self._fair_queue.clear():
            waiter.set_exception(RunError(str(error)))

    def _cached_verdict(self, job: bytes) -> Verdict | None:
        verdict = self._cache.get(job)
        self._counts["hits"] += verdict is not None
        return verdict

    def _verdict(self, task: Task, answer: ipc.GraderScored | ipc.GraderFailed) -> Verdict:
        """The verdict of an answer; raises the failure that it reports."""
        if isinstance(answer, ipc.GraderFailed):
            self._counts[answer.kind] += 1
            raise ScoreFailure(answer.kind, answer.reason, answer.detail)
        self._counts["scored"] += 1
        self._verdicts.add(answer.seconds)
        self._latency[f"{task.domain}/verdict"].add(answer.seconds)
        for part, seconds in answer.parts_s.items():
            self._latency[f"{task.domain}/part/{part}"].add(seconds)
        return answer.verdict


def pack(task: Task, response: Response, role_scores: RoleScores, votes: bool = False) -> bytes:
    """The job as bytes. Types of `__main__` are pickled by value, because an answer may be of any type."""
    import cloudpickle

    try:
        job: bytes = cloudpickle.dumps((task, response, role_scores, votes))
    except Exception as error:
        reason = f"task {task.id!r} cannot be sent to a grader process: {type(error).__name__}: {error}"
        raise ScoreFailure("raised", reason) from error
    return job
