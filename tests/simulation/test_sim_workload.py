"""What samples are like: fixed by seed and id, and of the shape the default workloads claim."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import correlation, mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.simulation.environments import EnvironmentSteps
from roll.simulation.lengths import LogNormal, uniforms
from roll.simulation.workload import AGENTIC, RLVR, Workload, needed

BOTH = pytest.mark.parametrize("workload", [RLVR, AGENTIC], ids=lambda workload: workload.name)


@given(st.integers(), st.text(max_size=20))
def test_chance_is_between_0_and_1_and_of_the_key_alone(seed: int, key: str) -> None:
    drawn = uniforms(seed, key)
    assert all(0 < number < 1 for number in drawn)
    assert drawn == uniforms(seed, key) != uniforms(seed + 1, key)


@BOTH
def test_a_sample_is_the_same_whoever_asks(workload: Workload) -> None:
    episode = workload.episode("17.3")
    assert episode == replace(workload).episode("17.3")
    assert episode != replace(workload, seed=2).episode("17.3")
    assert episode.reward == workload.reward("17.3")
    assert workload.scaled(1000).episode("17.3") == episode


def test_responses_have_the_mean_the_tail_and_the_likeness_they_claim() -> None:
    groups = [[RLVR.episode(sample).new_tokens for sample in RLVR.samples_of(group)] for group in range(500)]
    tokens = [length for group in groups for length in group]
    assert 900 < mean(tokens) < 1150
    assert max(tokens) == RLVR.responses.max_tokens
    assert 0.0005 < tokens.count(RLVR.responses.max_tokens) / len(tokens) < 0.01
    assert 0.2 < correlation([group[0] for group in groups], [group[1] for group in groups]) < 0.7


@BOTH
def test_about_three_groups_of_eight_have_no_signal(workload: Workload) -> None:
    assert 0.33 < mean(not workload.has_signal(group) for group in range(1000)) < 0.42


def test_turns_follow_each_other_in_one_context() -> None:
    numbers = set()
    for group in range(100):
        for sample in AGENTIC.samples_of(group):
            turns = AGENTIC.episode(sample).turns
            numbers.add(len(turns))
            assert all(b.prompt_tokens > a.prompt_tokens + a.new_tokens for a, b in pairwise(turns))
            assert all(turn.environment_s > 0 for turn in turns)
    assert numbers == set(range(2, 11))


def test_one_environment_step_in_a_hundred_is_fifty_times_slower() -> None:
    steps = EnvironmentSteps(LogNormal(mean=1.0, sigma=0.0))
    seconds = [steps.seconds(*uniforms(0, str(number))[:2]) for number in range(10_000)]
    assert set(seconds) == {1.0, 50.0}
    assert 70 < seconds.count(50.0) < 130


@BOTH
def test_scaling_keeps_the_work_of_an_engine(workload: Workload) -> None:
    larger = workload.scaled(workload.engines * 4)
    assert larger.samples_per_step == 4 * workload.samples_per_step
    assert larger.graders == 4 * workload.graders
    assert larger.train_s(range(8)) == pytest.approx(workload.train_s(range(8)) / 4)
    assert workload.scaled(1).groups_per_step == workload.groups_per_step // workload.engines


def test_groups_are_needed_in_order_until_enough_are_kept() -> None:
    workload = replace(RLVR, groups_per_step=20)
    first, second = needed(workload, 2)
    assert first.tried == tuple(range(len(first.tried)))
    assert second.tried[0] == first.tried[-1] + 1
    assert first.kept == tuple(group for group in first.tried if workload.has_signal(group))
    assert len(first.kept) == 20
    assert first.tried[-1] == first.kept[-1]


def test_no_more_groups_are_tried_than_may_be() -> None:
    hopeless = replace(RLVR, groups_per_step=4, solving=replace(RLVR.solving, bias=1000.0))
    (step,) = needed(hopeless, 1)
    assert (len(step.tried), step.kept) == (8, ())
