"""The rollout scheduler: which groups a step issues and keeps is fixed by their outcomes, never by who was faster."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import END, Moves, Party, ToyRunner, go, party, some_time, tasks, timings, turns, until

from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data import Group, Sample, Task
from roll.env import EnvFailure
from roll.rollout.lifecycle import MOVES, Lifecycle
from roll.scheduler.filters import FILTERS, keep_all, make_filter, no_signal
from roll.scheduler.long_tail import TailBatching
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.rollout_result import RolloutBatch
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import BatchPolicy, EpochSampler, SamplerWrapper, TaskDraw

NO_SIGNAL = "no signal: all rewards equal"
TOO_FEW = "fewer than two samples could be judged"
TASKS = tasks(7)

Outcome = Callable[[Sample], float | str | Exception]


@dataclass
class Setting:
    """A scheduler whose samples a toy runner drives, and the ledger of their moves."""

    runner: ToyRunner
    moves: Moves
    pool: RolloutPool
    scheduler: RolloutScheduler


async def setting(
    outcome: Outcome,
    delay: Callable[[Sample], float] = lambda sample: 0,
    *,
    workers: int = 1,
    engine_count: int = 1,
    order: Any = None,
    siblings_needed: int = 2,
    **config: Any,
) -> Setting:
    moves: Any = Moves()
    runner = ToyRunner(outcome, delay)
    pool = await runner.pool(workers, engine_count, config.get("max_attempts", 1))
    scheduler = scheduler_over(pool, Lifecycle(moves), order, siblings_needed, **config)
    return Setting(runner, moves, pool, scheduler)


def scheduler_over(
    pool: RolloutPool, life: Lifecycle, order: Any = None, siblings_needed: int = 2, **config: Any
) -> RolloutScheduler:
    """A scheduler of the toy tasks, in the order that the config shapes unless another is given."""
    settings = RolloutConfig(**config)
    order = order or EpochSampler(TASKS.train, 5, batch_policy=BatchPolicy(settings.oversample, settings.batch_selection))
    keep = make_filter(settings.filter, *settings.filter_range)
    return RolloutScheduler(order, pool, life, settings, keep, siblings_needed=siblings_needed)


def spread(sample: Sample) -> float:
    """Rewards that differ within a group."""
    return float(sample.id.endswith(".0"))


# determinism


@dataclass(frozen=True)
class Plan:
    """What becomes of each group, by its index: `kept`, `flat` (no signal), or how many of its samples fail."""

    fates: list[str | int]
    wanted: int
    size: int
    replacements: float

    def fate(self, index: int) -> str | int:
        return self.fates[index % len(self.fates)]

    def outcome(self, sample: Sample) -> float | str:
        fate, number = self.fate(sample.group), int(sample.id.partition(".")[2])
        if isinstance(fate, int):
            return "broken" if number < fate else float(number)
        return float(number) if fate == "kept" else 1.0

    def drop_reason(self, index: int) -> str | None:
        fate = self.fate(index)
        if isinstance(fate, int):
            return TOO_FEW if self.size - fate < 2 else None
        return None if fate == "kept" else NO_SIGNAL

    def one_after_the_other(self, first: int) -> tuple[list[int], list[int], Counter[str]]:
        """The step's groups, those kept, and why others were not, were groups judged in the order of their index."""
        most = self.wanted + int(self.wanted * self.replacements)
        issued, kept, dropped = self.wanted, [], Counter[str]()
        position = 0
        while position < issued:
            reason = self.drop_reason(first + position)
            if reason is None:
                kept.append(first + position)
            else:
                dropped[reason] += 1
                issued = min(issued + 1, most)
            position += 1
        return list(range(first, first + issued)), kept, dropped


PLANS = st.builds(
    Plan,
    fates=st.lists(st.sampled_from(["kept", "flat", "flat", 1, 2, 3]), min_size=1, max_size=12).filter(
        lambda fates: fates != [3] * len(fates)
    ),
    wanted=st.integers(1, 5),
    size=st.just(3),
    replacements=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)


@given(plan=PLANS, seed=st.integers(0, 1000), workers=st.integers(1, 3), engine_count=st.integers(1, 2))
@settings(max_examples=examples(120), derandomize=True, deadline=None)
def test_what_is_issued_and_kept_does_not_depend_on_timing(
    plan: Plan, seed: int, workers: int, engine_count: int
) -> None:
    def delay(sample: Sample) -> float:
        return random.Random(f"{seed}/{sample.id}").choice([0, 0, 0.1, 0.2, 0.5, 0.9])

    async def main() -> None:
        config = {"groups_per_step": plan.wanted, "group_size": plan.size, "max_replacements": plan.replacements}
        run = await setting(plan.outcome, delay, workers=workers, engine_count=engine_count, **config)
        first = 0
        for _ in range(2):
            issued, kept, dropped = plan.one_after_the_other(first)
            if all(plan.fate(index) == 3 for index in issued):
                with pytest.raises(RunError, match="samples of the step failed"):
                    await run.scheduler.next_rollout()
                return
            rollout = await run.scheduler.next_rollout()
            first += len(issued)
            assert run.scheduler.next_group == first
            assert [group.index for group in rollout.groups] == issued
            assert [group.index for group in rollout.kept] == kept
            assert rollout.dropped == dropped
            scored = [f"{g}.{i}" for g in kept for i in range(plan.size) if not failed(plan, g, i)]
            assert (rollout.batch["sample"].tolist() if rollout.batch is not None else []) == scored
            assert {sample.id for sample in rollout.samples if sample.state == "kept"} == set(scored)
            assert {sample.state for sample in rollout.samples} <= {"kept", "dropped", "failed"}
            assert rollout.trained_samples == [s for g in rollout.kept for s in g.samples if s.state == "kept"]
            run.scheduler.mark_trained(rollout, 1)
            assert {s.state for s in rollout.trained_samples} <= {"trained"}
        last = run.moves.last()
        assert len(last) == first * plan.size
        assert set(last.values()) <= {"trained", "dropped", "failed"}

    go(main())


