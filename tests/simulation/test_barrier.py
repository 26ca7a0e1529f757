"""The barrier and the bound on workloads one can work out by hand; the bound below barrier and scheduler on others."""

from __future__ import annotations

import math
import tempfile
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.simulation.barrier import run_barrier
from roll.simulation.bound import StepBound, on_policy_bound_s, overlapping_bound_s, step_bounds
from roll.simulation.clock import run
from roll.simulation.controller import simulate
from roll.simulation.environments import EnvironmentSteps
from roll.simulation.lengths import Lengths, LogNormal, Solving
from roll.simulation.spec import EngineSpec
from roll.simulation.workload import StepGroups, Workload, needed


def always(tokens: int) -> Lengths:
    return Lengths(mean_tokens=tokens, sigma=0.0, alike=0.5, max_tokens=10_000)


PLAIN = Workload(
    name="plain",
    engines=2,
    engine=EngineSpec(1.0, 0.5, 0.0, float("inf"), max_running=4, kv_tokens=1000),
    groups_per_step=4,
    group_size=2,
    prompts=always(5),
    responses=always(10),
    solving=Solving(bias=0.0, spread=0.0, by_length=0.0),  # half of the groups of two have no signal
    grading=LogNormal(mean=0.5, sigma=0.0),
    graders=4,
    train_tokens_per_s=10.0,
    publish_s=2.0,
)


def rounds_of(groups: StepGroups, wanted: int) -> list[int]:
    """How many groups each round of a step had."""
    rounds, kept, at = [], 0, 0
    while at < len(groups.tried):
        rounds.append(min(wanted - kept, 2 * wanted - at))
        kept += sum(group in groups.kept for group in groups.tried[at : at + rounds[-1]])
        at += rounds[-1]
    return rounds


@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_equal_samples(seed: int) -> None:
    workload = replace(PLAIN, seed=seed)
    (step,) = run_barrier(workload, 1).steps
    rounds = rounds_of(step.groups, 4)
    assert step.rounds == len(rounds)
    # The engine with most groups has ceil(groups / 2) of them, two samples each, in one batch.
    assert step.generate_s == pytest.approx(sum(10 * (1.0 + 0.5 * 2 * math.ceil(groups / 2)) for groups in rounds))
    assert step.grade_s == pytest.approx(sum(0.5 * math.ceil(2 * groups / 4) for groups in rounds))
    assert step.train_s == len(step.groups.kept) * 2 * 15 / 10.0


def test_a_step_that_may_try_no_more_trains_on_what_it_has() -> None:
    hopeless = replace(PLAIN, solving=Solving(bias=1000.0, spread=0.0, by_length=0.0))
    run = run_barrier(hopeless, 1)
    (step,) = run.steps
    assert (step.rounds, len(step.groups.tried), step.groups.kept) == (2, 8, ())
    assert run.seconds == pytest.approx(2 * 30.0 + 2 * 1.0 + 0.0 + 2.0)
    assert run.utilisation == pytest.approx(2 * 30.0 / run.seconds)
    assert run.decoded_tokens == 16 * 10


def test_more_samples_than_seats_take_turns() -> None:
    workload = replace(PLAIN, groups_per_step=6, engines=1, max_replacements=0.0)
    (step,) = run_barrier(workload, 1).steps
    assert step.generate_s == pytest.approx(3 * 10 * 3.0)


def test_whole_episodes_are_waited_for() -> None:
    workload = replace(
        PLAIN,
        max_replacements=0.0,
        turns=(2, 2),
        observations=always(3),
        environment=EnvironmentSteps(LogNormal(mean=7.0, sigma=0.0), straggler_share=0.0),
        grading=None,
    )
    (step,) = run_barrier(workload, 1).steps
    assert step.generate_s == pytest.approx(2 * (10 * 3.0 + 7.0))
    assert step.grade_s == 0.0


