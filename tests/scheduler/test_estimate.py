"""pass@k, maj@k and intervals against what they mean, tried out one by one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.scheduler.estimate import MeanEstimate, majority_at, mean_of, pass_at, student_quantile, wilson

# pass@k


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_of_k_attempts_with_a_solved_one(case: tuple[int, int, int]) -> None:
    attempts, solved, k = case
    made = [True] * solved + [False] * (attempts - solved)
    assert pass_at(attempts, solved, k) == pytest.approx(fmean(any(chosen) for chosen in combinations(made, k)))


def test_pass_at_k_by_example() -> None:
    assert pass_at(10, 3, 1) == pytest.approx(0.3)
    assert pass_at(10, 3, 8) == 1.0
    assert pass_at(5, 0, 5) == 0.0
    assert pass_at(1000, 1, 500) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@5 needs 5 attempts, but there are 4"):
        pass_at(4, 1, 5)


# maj@k


def voted(chosen: tuple[int, ...], answers: list[str | None], solved: list[bool]) -> float:
    """By hand: the mean correctness of the answers that have the most votes."""
    votes = Counter(answers[i] for i in chosen if answers[i] is not None)
    if not votes:
        return 0.0
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return fmean(fmean(solved[i] for i in range(len(answers)) if answers[i] == winner) for winner in winners)


Attempts = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8)


@given(Attempts, st.data())
@settings(max_examples=examples(300), deadline=None)
def test_majority_at_k_is_the_mean_over_all_choices_of_k_attempts(
    attempts: list[tuple[str | None, bool]], data: st.DataObject
) -> None:
    """Also where attempts with one answer were judged differently."""
    answers, solved = [answer for answer, _ in attempts], [right for _, right in attempts]
    k = data.draw(st.integers(1, len(attempts)))
    expected = fmean(voted(chosen, answers, solved) for chosen in combinations(range(len(attempts)), k))
    assert majority_at(answers, solved, k) == pytest.approx(expected)


@given(Attempts, st.randoms(use_true_random=False))
def test_majority_at_k_does_not_depend_on_the_order_of_the_attempts(
    attempts: list[tuple[str | None, bool]], rng: random.Random
) -> None:
    shuffled = rng.sample(attempts, len(attempts))
    k = max(1, len(attempts) // 2)
    found = [majority_at([a for a, _ in some], [s for _, s in some], k) for some in (attempts, shuffled)]
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize(
    ("answers", "right", "worth"),
    [
        ("aab", "a", 1.0),
        ("aab", "b", 0.0),
        ("ab", "a", 0.5),
        ("abc", "a", 1 / 3),
        ("aabb?", "b", 0.5),
        ("???a", "a", 1.0),
        ("???", "a", 0.0),
    ],
)
def test_majority_of_all_attempts_by_example(answers: str, right: str, worth: float) -> None:
    """`?` is a response without an answer: it does not vote."""
    read = [None if answer == "?" else answer for answer in answers]
    assert majority_at(read, [answer == right for answer in answers], len(answers)) == pytest.approx(worth)


def test_majority_of_many_attempts_takes_no_time() -> None:
    answers = [str(i % 7) for i in range(96)]
    assert 0 < majority_at(answers, [answer == "1" for answer in answers], 48) < 1
    assert majority_at(answers, [True] * 96, 48) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="maj@97 needs 97 attempts"):
        majority_at(answers, [True] * 96, 97)


# intervals


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (29, 2.0452), (1000, 1.9623)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, rel=2e-3)


def test_wilsons_interval_is_that_of_the_textbook() -> None:
    assert wilson(0.5, 10, 1.959964) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0.0, 10, 1.959964) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_attempts_at_one_task_do_not_count_as_tasks() -> None:
    """Where all attempts at a task are alike, asking more often says nothing more."""
    once = [[float(i % 3 == 0)] for i in range(30)]
    often = [task * 16 for task in once]
    alone, repeated = mean_of([once], shares=True), mean_of([often], shares=True)
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))
    naive = mean_of([[[value] for task in often for value in task]], shares=True)
    assert naive.high is not None
    assert repeated.high is not None
    assert naive.high - naive.value < (repeated.high - repeated.value) / 3


def test_one_task_has_no_interval() -> None:
    assert mean_of([[[1.0, 0.0]]], shares=True) == MeanEstimate(0.5, None, None, 1)
    assert str(MeanEstimate(0.5, None, None, 1)) == "0.500"
    assert str(MeanEstimate(0.5, 0.25, 0.75, 9)) == "0.500 (95 % interval 0.250 to 0.750)"


def test_strata_count_the_same_whatever_their_size() -> None:
    strata = [[[1.0]] * 2, [[0.0]] * 50]
    assert mean_of(strata, shares=True).value == 0.5
    assert mean_of(strata, shares=True).tasks == 52


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), min_size=2, max_size=20))
def test_the_interval_of_shares_holds_the_mean_and_stays_within_0_and_1(tasks: list[list[float]]) -> None:
    found = mean_of([tasks], shares=True)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1
    assert found.high - found.low > 0.01, "a few tasks never decide a share"


def drawn(rng: random.Random, tasks: int, attempts: int, share: float, alike: float) -> list[list[float]]:
    """Attempts that are right with a probability of their task's own: the same one for `alike` 0, 0 or 1 for 1."""
    rates = [
        share if not alike else float(rng.random() < share) if alike == 1 else rng.betavariate(
            share * (1 - alike) / alike, (1 - share) * (1 - alike) / alike
        )
        for _ in range(tasks)
    ]  # fmt: skip
    return [[float(rng.random() < rate) for _ in range(attempts)] for rate in rates]


@pytest.mark.parametrize("share", [0.5, 0.15, 0.97])
@pytest.mark.parametrize("alike", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("tasks", "attempts"), [(20, 8), (80, 4)])
def test_intervals_of_shares_hold_the_truth_about_as_often_as_they_say(
    share: float, alike: float, tasks: int, attempts: int
) -> None:
    rng = random.Random(f"{share} {alike} {tasks}")
    held = [
        found.low <= share <= found.high
        for found in (mean_of([drawn(rng, tasks, attempts, share, alike)], shares=True) for _ in range(400))
        if found.low is not None and found.high is not None
    ]
    assert len(held) == 400
    assert fmean(held) >= 0.90


@pytest.mark.parametrize(("tasks", "attempts"), [(8, 6), (60, 3)])
def test_intervals_of_rewards_hold_the_truth_about_as_often_as_they_say(tasks: int, attempts: int) -> None:
    rng, held = random.Random(tasks), []
    for _ in range(600):
        levels = [rng.gauss(3.0, 2.0) for _ in range(tasks)]
        found = mean_of([[[rng.gauss(level, 1.0) for _ in range(attempts)] for level in levels]], shares=False)
        assert found.low is not None
        assert found.high is not None
        held.append(found.low <= 3.0 <= found.high)
    assert 0.92 <= fmean(held) <= 0.98


def test_intervals_of_strata_hold_the_truth_about_as_often_as_they_say() -> None:
    rng, held = random.Random(5), []
    for _ in range(400):
        found = mean_of([drawn(rng, 12, 4, 0.3, 0.4), drawn(rng, 30, 4, 0.7, 0.4)], shares=True)
        assert found.low is not None
        assert found.high is not None
        held.append(found.low <= 0.5 <= found.high)
    assert fmean(held) >= 0.91
