"""The pool: leases out to rollout workers, outcomes back, tokens left where they are."""

from __future__ import annotations

import asyncio
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import (
    END,
    Party,
    ToyRunner,
    episode_of,
    failure,
    go,
    party,
    rollouts,
    some_time,
    spoken,
    timings,
    turns,
    undisturbed,
    until,
)

from roll.cluster import Worker, WorkerPlacement
from roll.cluster.errors import CallTimedOut
from roll.cluster.executor import LocalHandle
from roll.config.errors import RunError
from roll.data import Response, Sample, Task, remote_columns
from roll.data.remote_columns import ColumnBlock
from roll.engine.request import Request, SamplingParams, seed_of
from roll.env import EnvFailure
from roll.rollout.lifecycle import MOVES, Lifecycle
from roll.rollout.messages import FinalState, SampleCommand
from roll.rollout.worker import RolloutWorker
from roll.run import RunFolder, Transition, read_samples
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.router import Router


def drawn(run: Party, samples: list[Sample]) -> list[Sample]:
    """The samples as their workers have them, with their tokens."""
    return [run.drawn(sample) for sample in samples]


def fates(samples: list[Sample]) -> list[FinalState]:
    return [FinalState(sample.id, sample.state, sample.reason) for sample in samples]


def assert_valid(path: list[str]) -> None:
    assert all(after in MOVES[before] for before, after in zip(["new", *path], path, strict=False))


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# a lease's way


def test_a_group_is_carried_to_its_verdicts() -> None:
    async def main() -> None:
        run = await party()
        samples = run.group(3)
        call = run.start(samples)
        await until(lambda: len(run.running) == 2)
        asked = run.toys[0].running["3.1"]
        assert (asked.sampling.max_new_tokens, asked.sampling.temperature, asked.sampling.stop_ids) == (8, 0.5, (END,))
        run.answer("3.0")
        run.answer("3.1", text="five")
        await call
        assert [(s.state, s.reward, s.response_tokens, s.finish) for s in samples] == [
            ("scored", 1.0, 2, "stop"),
            ("scored", 0.0, 5, "stop"),
        ]
        assert [s.parts for s in samples] == [{"length": 2.0}, {"length": 5.0}]
        assert [s.tokens for s in samples] == [len(s.log) for s in drawn(run, samples)]
        assert await run.pool.tokens.texts(samples[::-1]) == ["five", "4"]
        for sample in samples:
            assert run.moves.of(sample.id) == ["queued", "generating", "scoring", "scored"]
            assert (len(sample.log), sample.response) == (0, None)
        infos = [record.info for record in run.moves.records if record.sample == "3.1"]
        told = {"tokens": 5, "finish": "stop", "versions": [3, 3]}
        assert infos == [{}, {"engine": 0, "worker": 0, "version": 0}, told, {"reward": 0.0}]
        assert [(s.oldest, s.newest, s.turns, s.tries) for s in samples] == [(3, 3, 1, 1)] * 2
        run.assert_idle()
        await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())


def test_samples_that_fail_say_why_and_have_no_tokens_to_train_on() -> None:
    def judge(task: Task, response: Response) -> float:
        if response.text == "no":
            raise failure("KeyError: 'answer'")
        return 1.0

    async def main() -> None:
        run = await party(judge=judge, max_new_tokens=8)
        samples = run.group(0, size=3)
        run.toys[0].context = 1
        await run.start(samples)
        assert {(s.state, s.reason) for s in samples} == {("failed", f"request '0.{i}' is too long") for i in range(3)}
        assert await run.pool.tokens.texts(samples) == ["", "", ""]
        run.toys[0].context = 1000
        more = run.group(1)
        call = run.start(more)
        await until(lambda: len(run.running) == 2)
        run.answer("1.0", text="no")
        run.answer("1.1")
        await call
        assert [(s.state, s.reason) for s in more] == [("failed", "reward raised: KeyError: 'answer'"), ("scored", "")]
        assert run.moves.of("1.0") == ["queued", "generating", "scoring", "failed"]
        await run.pool.tokens.release([*samples, *more])
        run.assert_empty()

    go(main())


def test_a_lease_that_is_done_is_reported_at_once() -> None:
    async def main() -> None:
        run = await party(says="4")
        await run.start(run.group(0))
        assert asyncio.get_running_loop().time() < 0.1

    go(main())


def test_transitions_are_reported_while_the_lease_still_runs() -> None:
    async def main() -> None:
        run = await party()
        call = run.start(run.group(0))
        await until(lambda: set(run.moves.last().values()) == {"generating"})
        run.answer("0.0")
        await until(lambda: run.moves.of("0.0")[-1] == "scored")
        assert not call.done()
        run.answer()
        await call

    go(main())


def test_a_lease_of_a_worker_in_this_process_begins_at_once() -> None:
    async def main() -> None:
        run = await party()
        calls = [run.start(run.group(index)) for index in range(5)]
        await turns(12)
        assert len(run.running) == 10
        run.answer()
        await asyncio.gather(*calls)

    go(main())


def test_a_key_can_be_out_once_only_even_if_both_wait_for_an_engine() -> None:
    async def main() -> None:
        run = await party()
        await run.router.drain(0)
        first, second = run.start(run.group(0), "key"), run.start(run.group(1), "key")
        await turns()
        run.router.add_engine(0)
        with pytest.raises(ValueError, match="the lease 'key' is in flight already"):
            await second
        await until(lambda: run.running)
        run.answer()
        await first

    go(main())


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    workers=st.integers(1, 3),
    engine_count=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_the_ledgers_moves_are_valid_and_in_order_whatever_comes_first(
    sizes: list[int], workers: int, engine_count: int, order: Any
) -> None:
    def judge(task: Task, response: Response) -> float:
        if response.text == "bad":
            raise failure("bad")
        return float(len(response.text))

    async def main() -> None:
        run = await party(engine_count, workers, judge, graders=2)
        groups = [run.group(index, size) for index, size in enumerate(sizes)]
        calls = [run.start(group) for group in groups]
        await until(lambda: len(run.running) == sum(sizes))
        names = sorted(run.running)
        order.shuffle(names)
        texts = {name: order.choice(["bad", "1", "22", ""]) for name in names}
        for name in names:
            run.answer(name, text=texts[name])
            await turns(order.randint(0, 5))
        await asyncio.gather(*calls)
        for group in groups:
            for sample in group:
                path = run.moves.of(sample.id)
                assert_valid(path)
                expected = ("failed", 0.0) if texts[sample.id] == "bad" else ("scored", float(len(texts[sample.id])))
                assert (sample.state, sample.reward) == expected
                assert path == ["queued", "generating", "scoring", sample.state]
                assert sample.response_tokens == len(spoken(texts[sample.id]))
        run.assert_idle()
        await run.pool.tokens.release([sample for group in groups for sample in group])
        run.assert_empty()

    go(main())


