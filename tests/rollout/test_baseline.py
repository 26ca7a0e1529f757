"""Greedy baselines: an answer at temperature 0 in every group, judged like the others and never trained on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_toys import Moves, Party, ToyRunner, episode_of, go, party, spoken, tasks, timings, until

from roll.config.schema import RolloutConfig
from roll.data import Group, Sample
from roll.pipeline.rlvr_metrics import rollout_metrics
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import make_filter, no_signal
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import EpochSampler

TASKS = tasks(7)
NO_SIGNAL = "no signal: all rewards equal"
NO_BASELINE = "no baseline: the greedy answer could not be judged"
NOT_TRAINED = ("dropped", "baseline: not trained on")


@dataclass
class Setting:
    """A scheduler of groups with greedy answers, which a toy runner drives."""

    runner: ToyRunner
    moves: Moves
    pool: RolloutPool
    scheduler: RolloutScheduler


async def setting(
    outcome: Callable[[Sample], float | str | Exception],
    delay: Callable[[Sample], float] = lambda sample: 0,
    workers: int = 1,
    **config: Any,
) -> Setting:
    moves: Any = Moves()
    runner = ToyRunner(outcome, delay)
    pool = await runner.pool(workers, tries=config.get("max_attempts", 1))
    return Setting(runner, moves, pool, scheduler_over(pool, Lifecycle(moves), **config))


def scheduler_over(pool: RolloutPool, life: Lifecycle, **config: Any) -> RolloutScheduler:
    settings = RolloutConfig(**config)
    keep = make_filter(settings.filter, *settings.filter_range)
    order = EpochSampler(TASKS.train, 5)
    return RolloutScheduler(order, pool, life, settings, keep, siblings_needed=1, greedy_baseline=True)


def rewarded(sampled: float, greedy: float | str) -> Callable[[Sample], float | str]:
    return lambda sample: greedy if sample.greedy else sampled


# in the scheduler


def test_a_greedy_answer_gives_its_siblings_their_baseline_and_is_not_trained_on() -> None:
    async def main() -> None:
        run = await setting(lambda s: 0.25 if s.greedy else float(s.id[-1]), groups_per_step=2, group_size=3)
        rollout = await run.scheduler.next_rollout()
        assert [s.id for s in rollout.samples] == [f"{g}.{i}" for g in range(2) for i in range(4)]
        assert [s.temperature for s in rollout.groups[0].samples] == [1.0, 1.0, 1.0, 0.0]
        assert rollout.batch is not None
        assert rollout.batch["sample"].tolist() == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
        assert rollout.batch["baseline"].tolist() == [0.25] * 6
        assert [s.id for s in rollout.trained_samples] == rollout.batch["sample"].tolist()
        run.scheduler.mark_trained(rollout, 1)
        assert run.moves.infos("1.3")[0][1]["greedy"] is True
        assert "greedy" not in run.moves.infos("1.2")[0][1]
        assert run.moves.of("1.3") == ["queued", "generating", "scoring", "scored", "dropped"]
        assert run.moves.reasons("1.3")[-1] == NOT_TRAINED
        assert run.moves.of("1.2")[-1] == "trained"
        await run.pool.tokens.release(rollout.samples)
        assert not run.pool.tokens._locations

    go(main())


def test_a_greedy_answer_ends_as_one_also_if_its_siblings_update_was_skipped() -> None:
    async def main() -> None:
        run = await setting(lambda s: 0.25 if s.greedy else float(s.id[-1]), groups_per_step=2, group_size=2)
        rollout = await run.scheduler.next_rollout()
        reasons = {"0.0": "update not finite", "0.1": "update not finite", "1.0": "left out"}
        run.scheduler.mark_trained(rollout, 1, reasons)
        assert run.moves.last() == dict.fromkeys([*reasons, "0.2", "1.2"], "dropped") | {"1.1": "trained"}
        assert {id: run.moves.reasons(id)[-1] for id in reasons} == {id: ("dropped", r) for id, r in reasons.items()}
        assert run.moves.reasons("0.2")[-1] == run.moves.reasons("1.2")[-1] == NOT_TRAINED
        assert [s.id for s in rollout.trained_samples] == ["1.1"]

    go(main())


def test_groups_of_one_have_signal_if_their_sample_differs_from_the_greedy_one() -> None:
    async def main() -> None:
        flat = {0, 2}
        run = await setting(lambda s: float(s.greedy and s.group not in flat), groups_per_step=2, group_size=1)
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.kept] == [1, 3]
        assert rollout.dropped == {NO_SIGNAL: 2}
        assert rollout.batch is not None
        assert (rollout.batch["reward"].tolist(), rollout.batch["baseline"].tolist()) == ([0.0] * 2, [1.0] * 2)
        assert run.moves.reasons("0.1")[-1] == ("dropped", NO_SIGNAL)

    go(main())


@pytest.mark.parametrize("name", ["none", "no_signal", "mean_range"])
def test_a_group_whose_greedy_answer_could_not_be_judged_is_dropped_and_replaced(name: str) -> None:
    async def main() -> None:
        def outcome(sample: Sample) -> float | str:
            return "broken" if sample.greedy and sample.group == 0 else float(sample.id.endswith(".0"))

        run = await setting(outcome, groups_per_step=1, group_size=2, filter=name)
        rollout = await run.scheduler.next_rollout()
        assert [g.index for g in rollout.kept] == [1]
        assert rollout.dropped == {NO_BASELINE: 1}
        assert [run.moves.reasons(f"0.{i}")[-1] for i in range(3)] == [
            ("dropped", NO_BASELINE),
            ("dropped", NO_BASELINE),
            ("failed", "broken"),
        ]

    go(main())


def test_a_greedy_answer_alone_is_nothing_to_train_on() -> None:
    async def main() -> None:
        run = await setting(
            lambda s: "broken" if s.group == 0 and not s.greedy else float(s.greedy), groups_per_step=1, group_size=2
        )
        rollout = await run.scheduler.next_rollout()
        assert rollout.dropped == {"no sample could be judged": 1}
        assert run.moves.reasons("0.2")[-1] == ("dropped", "no sample could be judged")
        assert [g.index for g in rollout.kept] == [1]

    go(main())


def test_tokens_that_are_lost_before_training_cost_a_new_baseline_too() -> None:
    async def main() -> None:
        drawn = 0.0

        def outcome(sample: Sample) -> float:
            nonlocal drawn
            drawn += sample.greedy
            return drawn if sample.greedy else 0.0

        run = await setting(outcome, groups_per_step=1, group_size=2, max_attempts=2)
        rollout = await run.scheduler.next_rollout()
        run.scheduler.requeue_batch(rollout, "tokens lost: rollout[0] died")
        again = await run.scheduler.next_rollout()
        assert again.batch is not None
        assert (again.batch["sample"].tolist(), again.batch["baseline"].tolist()) == (["0.0", "0.1"], [2.0, 2.0])
        run.scheduler.mark_trained(again, 1)
        once = ["queued", "generating", "scoring", "scored"]
        assert run.moves.of("0.2") == [*once, *once, "dropped"]
        assert run.moves.last() == {"0.0": "trained", "0.1": "trained", "0.2": "dropped"}

    go(main())


def test_a_checkpoint_closes_greedy_answers_with_their_groups() -> None:
    async def main() -> None:
        run = await setting(rewarded(0.0, 1.0), groups_per_step=2, group_size=1)
        rollout = await run.scheduler.next_rollout()
        state = run.scheduler.state()
        assert [[s["id"] for s in group["samples"]] for group in state["open"]] == [["0.0", "0.1"], ["1.0", "1.1"]]
        run.scheduler.mark_trained(rollout, 1)
        assert run.scheduler.state()["open"] == []

    go(main())


def test_metrics_are_of_what_is_sampled() -> None:
    async def main() -> None:
        run = await setting(rewarded(0.0, 1.0), groups_per_step=2, group_size=2)
        rollout = await run.scheduler.next_rollout()
        samples = [s for s in rollout.samples if not s.greedy]
        values = rollout_metrics(rollout, samples, [s.response_tokens for s in samples])
        assert values["reward/mean"] == 0.0
        assert run.scheduler.state()["lengths"][0] == 4

    go(main())


@given(seed=st.integers(0, 10**6))
@timings(40)
def test_whatever_becomes_of_samples_a_batch_has_a_baseline_for_each_and_no_greedy_one(seed: int) -> None:
    rng = random.Random(seed)
    size, wanted, workers = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 2)

    def outcome(sample: Sample) -> float | str:
        choice = random.Random(f"{seed}/{sample.id}")
        broken = choice.random() < 0.2 and (sample.greedy or size > 1)
        return "broken" if broken else float(choice.randrange(2))

    def kept(group: Group) -> bool:
        sampled = [outcome(s) for s in group.samples[:size]]
        greedy = outcome(group.samples[size])
        rewards = {reward for reward in sampled if reward != "broken"}
        return bool(rewards) and greedy != "broken" and len({*rewards, greedy}) > 1

    async def main() -> None:
        config = {"groups_per_step": wanted, "group_size": size, "max_replacements": 20.0, "max_attempts": 9}
        run = await setting(outcome, lambda s: rng.choice([0.0, 0.1, 1.0]), workers, **config)
        for number in range(3):
            rollout = await run.scheduler.next_rollout()
            if rng.random() < 0.3:
                run.scheduler.requeue_batch(rollout, "tokens lost: to see what happens")
                rollout = await run.scheduler.next_rollout()
            assert {g.index for g in rollout.kept} == {g.index for g in rollout.groups if kept(g)}
            assert rollout.batch is not None
            greedy = {g.index: outcome(g.samples[size]) for g in rollout.kept}
            assert rollout.batch["baseline"].tolist() == [greedy[group] for group in rollout.batch["group"]]
            assert not any(sample.endswith(f".{size}") for sample in rollout.batch["sample"])
            run.scheduler.after_publish(number + 1)
            run.scheduler.mark_trained(rollout, number + 1)
            assert all((s.state, s.reason) == NOT_TRAINED for g in rollout.kept for s in g.samples if s.greedy)
            await run.pool.tokens.release(rollout.samples)
        assert set(run.moves.last().values()) <= {"trained", "dropped", "failed"}
        assert not run.pool.tokens._locations
        assert not any(r.state in ("kept", "trained") for r in run.moves.records if r.sample.endswith(f".{size}"))

    go(main())


# on the way


def with_greedy(run: Party, index: int, size: int, task: Any = None) -> list[Sample]:
    samples = run.group(index, size + 1, task=task)
    samples[-1].greedy, samples[-1].temperature = True, 0.0
    return samples


def test_only_the_greedy_answer_is_drawn_at_temperature_0() -> None:
    async def main() -> None:
        run = await party()
        samples = with_greedy(run, 3, 2)
        call = run.start(samples)
        await until(lambda: len(run.running) == 3)
        asked = run.toys[0].running
        assert {id: asked[id].sampling.temperature for id in asked} == {"3.0": 0.5, "3.1": 0.5, "3.2": 0.0}
        run.answer("3.0", "3.1")
        run.toys[0].finish("3.2", spoken("five"))
        await call
        assert [s.reward for s in samples] == [1.0, 1.0, 0.0]
        assert run.moves.infos("3.1")[-1] == ("scored", {"reward": 1.0})
        assert run.moves.infos("3.2")[-1] == ("scored", {"baseline": 0.0})
        await run.pool.tokens.release(samples)
        run.assert_empty()

    go(main())


def test_an_episode_can_be_greedy_and_is_so_again_when_its_worker_dies() -> None:
    async def main() -> None:
        run = await party(1, 2, max_attempts=2)
        samples = with_greedy(run, 0, 1, episode_of(0.5, 0.5))
        call = run.start(samples)
        await until(lambda: len(run.running) == 2)
        home = run.pool.tokens.locate(samples[0])
        assert home is not None
        run.kill_worker(home)
        await until(lambda: {(s.state, s.tries) for s in samples} == {("generating", 2)})
        assert [asked.sampling.temperature for asked in run.toys[0].asked] == [0.5, 0.0] * 2
        run.toys[0].says = lambda request: spoken("4")
        run.answer()
        await call
        assert [(s.state, s.reward, s.tries) for s in samples] == [("scored", 1.0, 2)] * 2
        assert run.moves.infos("0.1")[-1] == ("scored", {"baseline": 1.0})

    go(main())


def test_equal_rewards_have_signal_if_the_greedy_one_differs() -> None:
    def group(greedy: float, *rewards: float) -> Group:
        task = TASKS.train[0]
        samples = [Sample(f"0.{i}", task, 0, 1.0, state="scored", reward=reward) for i, reward in enumerate(rewards)]
        samples.append(Sample(f"0.{len(rewards)}", task, 0, 0.0, state="scored", reward=greedy, greedy=True))
        return Group(0, task, samples)

    assert no_signal(group(1.0, 0.5, 0.5)) is None
    assert no_signal(group(0.5, 0.5)) == NO_SIGNAL
    assert no_signal(group(0.5, 0.5, 1.0)) is None
    assert len(group(1.0, 0.5, 0.5).scored) == 2
    assert make_filter("mean_range", 0.0, 0.6)(group(9.0, 0.5, 0.5)) is None
