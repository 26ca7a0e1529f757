"""A rollout worker by itself: what it reports and when, what it keeps, and how it lets go."""

from __future__ import annotations

import asyncio
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_toys import (
    END,
    Moves,
    Party,
    ToyRunner,
    episode_of,
    go,
    party,
    rollouts,
    some_time,
    timings,
    turns,
    until,
)

from roll.data import Sample, Task
from roll.data.batch import token_block
from roll.ledger.log import Transition
from roll.rollout.lifecycle import MOVES, Lifecycle
from roll.rollout.messages import EngineAssignment, Lease, SampleCommand, SampleResult, WorkerCommand
from roll.rollout.worker import RolloutWorker

TASK = Task.ask("t", "2+2", "4")


def lease(key: str, size: int = 2, engine: int = 0, task: Task = TASK) -> Lease:
    return Lease(key, engine, task, int(key), 0.5, tuple(f"{key}.{i}" for i in range(size)), version=6, tries=2)


async def worker_of(runner: ToyRunner) -> RolloutWorker:
    (worker,) = rollouts(1).workers
    worker._runner = runner.of(worker)
    return worker


@dataclass
class Report:
    """What a worker has reported of some leases."""

    transitions: list[Transition] = field(default_factory=list)
    results: list[SampleResult] = field(default_factory=list)
    done_leases: list[str] = field(default_factory=list)
    calls: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self, worker: RolloutWorker, message: Lease) -> None:
        self.results += await worker.run(self.transitions.append, message)
        self.done_leases.append(message.key)

    async def until(self, done: int) -> Report:
        """Itself, when so many leases are done."""
        await until(lambda: len(self.done_leases) >= done)
        assert len(self.done_leases) == done
        return self

    async def cancel(self, key: str) -> None:
        self.calls[key].cancel()
        await asyncio.gather(self.calls[key], return_exceptions=True)


def begin(worker: RolloutWorker, *leases: Lease) -> Report:
    """Has the worker run leases."""
    report = Report()
    for message in leases:
        report.calls[message.key] = asyncio.create_task(report.run(worker, message))
    return report


def tell(worker: RolloutWorker, *commands: WorkerCommand) -> None:
    for command in commands:
        worker.execute(command)


def test_a_lease_is_reported_with_its_transitions_and_results_once() -> None:
    async def main() -> None:
        worker = await worker_of(ToyRunner(lambda s: "broken" if s.id == "1.1" else 2.0, lambda s: s.group))
        found = begin(worker, lease("1"), lease("2", 1))
        await found.until(2)
        assert found.done_leases == ["1", "2"]
        paths = {id: [m.state for m in found.transitions if m.sample == id] for id in ("1.0", "1.1", "2.0")}
        scored = ["generating", "scoring", "scored"]
        assert paths == {"1.0": scored, "1.1": ["generating", "failed"], "2.0": scored}
        assert [(o.sample, o.reward, o.tokens, o.response_tokens, o.finish) for o in found.results] == [
            ("1.0", 2.0, 4, 2, "stop"),
            ("1.1", 0.0, 0, 0, None),
            ("2.0", 2.0, 5, 3, "stop"),
        ]

    go(main())


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_transitions_are_reported_as_they_happen() -> None:
    async def main() -> None:
        worker = await worker_of(ToyRunner(lambda s: 1.0, lambda s: 0.1 + s.group))
        found, seen = begin(worker, lease("1", 3), lease("2", 2)), []
        for at_s in (0.0, 1.05, 1.15, 2.15):
            await asyncio.sleep(at_s - now_s())
            await turns()
            seen.append((len(found.transitions), list(found.done_leases)))
        assert seen == [(5, []), (5, []), (11, ["1"]), (15, ["1", "2"])]

    go(main())


def test_a_sample_that_waits_for_an_assignment_is_reported_at_once() -> None:
    async def main() -> None:
        run = await party(2)
        (worker,) = run.workers
        found = begin(worker, lease("1"))
        await until(lambda: len(run.running) == 2)
        run.toys[0].draw("1.0", 11)
        await turns()
        told = len(found.transitions)
        tell(worker, SampleCommand("1.0", "requeue", "make room"))
        await turns()
        assert [(m.sample, m.state, m.reason) for m in found.transitions[told:]] == [("1.0", "queued", "make room")]
        await worker.close()

    go(main())


