"""The rollout scheduler: which groups a step issues and keeps is fixed by their outcomes, never by who was faster."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import END, Moves, Party, ToyRunner, go, party, tasks, turns, until

from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data import Group, Sample
from roll.rollout.filters import FILTERS, keep_all, no_signal
from roll.rollout.lifecycle import MOVES, Lifecycle
from roll.rollout.pool import RolloutPool
from roll.rollout.scheduler import RolloutScheduler

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
    delay: Callable[[Sample], int] = lambda sample: 0,
    *,
    workers: int = 1,
    engine_count: int = 1,
    **config: Any,
) -> Setting:
    moves: Any = Moves()
    runner = ToyRunner(outcome, delay)
    pool = await runner.pool(workers, engine_count)
    scheduler = RolloutScheduler(TASKS, pool, Lifecycle(moves), RolloutConfig(**config), seed=5)
    return Setting(runner, moves, pool, scheduler)


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
@settings(max_examples=120, derandomize=True, deadline=None)
def test_what_is_issued_and_kept_does_not_depend_on_timing(
    plan: Plan, seed: int, workers: int, engine_count: int
) -> None:
    def delay(sample: Sample) -> int:
        return random.Random(f"{seed}/{sample.id}").choice([0, 0, 1, 2, 5, 9])

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
        last = run.moves.last()
        assert len(last) == first * plan.size
        assert set(last.values()) <= {"kept", "dropped", "failed"}

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
            lambda s: 5000 if s.group == 1 else 1,
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


def test_going_on_from_a_group_index_issues_what_would_have_come() -> None:
    async def main() -> None:
        straight, resumed = [await setting(spread, groups_per_step=3, group_size=2) for _ in range(2)]
        await straight.scheduler.next_rollout()
        resumed.scheduler.next_group = 3
        after, again = await straight.scheduler.next_rollout(), await resumed.scheduler.next_rollout()
        assert [(g.index, g.task.id) for g in after.groups] == [(g.index, g.task.id) for g in again.groups]

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
            lambda s: 3 if s.id == "1.1" else 500,
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
            lambda s: 3 if s.id == "1.1" else 100_000,
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
        assert not run.pool._homes

    go(main())


# the whole path


def scheduler_of(run: Party, **config: Any) -> RolloutScheduler:
    return RolloutScheduler(TASKS, run.pool, run.life, RolloutConfig(**config), 0)


@pytest.mark.parametrize("after", [*range(12), 40])
def test_a_cancelled_step_frees_the_engines(after: int) -> None:
    async def main() -> None:
        run = await party(2, 2)
        call = asyncio.create_task(scheduler_of(run, groups_per_step=3, group_size=2).next_rollout())
        await turns(after)
        if after == 40:
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
        rollout = await scheduler_of(run, groups_per_step=4, group_size=3).next_rollout()
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
        drawn = {sample.id: sample.log for worker in run.workers for sample in worker._home.values()}
        for row, sample in zip(rollout.batch.rows("ids"), samples, strict=True):
            assert row.tolist() == drawn[sample.id].ids.tolist()
        await run.pool.forget(rollout.samples)
        run.assert_empty()

    go(main())
