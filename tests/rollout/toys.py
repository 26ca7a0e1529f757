"""Stand-ins for engines, graders and the runner, driven turn by turn: no models, and no clock that matters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from roll.cluster import Cluster, LocalExecutor, Place, Worker
from roll.config.schema import Config
from roll.data import Response, Sample, Task
from roll.data.sources import TaskSet
from roll.engine.request import Completion, Finish, Request, Sampling
from roll.model.character import character_tokenizer
from roll.reward import ScoreFailure, Verdict
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.messages import Report
from roll.rollout.pool import RolloutPool
from roll.rollout.router import Router
from roll.rollout.worker import RolloutWorker
from roll.run.ledger import Transition
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker

T = TypeVar("T")
WAIT_S = 20
LEAVE_S = 2
"""Who asks for news may go on for the length of a poll."""
TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id
TINY = Config.model_validate({"model": {"path": "tiny"}})


def go(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine, and holds that it leaves no task behind."""

    async def main() -> T:
        result = await asyncio.wait_for(coroutine, WAIT_S)
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=LEAVE_S)
        await turns()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still running: {left}"
        return result

    return asyncio.run(main())


async def turns(count: int = 10) -> None:
    """Lets the other coroutines run for a while."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(holds: Callable[[], Any]) -> None:
    """Lets the other coroutines run until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


def spoken(text: str) -> list[int]:
    """Tokens of a whole response."""
    return [*TOKENIZER(text)["input_ids"], END]


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


class ToyEngine:
    """An inference strategy. A test says when requests finish, or `says` does at once."""

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.submitted: list[str] = []
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
            if each.id in self.running:
                raise ValueError(f"request {each.id!r} is here already")
            self.running[each.id] = each
            self.submitted.append(each.id)
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
    """Inference workers over toy engines."""
    toys = [ToyEngine() for _ in range(count)]

    def make(place: Place) -> InferWorker:
        with patch("roll.strategy.infer.native.NativeStrategy", lambda *args, **settings: toys[place.rank]):
            return InferWorker(place, TINY)

    places = [Place("toys", rank, count, threads=1) for rank in range(count)]
    return await Cluster.start(LocalExecutor(), make, places), toys


Judge = Callable[[Task, Response], float]


class ToyRewards(Worker):
    """Judges by a function that returns a reward or raises; `gate` holds verdicts back while it is closed."""

    def __init__(self, place: Place, judge: Judge) -> None:
        super().__init__(place)
        self.judge = judge
        self.judged = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, task: Task, response: Response) -> Verdict:
        self.judged += 1
        await self.gate.wait()
        await asyncio.sleep(0)
        return Verdict(self.judge(task, response), {"length": float(response.tokens)})


async def rewards(judge: Judge, count: int = 1) -> tuple[Cluster[RewardWorker], list[ToyRewards]]:
    made: list[ToyRewards] = []

    def make(place: Place) -> Any:
        made.append(ToyRewards(place, judge))
        return made[-1]

    return await Cluster.start(LocalExecutor(), make, [Place("rewards", rank, count) for rank in range(count)]), made


async def rollouts(
    count: int = 1, config: Config | None = None, run: Path | None = None
) -> tuple[Cluster[RolloutWorker], list[RolloutWorker]]:
    made: list[RolloutWorker] = []

    def make(place: Place) -> RolloutWorker:
        made.append(RolloutWorker(place, config or TINY, run))
        return made[-1]

    return await Cluster.start(LocalExecutor(), make, [Place("rollout", rank, count) for rank in range(count)]), made


def right(task: Task, response: Response) -> float:
    return float(response.text == task.answer)