def test_an_error_ends_its_lease_and_no_other() -> None:
    async def main() -> None:
        runner = ToyRunner(lambda s: OSError(f"by {s.id}"), lambda s: 0.1 if s.id in ("1.1", "2.0") else 1000)
        worker = await worker_of(runner)
        found = begin(worker, lease("1"), lease("2"), lease("3"))
        for key, id in (("1", "1.1"), ("2", "2.0")):
            with pytest.raises(OSError, match=f"by {id}"):
                await found.calls[key]
        assert sorted(runner.cancelled) == ["1.0", "2.1"]
        assert set(worker._leases) == {"3"}
        assert set(worker._samples) == {"3.0", "3.1"}
        await worker.close()
        assert sorted(runner.cancelled) == ["1.0", "2.1", "3.0", "3.1"]
        assert not worker._leases

    go(main())


@pytest.mark.parametrize("after_s", [0, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 30])
def test_a_cancelled_lease_is_forgotten_with_what_was_to_be_said_of_it(after: int, after_s: float) -> None:
    async def main() -> None:
        runner = ToyRunner(lambda s: 1.0, lambda s: 0.1)
        worker = await worker_of(runner)
        found = begin(worker, lease("1"), lease("2"))
        await asyncio.sleep(after_s)
        await turns(after)
        await found.cancel("1")
        told = len([m for m in found.transitions if m.sample.startswith("1.")])
        kept = {"1", "2"} if "1" in found.done_leases else {"2"}
        assert set(worker._leases) == kept
        assert {sample.partition(".")[0] for sample in worker._samples} == kept
        await until(lambda: "2" in found.done_leases)
        assert len([m for m in found.transitions if m.sample.startswith("1.")]) == told
        if "1" not in found.done_leases:
            assert {outcome.sample for outcome in found.results} == {"2.0", "2.1"}

    go(main())


def test_closing_ends_every_lease() -> None:
    async def main() -> None:
        runner = ToyRunner(lambda s: 1.0, lambda s: 1000)
        worker = await worker_of(runner)
        begin(worker, lease("1"), lease("2"))
        await turns()
        await worker.close()
        assert sorted(runner.cancelled) == ["1.0", "1.1", "2.0", "2.1"]
        assert not worker._samples

    go(main())


def test_a_worker_that_is_not_connected_says_so() -> None:
    async def main() -> None:
        (worker,) = rollouts(1).workers
        found = begin(worker, lease("1"))
        with pytest.raises(AssertionError, match="connected before it takes leases"):
            await found.calls["1"]

    go(main())


def test_columns_are_the_token_logs_a_block_a_group() -> None:
    async def main() -> None:
        run = await party()
        run.toys[0].says = lambda request: [int(request.id[0]) + 5, *[9] * int(request.id[-1]), END]
        (worker,) = run.workers
        found = begin(worker, lease("1"), lease("2", 3))
        await found.until(2)
        blocks = worker.columns([["2.2", "2.0"], ["1.1"], []])
        assert len(blocks) == 3
        for names, block in zip([["2.2", "2.0"], ["1.1"], []], blocks, strict=True):
            logs = [worker._samples[name].log for name in names]
            for column in ("ids", "loss_mask", "behaviour", "versions"):
                expected = [value for log in logs for value in getattr(log, column).tolist()]
                assert block.column(column).tolist() == expected
                assert block.column(column).dtype == getattr(Sample("", TASK, 0, 1.0).log, column).dtype
        assert worker.texts(["1.1"]) == [run.workers[0]._samples["1.1"].response.text]  # type: ignore[union-attr]

    go(main())


def test_forgetting_frees_the_tokens() -> None:
    async def main() -> None:
        worker = await worker_of(ToyRunner(lambda s: 1.0))
        found = begin(worker, lease("1"), lease("2"))
        await found.until(2)
        worker.release(["1", "unknown"])
        assert set(worker._samples) == {"2.0", "2.1"}
        with pytest.raises(KeyError):
            worker.columns([["1.0"]])
        worker.release(["2"])
        assert not worker._samples
        assert not worker._leases

    go(main())


