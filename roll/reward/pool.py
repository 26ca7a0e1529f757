"""Grader processes and the queue before them.

Every call of `score` ends: in a verdict, in a `ScoreFailure` of its own, or, when no grader process can be started any
more, in a `RunError`. A process is idle, or belongs to exactly one call, or is being replaced; a call waits only while
every process belongs to another call or is being replaced, and each of those takes bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict, deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roll.config.errors import RunError
from roll.data.task import Response, Task
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.structured_gather import together
from roll.reward import ipc
from roll.reward.base import ScoreFailure, Verdict
from roll.reward.cache import VerdictCache
from roll.reward.fair_queue import FairQueue
from roll.reward.grader import Grader
from roll.reward.grader_main import judged
from roll.reward.model_reward import Said
from roll.reward.reward_spec import RewardSpec
from roll.reward.stats import GraderStats, Latency
from roll.sandbox.cgroups import sweep

_log = logging.getLogger(__name__)

_START_TRIES = 3
QUICK_CHARS = 8192
"""Longest text that a reward which calls itself quick judges where it is asked, without a process."""


class GraderPool:
    """Judges attempts in `workers` processes. Domains take turns; within a domain, first come, first served.

    A function that hangs beyond `deadline_s`, or whose process dies, is killed with all it started and tried again,
    up to `tries` times in all, ahead of its domain's queue; its process is replaced meanwhile. An exception or an
    invalid result is the same the second time and fails at once. The deadline counts from when a process has the job.
    What the function prints goes to the file `log`, of at most `log_bytes`, or to standard error. One that takes
    `memory_mb` beyond what its process started with gets a `MemoryError`, and the process is replaced if that leaves
    it short. Of rewards that are deterministic, `cache` verdicts are kept. Rewards that are `quick` judge short texts
    here, where a process would take a hundred times as long to ask as to judge.

    The processes end with the thread that runs the event loop, even when that is killed.

    With one worker and `tries=2`, of the jobs A (hangs) and B: A is killed, a new process starts, A is tried and killed
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
        self._workers = workers
        self._deadline_s = deadline_s
        self._tries = tries
        self._memory_mb = memory_mb
        self._cache = VerdictCache(cache)
        self._start_deadline_s = start_deadline_s
        self._log = log
        self._log_bytes = log_bytes
        self._graders: set[Grader] = set()
        self._idle: deque[Grader] = deque()
        self._turns: FairQueue[Grader] = FairQueue()
        self._replacing: set[asyncio.Task[None]] = set()
        self._starts = asyncio.Semaphore(os.cpu_count() or 1)  # more at once would only eat each other's deadline
        self._ended: RunError | None = RunError("the grader pool was not started")
        self._counts: Counter[str] = Counter()
        self._latency: defaultdict[str, Latency] = defaultdict(Latency)
        self._verdicts = Latency()
        self._taken = GraderStats()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start all processes and load the reward function in each. `UserError` if it cannot be loaded."""
        self._ended = None
        try:
            graders = await together(self._start_grader() for _ in range(self._workers))
        except BaseException:
            await self.close()
            raise
        for grader in graders:
            self._hand_on(grader)

    async def score(self, task: Task, response: Response, said: Said | None = None, *, votes: bool = False) -> Verdict:
        """Judge an attempt, of which roles `said` so much; `votes`: the verdict is to have its answer. May be cancelled
        at any time; the pool stays whole."""
        self._raise_if_ended()
        quick = self._quick.get(self._source.key_of(task.domain))
        if quick is not None and len(response.text) <= QUICK_CHARS:
            return self._verdict(task, judged(quick, task, response, said, votes)[0])
        job = pack(task, response, said or {}, votes)
        if (kept := self._kept(job)) is not None:
            return kept
        for tries_left in reversed(range(self._tries)):
            grader = await self._take(task.domain, ahead=tries_left < self._tries - 1)
            try:
                if (kept := self._kept(job)) is not None:  # judged while this one waited: siblings often say the same
                    return kept
                answer = await grader.ask(job, self._deadline_s)
            except ScoreFailure as failure:
                self._raise_if_ended()
                self._counts[failure.kind] += 1
                if tries_left:
                    continue
                times = f" ({self._tries} tries)" if self._tries > 1 else ""
                raise ScoreFailure(failure.kind, f"{failure.reason}{times}") from None
            finally:
                self._give_back(grader, task.domain)
            verdict = self._verdict(task, answer)
            if isinstance(answer, ipc.GraderScored) and answer.deterministic:
                self._cache.put(job, verdict)
            return verdict
        raise AssertionError("tries is at least 1")

    def count(self, failure: ScoreFailure) -> None:
        """A verdict failed before any grader had the job."""
        self._counts[failure.kind] += 1

    def stats(self) -> GraderStats:
        """Counts since the pool was made."""
        counts: dict[str, Any] = dict(self._counts)
        return GraderStats(**counts, verdicts=self._verdicts, latency=dict(self._latency))

    def take_stats(self) -> GraderStats:
        """Counts since this was asked last."""
        now = self.stats()
        since, self._taken = now - self._taken, now
        return since

    async def close(self) -> None:
        """Kill all processes and wait until they are gone. Calls still waiting get a `RunError`. Safe to repeat."""
        self._end(RunError("the grader pool was closed"))
        replacing = list(self._replacing)
        for replacement in replacing:
            replacement.cancel()
        # waits: they were cancelled
        await asyncio.gather(*replacing, return_exceptions=True)
        graders = list(self._graders)
        await asyncio.gather(*(self._retire(grader) for grader in graders))
        sweep()

    async def _take(self, domain: str, ahead: bool) -> Grader:
        """A grader for one job of the domain: the longest idle, or one when it is the domain's turn (`ahead`: before all
        of the domain who wait)."""
        started = asyncio.get_running_loop().time()
        while True:
            self._raise_if_ended()
            if self._idle:
                grader = self._idle.popleft()
                self._turns.begin(domain)
            else:
                grader = await self._wait_turn(domain, ahead)
            if grader.usable:
                self._took(f"{domain}/wait", asyncio.get_running_loop().time() - started)
                return grader
            self._turns.end(domain)
            self._replace(grader)  # it died while idle, which is no job's fault
            ahead = True

    async def _wait_turn(self, domain: str, ahead: bool) -> Grader:
        turn = self._turns.wait(domain, ahead)
        try:
            # waits: every process belongs to a call with a deadline, or is being replaced in bounded time
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it was our turn already
                self._give_back(turn.result(), domain)
            raise

    def _give_back(self, grader: Grader, domain: str) -> None:
        self._turns.end(domain)
        if grader.usable:
            self._hand_on(grader)
        else:
            self._replace(grader)

    def _hand_on(self, grader: Grader) -> None:
        """Give a free grader to whose turn it is, or let it be idle."""
        if self._ended is not None:
            return
        following = self._turns.next()
        if following is None:
            self._idle.append(grader)
            return
        domain, turn = following
        self._turns.begin(domain)
        turn.set_result(grader)

    def _replace(self, grader: Grader) -> None:
        """Kill a grader at once; in the background, start another in its place."""
        grader.kill()
        if self._ended is not None:
            return
        task = asyncio.create_task(self._replacement(grader))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replacement(self, grader: Grader) -> None:
        await self._retire(grader)
        for tries_left in reversed(range(_START_TRIES)):
            try:
                fresh = await self._start_grader()
            except Exception as error:
                _log.warning("a grader process did not start: %s", error)
                if not tries_left:
                    self._end(RunError(f"no grader process starts any more ({_START_TRIES} tries): {error}"))
            else:
                self._counts["restarts"] += 1
                self._hand_on(fresh)
                return

    async def _start_grader(self) -> Grader:
        async with self._starts:
            started = Grader.start(self._source, self._start_deadline_s, self._log, self._memory_mb, self._log_bytes)
            grader = await started
        self._graders.add(grader)
        return grader

    async def _retire(self, grader: Grader) -> None:
        grader.kill()
        await grader.gone()
        self._graders.discard(grader)

    def _end(self, error: RunError) -> None:
        """From now on every call fails with the error, those that wait included. The first error stands."""
        self._ended = self._ended or error
        self._idle.clear()
        for turn in self._turns.clear():
            turn.set_exception(RunError(str(self._ended)))

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise RunError(str(self._ended))

    def _kept(self, job: bytes) -> Verdict | None:
        verdict = self._cache.get(job)
        self._counts["hits"] += verdict is not None
        return verdict

    def _verdict(self, task: Task, answer: ipc.GraderScored | ipc.GraderFailed) -> Verdict:
        """The verdict of an answer, or what it says went wrong."""
        if isinstance(answer, ipc.GraderFailed):
            self._counts[answer.kind] += 1
            raise ScoreFailure(answer.kind, answer.reason, answer.detail)
        self._counts["scored"] += 1
        self._verdicts += Latency(1, answer.seconds)
        self._took(f"{task.domain}/verdict", answer.seconds)
        for part, seconds in answer.parts_s.items():
            self._took(f"{task.domain}/part/{part}", seconds)
        return answer.verdict

    def _took(self, what: str, seconds: float) -> None:
        self._latency[what] += Latency(1, seconds)


def pack(task: Task, response: Response, said: Said, votes: bool = False) -> bytes:
    """The job as bytes. By value where types are of `__main__`: an answer may be of any type."""
    import cloudpickle

    try:
        job: bytes = cloudpickle.dumps((task, response, said, votes))
    except Exception as error:
        reason = f"task {task.id!r} cannot be sent to a grader process: {type(error).__name__}: {error}"
        raise ScoreFailure("raised", reason) from error
    return job