def test_reports_of_strangers_are_ignored() -> None:
    async def main() -> None:
        run = await party()
        samples = run.group(0)
        call = run.start(samples)
        await until(lambda: len(run.running) == 2)
        report = run.workers[0]._reports.of_sample["0.0"]
        report(Transition("9.9", "scored"))
        run.answer()
        await call
        report(Transition("0.0", "queued"))  # its lease has ended
        assert set(run.moves.last()) == {"0.0", "0.1"}
        assert set(run.moves.last().values()) == {"scored"}

    go(main())


def test_a_move_that_cannot_be_fails_its_lease_instead_of_hanging_it() -> None:
    async def main() -> None:
        run = await party(1, 2)
        calls = [run.start(run.group(index)) for index in range(2)]
        await until(lambda: len(run.running) == 4)
        run.workers[0]._samples["0.0"].state = "kept"
        run.answer("0.0")
        with pytest.raises(AssertionError, match=r"sample 0\.0 cannot go from"):
            await calls[0]
        run.answer()
        await calls[1]

    go(main())


# balance


def test_groups_go_to_the_worker_with_the_fewest_samples_and_graders_take_turns() -> None:
    async def main() -> None:
        run = await party(2, 3, graders=3)
        groups = [run.group(index, size) for index, size in enumerate([4, 1, 2, 2, 1])]
        calls = []
        for group in groups:
            calls.append(run.start(group))
            await turns(3)
        homes = [run.pool.tokens._locations[group[0].id][0] for group in groups]
        assert homes == [0, 1, 2, 1, 2]
        assert run.pool._loads == [4, 3, 3]
        assert [run.router.running(engine) for engine in range(2)] == [4 + 1, 1 + 2 + 2]
        await until(lambda: len(run.running) == 10)
        assert [len(toy.running) for toy in run.toys] == [5, 5]
        run.answer()
        await asyncio.gather(*calls)
        assert sorted(judge.judged for judge in run.judges) == [3, 3, 4]
        run.assert_idle()

    go(main())


def test_workers_begin_with_different_graders() -> None:
    async def main() -> None:
        run = await party(1, 3, graders=3, says="4")
        await asyncio.gather(*(run.start(run.group(index, 1)) for index in range(3)))
        assert [judge.judged for judge in run.judges] == [1, 1, 1]

    go(main())


def test_a_group_stays_together_on_its_engine() -> None:
    async def main() -> None:
        run = await party(3, 2)
        calls = [run.start(run.group(index, 3)) for index in range(3)]
        await until(lambda: len(run.running) == 9)
        assert [{id.partition(".")[0] for id in toy.running} for toy in run.toys] == [{"0"}, {"1"}, {"2"}]
        run.answer()
        await asyncio.gather(*calls)

    go(main())


def test_groups_wait_until_an_engine_joins() -> None:
    async def main() -> None:
        run = await party()
        await run.router.drain(0)
        call = run.start(run.group(0))
        await turns(30)
        assert not run.running
        run.router.add_engine(0)
        await until(lambda: len(run.running) == 2)
        leaving = asyncio.create_task(run.router.drain(0))
        await turns()
        assert not leaving.done()
        run.answer()
        await call
        await leaving
        assert not run.running

    go(main())


# cancelling


@pytest.mark.parametrize("after", [*range(24), 60])
def test_a_cancelled_lease_is_nowhere_whenever_it_is_cancelled_and_can_be_given_out_again(after: int) -> None:
    async def main() -> None:
        run = await party()
        call, other = run.start(run.group(0)), run.start(run.group(1))
        await turns(after)
        await cancel(call)
        await until(lambda: len(run.running) == 2)
        assert {id.partition(".")[0] for id in run.running} == {"1"}
        assert "0" not in run.workers[0]._leases
        assert run.router.running(0) == 2
        again = run.group(0)  # the same samples from their beginning
        call = run.start(again)
        await until(lambda: len(run.running) == 4)
        run.answer()
        await asyncio.gather(call, other)
        assert [sample.state for sample in again] == ["scored", "scored"]
        await run.pool.tokens.release([*again, *run.group(1)])
        run.assert_empty()

    go(main())


def test_a_lease_can_be_cancelled_while_it_is_judged() -> None:
    async def main() -> None:
        run = await party(says="4")
        run.judges[0].gate.clear()
        samples = run.group(0)
        call = run.start(samples)
        await until(lambda: run.judges[0].judged == 2)
        await cancel(call)
        run.judges[0].gate.set()
        await turns()
        assert [sample.state for sample in samples] != ["scored", "scored"]
        run.assert_empty()

    go(main())


@pytest.mark.parametrize("after", range(1, 30, 2))
def test_a_lease_cancelled_at_any_time_is_forgotten(after: int) -> None:
    async def main() -> None:
        run = await party(says="4")
        samples = run.group(0)
        call = run.start(samples)
        await turns(after)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        if not call.cancelled():
            await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())


def test_a_lease_that_waits_for_an_engine_can_be_cancelled() -> None:
    async def main() -> None:
        run = await party()
        await run.router.drain(0)
        call = run.start(run.group(0))
        await turns()
        await cancel(call)
        run.router.add_engine(0)
        await turns()
        run.assert_empty()

    go(main())


def test_a_cancelled_lease_has_ended_on_its_worker_when_its_caller_goes_on() -> None:
    async def main() -> None:
        run = await party()
        gate = asyncio.Event()
        handle: Any = run.pool._workers._handles[0]
        stream = handle.stream

        async def slow(*args: Any) -> Any:
            try:
                return await stream(*args)
            except asyncio.CancelledError:
                await gate.wait()  # until the worker's answer is here
                raise

        handle.stream = slow
        task = run.start(run.group(0))
        await until(lambda: len(run.running) == 2)
        task.cancel()
        await turns(20)
        assert (run.running, task.done()) == (set(), False)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        run.assert_empty()

    go(main())


# errors


def test_an_engines_end_reaches_the_leases_of_every_worker_that_uses_it_and_stops_what_they_hold() -> None:
    async def main() -> None:
        run = await party(2, 2)
        calls = [run.start(run.group(index)) for index in range(4)]  # engines and workers 0 1 0 1
        await until(lambda: len(run.running) == 8)
        run.toys[0].break_down(RunError("the engine died"))
        for index in (0, 2):
            with pytest.raises(RunError, match="the engine died"):
                await calls[index]
        await turns()
        assert not calls[1].done()
        assert not calls[3].done()
        run.answer("1.0", "1.1", "3.0", "3.1")
        await asyncio.gather(calls[1], calls[3])

    go(main())


