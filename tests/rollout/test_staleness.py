"""Generation that goes on while a step is trained on: how much is under way, how old it may be, and what then."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_toys import Moves, ToyRunner, go, some_time, tasks, timings, turns, until

from roll.config.schema import RolloutConfig
from roll.data import Group, Sample
from roll.data.tokenlog import NO_VERSION
from roll.rollout.lifecycle import ENDS, MOVES, Lifecycle
from roll.scheduler.filters import make_filter
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.rollout_result import RolloutBatch
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import BatchPolicy, EpochSampler

TASKS = tasks(11)


def spread(sample: Sample) -> float:
    """Rewards that differ within a group."""
    return float(sample.id.endswith(".0"))


@dataclass
class World:
    """A scheduler, what its samples are drawn by, and the trainer's version."""

    config: RolloutConfig
    runner: ToyRunner
    pool: RolloutPool
    scheduler: RolloutScheduler
    moves: Moves
    version: int = 0
    """Trained on so far."""
    served: int = 0
    """By the engines."""
    most_charged: int = 0
    issued: dict[int, Group] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        wanted = self.config.groups_per_step
        return wanted * (self.config.max_staleness + 1) + int(wanted * self.config.oversample + 1e-9)

    def watch_volume(self) -> None:
        """Holds at every moment that a group is issued that there are not too many."""
        table, issue = self.scheduler._group_table, self.scheduler._group_table.issue

        def watched(group: Group) -> None:
            issue(group)
            self.issued[group.index] = group
            self.most_charged = max(self.most_charged, table.in_flight)
            assert table.in_flight <= self.capacity
            assert not set(table.open) & set(table.ready)
            assert not (set(table.open) | set(table.ready)) & set(table.taken)

        table.issue = watched  # type: ignore[method-assign]

    def assert_young(self, rollout: RolloutBatch) -> None:
        """None of the tokens that count is older than allowed."""
        assert rollout.version == self.version
        limit = self.version - self.config.max_staleness
        if rollout.batch is None:
            return
        versions, counts = rollout.batch["versions"], rollout.batch["loss_mask"]
        assert (versions[counts] >= limit).all()
        if self.config.staleness_policy == "mask":
            drawn = versions != NO_VERSION
            assert (counts == (drawn & (versions >= limit))).all()  # and all that is young enough counts
        else:
            assert (counts == (versions != NO_VERSION)).all()
            assert max(rollout.ages, default=0) <= self.config.max_staleness
        assert min(rollout.ages, default=0) >= 0

    async def publish(self, rollout: RolloutBatch | None = None, rng: random.Random | None = None) -> None:
        """As a pipeline does after a step was trained on."""
        new = self.version + 1
        self.scheduler.before_publish(new)
        if rng is not None:
            await some_time(rng)
        self.served = new
        if rng is not None:
            await some_time(rng)
        self.scheduler.after_publish(new)
        self.version = new
        if rollout is not None:
            self.scheduler.mark_trained(rollout, new)
            await self.pool.tokens.release(rollout.samples)

    async def step(self) -> RolloutBatch:
        rollout = await self.scheduler.next_rollout()
        self.assert_young(rollout)
        await self.publish(rollout)
        return rollout


async def world(
    delay: Callable[[Sample], float] = lambda sample: 0.0,
    outcome: Callable[[Sample], float | str | Exception] = spread,
    *,
    workers: int = 1,
    max_running: int = 0,
    **config: Any,
) -> World:
    settings = RolloutConfig(group_size=2, **config)
    moves: Any = Moves()
    runner = ToyRunner(outcome, delay, length=lambda sample: 4)
    pool = await runner.pool(workers, 2, settings.max_attempts, max_running=max_running)
    order = EpochSampler(TASKS.train, 5, batch_policy=BatchPolicy(settings.oversample, settings.batch_selection))
    keep = make_filter(settings.filter)
    made = World(settings, runner, pool, RolloutScheduler(order, pool, Lifecycle(moves), settings, keep), moves)
    runner.version = lambda: made.served
    made.watch_volume()
    return made