def failed(plan: Plan, group: int, number: int) -> bool:
    fate = plan.fate(group)
    return isinstance(fate, int) and number < fate


def test_the_example_of_the_docstring() -> None:
    async def main() -> None:
        flat = {1, 4}
        run = await setting(lambda s: 1.0 if s.group in flat else spread(s), groups_per_step=4, group_size=2)
        rollout = await run.scheduler.next_rollout()
        assert [group.index for group in rollout.groups] == [0, 1, 2, 3, 4, 5]
        assert [group.index for group in rollout.kept] == [0, 2, 3, 5]
        assert rollout.dropped == {NO_SIGNAL: 2}

    go(main())


def test_a_group_is_replaced_before_its_slower_siblings_are_done() -> None:
    async def main() -> None:
        run = await setting(
            lambda s: 1.0 if s.group == 0 else spread(s),
            lambda s: 50 if s.group == 1 else 0.1,
            groups_per_step=2,
            group_size=2,
        )
        call = asyncio.create_task(run.scheduler.next_rollout())
        await until(lambda: run.moves.last().get("2.0") == "scored")
        assert "1.0" in run.runner.started
        assert run.moves.last()["1.0"] in ("queued", "generating")
        rollout = await call
        assert [group.index for group in rollout.kept] == [1, 2]

    go(main())


def test_going_on_from_a_saved_state_issues_what_would_have_come() -> None:
    async def main() -> None:
        straight, resumed = [await setting(spread, groups_per_step=3, group_size=2) for _ in range(2)]
        straight.scheduler.mark_trained(await straight.scheduler.next_rollout(), 1)
        await resumed.scheduler.restore(straight.scheduler.state(), TASKS.train)
        after, again = await straight.scheduler.next_rollout(), await resumed.scheduler.next_rollout()
        assert [(g.index, g.task.id) for g in after.groups] == [(g.index, g.task.id) for g in again.groups]
        assert [g.index for g in after.groups] == [3, 4, 5]

    go(main())


# filters


def group(*rewards: float | None) -> Group:
    members = [
        Sample(f"0.{i}", TASKS.train[0], 0, 1.0, reward=reward or 0.0, state="failed" if reward is None else "scored")
        for i, reward in enumerate(rewards)
    ]
    return Group(0, TASKS.train[0], members)


def test_a_group_has_signal_if_two_of_its_scored_samples_differ() -> None:
    assert no_signal(group(1.0, 0.0)) is None
    assert no_signal(group(1.0, 1.0, 0.5)) is None
    assert no_signal(group(0.0, 0.0)) == NO_SIGNAL
    assert no_signal(group(1.0, None, 1.0)) == NO_SIGNAL  # a failed sample's reward is not a reward
    assert keep_all(group(0.0, 0.0)) is None
    assert set(FILTERS) == {"no_signal", "none"}


def test_without_a_filter_equal_rewards_are_kept() -> None:
    async def main() -> None:
        run = await setting(lambda s: 1.0, groups_per_step=2, group_size=2, filter="none")
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.groups] == [g.index for g in rollout.kept] == [0, 1]

    go(main())


@pytest.mark.parametrize("name", ["none", "no_signal"])
def test_a_group_with_one_judged_sample_is_dropped_whatever_the_filter(name: str) -> None:
    async def main() -> None:
        run = await setting(
            lambda s: "broken" if s.group == 0 and s.id != "0.1" else spread(s),
            groups_per_step=1,
            group_size=3,
            filter=name,
        )
        rollout = await run.scheduler.next_rollout()
        assert rollout.dropped == {TOO_FEW: 1}
        assert [g.index for g in rollout.kept] == [1]
        assert [sample.state for sample in rollout.groups[0].samples] == ["failed", "dropped", "failed"]
        assert rollout.groups[0].samples[1].reason == TOO_FEW

    go(main())


def test_where_siblings_are_not_compared_one_judged_sample_is_enough() -> None:
    async def main() -> None:
        run = await setting(
            lambda s: "broken" if s.group == 0 or s.id == "1.0" else spread(s),
            siblings_needed=1,
            groups_per_step=2,
            group_size=2,
            filter="none",
        )
        rollout = await run.scheduler.next_rollout()
        assert rollout.dropped == {"no sample could be judged": 1}
        assert rollout.batch is not None
        assert rollout.batch["sample"].tolist() == ["1.1", "2.0", "2.1"]

    go(main())


def test_groups_of_one_are_trained_on_where_siblings_are_not_compared() -> None:
    async def main() -> None:
        run = await setting(lambda s: 0.0, siblings_needed=1, groups_per_step=3, group_size=1, filter="none")
        rollout = await run.scheduler.next_rollout()
        assert [sample.id for sample in rollout.trained_samples] == ["0.0", "1.0", "2.0"]
        assert rollout.dropped == {}
        run.scheduler.mark_trained(rollout, 1)
        assert set(run.moves.last().values()) == {"trained"}

    go(main())


def test_a_step_without_any_signal_gives_no_batch() -> None:
    async def main() -> None:
        run = await setting(lambda s: 0.0, groups_per_step=3, group_size=2, max_replacements=0.5)
        rollout = await run.scheduler.next_rollout()
        assert (rollout.batch, rollout.kept, len(rollout.groups)) == (None, [], 4)
        assert rollout.dropped == {NO_SIGNAL: 4}
        assert set(run.moves.last().values()) == {"dropped"}

    go(main())


