"""Group filters: which finished groups are dropped, and why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import RunError, UserError
from roll.data import Sample, Task
from roll.data.sample import Group
from roll.scheduler.filters import FILTERS, by_domain, keep_all, make_filter, mean_range, no_signal

rewards_of = st.lists(st.floats(-10, 10), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def group_of(*rewards: float, failed: int = 0) -> Group:
    task = Task.ask("t", "?")
    samples = [Sample(f"7.{i}", task, 7, 1.0, state="scored", reward=reward) for i, reward in enumerate(rewards)]
    samples += [Sample(f"7.{len(rewards) + i}", task, 7, 1.0, state="failed", reward=99.0) for i in range(failed)]
    return Group(7, task, samples)


def test_equal_rewards_have_no_signal() -> None:
    assert no_signal(group_of(0.5, 0.5, failed=2)) == "no signal: all rewards equal"
    assert no_signal(group_of(0.5, 0.25)) is None
    assert keep_all(group_of(0.5, 0.5)) is None


EPISODES = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 0.0, 1.0]), st.integers(0, 2)), max_size=4), min_size=2, max_size=4
)


@given(EPISODES, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(deadline=None, max_examples=examples(300))
def test_equal_rewards_have_signal_where_turns_in_one_state_led_to_different_returns(
    episodes: list[list[tuple[float, int]]], discount: float
) -> None:
    group = group_of(*[1.0] * len(episodes))
    for sample, turns in zip(group.samples, episodes, strict=True):
        sample.turn_rewards, sample.turn_states = [reward for reward, _ in turns], [state for _, state in turns]
    worth: dict[int, set[float]] = {}
    for turns in episodes:
        ahead = 0.0
        for reward, state in reversed(turns):
            ahead = reward + discount * ahead
            worth.setdefault(state, set()).add(ahead)
    kept = make_filter("no_signal", turn_discount=discount)(group) is None
    assert kept == any(len(returns) > 1 for returns in worth.values())
    assert make_filter("no_signal")(group) is not None, "without turns the rewards alone count"


@given(rewards_of, st.floats(-10, 10), st.floats(0, 5))
@settings(deadline=None)
def test_a_mean_is_kept_exactly_in_its_range(rewards: list[float], low: float, width: float) -> None:
    mean = sum(rewards) / len(rewards)
    if min(abs(mean - low), abs(mean - low - width)) < 1e-6:
        return
    reason = mean_range(low, low + width)(group_of(*rewards, failed=1))
    assert (reason is None) == (low <= mean <= low + width)


def test_the_bounds_of_a_range_belong_to_it() -> None:
    in_range = mean_range(0.25, 0.75)
    assert in_range(group_of(0.0, 0.5)) is in_range(group_of(1.0, 0.5)) is None
    assert in_range(group_of(1.0, 0.9, 0.95)) == "mean reward out of range: 0.95 is not in 0.25 to 0.75"
    assert in_range(group_of(failed=2)) == "mean reward out of range: 0 is not in 0.25 to 0.75"


def test_filters_by_name() -> None:
    assert {name: make_filter(name) for name in FILTERS} == FILTERS
    assert make_filter("mean_range", 0.5, 0.5)(group_of(0.0, 1.0)) is None
    assert make_filter("mean_range", 0.6, 0.9)(group_of(0.0, 1.0)) is not None


USERS = """
def long_reason(group):
    return f"too easy: {group.index}" if group.scored[0].reward else None

def keep(group):
    return group.scored[0].reward == 0

def fails(group):
    return group.nothing

def empty(group):
    return ""

def number(group):
    return 1
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(USERS)
    (tmp_path / f"{tmp_path.name.replace('-', '_')}_module.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def test_a_users_function_names_its_reason_or_says_keep(file: str) -> None:
    named, says = make_filter(f"{file}:long_reason"), make_filter(f"{file}:keep")
    assert (named(group_of(1.0)), named(group_of(0.0))) == ("too easy: 7", None)
    assert (says(group_of(1.0)), says(group_of(0.0))) == ("filtered: by mine.py:keep", None)


def test_a_users_function_may_lie_in_a_module_or_under_another_root(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = next(path.stem for path in tmp_path.glob("*_module.py"))
    monkeypatch.chdir("/")
    for name in (f"{module}:keep", "mine.py:keep", f"{tmp_path}/mine.py:keep"):
        assert make_filter(name, root=tmp_path)(group_of(0.0)) is None
    with pytest.raises(UserError, match=r"there is no file /mine\.py"):
        make_filter("mine.py:keep", root=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("fails", "the filter 'mine.py:fails' failed on group 7 of task 't': AttributeError: .*'nothing'"),
        ("empty", "the filter 'mine.py:empty' returned '': return the reason"),
        ("number", "the filter 'mine.py:number' returned 1: return the reason"),
    ],
)
def test_a_users_function_that_fails_is_named(file: str, function: str, says: str) -> None:
    with pytest.raises(RunError, match=says):
        make_filter(f"{file}:{function}")(group_of(1.0))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "no_signals",
            "rollout.filter 'no_signals' is not known: write no_signal, none, mean_range, .*; did you mean 'no_signal'",
        ),
        ("absent.py:keep", "rollout.filter 'absent.py:keep': there is no file"),
    ],
)
def test_filters_that_are_not_there_are_refused(file: str, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_filter(name)


@pytest.mark.parametrize("bounds", [(0.9, 0.1), (float("nan"), 1.0)])
def test_a_range_the_wrong_way_round_is_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"rollout.filter_range is .*: write the lower bound first"):
        make_filter("mean_range", *bounds)


def test_a_group_is_filtered_as_its_domain_has_it() -> None:
    keep = by_domain({"a": keep_all, "b": mean_range(0.9, 1.0)}, no_signal)
    flat, mixed = group_of(0.5, 0.5), group_of(0.0, 0.5)
    for group, domain, kept in [(flat, "a", True), (flat, "b", False), (flat, "c", False), (mixed, "c", True)]:
        group.task = Task.ask("t", "?", domain=domain)
        assert (keep(group) is None) == kept


def test_a_domains_filter_is_refused_by_its_own_name() -> None:
    with pytest.raises(UserError, match=r"domains\.a\.filter 'non_signal' is not known.*did you mean 'no_signal'"):
        make_filter("non_signal", setting="domains.a.filter")