async def _report_of(length: int) -> tuple[Report, Party]:
    run = await party(judge=lambda task, response: 0.5)
    run.toys[0].says = lambda request: [9] * length
    run.toys[0].context = 10**6
    found = begin(run.workers[0], lease("1", 4))
    await found.until(1)
    assert [outcome.response_tokens for outcome in found.results] == [length] * 4
    return found, run


def test_a_report_does_not_grow_with_the_responses() -> None:
    async def main() -> None:
        (short, _), (long, run) = await _report_of(10), await _report_of(10_000)
        sizes = [len(pickle.dumps((found.transitions, found.results))) for found in (short, long)]
        assert abs(sizes[1] - sizes[0]) < 64
        assert len(pickle.dumps(token_block(list(run.workers[0]._samples.values())))) > 100_000

    go(main())


def test_a_leases_samples_are_what_it_says() -> None:
    async def main() -> None:
        seen: list[Sample] = []
        runner = ToyRunner(lambda s: seen.append(s) or 1.0)  # type: ignore[func-returns-value]
        worker = await worker_of(runner)
        found = begin(worker, lease("7", 2))
        await found.until(1)
        assert [(s.id, s.task, s.group, s.temperature) for s in seen] == [("7.0", TASK, 7, 0.5), ("7.1", TASK, 7, 0.5)]
        assert [s.tries for s in seen] == [2, 2]
        assert np.array_equal(seen[0].log.ids, worker._samples["7.0"].log.ids)

    go(main())


def test_what_is_reported_makes_the_same_ledger_as_carrying_them_here() -> None:
    async def main() -> None:
        run = await party(says="4")
        samples = run.group(0)
        await run.start(samples)
        direct: Any = Moves()
        life = Lifecycle(direct)
        assert run.workers[0]._runner is not None
        run.workers[0]._runner._lifecycle = life
        for sample in (Sample(s.id, s.task, 0, 0.5) for s in samples):
            life.move(sample, "queued")
            run.workers[0]._assignments.assign(EngineAssignment(sample.id, 0, run.pool.version))
            await run.workers[0]._runner.run(sample)
        for id in ("0.0", "0.1"):
            told = [(r.state, r.reason, r.info) for r in run.moves.records if r.sample == id]
            assert told == [(r.state, r.reason, r.info) for r in direct.records if r.sample == id]

    go(main())


def test_requests_still_running_are_aborted_when_their_lease_is_cancelled() -> None:
    async def main() -> None:
        run = await party(2)
        (worker,) = run.workers
        found = begin(worker, lease("1", engine=0), lease("2", engine=1))
        await until(lambda: len(run.running) == 4)
        run.toys[0].finish("1.0", [END])
        await until(lambda: run.judges[0].judged)
        await found.cancel("1")
        assert [sorted(toy.aborted) for toy in run.toys] == [["1.1"], []]
        await worker.close()
        assert not run.running

    go(main())


# pausing, displacing, dropping


def states(worker: RolloutWorker) -> dict[str, str]:
    return {id: sample.state for id, sample in worker._samples.items()}


def test_what_is_being_generated_is_paused_and_goes_on_and_nothing_else_is() -> None:
    async def main() -> None:
        run = await party(1)
        (worker,) = run.workers
        run.judges[0].gate.clear()
        found = begin(worker, lease("1", 3), lease("2", 1, task=episode_of(1.0)))
        run.envs[0].gate.clear()
        await until(lambda: len(run.running) == 3)
        run.answer("1.2")
        await until(lambda: run.judges[0].judged)
        worker.pause()
        assert states(worker) == {"1.0": "paused", "1.1": "paused", "1.2": "scoring", "2.0": "acting"}
        worker.pause()
        run.answer("1.1")  # it had finished when it was paused
        await until(lambda: states(worker)["1.1"] == "scoring")
        worker.resume()
        assert states(worker) == {"1.0": "generating", "1.1": "scoring", "1.2": "scoring", "2.0": "acting"}
        run.judges[0].gate.set()
        run.envs[0].gate.set()
        run.answer("1.0")
        await until(lambda: "2.0" in run.running)
        run.answer()
        await found.until(2)
        assert [m.state for m in found.transitions if m.sample == "1.0"] == [
            "generating",
            "paused",
            "generating",
            "scoring",
            "scored",
        ]
        assert {outcome.finish for outcome in found.results} == {"stop"}

    go(main())