def indices(groups: list[Group]) -> list[int]:
    return [group.index for group in groups]


# volume


def test_the_next_steps_are_generated_while_one_is_trained_on() -> None:
    async def main() -> None:
        run = await world(lambda s: 1.0, groups_per_step=3, max_staleness=2)
        rollout = await run.scheduler.next_rollout()
        assert indices(rollout.kept) == [0, 1, 2]
        assert run.scheduler.next_group == 9  # three steps of three
        await asyncio.sleep(10)  # the trainer's time
        assert len(run.scheduler._group_table.ready) == 6
        assert run.scheduler.next_group == 9  # all that is taken is still charged for
        await run.publish(rollout)
        before = asyncio.get_running_loop().time()
        rollout = await run.scheduler.next_rollout()
        assert indices(rollout.kept) == [3, 4, 5]
        assert asyncio.get_running_loop().time() == before  # it was there already
        assert run.scheduler.next_group == 12
        await run.scheduler.close()

    go(main())


def test_on_policy_nothing_is_issued_between_steps() -> None:
    async def main() -> None:
        run = await world(lambda s: 1.0, groups_per_step=3)
        rollout = await run.scheduler.next_rollout()
        await run.publish(rollout)
        await asyncio.sleep(10)
        assert run.scheduler.next_group == 3
        await run.publish()  # also when nothing is being trained on
        assert run.scheduler.next_group == 3

    go(main())


def test_what_was_trained_on_makes_room_at_once() -> None:
    async def main() -> None:
        run = await world(lambda s: 1.0, groups_per_step=3, max_staleness=1)
        rollout = await run.scheduler.next_rollout()
        assert run.scheduler.next_group == 6
        await run.publish(rollout)
        assert run.scheduler.next_group == 9  # before the next step begins
        await run.scheduler.close()

    go(main())


def test_what_is_oversampled_is_kept_for_the_next_step() -> None:
    async def main() -> None:
        run = await world(lambda s: 1.0, groups_per_step=4, max_staleness=1, oversample=0.5)
        first, second = [await run.step() for _ in range(2)]
        assert (indices(first.kept), indices(second.kept)) == ([0, 1, 2, 3], [4, 5, 6, 7])
        assert not first.dropped
        assert run.most_charged == run.capacity == 10
        third = await run.step()
        assert set(third.dropped) <= {"stale"}  # what was drawn by version 0 and had no place in two steps
        await run.scheduler.close()

    go(main())


def test_rejections_are_replaced_and_beyond_the_bound_they_are_not() -> None:
    async def main() -> None:
        run = await world(lambda s: 1.0, lambda s: 1.0, groups_per_step=2, max_staleness=1, max_replacements=1.0)
        rollout = await run.scheduler.next_rollout()
        assert rollout.batch is None
        # four at first, two replaced, and no more: two rejections may be replaced in a step of two
        assert len(rollout.groups) == 6
        assert run.scheduler.next_group >= 6
        await run.scheduler.close()

    go(main())


# age


def test_a_group_that_would_get_too_old_is_waited_for() -> None:
    async def main() -> None:
        run = await world(
            lambda s: 30.0 if s.group == 1 else 1.0, groups_per_step=2, max_staleness=1, batch_selection="first_finished"
        )
        first = await run.step()
        assert indices(first.kept) == [0, 2]  # the first to finish; group 1 may still come
        assert asyncio.get_running_loop().time() < 10
        second = await run.step()
        assert 1 in indices(second.kept)  # at version 1 it is one version old: now or never
        assert 29 < asyncio.get_running_loop().time() < 40
        assert sorted(second.ages) == [0, 0, 1, 1] or sorted(second.ages) == [1, 1, 1, 1]
        await run.scheduler.close()

    go(main())