# failures


def test_a_step_whose_samples_all_fail_names_the_commonest_reason() -> None:
    async def main() -> None:
        run = await setting(lambda s: "rare" if s.id == "0.0" else "no grader", groups_per_step=2, group_size=2)
        with pytest.raises(RunError, match=r"all 8 samples of the step failed.*the reason of 7 of them: no grader"):
            await run.scheduler.next_rollout()
        assert set(run.moves.last().values()) == {"failed"}

    go(main())


def test_failed_samples_are_left_out_of_a_kept_group() -> None:
    async def main() -> None:
        run = await setting(lambda s: "broken" if s.id == "0.1" else spread(s), groups_per_step=1, group_size=4)
        rollout = await run.scheduler.next_rollout()
        assert rollout.batch is not None
        assert rollout.batch["sample"].tolist() == ["0.0", "0.2", "0.3"]
        assert run.moves.of("0.1") == ["queued", "generating", "failed"]
        assert run.moves.of("0.0")[-1] == "kept"

    go(main())


def test_an_error_that_is_nobodys_sample_ends_the_step_and_everything_in_it() -> None:
    async def main() -> None:
        run = await setting(
            lambda s: RunError("the engine died") if s.id == "1.1" else spread(s),
            lambda s: 0.1 if s.id == "1.1" else 500,
            groups_per_step=3,
            group_size=3,
        )
        with pytest.raises(RunError, match="the engine died"):
            await run.scheduler.next_rollout()
        await turns()
        assert sorted(run.runner.cancelled) == ["0.0", "0.1", "0.2", "1.0", "1.2", "2.0", "2.1", "2.2"]

    go(main())


def test_an_error_at_one_rollout_worker_ends_what_runs_at_the_others() -> None:
    async def main() -> None:
        run = await setting(
            lambda s: RunError("the engine died") if s.id == "1.1" else spread(s),
            lambda s: 0.1 if s.id == "1.1" else 1000,
            workers=3,
            groups_per_step=3,
            group_size=2,
        )
        with pytest.raises(RunError, match="the engine died"):
            await run.scheduler.next_rollout()
        await turns()
        assert sorted(run.runner.cancelled) == ["0.0", "0.1", "1.0", "2.0", "2.1"]

    go(main())


def test_errors_of_several_groups_at_once_leave_no_complaint_behind() -> None:
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        run = await setting(lambda s: RunError("the engine died"), groups_per_step=3, group_size=3)
        with pytest.raises(RunError, match="the engine died"):
            await run.scheduler.next_rollout()
        gc.collect()

    go(main())
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("after", [*range(8), 30])
def test_a_cancelled_step_leaves_nothing_running(after: int) -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: 1000, groups_per_step=3, group_size=2)
        call = asyncio.create_task(run.scheduler.next_rollout())
        await turns(after)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await turns(20)
        assert sorted(run.runner.cancelled) == sorted(run.runner.started)
        assert after < 30 or run.runner.started
        assert not run.pool.tokens._locations

    go(main())


# the whole path


def scheduler_of(run: Party, order: Any = None, **config: Any) -> RolloutScheduler:
    return scheduler_over(run.pool, run.life, order, **config)


@pytest.mark.parametrize("after", [*range(16), 60])
def test_a_cancelled_step_frees_the_engines(after: int) -> None:
    async def main() -> None:
        run = await party(2, 2)
        call = asyncio.create_task(scheduler_of(run, groups_per_step=3, group_size=2).next_rollout())
        await turns(after)
        if after == 60:
            assert len(run.running) == 6
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await turns(20)
        run.assert_empty()
        submitted = sorted(id for toy in run.toys for id in toy.submitted)
        assert sorted(id for toy in run.toys for id in toy.aborted) == submitted

    go(main())


def test_every_sample_of_a_step_ends_on_the_ledger() -> None:
    async def main() -> None:
        run = await party(2, 2, lambda task, response: float(len(response.text) + ord(response.text[0]) % 2))
        for toy in run.toys:
            toy.says = lambda request: [7 + request.sampling.seed % 3, END]
        scheduler = scheduler_of(run, groups_per_step=4, group_size=3)
        rollout = await scheduler.next_rollout()
        assert len(rollout.groups) >= 4
        assert rollout.batch is not None
        for sample in rollout.samples:
            path = run.moves.of(sample.id)
            assert path[:4] == ["queued", "generating", "scoring", "scored"]
            assert path[4:] == [sample.state]
            assert all(after in MOVES[before] for before, after in zip(["new", *path], path, strict=False))
            assert sample.state in ("kept", "dropped")
            assert len(sample.log) == 0
        samples = [s for g in rollout.kept for s in g.samples]
        assert rollout.batch["reward"].tolist() == [s.reward for s in samples]
        drawn = {sample.id: sample.log for worker in run.workers for sample in worker._samples.values()}
        for row, sample in zip(rollout.batch.rows("ids"), samples, strict=True):
            assert row.tolist() == drawn[sample.id].ids.tolist()
        scheduler.mark_trained(rollout, 7)
        for sample in rollout.trained_samples:
            assert run.moves.infos(sample.id)[-1] == ("trained", {"version": 7})
        said = {"task": samples[0].task.id, "group": samples[0].group, "domain": "default"}
        assert run.moves.infos(samples[0].id)[0] == ("queued", said)
        await run.pool.tokens.release(rollout.samples)
        run.assert_empty()

    go(main())


# the first to finish


def drawn(moves: Moves) -> list[str]:
    """Tasks in the order their groups were issued."""
    issued = {r.info["group"]: r.info["task"] for r in moves.records if r.state == "queued" and "task" in r.info}
    return [issued[index] for index in sorted(issued)]