def test_an_unexpected_error_reaches_its_lease_and_the_others_go_on() -> None:
    async def main() -> None:
        def outcome(sample: Sample) -> float | Exception:
            return RuntimeError("a bug") if sample.id == "0.1" else 1.0

        runner = ToyRunner(outcome, lambda sample: 0.1 if sample.id == "0.1" else 1000)
        pool = await runner.pool(2)
        life = Lifecycle(None)

        def start(index: int) -> asyncio.Task[None]:
            samples = [Sample(f"{index}.{i}", Task.ask("t", "?"), index, 1.0, state="queued") for i in range(2)]
            return asyncio.create_task(pool.run(str(index), samples, life))

        calls = [start(index) for index in range(4)]  # workers 0 1 0 1
        with pytest.raises(RuntimeError, match="a bug"):
            await calls[0]
        await turns()
        assert runner.cancelled == ["0.0"]
        assert not any(call.done() for call in calls[1:])
        runner.outcome, runner.delay = (lambda sample: 1.0), (lambda sample: 0)
        await start(6)  # the worker goes on
        for index in (1, 2, 3):
            await cancel(calls[index])
        assert sorted(runner.cancelled) == ["0.0", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]

    go(main())


class Dead(Worker):
    """A rollout worker that raises whatever it is given."""

    async def run(self, report: Any, lease: Any) -> None:
        await asyncio.sleep(0)
        raise RunError("rollout[0] has a bug")


def test_an_error_of_a_worker_itself_reaches_all_its_leases() -> None:
    async def main() -> None:
        crew = rollouts(1)
        crew.handles[0].replace(LocalHandle(Dead(WorkerPlacement("rollout"))))
        pool = RolloutPool(crew.cluster, Router(1, 10), tries=3)
        samples = [Sample(f"{i}.0", Task.ask("t", "?"), i, 1.0, state="queued") for i in range(3)]
        calls = [pool.run(str(s.group), [s], Lifecycle(None)) for s in samples]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, RunError)
            assert str(result) == "rollout[0] has a bug"
        assert pool._loads == [0]

    go(main())


# tokens


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    workers=st.integers(1, 3),
    most=st.integers(1, 60),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(25), derandomize=True, deadline=None)
def test_a_batch_has_the_tokens_of_its_samples_in_its_order(sizes: list[int], workers: int, most: int, seed: int) -> None:
    async def main() -> None:
        run = await party(2, workers, lambda task, response: float(len(response.text)))
        rng = np.random.default_rng(seed)
        for toy in run.toys:
            toy.says = lambda request: [*rng.integers(5, 50, rng.integers(0, 7)).tolist(), END]
        groups = [run.group(index, size) for index, size in enumerate(sizes)]
        await asyncio.gather(*(run.start(group) for group in groups))
        samples = [sample for group in groups for sample in group if rng.random() < 0.8] or groups[0]
        rng.shuffle(samples)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote_columns, "BLOCK_TOKENS", most)
            batch = await run.pool.tokens.batch(samples)
        assert batch["sample"].tolist() == [sample.id for sample in samples]
        assert batch["reward"].tolist() == [sample.reward for sample in samples]
        for name in ("ids", "loss_mask", "behaviour", "versions", "turn"):
            for row, sample in zip(batch.rows(name), drawn(run, samples), strict=True):
                assert row.tolist() == getattr(sample.log, name).tolist()
        assert most > 1 or len(batch.blocks) == len(samples)

    go(main())


def test_a_batch_has_the_turns_of_its_episodes() -> None:
    async def main() -> None:
        run = await party(1, 2, says="4", max_turns=3)
        played = run.group(0, task=episode_of(0.5, 1.0, 2.0, 4.0, states=["a", "b", "a", "c"]))
        short = run.group(1, 1, task=episode_of(8.0))
        graded = run.group(2)
        await asyncio.gather(*(run.start(group) for group in (played, short, graded)))
        batch = await run.pool.tokens.batch([*short, *played])
        assert [row.tolist() for row in batch.rows("turn_reward")] == [[8.0], *[[0.5, 1.0, 2.0]] * 2]
        assert batch["reward"].tolist() == [8.0, 3.5, 3.5]
        assert [len(set(row.tolist())) for row in batch.rows("turn_state")] == [1, 2, 2]
        for turn, mask in zip(batch.rows("turn"), batch.rows("loss_mask"), strict=True):
            assert turn[mask].tolist() == sorted([*range(turn.max() + 1)] * 2)  # responses of two tokens
        alone = await run.pool.tokens.batch(graded)
        assert alone["turns"].tolist() == [1, 1]
        assert "turn_reward" not in alone

    go(main())


@pytest.mark.parametrize("workers", [1, 3])
def test_the_samples_of_a_step_are_written_whole_by_one_worker_or_several(tmp_path: Path, workers: int) -> None:
    async def main() -> None:
        folder = RunFolder.create(tmp_path / "run", "")
        run = await party(1, workers, says="4", run=folder.path)
        groups = [run.group(index) for index in range(12)]
        await asyncio.gather(*(run.start(group) for group in groups[:11]))
        run.toys[0].context = 1
        await run.start(groups[11])
        samples = [sample for group in groups for sample in group]
        for sample in samples[:22]:
            run.life.move(sample, "dropped", "no signal")
        await run.pool.tokens.write(7, fates(samples))
        names = sorted(path.name for path in folder.samples_dir.iterdir())
        parts = [f"step-000007.part-{rank}.jsonl" for rank in range(workers)]
        assert names == (parts if workers > 1 else ["step-000007.jsonl"])
        rows = read_samples(folder, 7)
        assert [row["sample"] for row in rows] == [sample.id for sample in samples]
        for row, sample, whole in zip(rows, samples, drawn(run, samples), strict=True):
            assert (row["state"], row["reason"]) == (sample.state, sample.reason)
            assert row["ids"] == whole.log.ids.tolist()
            assert row["loss_mask"] == whole.log.loss_mask.astype(int).tolist()
            assert row["versions"] == whole.log.versions.tolist()
            assert row["logprobs"] == pytest.approx(whole.log.behaviour.tolist())
            assert (row["task"], row["group"], row["reward"]) == (sample.task.id, sample.group, sample.reward)
            assert (row["question"], row["answer"], row["finish"]) == ("2+2", "4", sample.finish)
        assert {row["state"] for row in rows} == {"dropped", "failed"}
        assert [row["response"] for row in rows] == ["4"] * 22 + [None] * 2
        assert all({"queued", "generating"} <= set(row["seconds"]) for row in rows)
        await run.pool.tokens.write(7, fates(samples[:2]))  # a step that is done again
        assert [row["sample"] for row in read_samples(folder, 7)] == ["0.0", "0.1"]

    go(main())


