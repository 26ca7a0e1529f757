"""Stand-ins for engines, graders and the runner, driven turn by turn: no clocks, no models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from roll.cluster import Cluster, LocalExecutor, Place, Worker
from roll.data import Response, Sample, Task
from roll.data.sources import TaskSet
from roll.engine.request import Completion, Finish, Request, Sampling
from roll.reward import ScoreFailure, Verdict
from roll.rollout.lifecycle import Lifecycle
from roll.run.ledger import Transition
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker

T = TypeVar("T")
WAIT_S = 20


def go(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine, and holds that it leaves no task behind."""

    async def main() -> T:
        result = await asyncio.wait_for(coroutine, WAIT_S)
        await turns(20)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still running: {left}"
        return result

    return asyncio.run(main())


async def turns(count: int = 10) -> None:
    """Lets the other coroutines run for a while."""
    for _ in range(count):
        await asyncio.sleep(0)


class Moves:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.records: list[Transition] = []

    def append(self, transition: Transition) -> None:
        self.records.append(transition)

    def of(self, sample: str) -> list[str]:
        return [record.state for record in self.records if record.sample == sample]

    def last(self) -> dict[str, str]:
        return {record.sample: record.state for record in self.records}


def request(id: str, prompt: int = 3, new_tokens: int = 4) -> Request:
    return Request(id, np.arange(1, prompt + 1, dtype=np.int32), Sampling(new_tokens))


class ToyEngine(Worker):
    """Takes requests as an inference worker does. A test says when they finish, or `says` does at once."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.running: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.says: Callable[[Request], list[int]] | None = None
        self.context = 1000
        self._finished: list[Completion] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def submit(self, requests: Sequence[Request]) -> None:
        for each in requests:
            if len(each.ids) + each.sampling.max_new_tokens > self.context:
                raise ValueError(f"request {each.id!r} is too long")
            self.running[each.id] = each
            if self.says is not None:
                self.finish(each.id, self.says(each))

    async def results(self) -> list[Completion]:
        while self.running and not self._finished and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        finished, self._finished = self._finished, []
        return finished

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.aborted.append(id)
            if id in self.running:
                self.finish(id, [], "abort")

    def finish(self, id: str, ids: Sequence[int] = (7, 0), finish: Finish = "stop") -> None:
        self.running.pop(id, None)
        logprobs = np.full(len(ids), -0.5, np.float32)
        self._finished.append(Completion(id, np.array(ids, np.int32), logprobs, np.full(len(ids), 3, np.int32), finish))
        self._news.set()

    def break_down(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    def mend(self) -> None:
        self._error = None
        self.running.clear()


async def engines(count: int) -> tuple[Cluster[InferWorker], list[ToyEngine]]:
    toys: list[ToyEngine] = []

    def make(place: Place) -> Any:
        toys.append(ToyEngine(place))
        return toys[-1]

    return await Cluster.start(LocalExecutor(), make, [Place("toys", rank, count) for rank in range(count)]), toys


class ToyRewards(Worker):
    """Judges by a function that returns a reward or raises."""

    judge: Callable[[Task, Response], float]

    async def score(self, task: Task, response: Response) -> Verdict:
        await asyncio.sleep(0)
        return Verdict(self.judge(task, response), {"length": float(response.tokens)})


async def rewards(judge: Callable[[Task, Response], float]) -> Cluster[RewardWorker]:
    def make(place: Place) -> Any:
        worker = ToyRewards(place)
        worker.judge = judge  # type: ignore[method-assign]
        return worker

    return await Cluster.start(LocalExecutor(), make, [Place("rewards")])


@dataclass
class ToyRunner:
    """Drives samples to what `outcome` says: a reward, a reason to fail, or an error; after `delay` turns."""

    moves: Lifecycle
    outcome: Callable[[Sample], float | str | Exception]
    delay: Callable[[Sample], int] = lambda sample: 0
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    async def run(self, sample: Sample) -> None:
        self.started.append(sample.id)
        self.moves.move(sample, "generating")
        try:
            await turns(self.delay(sample))
        except asyncio.CancelledError:
            self.cancelled.append(sample.id)
            raise
        result = self.outcome(sample)
        if isinstance(result, Exception):
            raise result
        if isinstance(result, str):
            self.moves.move(sample, "failed", result)
            return
        sample.log.prompt([1, 2])
        sample.log.respond([3] * (1 + sample.group % 3), [-1.0] * (1 + sample.group % 3), [0] * (1 + sample.group % 3))
        sample.response = Response(f"answer to {sample.task.id}", sample.log.response_tokens, "stop")
        self.moves.move(sample, "scoring")
        sample.reward = result
        self.moves.move(sample, "scored")


def failure(reason: str) -> ScoreFailure:
    return ScoreFailure("raised", reason)


def tasks(count: int, held_out: int = 0) -> TaskSet:
    def ask(name: str) -> Task:
        return Task.ask(name, f"what is {name}?", name)

    return TaskSet(tuple(ask(f"t{i}") for i in range(count)), tuple(ask(f"h{i}") for i in range(held_out)))