def test_a_step_of_the_first_to_finish_leaves_the_rest_and_their_tasks_come_again() -> None:
    async def main() -> None:
        slow = {1, 3}
        run = await setting(
            spread,
            lambda s: 50 if s.group in slow else 0.1 + s.group / 1000,
            groups_per_step=4,
            group_size=2,
            oversample=0.5,
            batch_selection="first_finished",
        )
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.kept] == [0, 2, 4, 5]
        await turns(40)
        assert sorted(run.runner.cancelled) == ["1.0", "1.1", "3.0", "3.1"]
        assert [g.index for g in rollout.groups] == [0, 1, 2, 3, 4, 5]
        cut = [g for g in rollout.groups if g.index in slow]
        reason = "cut: the step was full before it ended"
        assert {(s.state, s.reason) for g in cut for s in g.samples} == {("dropped", reason)}
        assert rollout.dropped == {reason: 2}
        run.scheduler.mark_trained(rollout, 1)
        run.scheduler.after_publish(1)
        again = await run.scheduler.next_rollout()
        tasks = drawn(run.moves)
        assert tasks[6:8] == [tasks[1], tasks[3]]
        assert [g.task.id for g in again.kept if g.index < 8] == tasks[6:8]
        assert [g.epoch for g in again.kept if g.index < 8] == [0, 0]

    go(main())


def test_what_was_finished_beyond_the_need_comes_again_too() -> None:
    async def main() -> None:
        run = await setting(spread, groups_per_step=2, group_size=2, oversample=1.0)
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.kept] == [0, 1]
        surplus = [g for g in rollout.groups if g not in rollout.kept]
        assert {g.index for g in surplus} <= {2, 3}
        reasons = {"surplus: the step was full", "cut: the step was full before it ended"}
        assert {s.reason for g in surplus for s in g.samples} <= reasons
        run.scheduler.mark_trained(rollout, 1)
        await run.scheduler.next_rollout()
        tasks = drawn(run.moves)
        assert tasks[4:6] == tasks[2:4]

    go(main())


def test_oversampling_in_order_does_not_take_a_younger_group_for_an_older_one() -> None:
    async def main() -> None:
        run = await setting(
            spread, lambda s: 10 if s.group == 0 else 0.1, groups_per_step=2, group_size=2, oversample=0.5
        )
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.kept] == [0, 1]
        assert asyncio.get_running_loop().time() > 9

    go(main())


def test_tail_batches_gather_what_was_cut_and_wait_for_it() -> None:
    async def main() -> None:
        order = TailBatching(EpochSampler(TASKS.train, 5), 2, 0.5)
        slow = {TASKS.train[0].id, TASKS.train[1].id}
        run = await setting(
            spread,
            lambda s: 50 if s.task.id in slow else 0.1,
            order=order,
            groups_per_step=2,
            group_size=2,
            oversample=0.5,
        )
        trained: list[set[str]] = []
        for step in range(5):
            rollout = await run.scheduler.next_rollout()
            trained.append({g.task.id for g in rollout.kept})
            run.scheduler.mark_trained(rollout, step + 1)
        assert slow in trained
        assert not any(slow & tasks for tasks in trained if tasks != slow)

    go(main())


@pytest.mark.parametrize(("seen", "bias"), [(20, -0.5), (10, 0.0), (5, 1.0)])
def test_the_bias_in_length_is_below_zero_where_short_ones_finish_first(seen: int, bias: float) -> None:
    async def main() -> None:
        run = await setting(
            spread,
            lambda s: float(1 + s.group % 3),
            groups_per_step=2,
            group_size=2,
            oversample=2.0,
            batch_selection="first_finished",
        )
        run.runner.length = lambda s: 10 * (1 + s.group % 3)
        run.scheduler._lengths = [10**6, seen * 10**6]  # the mean of all so far
        rollout = await run.scheduler.next_rollout()
        assert {s.response_tokens for s in rollout.trained_samples} == {10}
        assert rollout.length_bias == pytest.approx(bias, abs=1e-3)

    go(main())


def test_in_order_the_bias_in_length_is_nothing() -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: float(s.group % 3), groups_per_step=3, group_size=2)
        for step in range(3):
            rollout = await run.scheduler.next_rollout()
            assert rollout.length_bias == pytest.approx(0.0)
            run.scheduler.mark_trained(rollout, step + 1)

    go(main())


# interfering


@pytest.mark.parametrize("at", ["queued", "open", "ready"])
def test_a_group_that_is_dropped_is_ended_and_recorded(at: str) -> None:
    async def main() -> None:
        run = await setting(
            spread, lambda s: 0.1 if s.group == 1 else 10.0, groups_per_step=2, group_size=2, max_replacements=0.0
        )
        call = asyncio.create_task(run.scheduler.next_rollout())
        await asyncio.sleep({"queued": 0, "open": 1, "ready": 1}[at])
        victim = run.scheduler._group_table.ready[1] if at == "ready" else run.scheduler.open_groups[0]
        run.scheduler.drop(victim, "by hand: not wanted")
        assert {(s.state, s.reason) for s in victim.samples} == {("dropped", "by hand: not wanted")}
        rollout = await call
        assert victim in rollout.groups
        assert victim not in rollout.kept
        assert rollout.dropped == {"by hand: not wanted": 1}
        assert sorted(run.runner.cancelled) == sorted(s.id for s in victim.samples if at == "open")
        await turns(40)
        assert not {s.id for s in victim.samples} & set(run.pool.tokens._locations) or at == "ready"

    go(main())


