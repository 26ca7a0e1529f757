"""Stand-ins for engines, graders, environments and the runner: no models, no processes, and a clock of their own.

Time is virtual: it passes only when nothing else is left to do, and then at once. So a test may wait for minutes, and
what can never happen is noticed immediately.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from unittest.mock import patch

import numpy as np
from hypothesis import Phase, settings
from hypothesis_examples import examples

from roll.cluster import Cluster, LocalExecutor, Worker, WorkerPlacement
from roll.cluster.errors import WorkerDied
from roll.cluster.executor import Handle, LocalHandle
from roll.config.schema import Config
from roll.data import Response, Sample, Task
from roll.data.sources import TaskSet
from roll.data.task import EnvSpec
from roll.engine.request import Completion, Finish, Progress, Request, SamplingParams
from roll.env import ResetResult, Step
from roll.ledger.log import Transition
from roll.model.tiny import character_tokenizer
from roll.reward import ScoreFailure, Verdict
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.messages import SampleCommand
from roll.rollout.worker import RolloutWorker
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.router import Router
from roll.workers.env import EnvWorker
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker

T = TypeVar("T")
W = TypeVar("W", bound=Worker)
WAIT_S = 100_000.0
LEAVE_S = 60.0
"""Who asks for news may go on for the length of a poll."""
START_S = 0.05
"""How long a worker takes to start at the least: by then who called the one before it has heard that it died."""
TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id
TINY = Config.model_validate({"model": {"path": "tiny"}})


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose seconds cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._selector.select = self._pass_time  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s

    def _pass_time(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing is left that could happen")
        self._now_s += max(timeout, 0.0)
        return []


def go(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine, and holds that it leaves no task behind."""

    async def main() -> T:
        try:
            result = await asyncio.wait_for(coroutine, WAIT_S)
            await _rest()
            assert not (left := _others()), f"still running: {left}"
            return result
        finally:
            while _others():  # of a test that failed; their ends may begin others
                for task in _others():
                    task.cancel()
                await _rest()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def _others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {cast(asyncio.Task[Any], asyncio.current_task())}


async def _rest() -> None:
    """Gives those who are still at something, and those whom they begin, the time to end."""
    clock = asyncio.get_running_loop()
    end_s = clock.time() + LEAVE_S
    await turns()
    while (others := _others()) and clock.time() < end_s:
        await asyncio.wait(others, timeout=end_s - clock.time())
        await turns()


async def turns(count: int = 10) -> None:
    """Lets the other coroutines run for a while, in no time."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(holds: Callable[[], Any], within_s: float = 60.0) -> None:
    """Lets the other coroutines run until something holds."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def timings(count: int) -> settings:
    """Settings of a test whose example is a seed: a smaller one is no simpler, so that none is looked for. `count` is
    the number of examples where all tests run."""
    return settings(
        max_examples=examples(count), derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate)
    )


async def some_time(rng: random.Random) -> None:
    """A few turns, or a while: what timing depends on."""
    if rng.random() < 0.5:
        await turns(rng.randrange(12))
    else:
        await asyncio.sleep(rng.choice([0.01, 0.1, 0.3, 1.0, 3.0]))


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

    def infos(self, sample: str) -> list[tuple[str, Mapping[str, Any]]]:
        return [(record.state, record.info) for record in self.records if record.sample == sample]

    def reasons(self, sample: str) -> list[tuple[str, str]]:
        return [(record.state, record.reason) for record in self.records if record.sample == sample]

    def last(self) -> dict[str, str]:
        return {record.sample: record.state for record in self.records}


# workers that die