def test_what_a_worker_wrote_of_a_step_stays_when_it_is_lost_and_the_others_write_theirs_again(tmp_path: Path) -> None:
    async def main() -> None:
        folder = RunFolder.create(tmp_path / "run", "")
        run = await party(1, 2, says="4", run=folder.path)
        samples = [sample for group in map(run.group, range(4)) for sample in group]
        await asyncio.gather(*(run.start(samples[at : at + 2]) for at in range(0, 8, 2)))
        await run.pool.tokens.write(7, fates(samples))
        run.pool.tokens.worker_died(1)
        here = [sample for sample in samples if run.pool.tokens.locate(sample) == 0]
        assert 0 < len(here) < len(samples)
        await run.pool.tokens.write(
            7, [FinalState(sample.id, "dropped", "left out") for sample in samples], overwrite=True
        )
        left_out = {row["sample"]: row["reason"] == "left out" for row in read_samples(folder, 7)}
        assert left_out == {sample.id: sample in here for sample in samples}

    go(main())


def test_what_is_forgotten_is_gone_and_the_rest_stays() -> None:
    async def main() -> None:
        run = await party(1, 2, says="4")
        groups = [run.group(index) for index in range(4)]
        await asyncio.gather(*(run.start(group) for group in groups))
        await run.pool.tokens.release([*groups[1], *groups[2]])
        kept = {sample.id for group in (groups[0], groups[3]) for sample in group}
        assert {id for worker in run.workers for id in worker._samples} == set(run.pool.tokens._locations) == kept
        assert len(await run.pool.tokens.texts(groups[3])) == 2
        await run.pool.tokens.release([*groups[0], *groups[3]])
        run.assert_empty()

    go(main())


def test_a_worker_says_what_it_was_not_told_where_to_write() -> None:
    with pytest.raises(AssertionError, match="nowhere to write samples"):
        go(_write_nowhere())