def test_a_group_that_is_dropped_is_replaced() -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: 10.0, groups_per_step=2, group_size=2)
        call = asyncio.create_task(run.scheduler.next_rollout())
        await asyncio.sleep(1)
        run.scheduler.drop(run.scheduler.open_groups[0], "by hand: not wanted")
        rollout = await call
        assert [g.index for g in rollout.kept] == [1, 2]

    go(main())


def test_a_group_that_is_being_trained_on_cannot_be_dropped() -> None:
    async def main() -> None:
        run = await setting(spread, groups_per_step=1, group_size=2)
        rollout = await run.scheduler.next_rollout()
        with pytest.raises(ValueError, match="group 0 is being trained on"):
            run.scheduler.drop(rollout.kept[0], "too late")
        run.scheduler.mark_trained(rollout, 1)

    go(main())


@given(seed=st.integers(0, 10**6))
@timings(60)
def test_groups_may_be_dropped_at_any_moment(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        run = await party(
            2, 2, lambda task, response: rng.random(), pace_s=0.1, max_running=rng.choice([0, 3]), deadline_s=10_000
        )
        scheduler = scheduler_of(run, groups_per_step=3, group_size=2, max_replacements=2.0)
        call = asyncio.create_task(scheduler.next_rollout())
        dropped: list[Group] = []
        for _ in range(4):
            await some_time(rng)
            await turns(rng.randrange(30))
            if not call.done() and (waiting := [*scheduler._group_table.ready.values(), *scheduler.open_groups]):
                dropped.append(rng.choice([*waiting, waiting[-1]]))
                scheduler.drop(dropped[-1], "by hand")
        rollout = await call
        assert not {g.index for g in rollout.kept} & {g.index for g in dropped}
        assert {s.state for g in dropped for s in g.samples} <= {"dropped"}
        for sample in rollout.samples:
            path = run.moves.of(sample.id)
            assert all(after in MOVES[before] for before, after in zip(["new", *path], path, strict=False))
        scheduler.mark_trained(rollout, 1)
        await asyncio.sleep(1)
        run.assert_idle()
        await run.pool.tokens.release(rollout.samples)
        run.assert_empty()

    go(main())


def test_dropping_what_waits_for_verdicts_makes_room_for_others() -> None:
    async def main() -> None:
        run = await party(judge=lambda task, response: 1.0, says="4", max_scoring=2)
        run.judges[0].gate.clear()
        scheduler = scheduler_of(run, groups_per_step=1, group_size=2, filter="none")
        call = asyncio.create_task(scheduler.next_rollout())
        await until(lambda: run.pool._scoring == 2)
        (group,) = scheduler.open_groups
        scheduler.drop(group, "by hand")
        await asyncio.sleep(1)
        assert run.pool._scoring == sum(s.state == "scoring" for g in scheduler.open_groups for s in g.samples)
        run.judges[0].gate.set()
        scheduler.mark_trained(await call, 1)
        rollout = await scheduler.next_rollout()
        assert len(rollout.kept) == 1
        run.assert_idle()

    go(main())


def test_a_group_may_be_added_and_is_of_the_step_like_any_other() -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: 1.0, groups_per_step=2, group_size=2)
        call = asyncio.create_task(run.scheduler.next_rollout())
        await asyncio.sleep(0.5)
        added = run.scheduler.add(Task.ask("mine", "?"), priority=3)
        assert (added.index, added.priority, [s.priority for s in added.samples]) == (2, 3, [3, 3])
        assert run.moves.infos("2.0")[0][1] == {"task": "mine", "group": 2, "domain": "default", "priority": 3}
        rollout = await call
        assert [g.index for g in rollout.kept] == [0, 1]
        run.scheduler.mark_trained(rollout, 1)
        assert added in rollout.groups
        assert {s.state for s in added.samples} == {"dropped"}

    go(main())


def test_a_group_added_before_a_step_takes_a_place_in_it() -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: 1.0, groups_per_step=2, group_size=2)
        added = run.scheduler.add(TASKS.train[3])
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.kept] == [0, 1]
        assert rollout.kept[0] is added
        run.scheduler.mark_trained(rollout, 1)
        state = json.loads(json.dumps(run.scheduler.state()))
        assert state["open"] == []

    go(main())


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("after", [*range(0, 30, 2), 60])
def test_a_group_gets_its_engine_earlier_when_its_priority_is_raised_whenever_that_is(after: int, which: int) -> None:
    async def main() -> None:
        run = await party(1, judge=lambda task, response: 1.0, max_running=2 if which else 0)
        scheduler = scheduler_of(run, groups_per_step=4, group_size=2, filter="none")
        call = asyncio.create_task(scheduler.next_rollout())
        await turns(after)
        groups = scheduler.open_groups
        if groups:
            scheduler.reprioritise(groups[which], 5)
            assert {s.priority for s in groups[which].samples} == {5}
        begun: list[str] = []
        while not call.done():
            await asyncio.sleep(1)
            begun += [id for id in sorted(run.running) if id.endswith(".0")]
            run.answer()
        rollout = await call
        assert [g.index for g in rollout.kept] == [0, 1, 2, 3]
        assert sorted(begun) == ["0.0", "1.0", "2.0", "3.0"]
        if after == 60 and which:
            assert begun == ["0.0", "3.0", "1.0", "2.0"]
        scheduler.mark_trained(rollout, 1)
        await run.pool.tokens.release(rollout.samples)
        run.assert_empty()

    go(main())


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.3, 0.6])
def test_a_group_whose_priority_changes_while_it_begins_is_whole(after_s: float) -> None:
    """Word of its beginning may come after it was called back, and before it is."""

    async def main() -> None:
        run = await party(1, judge=lambda task, response: 1.0)
        handle: Any = run.pool._workers._handles[0]
        call_on = handle.call

        async def slow(method: str, args: Any, kwargs: Any) -> Any:
            await asyncio.sleep(0.5 if method == "cancel" else 0.0)
            return await call_on(method, args, kwargs)

        handle.call = slow
        scheduler = scheduler_of(run, groups_per_step=1, group_size=3, filter="none")
        call = asyncio.create_task(scheduler.next_rollout())
        await turns(30)
        await asyncio.sleep(after_s)
        (group,) = scheduler.open_groups
        scheduler.reprioritise(group, 5)
        while not call.done():
            await asyncio.sleep(3)
            run.answer()
        rollout = await call
        assert rollout.batch is not None
        assert rollout.batch["sample"].tolist() == ["0.0", "0.1", "0.2"]
        assert [s.state for s in group.samples] == ["kept"] * 3
        await run.pool.tokens.release(rollout.samples)
        run.assert_empty()

    go(main())