class Mortal:
    """A handle on a worker that can be killed under its calls, and be replaced."""

    in_process = True

    def __init__(self, inner: Handle, is_line: bool = False) -> None:
        """`is_line`: it is the caller that dies, so that the worker goes on with the calls it has."""
        self.inner = inner
        self.is_line = is_line
        self.restart_count = 0
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def placement(self) -> WorkerPlacement:
        return self.inner.placement

    @property
    def worker(self) -> Any:
        return cast(LocalHandle, self.inner)._worker

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return await self._arrive(lambda: self.inner.call(method, args, kwargs))

    async def stream(self, method: str, report: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        death = self._death

        def heard(each: Any) -> None:
            if not death.done():
                report(each)

        return await self._arrive(lambda: self.inner.stream(method, heard, args, kwargs))

    async def _arrive(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        death = self._death
        if death.done():
            raise WorkerDied(self.placement.name, "killed")

        async def arrived() -> Any:
            return None if death.done() else await begin()

        call = asyncio.ensure_future(arrived())
        call.add_done_callback(lambda call: call.cancelled() or call.exception())
        try:
            await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise WorkerDied(self.placement.name, "killed")
            return call.result()
        except asyncio.CancelledError:
            if not (self.is_line and death.done()):
                call.cancel()
                await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            if not (self.is_line and death.done()):
                call.cancel()

    async def ping(self, deadline_s: float) -> None:
        if self._death.done():
            raise WorkerDied(self.placement.name, "killed")

    def kill(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    def replace(self, inner: Handle) -> None:
        self.kill()
        self.inner, self.restart_count = inner, self.restart_count + 1
        self._death = asyncio.get_running_loop().create_future()


def of(role: str, handles: Sequence[Any]) -> Cluster[Any]:
    return Cluster(role, handles)


# engines


def request(id: str, prompt: int = 3, new_tokens: int = 4) -> Request:
    return Request(id, np.arange(1, prompt + 1, dtype=np.int32), SamplingParams(new_tokens))


def token_at(seed: int, position: int) -> int:
    """The token an engine draws there, whichever engine and whatever came before: one in six ends the response."""
    rng = random.Random(f"{seed}/{position}")
    return END if rng.random() < 1 / 6 else rng.randrange(10, 60)


def undisturbed(asked: Request) -> list[int]:
    """The response to a request that nobody interferes with."""
    ids: list[int] = []
    while len(ids) < asked.sampling.max_new_tokens and END not in ids:
        ids.append(token_at(asked.sampling.seed, len(asked.ids) + len(ids)))
    return ids


def logprob_of(token: int) -> float:
    return -(token % 16 + 1) / 16


class ToyEngine:
    """An inference strategy. A test says when requests finish, or `says` does at once, or they go on by themselves, a
    token every `pace_s`."""

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.asked: list[Request] = []
        self.aborted: list[str] = []
        self.says: Callable[[Request], list[int]] | None = None
        self.pace_s: float | None = None
        self.version = 3
        self.context = 1000
        self._drawn: dict[str, list[tuple[int, int]]] = {}
        """Token and version of all that running requests have."""
        self._finished: list[Completion] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def submitted(self) -> list[str]:
        return [asked.id for asked in self.asked]

    def submit(self, requests: Sequence[Request]) -> None:
        for each in requests:
            if len(each.ids) + each.sampling.max_new_tokens > self.context:
                raise ValueError(f"request {each.id!r} is too long")
            if each.sampling.max_new_tokens < 1:
                raise ValueError(f"request {each.id!r} asks for nothing")
            if each.id in self.running:
                raise ValueError(f"request {each.id!r} is here already")
            self.running[each.id] = each
            self._drawn[each.id] = []
            self.asked.append(each)
            if self.says is not None:
                self.finish(each.id, self.says(each))

    async def results(self) -> list[Completion]:
        while self.running and not self._finished and self._error is None:
            if self.pace_s is not None:
                await asyncio.sleep(self.pace_s)
                self.step()
                continue
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        finished, self._finished = self._finished, []
        return finished

    def progress(self, heard: Mapping[str, int]) -> list[Progress]:
        return [
            Progress(id, heard.get(id, 0), *_columns(drawn[heard.get(id, 0) :]))
            for id, drawn in self._drawn.items()
            if len(drawn) > heard.get(id, 0)
        ]

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.aborted.append(id)
            if id in self.running:
                self.finish(id, [], "abort")

    async def close(self) -> None:
        """There is nothing to end."""

    def step(self) -> None:
        """One token for every request."""
        for id in list(self.running):
            self.go_on(id)

    def go_on(self, id: str) -> None:
        """The token that the request's noise draws next."""
        asked, drawn = self.running[id], self._drawn[id]
        token = token_at(asked.sampling.seed, len(asked.ids) + len(drawn))
        self.draw(id, token)
        if token == END or len(drawn) == asked.sampling.max_new_tokens:
            self.finish(id, [], "stop" if token == END else "length")

    def draw(self, id: str, *tokens: int) -> None:
        """Tokens of a response that goes on."""
        self._drawn[id].extend((token, self.version) for token in tokens)

    def finish(self, id: str, ids: Sequence[int] = (7, 0), finish: Finish = "stop") -> None:
        drawn = [*self._drawn.pop(id, []), *((token, self.version) for token in ids)]
        self.running.pop(id, None)
        self._finished.append(Completion(id, *_columns(drawn), finish))
        self._news.set()

    def break_down(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    def mend(self) -> None:
        self._error = None
        self.running.clear()
        self._drawn.clear()


def _columns(drawn: Sequence[tuple[int, int]]) -> tuple[Any, Any, Any]:
    tokens, versions = [token for token, _ in drawn], [version for _, version in drawn]
    logprobs = np.array([logprob_of(token) for token in tokens], np.float32)
    return np.array(tokens, np.int32), logprobs, np.array(versions, np.int32)


def engine_worker(place: WorkerPlacement, toy: ToyEngine) -> InferWorker:
    with patch("roll.strategy.infer.native.NativeStrategy", lambda *args, **settings: toy):
        return InferWorker(place, TINY)


async def engines(count: int) -> tuple[Cluster[InferWorker], list[ToyEngine]]:
    """Inference workers over toy engines."""
    toys = [ToyEngine() for _ in range(count)]
    places = [WorkerPlacement("toys", rank, count, threads=1) for rank in range(count)]
    return await Cluster.start(LocalExecutor(), lambda place: engine_worker(place, toys[place.rank]), places), toys


# graders and environments


Judge = Callable[[Task, Response], float]


class ToyRewards(Worker):
    """Judges by a function that returns a reward or raises; `gate` holds verdicts back while it is closed."""

    def __init__(self, place: WorkerPlacement, judge: Judge) -> None:
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
    made = [ToyRewards(WorkerPlacement("rewards", rank, count), judge) for rank in range(count)]
    return of("rewards", [Mortal(LocalHandle(worker)) for worker in made]), made


def right(task: Task, response: Response) -> float:
    return float(response.text == task.answer)


class ToyEnvs(Worker):
    """Plays episodes of as many turns as the spec has rewards, from the beginning if one is reset again; the last step
    closes an episode. A spec may name the states they go through. `trouble` may raise at any call."""

    def __init__(self, place: WorkerPlacement, log: list[str]) -> None:
        super().__init__(place)
        self.log = log
        self.episodes: dict[str, list[float]] = {}
        self.states: dict[str, list[Any]] = {}
        self.alone: dict[str, bool] = {}
        self.trouble: Callable[[str, str], None] = lambda method, episode: None
        self.gate = asyncio.Event()
        self.gate.set()

    async def reset(self, episode: str, spec: EnvSpec, alone: bool = False) -> ResetResult:
        self.alone[episode] = alone
        self.episodes[episode] = list(spec.options["rewards"])
        self.states[episode] = list(spec.options.get("states", ()))
        self.log.append(f"reset {episode}")
        await self._at("reset", episode)
        return ResetResult(({"role": "user", "content": "begin"},), self._info(episode), spec.options.get("tools", ()))

    async def step(self, episode: str, action: str) -> Step:
        self.log.append(f"step {episode} {action}")
        await self._at("step", episode)
        left = self.episodes[episode]
        reward = left.pop(0)
        if not left:
            del self.episodes[episode]
        return Step(f"you said {action}", reward, terminated=not left, info=self._info(episode))

    def _info(self, episode: str) -> dict[str, Any]:
        states = self.states[episode]
        return {"state": states.pop(0)} if states else {}

    async def close_episodes(self, episodes: Sequence[str]) -> None:
        for episode in episodes:
            self.episodes.pop(episode, None)
            self.log.append(f"close {episode}")

    async def _at(self, method: str, episode: str) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)
        self.trouble(method, episode)


async def environments(count: int = 1) -> tuple[Cluster[EnvWorker], list[ToyEnvs], list[str]]:
    log: list[str] = []
    made = [ToyEnvs(WorkerPlacement("env", rank, count), log) for rank in range(count)]
    return of("env", [Mortal(LocalHandle(worker)) for worker in made]), made, log


def episode_of(*rewards: float, id: str = "e", states: Sequence[Any] = ()) -> Task:
    """A task of so many turns, with these rewards, through these states if they have names."""
    return Task(id, (), environment=EnvSpec("toy", options={"rewards": rewards, "states": states}))


# everything together


class Crew(Generic[W]):
    """Rollout workers that can be killed; `ready` makes a new one fit to work."""

    def __init__(self, count: int, make: Callable[[WorkerPlacement], W], ready: Callable[[W], list[Mortal]]) -> None:
        self.places = [WorkerPlacement("rollout", rank, count) for rank in range(count)]
        self._make, self._ready = make, ready
        self.workers: list[W] = []
        self._lines: list[list[Mortal]] = []
        for place in self.places:
            self.workers.append(make(place))
            self._lines.append(ready(self.workers[-1]))
        self.handles = [Mortal(LocalHandle(worker)) for worker in self.workers]
        self.cluster: Cluster[RolloutWorker] = of("rollout", self.handles)

    def kill(self, rank: int) -> None:
        """Ends a worker at once: what it was at stops, and nobody hears of it."""
        self.handles[rank].kill()
        for line in self._lines[rank]:
            line.kill()
        for task in list(cast(Any, self.workers[rank])._tasks.values()):
            task.cancel()

    def revive(self, rank: int) -> None:
        self.workers[rank] = self._make(self.places[rank])
        self._lines[rank] = self._ready(self.workers[rank])
        self.handles[rank].replace(LocalHandle(self.workers[rank]))


@dataclass
class Party:
    """Everything that carries samples, over toy engines, graders and environments."""

    pool: RolloutPool
    router: Router
    crew: Crew[RolloutWorker]
    engines: Cluster[InferWorker]
    toys: list[ToyEngine]
    judges: list[ToyRewards]
    graders: Cluster[RewardWorker]
    envs: list[ToyEnvs]
    environments: Cluster[EnvWorker]
    env_log: list[str]
    moves: Moves
    life: Lifecycle
    troubles: list[tuple[int, str]] = field(default_factory=list)
    orphans: set[str] = field(default_factory=set)
    """Episodes of rollout workers that died."""

    @property
    def workers(self) -> list[RolloutWorker]:
        return self.crew.workers

    @property
    def running(self) -> set[str]:
        return {id for toy in self.toys for id in toy.running}

    def group(self, index: int, size: int = 2, answer: str = "4", task: Task | None = None) -> list[Sample]:
        """Samples of one task, queued."""
        task = task or Task.ask(f"t{index}", "2+2", answer)
        samples = [Sample(f"{index}.{i}", task, index, 0.5) for i in range(size)]
        for sample in samples:
            self.life.move(sample, "queued")
        return samples

    def start(self, samples: list[Sample], key: str | None = None, **how: Any) -> asyncio.Task[None]:
        return asyncio.create_task(self.pool.run(key or str(samples[0].group), samples, self.life, **how))

    def answer(self, *ids: str, text: str = "4") -> None:
        for toy in self.toys:
            for id in list(toy.running):
                if not ids or id in ids:
                    toy.finish(id, spoken(text))

    def drawn(self, sample: Sample) -> Sample:
        """A sample as its worker has it, with its tokens."""
        home = self.pool.tokens.locate(sample)
        assert home is not None
        return self.workers[home]._samples[sample.id]

    def kill_engine(self, rank: int) -> None:
        """Ends an engine at once. Who has requests there hears of it; the router when somebody tells it."""
        handle = cast(Mortal, self.engines._handles[rank])
        handle.kill()
        for task in handle.worker._tasks.values():
            task.cancel()
        self.toys[rank].running.clear()

    async def revive_engine(self, rank: int) -> None:
        await asyncio.sleep(START_S)
        old, self.toys[rank] = self.toys[rank], ToyEngine()
        self.toys[rank].pace_s, self.toys[rank].version = old.pace_s, old.version
        self.toys[rank].says = old.says
        handle = cast(Mortal, self.engines._handles[rank])
        handle.replace(LocalHandle(engine_worker(handle.placement, self.toys[rank])))
        self.router.add_engine(rank)

    def kill_worker(self, rank: int) -> None:
        """Ends a rollout worker at once; the pool is told, as a supervisor would."""
        self.orphans |= {f"{id}.{sample.tries}" for id, sample in self.workers[rank]._samples.items()}
        self.crew.kill(rank)
        self.pool.worker_lost(rank, f"rollout worker died: rollout[{rank}]")

    async def revive_worker(self, rank: int) -> None:
        await asyncio.sleep(START_S)
        self.crew.revive(rank)
        self.pool.worker_joined(rank)

    def assert_idle(self) -> None:
        """Nothing is with anyone."""
        assert not self.running
        assert self.pool._loads == [0] * len(self.workers)
        assert not self.pool._in_flight
        assert not self.pool._by_sample
        assert not self.pool._background_tasks
        assert self.pool._scoring == 0
        assert [self.router.running(engine) for engine in range(len(self.toys))] == [0] * len(self.toys)
        assert self.router.waiting == 0
        assert {episode for env in self.envs for episode in env.episodes} <= self.orphans
        for worker in self.workers:
            assert not worker._tasks
            assert not worker._reports.of_sample
            assert worker._runner is None or not worker._runner._commands

    def assert_empty(self) -> None:
        """Nothing is kept of any sample."""
        self.assert_idle()
        assert not self.pool.tokens._locations
        for worker in self.workers:
            assert not worker._leases
            assert not worker._samples
            assert not worker._assignments._assigned
            assert not worker._assignments._waiters


async def party(
    engine_count: int = 1,
    worker_count: int = 1,
    judge: Judge = right,
    *,
    graders: int = 1,
    envs: int = 1,
    says: str | None = None,
    pace_s: float | None = None,
    run: Path | None = None,
    max_running: int = 0,
    max_scoring: int = 0,
    max_turns: int = 16,
    **rollout: Any,
) -> Party:
    sections = {"rollout": {"max_new_tokens": 8, **rollout}, "env": {"max_turns": max_turns}}
    config = Config.model_validate({**sections, "seed": 11, "model": {"path": "tiny"}})
    started, toys = await engines(engine_count)
    cluster: Cluster[InferWorker] = of("toys", [Mortal(handle) for handle in started._handles])
    for toy in toys:
        toy.pace_s = pace_s
        if says is not None:
            toy.says = lambda request: spoken(says)
    judges, made = await rewards(judge, graders)
    worlds, playing, log = await environments(envs)

    def ready(worker: RolloutWorker) -> list[Mortal]:
        """Lines of the worker's own to the others, which are cut when it dies."""
        lines = {c.role: [Mortal(handle, is_line=True) for handle in c._handles] for c in (cluster, judges, worlds)}
        worker.connect(*(of(role, handles) for role, handles in lines.items()))
        return [line for some in lines.values() for line in some]

    crew = Crew(worker_count, lambda place: RolloutWorker(place, config, run), ready)
    router = Router(engine_count, deadline_s=600, max_running=max_running)
    tries = config.rollout.max_attempts
    pool = RolloutPool(crew.cluster, router, tries=tries, max_scoring=max_scoring, deadline_s=600)
    moves: Any = Moves()
    whole = Party(pool, router, crew, cluster, toys, made, judges, playing, worlds, log, moves, Lifecycle(moves))

    def lost(engine: int, reason: str) -> None:
        whole.troubles.append((engine, reason))
        router.mark_dead(engine)

    pool.on_engine_died = lost
    return whole


# a runner without engines


def rollouts(count: int = 1) -> Crew[RolloutWorker]:
    """Rollout workers that are connected to nobody."""
    return Crew(count, lambda place: RolloutWorker(place, TINY, None), lambda worker: [])


@dataclass
class ToyRunner:
    """Drives samples to what `outcome` says: a reward, a reason to fail, or an error; after `delay` seconds. The first
    half of a response is drawn by the `version` at its beginning, the second by the one at its end."""

    outcome: Callable[[Sample], float | str | Exception]
    delay: Callable[[Sample], float] = lambda sample: 0
    length: Callable[[Sample], int] = lambda sample: 1 + sample.group % 3
    version: Callable[[], int] = lambda: 0
    judging: Callable[[Sample], float] = lambda sample: 0
    """Seconds until the verdict."""
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    ended: list[SampleCommand] = field(default_factory=list)
    crew: Any = None

    def of(self, worker: RolloutWorker) -> Any:
        """The runner as one worker has it."""
        return _ToyRunnerOf(self, Lifecycle(worker._reports))

    async def pool(self, workers: int = 1, engine_count: int = 1, tries: int = 1, **router: Any) -> RolloutPool:
        """A pool whose samples this runner drives."""

        def ready(worker: RolloutWorker) -> list[Mortal]:
            worker._runner = self.of(worker)
            return []

        self.crew = Crew(workers, lambda place: RolloutWorker(place, TINY, None), ready)
        seats = Router(engine_count, deadline_s=600, **router)
        return RolloutPool(self.crew.cluster, seats, tries=tries, deadline_s=600)


@dataclass
class _ToyRunnerOf:
    whole: ToyRunner
    moves: Lifecycle
    _commands: dict[str, SampleCommand] = field(default_factory=dict)

    def stop(self, stop: SampleCommand) -> None:
        self.whole.ended.append(stop)

    async def run(self, sample: Sample, siblings: Sequence[Sample] = ()) -> None:
        whole = self.whole
        whole.started.append(sample.id)
        first = whole.version()
        self.moves.move(sample, "generating")
        try:
            await asyncio.sleep(whole.delay(sample))
        except asyncio.CancelledError:
            whole.cancelled.append(sample.id)
            raise
        result = whole.outcome(sample)
        if isinstance(result, Exception):
            raise result
        if isinstance(result, str):
            self.moves.move(sample, "failed", result)
            return
        length = whole.length(sample)
        versions = [first] * (length // 2) + [whole.version()] * (length - length // 2)
        sample.log.prompt([1, 2])
        sample.log.respond([3] * length, [-1.0] * length, versions)
        sample.response = Response(f"answer to {sample.task.id}", length, "stop")
        sample.tokens, sample.response_tokens, sample.finish = len(sample.log), length, "stop"
        sample.turns = 1
        sample.oldest, sample.newest = min(versions), max(versions)
        self.moves.move(sample, "scoring")
        if seconds := whole.judging(sample):
            await asyncio.sleep(seconds)
        sample.reward = result
        self.moves.move(sample, "scored")


def failure(reason: str) -> ScoreFailure:
    return ScoreFailure("raised", reason)


def tasks(count: int, held_out: int = 0) -> TaskSet:
    def ask(name: str) -> Task:
        return Task.ask(name, f"what is {name}?", name)

    return TaskSet(tuple(ask(f"t{i}") for i in range(count)), tuple(ask(f"h{i}") for i in range(held_out)))
