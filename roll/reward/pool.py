"""Grader processes and the queue before them.

Every call of `score` ends: in a verdict, in a `ScoreFailure` of its own, or, when no grader process can be started any
more, in a `RunError`. A process is idle, or belongs to exactly one call, or is being replaced; a call waits only while
every process belongs to another call or is being replaced, and each of those takes bounded time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from roll.child.together import together
from roll.config.errors import RunError
from roll.data.task import Response, Task
from roll.reward import wire
from roll.reward.base import ScoreFailure, Verdict
from roll.reward.grader import Grader
from roll.reward.resolve import RewardSource

_log = logging.getLogger(__name__)

_START_TRIES = 3


@dataclass(frozen=True)
class GraderStats:
    """Attempts at verdicts by how they ended (a retried job counts each time), and processes replaced."""

    scored: int = 0
    raised: int = 0
    deadline: int = 0
    crashed: int = 0
    invalid: int = 0
    restarts: int = 0
    mean_s: float = 0.0
    """Mean seconds of the verdicts given, inside the reward function."""


class GraderPool:
    """Judges attempts in `workers` processes, first come, first served.

    A function that hangs beyond `deadline_s`, or whose process dies, is killed with all it started and tried again, up
    to `tries` times in all, ahead of the queue; its process is replaced meanwhile. An exception or an invalid result is
    the same the second time and fails at once. The deadline counts from when a process has the job. What the function
    prints goes to the file `log`, or to standard error.

    The processes end with the thread that runs the event loop, even when that is killed.

    With one worker and `tries=2`, of the jobs A (hangs) and B: A is killed, a new process starts, A is tried and killed
    again and fails with `deadline`; B gets the third process.
    """

    def __init__(
        self,
        source: RewardSource,
        *,
        workers: int = 1,
        deadline_s: float = 10.0,
        tries: int = 2,
        start_deadline_s: float = 60.0,
        log: Path | None = None,
    ) -> None:
        self._source = source
        self._workers = workers
        self._deadline_s = deadline_s
        self._tries = tries
        self._start_deadline_s = start_deadline_s
        self._log = log
        self._graders: set[Grader] = set()
        self._idle: deque[Grader] = deque()
        self._waiting: deque[asyncio.Future[Grader]] = deque()
        self._replacing: set[asyncio.Task[None]] = set()
        self._starts = asyncio.Semaphore(os.cpu_count() or 1)  # more at once would only eat each other's deadline
        self._ended: RunError | None = RunError("the grader pool was not started")
        self._stats = GraderStats()
        self._scored_s = 0.0

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

    async def score(self, task: Task, response: Response) -> Verdict:
        """Judge an attempt. May be cancelled at any time; the pool stays whole."""
        job = _pack(task, response)
        for tries_left in reversed(range(self._tries)):
            grader = await self._take(ahead=tries_left < self._tries - 1)
            try:
                answer = await grader.ask(job, self._deadline_s)
            except ScoreFailure as failure:
                self._raise_if_ended()
                self._count(failure.kind)
                if tries_left:
                    continue
                times = f" ({self._tries} tries)" if self._tries > 1 else ""
                raise ScoreFailure(failure.kind, f"{failure.reason}{times}") from None
            finally:
                self._give_back(grader)
            if isinstance(answer, wire.Failed):
                self._count(answer.kind)
                raise ScoreFailure(answer.kind, answer.reason, answer.detail)
            self._count("scored")
            self._scored_s += answer.seconds
            return answer.verdict
        raise AssertionError("tries is at least 1")

    def stats(self) -> GraderStats:
        """Counts since the pool was made."""
        return dataclasses.replace(self._stats, mean_s=self._scored_s / max(self._stats.scored, 1))

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

    async def _take(self, ahead: bool) -> Grader:
        """A grader for one job: the longest idle, or the next to become free (`ahead`: before all who wait)."""
        while True:
            self._raise_if_ended()
            grader = self._idle.popleft() if self._idle else await self._wait_turn(ahead)
            if grader.usable:
                return grader
            self._replace(grader)  # it died while idle, which is no job's fault
            ahead = True

    async def _wait_turn(self, ahead: bool) -> Grader:
        turn: asyncio.Future[Grader] = asyncio.get_running_loop().create_future()
        if ahead:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        try:
            # waits: every process belongs to a call with a deadline, or is being replaced in bounded time
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it was our turn already
                self._give_back(turn.result())
            raise

    def _give_back(self, grader: Grader) -> None:
        if grader.usable:
            self._hand_on(grader)
        else:
            self._replace(grader)

    def _hand_on(self, grader: Grader) -> None:
        """Give a free grader to who waits longest, or let it be idle."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(grader)
                return
        self._idle.append(grader)

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
                self._count("restarts")
                self._hand_on(fresh)
                return

    async def _start_grader(self) -> Grader:
        async with self._starts:
            grader = await Grader.start(self._source, self._start_deadline_s, self._log)
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
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(RunError(str(self._ended)))

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise RunError(str(self._ended))

    def _count(self, what: str) -> None:
        self._stats = dataclasses.replace(self._stats, **{what: getattr(self._stats, what) + 1})


def _pack(task: Task, response: Response) -> bytes:
    """The job as bytes. By value where types are of `__main__`: an answer may be of any type."""
    import cloudpickle

    try:
        job: bytes = cloudpickle.dumps((task, response))
    except Exception as error:
        reason = f"task {task.id!r} cannot be sent to a grader process: {type(error).__name__}: {error}"
        raise ScoreFailure("raised", reason) from error
    return job