def test_in_order_the_oldest_groups_make_the_step_whoever_is_faster() -> None:
    async def main() -> None:
        run = await world(lambda s: 20.0 if s.group == 1 else 1.0, groups_per_step=2, max_staleness=1)
        assert indices((await run.step()).kept) == [0, 1]
        assert asyncio.get_running_loop().time() > 19
        await run.scheduler.close()

    go(main())


def test_who_is_waited_for_too_long_is_dropped() -> None:
    async def main() -> None:
        run = await world(
            lambda s: 1000.0 if s.group == 1 else 1.0,
            groups_per_step=2,
            max_staleness=1,
            batch_selection="first_finished",
            staleness_timeout_s=50.0,
        )
        await run.step()
        second = await run.step()
        assert 45 < asyncio.get_running_loop().time() < 60
        assert 1 not in indices(second.kept)
        assert len(second.kept) == 2
        (late,) = [g for g in second.groups if g.index == 1]
        assert {s.state for s in late.samples} == {"dropped"}
        assert late.samples[0].reason == "stale: not finished 50 s after its step was due"
        assert second.dropped == {"stale": 1}
        await turns(40)
        assert sorted(run.runner.cancelled) == ["1.0", "1.1"]
        await run.scheduler.close()

    go(main())


def test_when_dropping_nobody_waits_and_what_is_too_old_is_dropped_before_the_weights_change() -> None:
    async def main() -> None:
        run = await world(
            lambda s: 1000.0 if s.group == 1 else 1.0, groups_per_step=2, max_staleness=1, staleness_policy="drop"
        )
        for _ in range(2):
            rollout = await run.step()
            assert 1 not in indices(rollout.kept)
        assert asyncio.get_running_loop().time() < 10
        assert run.moves.last()["1.0"] == "dropped"
        assert run.moves.reasons("1.0")[-1] == ("dropped", "stale: 2 versions old at version 2")
        rollout = await run.step()
        assert 1 in indices(rollout.groups)
        assert rollout.dropped == {"stale": 1}
        await run.scheduler.close()

    go(main())


def test_when_masking_old_tokens_stay_and_do_not_count() -> None:
    async def main() -> None:
        run = await world(
            lambda s: 10.0 if s.group == 1 else 1.0, groups_per_step=2, max_staleness=1, staleness_policy="mask"
        )
        await run.step()
        await run.step()
        assert asyncio.get_running_loop().time() < 9
        await until(lambda: 1 in run.scheduler._group_table.ready)
        rollout = await run.scheduler.next_rollout()
        run.assert_young(rollout)
        assert 1 in indices(rollout.kept)
        assert rollout.batch is not None
        row = rollout.batch["sample"].tolist().index("1.0")
        assert rollout.batch.rows("versions")[row].tolist() == [-1, -1, 0, 0, 2, 2]
        assert rollout.batch.rows("loss_mask")[row].tolist() == [False] * 4 + [True] * 2
        assert max(rollout.ages) == 2
        await run.scheduler.close()

    go(main())


def test_when_masking_what_has_no_young_token_is_dropped() -> None:
    async def main() -> None:
        run = await world(
            lambda s: 0.5 if s.group < 6 else 1000.0, groups_per_step=1, max_staleness=1, staleness_policy="mask"
        )
        run.scheduler._config = run.config
        rollout = await run.scheduler.next_rollout()
        await until(lambda: 1 in run.scheduler._group_table.ready)  # drawn by version 0, all of it
        await run.publish(rollout)
        await run.publish()
        assert run.moves.reasons("1.0")[-1] == ("dropped", "stale: 2 versions old at version 2")
        await run.scheduler.close()

    go(main())


