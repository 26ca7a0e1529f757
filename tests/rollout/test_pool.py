"""The pool: leases out to rollout workers, outcomes back, tokens left where they are."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import END, Party, ToyRunner, failure, go, party, rollouts, spoken, turns, until

import roll.rollout.worker
from roll.cluster import Place, Worker
from roll.cluster.executor import LocalHandle
from roll.config.errors import RunError
from roll.data import Response, Sample, Task, columns
from roll.data.columns import Block
from roll.rollout.lifecycle import MOVES, Lifecycle
from roll.rollout.messages import Outcome, Report
from roll.rollout.pool import RolloutPool
from roll.rollout.router import Router
from roll.rollout.worker import RolloutWorker
from roll.run import RunFolder, Transition, read_samples


def drawn(run: Party, samples: list[Sample]) -> list[Sample]:
    """The samples as their workers have them, with their tokens."""
    home = {id: sample for worker in run.workers for id, sample in worker._home.items()}
    return [home[sample.id] for sample in samples]


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
        assert await run.pool.texts(samples[::-1]) == ["five", "4"]
        for sample in samples:
            assert run.moves.of(sample.id) == ["queued", "generating", "scoring", "scored"]
            assert (len(sample.log), sample.response) == (0, None)
        infos = [record.info for record in run.moves.records if record.sample == "3.1"]
        assert infos == [{}, {}, {"tokens": 5, "finish": "stop"}, {"reward": 0.0}]
        run.assert_idle()
        await run.pool.forget(samples)
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
        assert await run.pool.texts(samples) == ["", "", ""]
        run.toys[0].context = 1000
        more = run.group(1)
        call = run.start(more)
        await until(lambda: len(run.running) == 2)
        run.answer("1.0", text="no")
        run.answer("1.1")
        await call
        assert [(s.state, s.reason) for s in more] == [("failed", "reward raised: KeyError: 'answer'"), ("scored", "")]
        assert run.moves.of("1.0") == ["queued", "generating", "scoring", "failed"]
        await run.pool.forget([*samples, *more])
        run.assert_empty()

    go(main())


def test_a_lease_that_is_done_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        run = await party(says="4")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await run.start(run.group(0))
        assert loop.time() - began < 5

    monkeypatch.setattr(roll.rollout.worker, "GATHER_S", 10)
    monkeypatch.setattr(roll.rollout.worker, "POLL_S", 10)
    go(main())


def test_moves_are_heard_of_while_the_lease_still_runs() -> None:
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


def test_leases_issued_together_travel_together() -> None:
    async def main() -> None:
        run = await party()
        taken: list[list[str]] = []
        take = run.workers[0].take
        run.workers[0].take = lambda leases: taken.append([lease.key for lease in leases]) or take(leases)  # type: ignore
        calls = [run.start(run.group(index)) for index in range(5)]
        await until(lambda: len(run.running) == 10)
        assert taken == [["0", "1", "2", "3", "4"]]
        run.answer()
        await asyncio.gather(*calls)

    go(main())


def test_a_key_can_be_out_once_only_even_if_both_wait_for_an_engine() -> None:
    async def main() -> None:
        run = await party()
        await run.router.leave(0)
        first, second = run.start(run.group(0), "key"), run.start(run.group(1), "key")
        await turns()
        run.router.join(0)
        with pytest.raises(ValueError, match="the lease 'key' is out already"):
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
@settings(max_examples=40, derandomize=True, deadline=None)
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
                assert all(after in MOVES[before] for before, after in zip(["new", *path], path, strict=False))
                expected = ("failed", 0.0) if texts[sample.id] == "bad" else ("scored", float(len(texts[sample.id])))
                assert (sample.state, sample.reward) == expected
                assert path == ["queued", "generating", "scoring", sample.state]
                assert sample.response_tokens == len(spoken(texts[sample.id]))
        run.assert_idle()
        await run.pool.forget([sample for group in groups for sample in group])
        run.assert_empty()

    go(main())


def test_outcomes_of_strangers_are_ignored() -> None:
    async def main() -> None:
        run = await party()
        samples = run.group(0)
        call = run.start(samples)
        await until(lambda: len(run.running) == 2)
        run.workers[0]._outbox.report.outcomes.append(Outcome("9.9", 1.0, {}, 1, 1, "stop"))
        run.workers[0]._outbox.report.done.append("9")
        run.workers[0]._outbox.append(Transition("9.9", "scored"))
        run.answer()
        await call
        assert set(run.moves.last()) == {"0.0", "0.1"}

    go(main())


def test_a_move_that_cannot_be_fails_the_workers_leases_instead_of_hanging_them() -> None:
    async def main() -> None:
        run = await party(1, 2)
        calls = [run.start(run.group(index)) for index in range(2)]
        await until(lambda: len(run.running) == 4)
        run.workers[0]._outbox.append(Transition("0.0", "trained"))
        with pytest.raises(AssertionError, match=r"sample 0\.0 cannot go from"):
            await calls[0]
        run.answer()
        await calls[1]
        await run.workers[0].close()

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
        homes = [run.pool._homes[group[0].id][0] for group in groups]
        assert homes == [0, 1, 2, 1, 2]
        assert run.pool._loads == [4, 3, 3]
        assert run.router._loads == [4 * 8 + 1 * 8, 1 * 8 + 2 * 8 + 2 * 8]
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
        await run.router.leave(0)
        call = run.start(run.group(0))
        await turns(30)
        assert not run.running
        run.router.join(0)
        await until(lambda: len(run.running) == 2)
        leaving = asyncio.create_task(run.router.leave(0))
        await turns()
        assert not leaving.done()
        run.answer()
        await call
        await leaving
        assert not run.running

    go(main())


# cancelling


@pytest.mark.parametrize("after", [*range(12), 40])
def test_a_cancelled_lease_is_nowhere_whenever_it_is_cancelled_and_can_be_given_out_again(after: int) -> None:
    async def main() -> None:
        run = await party()
        call, other = run.start(run.group(0)), run.start(run.group(1))
        await turns(after)
        await cancel(call)
        await until(lambda: len(run.running) == 2)
        assert {id.partition(".")[0] for id in run.running} == {"1"}
        assert "0" not in run.workers[0]._held
        assert run.router._loads == [16]
        again = run.group(0)  # the same samples from their beginning
        call = run.start(again)
        await until(lambda: len(run.running) == 4)
        run.answer()
        await asyncio.gather(call, other)
        assert [sample.state for sample in again] == ["scored", "scored"]
        await run.pool.forget([*again, *run.group(1)])
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


def test_a_lease_cancelled_when_it_is_done_but_not_reported_is_forgotten() -> None:
    async def main() -> None:
        run = await party(says="4")
        call = run.start(run.group(0))
        await until(lambda: run.workers[0]._outbox.report.done)
        await cancel(call)
        run.assert_empty()

    go(main())


def test_a_lease_that_waits_for_an_engine_can_be_cancelled() -> None:
    async def main() -> None:
        run = await party()
        await run.router.leave(0)
        call = run.start(run.group(0))
        await turns()
        await cancel(call)
        run.router.join(0)
        await turns()
        run.assert_empty()

    go(main())


def test_a_lease_cancelled_on_its_way_is_called_off_when_it_has_arrived() -> None:
    async def main() -> None:
        run = await party()
        gate = asyncio.Event()
        (handle,) = run.pool._workers._handles
        call, sent = handle.call, []

        async def slow(method: str, args: Any, kwargs: Any) -> Any:
            sent.append(method)
            if method == "take":
                await gate.wait()
            return await call(method, args, kwargs)

        handle.call = slow  # type: ignore[method-assign]
        task = run.start(run.group(0))
        await until(lambda: sent)
        task.cancel()
        await turns()
        assert sent == ["take"]
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "cancel" in sent
        await turns()
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


def test_an_unexpected_error_reaches_every_waiting_lease_of_its_worker() -> None:
    async def main() -> None:
        def outcome(sample: Sample) -> float | Exception:
            return RuntimeError("a bug") if sample.id == "0.1" else 1.0

        runner = ToyRunner(outcome, lambda sample: 5 if sample.id == "0.1" else 100_000)
        pool = await runner.pool(2)
        life = Lifecycle(None)

        def start(index: int) -> asyncio.Task[None]:
            samples = [Sample(f"{index}.{i}", Task.ask("t", "?"), index, 1.0, state="queued") for i in range(2)]
            return asyncio.create_task(pool.run(str(index), samples, life))

        calls = [start(index) for index in range(4)]  # workers 0 1 0 1
        for index in (0, 2):
            with pytest.raises(RuntimeError, match="a bug"):
                await calls[index]
        await turns()
        assert sorted(runner.cancelled) == ["0.0", "2.0", "2.1"]
        assert not calls[1].done()
        runner.outcome, runner.delay = (lambda sample: 1.0), (lambda sample: 0)
        await start(6)  # the worker goes on
        for index in (1, 3):
            await cancel(calls[index])
        assert sorted(runner.cancelled) == ["0.0", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]

    go(main())


class Dead(Worker):
    """A rollout worker that cannot be reached, from some call on."""

    def __init__(self, place: Place, dies_in: str) -> None:
        super().__init__(place)
        self._dies_in = dies_in

    def take(self, leases: Any) -> None:
        self._die("take")

    async def report(self) -> Report:
        await asyncio.sleep(0)
        self._die("report")
        return Report()

    def _die(self, method: str) -> None:
        if method == self._dies_in:
            raise RunError("rollout[0] died")


@pytest.mark.parametrize("method", ["take", "report"])
def test_a_workers_death_reaches_all_its_leases(method: str) -> None:
    async def main() -> None:
        cluster, _ = await rollouts(1)
        cluster._handles[0]._worker = Dead(Place("rollout"), method)  # type: ignore[attr-defined]
        pool = RolloutPool(cluster, Router(1, 10), 8)
        samples = [Sample(f"{i}.0", Task.ask("t", "?"), i, 1.0, state="queued") for i in range(3)]
        calls = [pool.run(str(s.group), [s], Lifecycle(None)) for s in samples]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, RunError)
            assert str(result) == "rollout[0] died"
        assert pool._loads == [0]

    go(main())


# tokens


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    workers=st.integers(1, 3),
    most=st.integers(1, 60),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, derandomize=True, deadline=None)
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
            patch.setattr(columns, "BLOCK_TOKENS", most)
            batch = await run.pool.batch(samples)
        assert batch["sample"].tolist() == [sample.id for sample in samples]
        assert batch["reward"].tolist() == [sample.reward for sample in samples]
        for name in ("ids", "loss_mask", "behaviour", "versions"):
            for row, sample in zip(batch.rows(name), drawn(run, samples), strict=True):
                assert row.tolist() == getattr(sample.log, name).tolist()
        assert most > 1 or len(batch.blocks) == len(samples)

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
        await run.pool.write(7, samples)
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
        await run.pool.write(7, samples[:2])  # a step that is done again
        assert [row["sample"] for row in read_samples(folder, 7)] == ["0.0", "0.1"]

    go(main())


def test_what_is_forgotten_is_gone_and_the_rest_stays() -> None:
    async def main() -> None:
        run = await party(1, 2, says="4")
        groups = [run.group(index) for index in range(4)]
        await asyncio.gather(*(run.start(group) for group in groups))
        await run.pool.forget([*groups[1], *groups[2]])
        kept = {sample.id for group in (groups[0], groups[3]) for sample in group}
        assert {id for worker in run.workers for id in worker._home} == set(run.pool._homes) == kept
        assert len(await run.pool.texts(groups[3])) == 2
        await run.pool.forget([*groups[0], *groups[3]])
        run.assert_empty()

    go(main())


def test_a_worker_says_what_it_was_not_told_where_to_write() -> None:
    with pytest.raises(AssertionError, match="nowhere to write samples"):
        go(_write_nowhere())


async def _write_nowhere() -> None:
    _, (worker,) = await rollouts(1)
    RolloutWorker.write(worker, 0, [])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_passes_through_the_controller_does_not_grow_with_responses(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Everything said between the pool and its workers in the life of a step; blocks of tokens travel as references."""
    call, passed = LocalHandle.call, 0

    async def counted(handle: LocalHandle, method: str, args: Any, kwargs: Any) -> Any:
        nonlocal passed
        result = await call(handle, method, args, kwargs)
        if isinstance(handle._worker, RolloutWorker) and method != "connect":
            said = [None if isinstance(each, Block) else each for each in result] if method == "columns" else result
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
        batch = await run.pool.batch(samples)
        assert batch.tokens > 16 * tokens
        await run.pool.forget(samples)
        return passed

    monkeypatch.setattr(LocalHandle, "call", counted)
    short, long = go(step(10)), go(step(5_000))
    assert short > 1_000
    assert abs(long - short) < 5_000  # some reports more or less; the tokens would be 600,000