@pytest.mark.parametrize("engine", [None, 1])
def test_a_requeued_sample_keeps_its_tokens_while_it_waits_for_an_assignment(engine: int | None) -> None:
    async def main() -> None:
        run = await party(2)
        (worker,) = run.workers
        found = begin(worker, lease("1", engine=0), lease("2", engine=1), lease("3", 1, engine=1))
        await until(lambda: len(run.running) == 5)
        run.toys[1].draw("2.0", 11, 12)
        worker._lifecycle.move(worker._samples["2.1"], "paused")
        run.answer("3.0")
        await until(lambda: states(worker)["3.0"] == "scored")
        await run.pool.requeue_generating("new weights", engine)
        await turns(40)
        off = {id for id, state in states(worker).items() if state == "queued"}
        assert off == ({"2.0", "2.1"} if engine == 1 else {"1.0", "1.1", "2.0", "2.1"})
        assert run.running == {"1.0", "1.1", "2.0", "2.1"} - off
        tell(worker, *(EngineAssignment(id, 0) for id in sorted(off)))
        await until(lambda: len(run.running) == 4)
        assert run.toys[0].running["2.0"].ids.tolist()[-2:] == [11, 12]
        run.answer()
        await found.until(3)
        assert [m.reason for m in found.transitions if m.state == "queued"] == ["new weights"] * len(off)
        assert len(found.results) == 5

    go(main())


async def at_state(run: Party, worker: RolloutWorker, state: str) -> Report:
    """Brings the sample 1.0 into a state, and keeps it there."""
    run.judges[0].gate.clear()
    run.envs[0].gate.clear()
    task = episode_of(1.0, 1.0) if state == "acting" else TASK
    found = begin(worker, lease("1", 2, task=task))
    if state == "acting":
        await until(lambda: run.env_log.count("reset 1.0.2") == 1)
    elif state == "new":
        return found
    else:
        await until(lambda: "1.0" in run.running)
    if state == "queued":
        await run.pool.requeue_generating("away")
        await turns(40)
    elif state == "paused":
        worker.pause()
    elif state in ("scoring", "scored"):
        run.answer("1.0")
        await until(lambda: run.judges[0].judged)
        if state == "scored":
            run.judges[0].gate.set()
            await until(lambda: states(worker)["1.0"] == "scored")
    assert states(worker)["1.0"] == state
    return found