@dataclass
class Party:
    """Everything that carries samples, over toy engines and graders."""

    pool: RolloutPool
    router: Router
    workers: list[RolloutWorker]
    toys: list[ToyEngine]
    judges: list[ToyRewards]
    moves: Moves
    life: Lifecycle

    @property
    def running(self) -> set[str]:
        return {id for toy in self.toys for id in toy.running}

    def group(self, index: int, size: int = 2, answer: str = "4") -> list[Sample]:
        """Samples of one task, queued."""
        task = Task.ask(f"t{index}", "2+2", answer)
        samples = [Sample(f"{index}.{i}", task, index, 0.5) for i in range(size)]
        for sample in samples:
            self.life.move(sample, "queued")
        return samples

    def start(self, samples: list[Sample], key: str | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.pool.run(key or str(samples[0].group), samples, self.life))

    def answer(self, *ids: str, text: str = "4") -> None:
        for toy in self.toys:
            for id in list(toy.running):
                if not ids or id in ids:
                    toy.finish(id, spoken(text))

    def assert_idle(self) -> None:
        """Nothing is with anyone."""
        assert not self.running
        assert self.pool._loads == [0] * len(self.workers)
        assert not self.pool._out
        assert not self.pool._by_sample
        assert self.router._loads == [0] * len(self.toys)
        for worker in self.workers:
            assert all(held.running is None or held.running.done() for held in worker._held.values())

    def assert_empty(self) -> None:
        """Nothing is kept of any sample."""
        self.assert_idle()
        assert not self.pool._homes
        for worker in self.workers:
            assert not worker._held
            assert not worker._home
            assert worker._outbox.report == Report()


async def party(
    engine_count: int = 1,
    worker_count: int = 1,
    judge: Judge = right,
    *,
    graders: int = 1,
    says: str | None = None,
    run: Path | None = None,
    **rollout: Any,
) -> Party:
    config = Config.model_validate({"rollout": {"max_new_tokens": 8, **rollout}, "seed": 11, "model": {"path": "tiny"}})
    cluster, toys = await engines(engine_count)
    if says is not None:
        for toy in toys:
            toy.says = lambda request: spoken(says)
    judges, made = await rewards(judge, graders)
    carriers, workers = await rollouts(worker_count, config, run)
    await carriers.call(RolloutWorker.connect, cluster, judges)
    router = Router(engine_count, deadline_s=10)
    moves: Any = Moves()
    return Party(RolloutPool(carriers, router, 8), router, workers, toys, made, moves, Lifecycle(moves))


@dataclass
class ToyRunner:
    """Drives samples to what `outcome` says: a reward, a reason to fail, or an error; after `delay` turns."""

    outcome: Callable[[Sample], float | str | Exception]
    delay: Callable[[Sample], int] = lambda sample: 0
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def of(self, worker: RolloutWorker) -> Any:
        """The runner as one worker has it."""
        return _ToyRunnerOf(self, Lifecycle(worker._outbox))

    async def pool(self, workers: int = 1, engine_count: int = 1) -> RolloutPool:
        """A pool whose samples this runner drives."""
        cluster, made = await rollouts(workers)
        for worker in made:
            worker._runner = self.of(worker)
        return RolloutPool(cluster, Router(engine_count, deadline_s=10), 8)


@dataclass
class _ToyRunnerOf:
    whole: ToyRunner
    moves: Lifecycle

    async def run(self, sample: Sample, engine: int) -> None:
        self.whole.started.append(sample.id)
        self.moves.move(sample, "generating")
        try:
            await turns(self.whole.delay(sample))
        except asyncio.CancelledError:
            self.whole.cancelled.append(sample.id)
            raise
        result = self.whole.outcome(sample)
        if isinstance(result, Exception):
            raise result
        if isinstance(result, str):
            self.moves.move(sample, "failed", result)
            return
        length = 1 + sample.group % 3
        sample.log.prompt([1, 2])
        sample.log.respond([3] * length, [-1.0] * length, [0] * length)
        sample.response = Response(f"answer to {sample.task.id}", length, "stop")
        sample.tokens, sample.response_tokens, sample.finish = len(sample.log), length, "stop"
        self.moves.move(sample, "scoring")
        sample.reward = result
        self.moves.move(sample, "scored")


def failure(reason: str) -> ScoreFailure:
    return ScoreFailure("raised", reason)


def tasks(count: int, held_out: int = 0) -> TaskSet:
    def ask(name: str) -> Task:
        return Task.ask(name, f"what is {name}?", name)

    return TaskSet(tuple(ask(f"t{i}") for i in range(count)), tuple(ask(f"h{i}") for i in range(held_out)))