def test_when_masking_what_was_drawn_long_before_it_was_judged_is_dropped() -> None:
    async def main() -> None:
        run = await world(lambda s: 1.0, groups_per_step=1, max_staleness=1, staleness_policy="mask", max_attempts=1)
        run.runner.judging = lambda s: 50.0 if s.group == 1 else 0.0
        await run.step()
        await run.step()
        assert next(g.index for g in run.scheduler.open_groups) == 1
        await asyncio.sleep(60)  # its verdict comes at version 2, its tokens are all of version 0
        assert run.moves.reasons("1.0")[-1] == ("dropped", "stale: 2 versions old at version 2")
        await run.scheduler.close()

    go(main())


@pytest.mark.parametrize("stale", ["wait", "drop", "mask"])
def test_a_group_that_has_no_engine_yet_cannot_be_old(stale: str) -> None:
    async def main() -> None:
        run = await world(
            lambda s: 500.0, groups_per_step=1, max_staleness=1, oversample=4.0, staleness_policy=stale, max_running=2
        )
        call = asyncio.create_task(run.scheduler.next_rollout())
        await asyncio.sleep(1)
        assert indices([g for g in run.scheduler.open_groups if g.oldest is not None]) == [0, 1]
        run.scheduler.before_publish(5)
        assert set(range(2, 6)) <= set(indices(run.scheduler.open_groups))
        assert ({0, 1} <= set(indices(run.scheduler.open_groups))) == (stale == "mask")  # they may have young tokens yet
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    go(main())


def test_a_group_that_ran_again_does_not_hide_an_older_one_from_those_who_wait() -> None:
    async def main() -> None:
        run = await world(
            lambda s: 60.0 if s.group == 2 else 200.0 if s.group == 0 and s.tries > 1 else 1.0,
            groups_per_step=2,
            max_staleness=1,
            batch_selection="first_finished",
            max_attempts=3,
        )
        rollout = await run.scheduler.next_rollout()  # 0 and 1; 2 runs on, and 3 is ready
        assert indices(rollout.kept) == [0, 1]
        await run.publish()
        run.scheduler.requeue_batch(rollout, "tokens lost: ?")  # 0 and 1 run again, of version 1
        rollout = await run.scheduler.next_rollout()
        assert 2 in indices(rollout.kept)  # of version 0: now or never
        await run.scheduler.close()

    go(main())


def test_a_group_that_ran_again_is_as_young_as_its_new_beginning() -> None:
    async def main() -> None:
        def delay(sample: Sample) -> float:
            return 500.0 if sample.tries > 1 else 1.0 + sample.group

        run = await world(delay, groups_per_step=1, max_staleness=1, batch_selection="first_finished", max_attempts=3)
        rollout = await run.scheduler.next_rollout()
        assert indices(rollout.kept) == [0]
        await run.publish()
        run.scheduler.requeue_batch(rollout, "tokens lost: ?")  # it runs again, of version 1
        began = asyncio.get_running_loop().time()
        rollout = await run.scheduler.next_rollout()
        assert indices(rollout.kept) == [1]
        assert asyncio.get_running_loop().time() - began < 10  # there is time for it in the next step
        await run.scheduler.close()

    go(main())


# both, whatever happens