def test_single_samples_may_be_dropped_ended_or_requeued() -> None:
    async def main() -> None:
        run = await party(2, judge=lambda task, response: float(len(response.text)))
        scheduler = scheduler_of(run, groups_per_step=1, group_size=4)
        call = asyncio.create_task(scheduler.next_rollout())
        await until(lambda: len(run.running) == 4)
        (group,) = scheduler.open_groups
        for toy in run.toys:
            for id in toy.running:
                toy.draw(id, 20, 21)
        assert scheduler.drop_sample(group.samples[0], "not wanted")
        assert scheduler.end_response(group.samples[1], "long enough")
        assert scheduler.requeue(group.samples[2], "make room")
        await until(lambda: run.running == {"0.2", "0.3"})
        run.answer()
        rollout = await call
        assert [s.state for s in group.samples] == ["dropped", "kept", "kept", "kept"]
        assert [s.finish for s in group.samples] == [None, "ended", "stop", "stop"]
        assert rollout.batch is not None
        assert rollout.batch["sample"].tolist() == ["0.1", "0.2", "0.3"]
        assert not scheduler.drop_sample(group.samples[1], "too late")
        scheduler.mark_trained(rollout, 1)
        assert [s.state for s in group.samples] == ["dropped", "trained", "trained", "trained"]

    go(main())


def test_a_run_that_stops_records_its_groups_in_flight_as_dropped_and_they_come_again() -> None:
    async def main() -> None:
        run = await setting(
            spread, lambda s: 0.1 if s.group < 3 else 50.0, groups_per_step=2, group_size=2, max_staleness=1
        )
        first = await run.scheduler.next_rollout()
        await asyncio.sleep(1)
        run.scheduler.add(Task.ask("mine", "?"))
        run.scheduler.mark_trained(first, 1)
        waiting = {g.index: (g.task.id, g.epoch) for g in run.scheduler._group_table.waiting}
        assert set(waiting) == {2, 3, 4, 5}
        await run.scheduler.finish()
        reason = "ended: the run stopped before it was trained on"
        for index in waiting:
            assert run.moves.reasons(f"{index}.0")[-1] == ("dropped", reason)
        assert run.scheduler._group_table.in_flight == 0
        state = json.loads(json.dumps(run.scheduler.state()))
        assert state["open"] == []
        resumed = await setting(spread, groups_per_step=2, group_size=2)
        await resumed.scheduler.restore(state, TASKS.train)
        rollout = await resumed.scheduler.next_rollout()
        assert {(g.task.id, g.epoch) for g in rollout.kept} == {waiting[2], waiting[3]}
        assert [g.index for g in rollout.kept] == [6, 7]

    go(main())


# what is not tried


class Skipping(SamplerWrapper):
    """Skips some tasks."""

    def __init__(self, skip: set[str]) -> None:
        super().__init__(EpochSampler(TASKS.train, 5))
        self._skip = skip

    def next(self) -> TaskDraw:
        draw = super().next()
        return TaskDraw(draw.task, draw.epoch, "boring: of no use" if draw.task.id in self._skip else "", draw.again)


def test_what_is_skipped_is_on_record_and_costs_nothing() -> None:
    async def main() -> None:
        skipped = {"t1", "t4"}
        run = await setting(spread, groups_per_step=5, group_size=2, order=Skipping(skipped))
        rollout = await run.scheduler.next_rollout()
        kept = {g.index: g.task.id for g in rollout.kept}
        assert len(kept) == 5
        assert not set(kept.values()) & skipped
        others = [r for r in run.moves.records if r.info.get("task") in skipped]
        assert others
        for record in others:
            id = record.sample
            assert id == f"{record.info['group']}.0"
            assert run.moves.reasons(id) == [("queued", ""), ("dropped", "boring: of no use")]
            assert id not in run.runner.started
        assert rollout.dropped == {"boring: of no use": len(others)}
        assert run.scheduler.next_group == 5 + len(others)

    go(main())


def test_when_nothing_is_left_to_try_the_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        run = await setting(spread, groups_per_step=1, group_size=2, order=Skipping({t.id for t in TASKS.train}))
        with pytest.raises(RunError, match=r"tasks in a row were skipped; the last reason: boring: of no use"):
            await run.scheduler.next_rollout()

    monkeypatch.setattr("roll.scheduler.scheduler.MAX_SKIPS", 50)
    go(main())


def test_a_task_that_keeps_killing_workers_is_left_out() -> None:
    async def main() -> None:
        run = await party(1, says="4", max_attempts=2, envs=1)
        victims = TASKS.train[:2]

        def judge(task: Task, response: Any) -> float:
            if task.id == victims[0].id:
                raise EnvFailure("crashed", "?")
            return random.random()

        run.judges[0].judge = judge
        scheduler = scheduler_of(run, groups_per_step=3, group_size=2, quarantine_after=3)
        scheduler._kills.update({victims[0].id: 2, victims[1].id: 3})
        assert scheduler._quarantine(victims[0]) == ""
        assert scheduler._quarantine(victims[1]) == "quarantined: it has killed or hung 3 workers"

    go(main())


