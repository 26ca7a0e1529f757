"""GroupTable against plain lists: each group is in one state, and every query gives the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.data import Group, Task
from roll.scheduler.group_table import GroupTable


def group(index: int, version: int = 0) -> Group:
    return Group(index, Task.ask(str(index), "?"), [], version=version)


class Model:
    """The table's groups, as lists of indices."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.ready: list[int] = []
        """In the order they were finished."""
        self.taken: list[int] = []

    def before_any_open(self) -> int:
        return sum(index < min(self.open, default=10**9) for index in self.ready)


STEPS = st.tuples(
    st.sampled_from(["issue", "issue", "issue", "finish", "finish", "drop", "take", "reopen", "trained"]),
    st.integers(0, 99),
)


@given(steps=st.lists(STEPS, max_size=80))
@settings(max_examples=examples(200), derandomize=True, deadline=None)
def test_the_group_table_agrees_with_plain_lists(steps: list[tuple[str, int]]) -> None:
    table, model = GroupTable(), Model()
    groups: dict[int, Group] = {}

    def some(of: list[int], which: int) -> int | None:
        return sorted(of)[which % len(of)] if of else None

    for what, which in steps:
        if what == "issue":
            index = len(groups)
            groups[index] = group(index, which % 5)
            table.issue(groups[index])
            model.open.append(index)
        elif what == "finish" and (at := some(model.open, which)) is not None:
            table.finish(groups[at])
            model.open.remove(at)
            model.ready.append(at)
        elif what == "drop" and (at := some([*model.open, *model.ready], which)) is not None:
            table.drop(groups[at])
            (model.open if at in model.open else model.ready).remove(at)
        elif what == "take":
            chosen = sorted(model.ready)[: which % 3]
            table.take([groups[at] for at in chosen])
            model.taken += chosen
            model.ready = [at for at in model.ready if at not in chosen]
        elif what == "reopen" and (at := some([*model.ready, *model.taken], which)) is not None:
            groups[at].version = which % 7  # it runs again
            table.reopen(groups[at])
            (model.ready if at in model.ready else model.taken).remove(at)
            model.open.append(at)
        elif what == "trained" and model.taken:
            done = sorted(model.taken)[: 1 + which % 2]
            table.remove_trained([groups[at] for at in done])
            model.taken = [at for at in model.taken if at not in done]
        assert set(table.open) == set(model.open)
        assert list(table.ready) == model.ready
        assert set(table.taken) == set(model.taken)
        assert table.in_flight == len(model.open) + len(model.ready) + len(model.taken)
        assert sorted(g.index for g in table.waiting) == sorted([*model.open, *model.ready])
        assert [g.index for g in table.ready_in_order()] == sorted(model.ready)
        assert table.ready_before_any_open() == model.before_any_open()
        first = table.first_open()
        assert (None if first is None else first.index) == min(model.open, default=None)
        assert table.oldest_open_version == min((groups[at].version for at in model.open), default=None)


def test_a_group_that_runs_again_counts_as_open_from_its_old_place() -> None:
    table = GroupTable()
    groups = [group(index) for index in range(4)]
    for each in groups:
        table.issue(each)
    for each in groups[:3]:
        table.finish(each)
    table.take(groups[:1])
    assert table.ready_before_any_open() == 2
    table.reopen(groups[0])
    assert table.ready_before_any_open() == 0
    assert table.first_open() is groups[0]
    table.finish(groups[0])
    assert table.ready_before_any_open() == 3
    assert [g.index for g in table.ready.values()] == [1, 2, 0]


@pytest.mark.parametrize("place", ["nowhere", "taken"])
def test_a_group_that_is_not_in_flight_cannot_be_dropped(place: str) -> None:
    table, subject = GroupTable(), group(0)
    if place == "taken":
        table.issue(subject)
        table.finish(subject)
        table.take([subject])
    with pytest.raises(KeyError):
        table.drop(subject)
    assert table.in_flight == (place == "taken")