@pytest.mark.parametrize("state", ["new", "queued", "generating", "paused", "acting", "scoring", "scored"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_sample_is_dropped_whatever_it_is_at_and_its_siblings_go_on(state: str, times: int) -> None:
    async def main() -> None:
        run = await party(1)
        (worker,) = run.workers
        found = await at_state(run, worker, state)
        tell(worker, *[SampleCommand("1.0", "drop", "not wanted")] * times)
        await turns(60)
        run.judges[0].gate.set()
        run.envs[0].gate.set()
        for _ in range(4):
            if states(worker).get("1.1") == "queued":
                tell(worker, EngineAssignment("1.1", 0))
            await asyncio.sleep(1)
            run.answer()
        await found.until(1)
        moves = {id: [m.state for m in found.transitions if m.sample == id] for id in ("1.0", "1.1")}
        for path in moves.values():
            assert all(after in MOVES[before] for before, after in zip(["queued", *path], path, strict=False))
        if state in ("scored", "new"):  # too late for it, or too early
            assert moves["1.0"][-1] in ("scored", "dropped")
        else:
            assert (moves["1.0"][-1], states(worker)["1.0"]) == ("dropped", "dropped")
            assert [m.reason for m in found.transitions if m.state == "dropped"] == ["not wanted"]
        assert moves["1.1"][-1] == "scored"
        assert {outcome.sample for outcome in found.results} == {"1.0", "1.1"}
        assert not run.running
        assert not run.envs[0].episodes
        await worker.close()
        run.pool.tokens._locations.clear()
        assert not worker._leases

    go(main())


@pytest.mark.parametrize("then", ["dropped", "cancelled"])
def test_a_sample_dropped_on_its_way_to_an_engine_is_taken_off_it_whatever_else_happens(then: str) -> None:
    async def main() -> None:
        run = await party(1)
        (worker,), gate = run.workers, asyncio.Event()
        handle: Any = run.engines._handles[0]
        stream = handle.stream

        async def slow(*args: Any) -> Any:
            await asyncio.shield(gate.wait())
            return await stream(*args)

        handle.stream = slow
        found = begin(worker, lease("1"))
        await asyncio.sleep(1)
        tell(worker, SampleCommand("1.0", "drop", "not wanted"))
        await asyncio.sleep(1)
        if then == "dropped":
            tell(worker, SampleCommand("1.0", "drop", "not wanted"))
        else:
            ending = asyncio.create_task(found.cancel("1"))
        await asyncio.sleep(1)
        gate.set()
        await asyncio.sleep(1)
        if then == "dropped":
            assert run.running == {"1.1"}
            run.answer()
            await found.until(1)
        else:
            await ending
        assert not run.running

    go(main())


def test_orders_for_samples_that_are_not_here_are_ignored() -> None:
    async def main() -> None:
        run = await party(1, says="4")
        (worker,) = run.workers
        strange: list[WorkerCommand] = [
            EngineAssignment("9.9", 0),
            *(SampleCommand("9.9", how, "?") for how in ("end", "requeue", "drop")),
        ]  # type: ignore[arg-type]
        tell(worker, *strange)
        await begin(worker, lease("1")).until(1)
        worker.release(["1"])
        tell(worker, EngineAssignment("1.0", 0), SampleCommand("1.0", "drop", "?"))
        assert not worker._assignments._assigned
        assert not worker._samples

    go(main())


def test_a_lease_that_is_sent_again_starts_from_nothing() -> None:
    async def main() -> None:
        run = await party(1)
        (worker,) = run.workers
        for text in ("4", "5"):
            found = begin(worker, lease("1"))
            await until(lambda: len(run.running) == 2)
            run.answer(text=text)
            await found.until(1)
            assert [outcome.reward for outcome in found.results] == [float(text == "4")] * 2
        assert worker.texts(["1.0"]) == ["5"]

    go(main())


def test_masked_columns_have_no_loss_on_old_tokens() -> None:
    async def main() -> None:
        run = await party(1)
        (worker,) = run.workers
        found = begin(worker, lease("1", 1))
        await until(lambda: run.running)
        run.toys[0].version = 4
        run.toys[0].draw("1.0", 11)
        run.toys[0].version = 5
        run.toys[0].finish("1.0", [12, END])
        await found.until(1)
        for below, counted in ((0, 3), (4, 3), (5, 2), (6, 0)):
            (block,) = worker.columns([["1.0"]], below)
            assert block.column("loss_mask").tolist().count(True) == counted
            assert block.column("versions").tolist()[-3:] == [4, 5, 5]

    go(main())


@given(seed=st.integers(0, 10**6))
@timings(60)
def test_whatever_is_done_to_its_samples_a_lease_is_reported_done_once(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        run = await party(2, pace_s=0.1, deadline_s=10_000)
        (worker,) = run.workers
        names = [f"{key}.{i}" for key in "123" for i in range(2)]
        whole = begin(worker, lease("1"), lease("2", engine=1), lease("3", task=episode_of(0.5, 0.5)))
        while len(whole.done_leases) < 3:
            await some_time(rng)
            for _ in range(rng.randrange(3)):
                what = rng.choice(["pause", "resume", "displace", "stop", "stop"])
                if what == "displace":
                    await run.pool.requeue_generating("off", rng.choice([None, 0, 1]))
                elif what == "stop":
                    how: Any = rng.choice(["end", "requeue", "drop"])
                    tell(worker, SampleCommand(rng.choice(names), how, how))
                else:
                    getattr(worker, what)()
            for name, state in states(worker).items():
                if state == "queued" and worker._assignments.engine(name) is None:
                    tell(worker, EngineAssignment(name, rng.randrange(2)))
        assert sorted(whole.done_leases) == ["1", "2", "3"]
        assert sorted(outcome.sample for outcome in whole.results) == names
        for name in names:
            path = [m.state for m in whole.transitions if m.sample == name]
            assert all(after in MOVES[before] for before, after in zip(["queued", *path], path, strict=False))
            assert path[-1] in ("scored", "dropped")
        assert not run.running
        assert not run.envs[0].episodes
        assert worker._runner is not None
        assert not worker._runner._commands
        assert not worker._tasks
        worker.release(["1", "2", "3"])
        assert not worker._assignments._assigned

    go(main())