def test_the_bound_by_hand() -> None:
    workload = replace(PLAIN, engine=EngineSpec(1.0, 0.5, 0.25, 10.0, max_running=4, kv_tokens=1000))
    steps = [StepGroups(tried=(0, 1, 2), kept=(0, 2)), StepGroups(tried=(3,), kept=(3,))]
    attention_s = 0.25 * sum(range(5, 15))
    of_group_s = 2 * (10 * 3.0 / 4 + attention_s) + 0.5
    path_s = 0.5 + 10 * 1.5 + attention_s + 0.5
    training_s = [2 * 2 * 15 / 10 + 2.0, 2 * 15 / 10 + 2.0]
    decode_s = [3 * of_group_s / 2, of_group_s / 2]
    for part, decode, train in zip(step_bounds(workload, steps), decode_s, training_s, strict=True):
        assert astuple(part) == pytest.approx(astuple(StepBound(decode, path_s, train)))
    first_s = max(decode_s[0], path_s) + training_s[0]
    second_s = max(first_s, decode_s[0] + decode_s[1], path_s) + training_s[1]
    assert overlapping_bound_s(workload, steps) == pytest.approx(second_s)
    turns_s = [max(decode, path_s) + train for decode, train in zip(decode_s, training_s, strict=True)]
    assert on_policy_bound_s(workload, steps) == pytest.approx(sum(turns_s))


def test_the_bound_knows_turns() -> None:
    workload = replace(
        PLAIN,
        engine=EngineSpec(1.0, 0.5, 0.0, 10.0, max_running=4, kv_tokens=1000),
        turns=(3, 3),
        observations=always(4),
        environment=EnvironmentSteps(LogNormal(mean=7.0, sigma=0.0), straggler_share=0.0),
        grading=None,
    )
    (bound,) = step_bounds(workload, [StepGroups((0,), (0,))])
    assert bound.decode_s == pytest.approx((0.5 + 2 * (0.8 + 30 * 3.0 / 4)) / 2)
    assert bound.longest_s == pytest.approx(0.5 + 0.8 + 30 * 1.5 + 3 * 7.0)


workloads = st.builds(
    Workload,
    name=st.just("any"),
    engines=st.integers(1, 4),
    engine=st.builds(
        EngineSpec,
        base_s=st.floats(0.01, 1.0),
        per_sequence_s=st.floats(0.0, 0.1),
        per_cached_token_s=st.floats(0.0, 1e-3),
        prefill_tokens_per_s=st.floats(10.0, 1e4),
        max_running=st.integers(1, 8),
        kv_tokens=st.integers(600, 1500),
        reserve_tokens=st.integers(0, 20),
    ),
    groups_per_step=st.integers(1, 6),
    group_size=st.integers(1, 4),
    prompts=st.builds(Lengths, st.floats(1, 50), st.floats(0, 1), st.floats(0, 1), st.just(100)),
    responses=st.builds(Lengths, st.floats(1, 30), st.floats(0, 1.5), st.floats(0, 1), st.just(80)),
    solving=st.builds(Solving, st.floats(-1, 1), st.floats(0, 3), st.floats(0, 1)),
    turns=st.sampled_from([(1, 1), (1, 4), (2, 3)]),
    observations=st.none() | st.just(Lengths(5, 0.5, 0.5, 20)),
    environment=st.none() | st.just(EnvironmentSteps(LogNormal(1.0, 0.5), straggler_share=0.1)),
    grading=st.none() | st.builds(LogNormal, st.floats(0.1, 5.0), st.floats(0, 1)),
    graders=st.integers(1, 5),
    train_tokens_per_s=st.floats(10.0, 1e4),
    publish_s=st.floats(0.0, 5.0),
    max_replacements=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=examples(40), deadline=None)
@given(workloads, st.integers(1, 3))
def test_no_barrier_beats_the_bound(workload: Workload, steps: int) -> None:
    run = run_barrier(workload, steps)
    groups = [step.groups for step in run.steps]
    assert groups == needed(workload, steps)
    bound_s = overlapping_bound_s(workload, groups)
    in_turns_s = on_policy_bound_s(workload, groups)
    assert bound_s <= in_turns_s * (1 + 1e-9)
    assert in_turns_s <= run.seconds * (1 + 1e-9)
    assert run.seconds == pytest.approx(sum(step.seconds for step in run.steps))
    assert 0 < run.utilisation <= 1
    assert run == run_barrier(workload, steps)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@settings(max_examples=examples(20), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(workloads, st.integers(1, 5))
def test_no_schedule_beats_the_bound(staleness: int, workload: Workload, steps: int) -> None:
    """The real scheduler on simulated engines, from the first token to each step's publishing."""
    with tempfile.TemporaryDirectory() as folder:
        times, _ = run(simulate(workload, steps, Path(folder) / "ledger", max_staleness=staleness, tasks=64))
    groups = [step.groups for step in times]
    for done in range(1, steps + 1):
        published_s = times[done - 1].published_s
        assert overlapping_bound_s(workload, groups[:done]) <= published_s * (1 + 1e-9)
        if not staleness:
            assert on_policy_bound_s(workload, groups[:done]) <= published_s * (1 + 1e-9)