def test_what_a_sample_killed_counts_against_its_task_and_is_saved() -> None:
    async def main() -> None:
        culprit = TASKS.train[2].id

        def outcome(sample: Sample) -> float | str:
            if sample.task.id == culprit:
                sample.kills += 1
                return "reward crashed: boom"
            return spread(sample)

        run = await setting(outcome, groups_per_step=4, group_size=2, quarantine_after=3)
        for step in range(9):
            rollout = await run.scheduler.next_rollout()
            assert culprit not in {g.task.id for g in rollout.kept}
            run.scheduler.mark_trained(rollout, step + 1)
        tried = [r.sample for r in run.moves.records if r.state == "generating" and f"{r.sample}" in run.runner.started]
        issued = [r for r in run.moves.records if r.state == "queued" and r.info.get("task") == culprit]
        attempts = {r.info["group"] for r in issued if f"{r.info['group']}.1" in run.moves.last()}
        skipped = {r.info["group"] for r in issued} - attempts
        assert len(attempts) == 2  # two groups of two samples: four kills, and the second group made it more than three
        assert len(skipped) >= 2
        for index in skipped:
            assert run.moves.reasons(f"{index}.0")[-1] == ("dropped", "quarantined: it has killed or hung 4 workers")
        assert tried
        state = json.loads(json.dumps(run.scheduler.state()))
        assert state["kills"] == {culprit: 4}
        other = await setting(outcome, groups_per_step=4, group_size=2, quarantine_after=3)
        await other.scheduler.restore(state, TASKS.train)
        assert other.scheduler._quarantine(TASKS.train[2])

    go(main())


# workers that die


def test_finished_groups_whose_tokens_died_run_again() -> None:
    async def main() -> None:
        run = await setting(
            spread, lambda s: 10 if s.group == 3 else 0.1, workers=2, groups_per_step=4, group_size=2, max_attempts=3
        )
        call = asyncio.create_task(run.scheduler.next_rollout())
        await asyncio.sleep(5)
        homes = {index: run.pool.tokens.locate(g.samples[0]) for index, g in run.scheduler._group_table.ready.items()}
        assert set(homes) == {0, 1, 2}
        lost = [index for index, home in homes.items() if home == 0]
        assert lost
        run.runner.crew.kill(0)
        run.pool.worker_lost(0, "rollout worker died: rollout[0]")
        run.scheduler.worker_lost(0, "rollout worker died: rollout[0]")
        assert {g.index for g in run.scheduler.open_groups} == {*lost, 3}  # at once, not when the step is closed
        rollout = await call
        assert [g.index for g in rollout.kept] == [0, 1, 2, 3]
        assert {g.index for g in rollout.kept if g.samples[0].tries == 2} >= set(lost)
        path = run.moves.of(f"{lost[0]}.0")
        assert path == ["queued", "generating", "scoring", "scored"] * 2 + ["kept"]
        assert rollout.batch is not None
        run.scheduler.mark_trained(rollout, 1)

    go(main())


def test_a_worker_that_dies_as_the_batch_is_made_costs_a_repetition_not_the_run() -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: 1.0, workers=2, groups_per_step=2, group_size=2, max_attempts=3)
        batch = run.pool.tokens.batch
        times = 0

        async def dying(samples: list[Sample], mask_below: int = 0) -> Any:
            nonlocal times
            times += 1
            if times == 1:
                run.runner.crew.kill(0)
            return await batch(samples, mask_below)

        run.pool.tokens.batch = dying  # type: ignore[method-assign]
        rollout = await run.scheduler.next_rollout()
        assert times == 2
        assert [g.index for g in rollout.kept] == [0, 1]
        assert rollout.batch is not None
        assert {s.state for s in rollout.trained_samples} == {"kept"}
        assert len(rollout.trained_samples) == 4
        run.scheduler.mark_trained(rollout, 1)

    go(main())


def test_tokens_lost_before_they_were_trained_on_are_made_again() -> None:
    async def main() -> None:
        flat = {1}
        run = await setting(
            lambda s: 1.0 if s.group in flat else spread(s),
            lambda s: 1.0,
            groups_per_step=2,
            group_size=2,
            max_attempts=3,
        )
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.kept] == [0, 2]
        run.scheduler.requeue_batch(rollout, "tokens lost: rollout[0] died")
        assert run.scheduler._group_table.in_flight == 2
        again = await run.scheduler.next_rollout()
        assert [g.index for g in again.kept] == [0, 2]
        assert [g.index for g in again.groups] == [0, 1, 2]
        assert {s.tries for g in again.kept for s in g.samples} == {2}
        path = run.moves.of("0.0")
        assert path == [
            "queued",
            "generating",
            "scoring",
            "scored",
            "kept",
            "queued",
            "generating",
            "scoring",
            "scored",
            "kept",
        ]
        assert run.moves.reasons("0.0")[5] == ("queued", "tokens lost: rollout[0] died")
        assert run.moves.infos("0.0")[5][1] == {"try": 2}
        run.scheduler.mark_trained(again, 1)
        assert run.scheduler._group_table.in_flight == 0

    go(main())


def test_groups_without_tries_left_are_dropped_from_the_group_table() -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: 1.0, groups_per_step=1, group_size=2, max_attempts=1)
        rollout = await run.scheduler.next_rollout()
        run.scheduler.requeue_batch(rollout, "tokens lost: rollout[0] died")
        assert run.scheduler._group_table.in_flight == 0
        assert {s.state for s in rollout.kept[0].samples} == {"failed"}
        again = await run.scheduler.next_rollout()
        assert [g.index for g in again.kept] == [1]
        assert [g.index for g in again.groups] == [0, 1]
        assert again.dropped == {"tokens lost: rollout[0] died": 1}

    go(main())