async def _write_nowhere() -> None:
    (worker,) = rollouts(1).workers
    RolloutWorker.write(worker, 0, [])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_passes_through_the_controller_does_not_grow_with_responses(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Everything said between the pool and its workers in the life of a step; blocks of tokens travel as references."""
    call, stream, passed = LocalHandle.call, LocalHandle.stream, 0

    async def counted_stream(handle: LocalHandle, method: str, report: Any, args: Any, kwargs: Any) -> Any:
        nonlocal passed

        def listen(each: Any) -> None:
            nonlocal passed
            passed += len(pickle.dumps(each)) * isinstance(handle._worker, RolloutWorker)
            report(each)

        result = await stream(handle, method, listen, args, kwargs)
        if isinstance(handle._worker, RolloutWorker):
            passed += len(pickle.dumps((args, kwargs, result)))
        return result

    async def counted(handle: LocalHandle, method: str, args: Any, kwargs: Any) -> Any:
        nonlocal passed
        result = await call(handle, method, args, kwargs)
        if isinstance(handle._worker, RolloutWorker) and method != "connect":
            said = [None if isinstance(each, ColumnBlock) else each for each in result] if method == "columns" else result
            passed += len(pickle.dumps((args, kwargs, said)))
        return result

    async def step(tokens: int) -> int:
        nonlocal passed
        run = await party(2, workers, lambda task, response: float(len(response.text)))
        for toy in run.toys:
            toy.says = lambda request: [*[9] * tokens, END]
        passed = 0
        groups = [run.group(index, 4) for index in range(4)]
        await asyncio.gather(*(run.start(group) for group in groups))
        samples = [sample for group in groups for sample in group]
        batch = await run.pool.tokens.batch(samples)
        assert batch.tokens > 16 * tokens
        await run.pool.tokens.release(samples)
        return passed

    monkeypatch.setattr(LocalHandle, "call", counted)
    monkeypatch.setattr(LocalHandle, "stream", counted_stream)
    short, long = go(step(10)), go(step(5_000))
    assert short > 1_000
    assert abs(long - short) < 5_000  # some reports more or less; the tokens would be 600,000


# engines that die


def response_of(sample: Sample, prompt: list[int], new_tokens: int = 8) -> list[int]:
    """What nobody interfered with would have said."""
    seed = seed_of(11, sample.id)
    return undisturbed(Request(sample.id, np.array(prompt, np.int32), SamplingParams(new_tokens, seed=seed)))


def assert_undisturbed(run: Party, sample: Sample, new_tokens: int = 8) -> None:
    log = run.drawn(sample).log
    prompt = log.segments[0].ids.tolist()
    assert log.ids.tolist() == [*prompt, *response_of(sample, prompt, new_tokens)]
    assert len(log.segments) == 2


def test_the_responses_of_a_dead_engine_resume_elsewhere() -> None:
    async def main() -> None:
        run = await party(2, pace_s=1.0, max_new_tokens=30)
        groups = [run.group(index) for index in range(2)]
        calls = [run.start(group) for group in groups]
        await asyncio.sleep(2.2)
        assert run.running
        before = run.toys[0].submitted
        run.kill_engine(0)
        await asyncio.gather(*calls)
        assert {engine for engine, _ in run.troubles} == {0}
        for group in groups:
            for sample in group:
                assert (sample.state, sample.tries) == ("scored", 1)
                assert_undisturbed(run, sample, 30)
        moved = [s for s in groups[0] if "queued" in run.moves.of(s.id)[1:]]
        assert moved
        for sample in moved:
            assert sample.id in before
            (second,) = [asked for asked in run.toys[1].asked if asked.id == sample.id]
            (lost,) = [info for _, info in run.moves.infos(sample.id) if "lost_engine" in info]
            assert lost["tokens"] > 0
            assert len(second.ids) == len(run.drawn(sample).log.segments[0].ids) + lost["tokens"]
            assert second.sampling.max_new_tokens == 30 - lost["tokens"]
        run.assert_idle()

    go(main())


def test_samples_of_a_dead_engine_wait_until_another_is_there() -> None:
    async def main() -> None:
        run = await party(1, pace_s=1.0)
        samples = run.group(0)
        call = run.start(samples)
        await until(lambda: len(run.running) == 2)
        run.kill_engine(0)
        await asyncio.sleep(30)
        assert {sample.state for sample in samples} == {"queued"}
        assert run.router.waiting == 2
        await run.revive_engine(0)
        await call
        assert {sample.state for sample in samples} == {"scored"}
        for sample in samples:
            assert_undisturbed(run, sample)
        await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())


@given(seed=st.integers(0, 10**6))
@timings(60)
def test_whenever_engines_die_nothing_is_lost_or_doubled(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        count = rng.randint(1, 3)
        run = await party(count, rng.randint(1, 2), pace_s=0.3, max_running=rng.choice([0, 2]), deadline_s=10_000)
        groups = [run.group(index, rng.randint(1, 3)) for index in range(3)]
        calls = [run.start(group, fifo_key=group[0].group) for group in groups]
        dead: set[int] = set()
        while not all(call.done() for call in calls):
            await some_time(rng)
            for engine in list(dead):
                if engine not in run.router.open_engines and rng.random() < 0.5:
                    await run.revive_engine(engine)
                    dead.discard(engine)
            if rng.random() < 0.4 and (alive := set(range(count)) - dead):
                engine = rng.choice(sorted(alive))
                run.kill_engine(engine)
                run.router.mark_dead(engine)
                dead.add(engine)
        await asyncio.gather(*calls)
        samples = [sample for group in groups for sample in group]
        for sample in samples:
            assert (sample.state, sample.tries) == ("scored", 1)
            assert_undisturbed(run, sample)
            path = run.moves.of(sample.id)
            assert_valid(path)
            assert path.count("scoring") == path.count("scored") == 1
        for engine in dead:
            await run.revive_engine(engine)
        run.assert_idle()
        await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())


def test_slots_on_a_dead_engine_are_gone_with_it() -> None:
    async def main() -> None:
        run = await party(2, max_running=2)
        calls = [run.start(run.group(index)) for index in range(2)]
        await until(lambda: len(run.running) == 4)
        run.kill_engine(0)
        await until(lambda: run.router.waiting == 2)  # the other one is full
        assert [run.router.running(engine) for engine in range(2)] == [0, 2]
        run.answer()
        await until(lambda: len(run.running) == 2)
        run.answer()
        await asyncio.gather(*calls)
        run.assert_idle()

    go(main())


# rollout workers that die


def test_the_leases_of_a_dead_worker_start_again_elsewhere() -> None:
    async def main() -> None:
        run = await party(2, 2, max_attempts=3)
        groups = [run.group(index) for index in range(2)]
        calls = [run.start(group) for group in groups]
        await until(lambda: len(run.running) == 4)
        run.answer("0.1", text="no")
        await until(lambda: groups[0][1].state == "scored")
        run.kill_worker(0)
        await until(lambda: [s.tries for s in groups[0]] == [2, 2])
        assert [(s.tokens, s.finish, s.newest) for s in groups[0]] == [(0, None, None)] * 2
        await until(lambda: {s.state for s in groups[0]} == {"generating"})
        assert run.pool.tokens._locations["0.0"][0] == 1
        run.answer()
        await asyncio.gather(*calls)
        assert [(s.state, s.reward, s.tries) for s in groups[0]] == [("scored", 1.0, 2)] * 2
        assert [s.tries for s in groups[1]] == [1, 1]
        reason = "rollout worker died: rollout[0]"
        anew = ["queued", "generating", "scoring", "scored"]
        assert run.moves.of("0.0") == ["queued", "generating", "failed", *anew]
        assert run.moves.of("0.1") == ["queued", "generating", "scoring", "scored", *anew]
        assert run.moves.reasons("0.0")[2:4] == [("failed", reason), ("queued", reason)]
        assert run.moves.infos("0.0")[3] == ("queued", {"try": 2})
        run.assert_idle()

    go(main())


def test_the_requests_of_a_dead_worker_do_not_keep_its_samples_from_starting_again() -> None:
    async def main() -> None:
        run = await party(1, 2)
        samples = run.group(0)
        call = run.start(samples)
        await until(lambda: len(run.running) == 2)
        run.toys[0].pace_s = 0.5
        run.kill_worker(0)  # its requests are still with the engine, which has nobody to tell
        await call
        assert [(s.state, s.tries, s.reason) for s in samples] == [("scored", 2, "")] * 2
        for sample in samples:
            assert_undisturbed(run, sample)

    go(main())


def test_a_worker_that_is_started_again_hears_nothing_of_its_earlier_life() -> None:
    async def main() -> None:
        run = await party(1, 1)
        samples = run.group(0)
        call = run.start(samples)
        await until(lambda: len(run.running) == 2)
        run.toys[0].draw("0.0", 55, 56)
        run.kill_worker(0)
        await asyncio.sleep(1)
        run.toys[0].finish("0.0", spoken("old"))
        run.toys[0].finish("0.1", spoken("old"))
        await run.revive_worker(0)
        await until(lambda: len(run.running) == 2)
        await asyncio.sleep(10)
        run.answer()
        await call
        assert [(s.state, s.reward) for s in samples] == [("scored", 1.0)] * 2
        assert await run.pool.tokens.texts(samples) == ["4", "4"]

    go(main())


def test_without_tries_left_the_samples_of_a_dead_worker_have_failed() -> None:
    async def main() -> None:
        run = await party(2, 2, max_attempts=1)
        groups = [run.group(index, 3) for index in range(2)]
        calls = [run.start(group) for group in groups]
        await until(lambda: len(run.running) == 6)
        run.answer("0.1")
        await until(lambda: groups[0][1].state == "scored")
        run.kill_worker(0)
        await calls[0]
        assert {(s.state, s.reason) for s in groups[0]} == {("failed", "rollout worker died: rollout[0]")}
        for sample in groups[0]:
            assert_valid(run.moves.of(sample.id))
        run.answer()  # also what the dead one asked for
        await calls[1]
        assert {s.state for s in groups[1]} == {"scored"}

    go(main())


@pytest.mark.parametrize("error", ["died", "hangs"])
def test_a_worker_that_does_not_answer_is_reported_and_does_not_get_leases(error: str) -> None:
    async def main() -> None:
        run = await party(1, 2, says="4", max_attempts=2)
        told: list[tuple[int, str]] = []
        run.pool.on_worker_died = lambda worker, reason: told.append((worker, reason))
        if error == "died":
            run.crew.kill(0)
        else:

            async def hang(*call: Any) -> None:
                await asyncio.sleep(5)
                raise CallTimedOut("rollout[0]", "a poll for results", 5)

            run.crew.handles[0].stream = hang  # type: ignore[method-assign]
        groups = [run.group(index) for index in range(3)]
        await asyncio.gather(*(run.start(group) for group in groups))
        assert {s.state for group in groups for s in group} == {"scored"}
        assert {run.pool.tokens.locate(s) for group in groups for s in group} == {1}
        assert told
        assert {worker for worker, _ in told} == {0}
        assert ("killed" if error == "died" else "has not answered") in told[0][1]
        later = run.group(7)
        await run.start(later)
        assert later[0].tries == 1

    go(main())


def test_leases_wait_while_no_worker_is_there() -> None:
    async def main() -> None:
        run = await party(1, 1, says="4")
        run.kill_worker(0)
        samples = run.group(0)
        call = run.start(samples)
        await asyncio.sleep(30)
        assert not call.done()
        await run.revive_worker(0)
        await call
        assert [(s.state, s.tries) for s in samples] == [("scored", 1)] * 2
        run.assert_idle()

    go(main())


def test_a_sample_that_was_dropped_does_not_start_again_with_its_group() -> None:
    async def main() -> None:
        run = await party(1, 2)
        samples = run.group(0, 3)
        call = run.start(samples)
        await until(lambda: len(run.running) == 3)
        assert run.pool.send_command(SampleCommand("0.1", "drop", "not wanted"))
        await until(lambda: samples[1].state == "dropped")
        run.kill_worker(0)
        await asyncio.sleep(1)
        assert run.running == {"0.0", "0.2"}
        run.answer()
        await call
        assert [s.state for s in samples] == ["scored", "dropped", "scored"]
        assert samples[1].reason == "not wanted"
        run.assert_idle()

    go(main())


@given(seed=st.integers(0, 10**6))
@timings(60)
def test_whenever_workers_die_every_sample_ends_once(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        workers, tries = rng.randint(1, 3), rng.randint(1, 4)
        run = await party(2, workers, pace_s=0.3, max_attempts=tries, deadline_s=10_000)
        groups = [run.group(index, rng.randint(1, 3)) for index in range(3)]
        calls = [run.start(group) for group in groups]
        dead: set[int] = set()
        for _ in range(rng.randint(1, 4)):
            await some_time(rng)
            for worker in list(dead):
                if rng.random() < 0.5:
                    await run.revive_worker(worker)
                    dead.discard(worker)
            if alive := sorted(set(range(workers)) - dead):
                worker = rng.choice(alive)
                dead.add(worker)
                run.kill_worker(worker)
        for worker in dead:
            await run.revive_worker(worker)
        await asyncio.gather(*calls)
        samples = [sample for group in groups for sample in group]
        for sample in samples:
            path = run.moves.of(sample.id)
            assert_valid(path)
            assert path.count("failed") == 0 or sample.tries > 1
            if sample.state == "scored":
                assert sample.tries <= tries
                if any(sample.id in worker._samples for worker in run.workers):  # else it was lost since
                    assert_undisturbed(run, sample)
            else:
                assert (sample.state, sample.reason[:19]) == ("failed", "rollout worker died")
        await run.pool.tokens.release(samples)
        await asyncio.sleep(100)  # what dead workers asked of engines ends by itself
        run.assert_empty()

    go(main())


# interfering


def test_a_sample_that_is_not_out_cannot_be_stopped() -> None:
    async def main() -> None:
        run = await party(says="4")
        assert not run.pool.send_command(SampleCommand("0.0", "drop", "?"))
        samples = run.group(0)
        await run.start(samples)
        assert not run.pool.send_command(SampleCommand("0.0", "drop", "?"))
        assert samples[0].state == "scored"

    go(main())


@pytest.mark.parametrize("how", ["end", "requeue", "drop"])
def test_dropping_a_sample_frees_its_slot_and_leaves_its_siblings_alone(how: Any) -> None:
    async def main() -> None:
        run = await party(1)
        samples = run.group(0, 3)
        call = run.start(samples)
        await until(lambda: len(run.running) == 3)
        run.toys[0].draw("0.1", *spoken("4")[:1])
        run.router.pause_admission(True)
        assert run.pool.send_command(SampleCommand("0.1", how, "by hand"))
        await until(lambda: "0.1" not in run.running)
        await asyncio.sleep(1)
        assert run.router.running(0) == 2
        run.router.pause_admission(False)
        await asyncio.sleep(1)
        assert run.running == {"0.0", "0.2"} | ({"0.1"} if how == "requeue" else set())
        assert run.router.running(0) == len(run.running)
        run.toys[0].finish("0.1", [END]) if how == "requeue" else None
        run.answer("0.0", "0.2")
        await call
        expected = {"end": ("scored", "ended"), "requeue": ("scored", "stop"), "drop": ("dropped", None)}[how]
        assert (samples[1].state, samples[1].finish) == expected
        assert samples[1].reward == float(how != "drop")
        assert [(s.state, s.finish) for s in (samples[0], samples[2])] == [("scored", "stop")] * 2
        assert "by hand" in [reason for _, reason in run.moves.reasons("0.1")]
        await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())


def test_the_transitions_show_which_samples_are_paused() -> None:
    async def main() -> None:
        run = await party(2, 2)
        groups = [run.group(index) for index in range(2)]
        calls = [run.start(group) for group in groups]
        await until(lambda: {s.state for group in groups for s in group} == {"generating"})
        assert run.pool.busy
        await run.pool.pause()
        await until(lambda: {s.state for group in groups for s in group} == {"paused"})
        await run.pool.resume()
        await until(lambda: {s.state for group in groups for s in group} == {"generating"})
        run.answer()
        await asyncio.gather(*calls)
        assert run.moves.of("1.1") == ["queued", "generating", "paused", "generating", "scoring", "scored"]
        assert not run.pool.busy

    go(main())


def test_pausing_and_displacing_pass_over_workers_that_are_gone() -> None:
    async def main() -> None:
        run = await party(1, 2)
        call = run.start(run.group(0))
        await until(lambda: len(run.running) == 2)
        run.crew.kill(1)
        await run.pool.pause()
        await run.pool.resume()
        await run.pool.requeue_generating("off")
        run.answer()
        await until(lambda: run.running or call.done())
        run.answer()
        await call

    go(main())


@pytest.mark.parametrize("engine", [None, 0])
def test_requeued_samples_get_slots_again_and_resume_from_their_prefix(engine: int | None) -> None:
    async def main() -> None:
        run = await party(2, 2, pace_s=1.0, max_new_tokens=30)
        groups = [run.group(index) for index in range(2)]
        calls = [run.start(group) for group in groups]
        await asyncio.sleep(1.7)
        on = {id for toy in (run.toys if engine is None else run.toys[:1]) for id in toy.running}
        run.router.close_engine(0)  # as when its device is needed
        await run.pool.requeue_generating("its device is needed", engine)
        await run.router.drain(0)
        assert not run.toys[0].running
        await asyncio.gather(*calls)
        off = {s.id for group in groups for s in group if "queued" in run.moves.of(s.id)[1:]}
        assert off == on
        assert all(asked.id not in off for asked in run.toys[0].asked[2:])
        for group in groups:
            for sample in group:
                assert_undisturbed(run, sample, 30)
        run.router.add_engine(0)
        run.assert_idle()

    go(main())


def test_while_too_many_wait_for_verdicts_nothing_new_begins() -> None:
    async def main() -> None:
        run = await party(1, max_scoring=2)
        run.judges[0].gate.clear()
        first = run.start(run.group(0))
        await until(lambda: len(run.running) == 2)
        run.answer("0.0")
        await until(lambda: run.moves.of("0.0")[-1] == "scoring")
        second = run.start(run.group(1))
        await until(lambda: "1.0" in run.running)  # one waits, and two may
        run.answer("0.1")
        await until(lambda: run.moves.of("0.1")[-1] == "scoring")
        third = run.start(run.group(2))
        await asyncio.sleep(50)
        assert run.running == {"1.0", "1.1"}
        run.judges[0].gate.set()
        await until(lambda: "2.0" in run.running)
        assert run.pool.take_backpressure_s() == pytest.approx(50, abs=1)
        assert run.pool.take_backpressure_s() == 0.0
        run.answer()
        await asyncio.gather(first, second, third)
        run.assert_idle()

    go(main())


def test_the_seconds_of_a_full_queue_are_counted_once_while_they_last() -> None:
    async def main() -> None:
        run = await party(1, max_scoring=1, says="4")
        run.judges[0].gate.clear()
        call = run.start(run.group(0, 1))
        await until(lambda: run.pool._scoring == 1)
        await asyncio.sleep(10)
        assert run.pool.take_backpressure_s() == pytest.approx(10, abs=0.5)
        await asyncio.sleep(5)
        assert run.pool.take_backpressure_s() == pytest.approx(5, abs=0.5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert run.pool.take_backpressure_s() == pytest.approx(0, abs=0.5)
        run.judges[0].gate.set()
        await run.start(run.group(1, 1))  # nobody is kept waiting by what was cancelled
        run.assert_idle()

    go(main())


def test_admission_paused_for_two_reasons_is_paused_until_both_are_gone() -> None:
    """Verdicts are waited for and new weights are published: each of them holds what is new, and lets go for itself."""

    async def main() -> None:
        run = await party(1, max_scoring=1, says="4")
        run.judges[0].gate.clear()
        calls = [run.start(run.group(0, 1))]
        await until(lambda: run.pool._scoring == 1)
        run.router.pause_admission(True)
        run.router.pause_admission(False)
        calls.append(run.start(run.group(1, 1)))
        await asyncio.sleep(5)
        assert run.toys[0].submitted == ["0.0"]
        run.router.pause_admission(True)
        run.judges[0].gate.set()
        await asyncio.sleep(5)
        assert run.toys[0].submitted == ["0.0"]
        run.router.pause_admission(False)
        await asyncio.gather(*calls)

    go(main())


def test_no_slot_is_leaked_when_environments_fail_again_and_again() -> None:
    def trouble(method: str, episode: str) -> None:
        raise EnvFailure("crashed", "boom")

    async def main() -> None:
        run = await party(1, max_attempts=4)
        run.envs[0].trouble = trouble
        samples = run.group(0, task=episode_of(1.0))
        await run.start(samples)
        assert [(s.state, s.tries, s.kills) for s in samples] == [("failed", 4, 4)] * 2
        run.assert_idle()

    go(main())


def test_a_sample_has_one_slot_however_often_it_starts_again() -> None:
    async def main() -> None:
        run = await party(1, max_attempts=4)
        failures = 0

        def trouble(method: str, episode: str) -> None:
            nonlocal failures
            if episode.startswith("0.0") and failures < 3:
                failures += 1
                raise EnvFailure("crashed", "boom")

        run.envs[0].trouble = trouble
        samples = run.group(0, task=episode_of(1.0))
        call = run.start(samples)
        await until(lambda: run.running == {"0.0", "0.1"})
        await asyncio.sleep(5)
        assert (samples[0].tries, run.router.running(0)) == (4, 2)
        run.answer("0.0")
        await until(lambda: samples[0].state == "scored")
        assert run.router.running(0) == 1
        run.answer()
        await call
        run.assert_idle()

    go(main())


def test_an_episode_that_starts_again_reserves_one_slot() -> None:
    async def main() -> None:
        run = await party(1, 1, max_attempts=2)
        failures = 0

        def trouble(method: str, episode: str) -> None:
            nonlocal failures
            if failures < 1:
                failures += 1
                raise EnvFailure("lost", "gone")

        run.envs[0].trouble = trouble
        samples = run.group(0, 1, task=episode_of(1.0))
        call = run.start(samples)
        await until(lambda: run.running)
        await asyncio.sleep(5)
        assert run.moves.of("0.0") == ["queued", "acting", "failed", "queued", "acting", "generating"]
        assert (run.router.running(0), run.router.waiting) == (1, 0)
        run.answer()
        await call
        run.assert_idle()

    go(main())


def test_a_failed_sample_waits_for_no_slot() -> None:
    async def main() -> None:
        run = await party(1, max_running=2, max_attempts=2)
        samples = run.group(0, task=episode_of(1.0))
        call = run.start(samples)
        await until(lambda: run.running == {"0.0", "0.1"})
        run.router.pause_admission(True)

        def trouble(method: str, episode: str) -> None:
            if episode.startswith("0.0"):
                raise EnvFailure("lost", "gone")

        run.envs[0].trouble = trouble
        run.answer("0.0")  # fails twice, without having used the place it waits for
        await until(lambda: samples[0].state == "failed" and samples[0].tries == 2)
        await asyncio.sleep(5)
        assert run.router.waiting == 0
        run.router.pause_admission(False)
        await asyncio.sleep(5)
        assert run.router.running(0) == 1
        run.answer()
        await call
        assert [s.state for s in samples] == ["failed", "scored"]
        run.assert_idle()

    go(main())


def test_an_episode_releases_its_slot_while_it_acts_and_continues_on_its_engine() -> None:
    async def main() -> None:
        run = await party(2)
        run.envs[0].gate.clear()
        samples = run.group(0, task=episode_of(0.5, 0.5))
        call = run.start(samples)
        await until(lambda: {s.state for s in samples} == {"acting"})
        assert [run.router.running(engine) for engine in range(2)] == [0, 0]
        run.envs[0].gate.set()
        for _ in range(2):
            await until(lambda: {s.state for s in samples} == {"generating"})
            assert [run.router.running(engine) for engine in range(2)] == [2, 0]
            assert sorted(run.toys[0].running) == ["0.0", "0.1"]
            run.envs[0].gate.clear()
            run.answer()
            await until(lambda: {s.state for s in samples} == {"acting"})
            assert [run.router.running(engine) for engine in range(2)] == [0, 0]
            run.envs[0].gate.set()
        await call
        assert [(s.state, s.reward, s.turns) for s in samples] == [("scored", 1.0, 2)] * 2
        assert run.moves.of("0.0") == ["queued", "acting", *["generating", "acting"] * 2, "scoring", "scored"]
        await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())


def test_an_episode_whose_engine_was_taken_away_while_it_acted_continues_on_another() -> None:
    async def main() -> None:
        run = await party(2)
        samples = run.group(0, 1, task=episode_of(0.5, 0.5))
        call = run.start(samples)
        await until(lambda: run.running)
        run.envs[0].gate.clear()
        run.answer()
        await until(lambda: samples[0].state == "acting")
        run.router.close_engine(0)
        await run.pool.requeue_generating("its device is needed", 0)
        await run.router.drain(0)
        run.envs[0].gate.set()
        await until(lambda: run.toys[1].running)
        assert not run.toys[0].running
        assert ("queued", "its engine was taken away meanwhile") in run.moves.reasons("0.0")
        run.answer()
        await call
        assert (samples[0].state, samples[0].turns, samples[0].tries) == ("scored", 2, 1)
        run.router.add_engine(0)
        run.assert_idle()

    go(main())


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1, 0.2, 0.3, 1.0])
def test_an_engine_that_was_left_has_nothing_to_do_whatever_came_back_from_its_environment(after_s: float) -> None:
    async def main() -> None:
        run = await party(2)
        run.envs[0].gate.clear()
        samples = run.group(0, 1, task=episode_of(0.5))
        call = run.start(samples)
        await until(lambda: samples[0].state == "acting")
        await asyncio.sleep(1)
        handle: Any = run.engines._handles[0]
        call_on = handle.call

        async def slow(method: str, args: Any, kwargs: Any) -> Any:
            await asyncio.sleep(0.02 if method == "abort" else 0.0)
            return await call_on(method, args, kwargs)

        handle.call = slow
        run.envs[0].gate.set()
        await asyncio.sleep(after_s)
        run.router.close_engine(0)
        await run.pool.requeue_generating("its device is needed", 0)
        await run.router.drain(0)
        assert not run.toys[0].running
        await until(lambda: run.toys[1].running)
        run.answer()
        await call

    go(main())


# everything at once


def watch_slots(run: Party) -> None:
    """Asserts that a sample has its slot where it generates, whenever the pool records that it does."""
    apply = run.pool._apply_transition

    def watched(lease: Any, sample: Sample, transition: Transition) -> None:
        apply(lease, sample, transition)
        if transition.state == "generating" and sample.state == "generating" and "engine" in transition.info:
            assert sample.id not in lease.without_slot
            assert (lease.reassigned.get(sample.id) or lease.reservation).engine == transition.info["engine"]

    run.pool._apply_transition = watched  # type: ignore[method-assign]


@given(seed=st.integers(0, 10**6))
@timings(80)
def test_whatever_happens_every_sample_ends_and_nothing_is_left(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        engine_count, worker_count = rng.randint(1, 3), rng.randint(1, 2)
        run = await party(
            engine_count,
            worker_count,
            pace_s=0.2,
            graders=2,
            envs=2,
            max_attempts=rng.randint(1, 3),
            max_running=rng.choice([0, 1, 3]),
            max_scoring=rng.choice([0, 1, 4]),
            deadline_s=10_000,
        )
        for toy in run.toys:
            toy.context = 10**6

        def trouble(method: str, episode: str) -> None:
            if rng.random() < 0.1:
                raise EnvFailure(rng.choice(["lost", "crashed", "raised"]), "boom")

        for env in run.envs:
            env.trouble = trouble
        watch_slots(run)
        groups = [
            run.group(index, rng.randint(1, 3), task=episode_of(0.5, 0.5) if rng.random() < 0.3 else None)
            for index in range(4)
        ]
        calls = [run.start(group, fifo_key=group[0].group, priority=rng.randrange(2)) for group in groups]
        samples = [sample for group in groups for sample in group]
        dead_engines: set[int] = set()
        dead_workers: set[int] = set()
        cancelled: set[int] = set()
        for _ in range(rng.randint(0, 25)):
            await some_time(rng)
            if all(call.done() for call in calls):
                break
            what = rng.choice(["stop", "stop", "displace", "pause", "engine", "worker", "cancel", "hold", "grader"])
            if what == "stop":
                how: Any = rng.choice(["end", "requeue", "requeue", "drop"])
                run.pool.send_command(SampleCommand(rng.choice(samples).id, how, how))
            elif what == "displace":
                await run.pool.requeue_generating("off", rng.choice([None, *range(engine_count)]))
            elif what == "pause":
                await run.pool.pause()
                await some_time(rng)
                await run.pool.resume()
            elif what == "engine":
                engine = rng.randrange(engine_count)
                if engine in dead_engines:
                    await run.revive_engine(engine)
                else:
                    run.kill_engine(engine)
                    run.router.mark_dead(engine)
                dead_engines ^= {engine}
            elif what == "worker" and rng.random() < 0.3:
                worker = rng.randrange(worker_count)
                if worker in dead_workers:
                    await run.revive_worker(worker)
                else:
                    run.kill_worker(worker)
                dead_workers ^= {worker}
            elif what == "cancel" and rng.random() < 0.2:
                number = rng.randrange(len(calls))
                calls[number].cancel()
                cancelled.add(number)
            elif what == "hold":
                run.judges[0].gate.clear()
                await some_time(rng)
                run.judges[0].gate.set()
            elif what == "grader" and rng.random() < 0.3:
                run.graders._handles[0].kill()  # type: ignore[attr-defined]
        for engine in dead_engines:
            await run.revive_engine(engine)
        for worker in dead_workers:
            await run.revive_worker(worker)
        for number, result in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            assert result is None or (number in cancelled and isinstance(result, asyncio.CancelledError)), result
        for sample in samples:
            assert_valid(run.moves.of(sample.id))
            assert sample.state in ("scored", "failed", "dropped") or sample.group in cancelled
            whole = sample.state == "scored" and sample.task.environment is None and sample.finish != "ended"
            if whole and any(
                sample.id in worker._samples for worker in run.workers
            ):  # else it was lost since, or cancelled
                assert_undisturbed(run, sample)
        await asyncio.sleep(100)  # what dead workers asked of engines ends by itself
        run.assert_idle()
        await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())