@given(seed=st.integers(0, 10**6))
@timings(120)
def test_whatever_happens_there_is_never_too_much_or_too_old_and_every_group_ends_once(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        noise = random.Random(f"{seed}/noise")

        def outcome(sample: Sample) -> float | str:
            fate = random.Random(f"{seed}/{sample.group}").random()
            if fate < 0.2:
                return 1.0  # no signal
            return "broken" if noise.random() < 0.05 else spread(sample)

        deaths = rng.random() < 0.5
        run = await world(
            lambda sample: noise.choice([0.0, 0.1, 0.5, 2.0, 2.0, 10.0]),
            outcome,
            workers=rng.randint(1, 3),
            max_running=rng.choice([0, 2, 6]),
            groups_per_step=rng.randint(1, 4),
            max_staleness=rng.choice([0, 1, 1, 2, 3]),
            staleness_policy=rng.choice(["wait", "mask", "drop"]),
            staleness_timeout_s=rng.choice([1.0, 30.0]),
            batch_selection=rng.choice(["in_order", "first_finished"]),
            oversample=rng.choice([0.0, 0.0, 0.5, 1.0]),
            max_replacements=rng.choice([0.0, 1.0, 2.0]),
            max_attempts=100 if deaths else rng.randint(2, 3),
        )
        seen: list[Group] = []
        crew, scheduler = run.runner.crew, run.scheduler

        async def lose_workers() -> None:
            """From time to time one dies; the supervisor tells the pool, then the scheduler, and brings it back."""
            while True:
                await asyncio.sleep(noise.choice([1.0, 5.0, 20.0]))
                if noise.random() < 0.5 or len(crew.workers) == 1:
                    continue
                worker = noise.randrange(len(crew.workers))
                crew.kill(worker)
                await turns(noise.randrange(5))
                run.pool.worker_lost(worker, f"rollout worker died: rollout[{worker}]")
                scheduler.worker_lost(worker, f"rollout worker died: rollout[{worker}]")
                await asyncio.sleep(noise.choice([0.1, 3.0]))
                crew.revive(worker)
                run.pool.worker_joined(worker)

        losing = asyncio.create_task(lose_workers()) if deaths else None
        try:
            for _ in range(8):
                async with asyncio.timeout(5000):
                    rollout = await scheduler.next_rollout()
                run.assert_young(rollout)
                assert len(rollout.kept) <= run.config.groups_per_step
                assert indices(rollout.kept) == sorted(indices(rollout.kept))
                await some_time(rng)  # training
                if rng.random() < 0.15:
                    scheduler.requeue_batch(rollout, "tokens lost: rollout[0] died")
                    continue
                seen += rollout.groups
                await run.publish(rollout, rng)
                assert {s.state for s in rollout.trained_samples} <= {"trained"}
                assert {s.state for g in rollout.groups for s in g.samples} <= ENDS
        finally:
            if losing is not None:
                losing.cancel()
                await asyncio.gather(losing, return_exceptions=True)
        counted = Counter(indices(seen))
        assert max(counted.values(), default=1) == 1
        under_way = {*scheduler._group_table.open, *scheduler._group_table.ready, *scheduler._group_table.taken}
        ended_since = set(indices(scheduler._counters.ended))
        assert set(run.issued) == set(counted) | under_way | ended_since
        assert not set(counted) & under_way
        for index, group in run.issued.items():
            for sample in group.samples:
                path = run.moves.of(sample.id)
                assert all(after in MOVES[before] for before, after in zip(["new", *path], path, strict=False))
                assert path.count("trained") + path.count("dropped") <= 1
                assert (sample.state in ENDS) or index in under_way
        await scheduler.close()
        await asyncio.sleep(1)
        assert not run.pool._in_flight
        assert not run.pool._by_sample
        assert [run.pool._router.running(engine) for engine in range(2)] == [0, 0]
        left = {sample.id for index in under_way for sample in run.issued[index].samples}
        left |= {sample.id for group in scheduler._counters.ended for sample in group.samples}
        assert set(run.pool.tokens._locations) <= left

    go(main())


@given(seed=st.integers(0, 10**6), staleness=st.integers(1, 3))
@timings(30)
def test_with_nothing_lost_every_task_is_trained_on_in_its_turn(seed: int, staleness: int) -> None:
    """In order, waiting, without rejections: the steps are those of a run that never overlaps anything."""

    async def main() -> None:
        rng = random.Random(seed)
        wanted = rng.randint(1, 4)
        run = await world(
            lambda sample: rng.choice([0.0, 0.2, 1.0, 7.0]), groups_per_step=wanted, max_staleness=staleness, workers=2
        )
        for number in range(6):
            rollout = await run.scheduler.next_rollout()
            run.assert_young(rollout)
            assert indices(rollout.kept) == list(range(number * wanted, (number + 1) * wanted))
            await some_time(rng)
            await run.publish(rollout, rng)
        await run.scheduler.close()

    go(main())