def test_nothing_is_left_at_workers_of_what_was_made_again() -> None:
    async def main() -> None:
        run = await party(2, 2, lambda task, response: random.random(), says="4")
        scheduler = scheduler_of(run, groups_per_step=1, group_size=2)
        rollout = await scheduler.next_rollout()
        assert run.pool.tokens.locate(rollout.samples[0]) == 0
        run.judges[0].gate.clear()
        other = run.start(run.group(99))  # so that the other worker has less to do
        await asyncio.sleep(1)
        scheduler.requeue_batch(rollout, "tokens lost: ?")
        run.judges[0].gate.set()
        rollout = await scheduler.next_rollout()
        await other
        scheduler.mark_trained(rollout, 1)
        await run.pool.tokens.release([*rollout.samples, *run.group(99)])
        await asyncio.sleep(1)
        run.assert_empty()

    go(main())


# what a checkpoint holds


async def step(run: Setting, number: int) -> RolloutBatch:
    rollout = await run.scheduler.next_rollout()
    run.scheduler.before_publish(number + 1)
    run.scheduler.after_publish(number + 1)
    run.scheduler.mark_trained(rollout, number + 1)
    return rollout


@given(seed=st.integers(0, 10**6))
@timings(50)
def test_a_resumed_run_trains_drops_or_draws_again_every_task_once(seed: int) -> None:
    rng = random.Random(seed)
    config: dict[str, Any] = {
        "groups_per_step": rng.randint(1, 3),
        "group_size": 2,
        "max_staleness": rng.choice([0, 1, 2]),
        "oversample": rng.choice([0.0, 0.5]),
        "batch_selection": rng.choice(["in_order", "first_finished"]),
        "staleness_policy": rng.choice(["wait", "drop", "mask"]),
    }
    ends: Counter[tuple[str, int]] = Counter()
    """How often each draw, a task of an epoch, came to its end."""

    def note(run: Setting, rollout: RolloutBatch) -> None:
        for group in rollout.groups:
            again = any(s.reason.startswith(("cut", "surplus")) for s in group.samples)
            if not again:
                ends[group.task.id, group.epoch] += 1

    async def before() -> tuple[str, list[str]]:
        run = await setting(flaky, lambda s: rng.choice([0.0, 0.3, 2.0]), **config)
        for number in range(rng.randint(0, 4)):
            note(run, await step(run, number))
            await some_time(rng)
        if rng.random() < 0.5:
            await run.scheduler.close()
        state = json.dumps(run.scheduler.state())
        unfinished = [id for id, state in run.moves.last().items() if state not in ("trained", "dropped", "failed")]
        await run.scheduler.close()
        note_ended(run)
        return state, unfinished

    def note_ended(run: Setting) -> None:
        for group in run.scheduler._counters.ended:
            if not any(s.reason.startswith(("cut", "surplus")) for s in group.samples):
                ends[group.task.id, group.epoch] += 1

    async def after(state: str, unfinished: list[str]) -> None:
        run = await setting(flaky, lambda s: rng.choice([0.0, 0.3, 2.0]), **config)
        await run.scheduler.restore(json.loads(state), TASKS.train)
        closed = [r.sample for r in run.moves.records]
        assert sorted(closed) == sorted(unfinished)
        assert {(r.state, r.reason) for r in run.moves.records} <= {("dropped", "resumed: its group is issued again")}
        first = run.scheduler.next_group
        for number in range(10):
            note(run, await step(run, number))
        assert not {r.sample for r in run.moves.records if r.state == "queued"} & set(unfinished)
        assert all(int(r.sample.partition(".")[0]) >= first for r in run.moves.records if r.state == "queued")
        open_now = {(g.task.id, g.epoch) for g in run.scheduler._group_table.waiting}
        returned = {tuple(key) for key in run.scheduler._task_sampler.state()["returned"]}
        await run.scheduler.close()
        note_ended(run)
        assert max(ends.values()) == 1
        draws = run.scheduler._task_sampler.state()["drawn"][""]
        whole = {(t.id, epoch) for epoch in range(draws // len(TASKS.train)) for t in TASKS.train}
        assert whole <= set(ends) | open_now | returned  # the last epoch may be a part of one

    def flaky(sample: Sample) -> float | str:
        choice = random.Random(f"{seed}/{sample.group}/{sample.id}")
        broken = choice.random() < 0.2 and sample.id.endswith(".1")  # never all of them
        return "broken" if broken else float(choice.randrange(2))

    go(after(*go(before())))


def test_a_state_is_plain_json_and_lists_the_groups_in_flight() -> None:
    async def main() -> None:
        run = await setting(spread, lambda s: 5.0, groups_per_step=2, group_size=2)
        call = asyncio.create_task(run.scheduler.next_rollout())
        await asyncio.sleep(1)
        state = json.loads(json.dumps(run.scheduler.state()))
        assert state["next_group"] == 2
        assert [([s["id"] for s in g["samples"]], g["epoch"]) for g in state["open"]] == [
            (["0.0", "0.1"], 0),
            (["1.0", "1.1"], 0),
        ]
        rollout = await call
        taken = json.loads(json.dumps(run.scheduler.state()))
        assert [g["task"] for g in taken["open"]] == [g.task.id for g in rollout.kept]  # not trained on yet
        run.scheduler.mark_trained(rollout, 1)
        assert run.scheduler.state()["open"] == []
        assert run.scheduler.state()["lengths"] == [4, sum(s.response_tokens for s in rollout.samples)]

    go(main())
