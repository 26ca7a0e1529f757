"""LongestFirst, tail rounds, and the order a config names."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import UserError
from roll.config.rollout import RolloutConfig
from roll.data import Sample, Task
from roll.data.sample import Group
from roll.rollout.early_stop import RunningResponse
from roll.scheduler.long_tail import LongestFirst, TailBatching, make_task_sampler
from roll.scheduler.task_sampler import BatchPolicy, EpochSampler, SamplerWrapper, SolveRateSampler, TaskDraw, TaskSampler


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


class InTurn(SamplerWrapper):
    """Tasks as they are given, epoch after epoch, without a shuffle."""

    def __init__(self, tasks: Sequence[Task], skip: Sequence[str] = ()) -> None:
        super().__init__(EpochSampler(tasks, 0))
        self._tasks = tasks
        self._skip = skip
        self._drawn = 0

    def next(self) -> TaskDraw:
        epoch, place = divmod(self._drawn, len(self._tasks))
        self._drawn += 1
        task = self._tasks[place]
        return TaskDraw(task, epoch, skip="no" if task.id in self._skip else "")


def tasks_of(count: int) -> list[Task]:
    return [Task.ask(str(n), "?") for n in range(count)]


def told(order: LongestFirst, lengths: Mapping[int, int]) -> LongestFirst:
    """An order that has seen these tasks, by number, at these lengths."""
    for number, length in lengths.items():
        order.on_group_judged(tasks_of(number + 1)[number], [0.0, 1.0], [length - 1, length + 1])
    order.begin_step()
    return order


def test_the_longest_of_the_window_goes_first_but_not_for_ever() -> None:
    lengths = [10, 80, 20, 50, 40, 30, 60, 5, 5]
    tasks = tasks_of(len(lengths))
    order = told(LongestFirst(InTurn(tasks), 3), dict(enumerate(lengths)))
    assert [lengths[int(order.next().task.id)] for _ in range(6)] == [80, 50, 40, 10, 60, 20]


@given(st.lists(st.integers(1, 50) | st.none(), min_size=1, max_size=30), st.integers(1, 8))
@settings(deadline=None)
def test_no_draw_is_overtaken_more_often_than_the_window(lengths: list[int | None], window: int) -> None:
    tasks = tasks_of(len(lengths))
    known = {number: length for number, length in enumerate(lengths) if length is not None}
    order = told(LongestFirst(InTurn(tasks), window), known)
    draws = [order.next() for _ in range(3 * len(tasks) + 20)]
    places = [draw.epoch * len(tasks) + int(draw.task.id) for draw in draws]
    assert len(set(places)) == len(places)
    for number, place in enumerate(places):
        assert place - window + 1 <= number <= place + window
        assert sum(later > place for later in places[:number]) <= window


@given(st.lists(st.integers(1, 50), min_size=2, max_size=20), st.integers(2, 8))
@settings(deadline=None)
def test_each_draw_is_the_longest_of_the_window_or_its_oldest(lengths: list[int], window: int) -> None:
    tasks = tasks_of(len(lengths))
    order = told(LongestFirst(InTurn(tasks), window), dict(enumerate(lengths)))
    base = [TaskDraw(task, epoch) for epoch in range(60) for task in tasks]
    ahead, coming = base[:window], iter(base[window:])
    for _ in range(40):
        draw = order.next()
        longest = max(lengths[int(waiting.task.id)] for waiting in ahead)
        assert draw == ahead[0] or lengths[int(draw.task.id)] == longest
        ahead.remove(draw)
        ahead.append(next(coming))


def test_a_task_never_seen_is_expected_to_be_as_long_as_the_mean() -> None:
    tasks = tasks_of(3)
    assert told(LongestFirst(InTurn(tasks), 3), {1: 9, 2: 10}).next().task.id == "2"
    assert told(LongestFirst(InTurn(tasks), 3), {1: 9, 0: 3}).next().task.id == "1"
    assert told(LongestFirst(InTurn(tasks), 3), {0: 9, 1: 5}).next().task.id == "0"
    four = tasks_of(4)
    order = told(LongestFirst(InTurn(four), 3), {0: 2, 1: 4, 3: 30})
    assert order.next().task.id == "2", "12 on average"
    assert LongestFirst(InTurn(tasks), 3).next().task.id == "0", "nothing is known of anything"


def test_only_the_last_group_of_a_task_counts() -> None:
    tasks = tasks_of(2)
    order = told(told(LongestFirst(InTurn(tasks), 2), {0: 90, 1: 50}), {0: 10})
    assert order.next().task.id == "1"
    third = tasks_of(3)
    order = told(told(LongestFirst(InTurn(third), 3), {1: 900, 2: 50}), {1: 40})
    order.on_group_judged(third[0], [], [])
    assert order.next().task.id == "2", "the mean is 45, without the 900"


def test_skipped_draws_take_no_position_in_the_window() -> None:
    tasks = tasks_of(4)
    order = told(LongestFirst(InTurn(tasks, skip=["1"]), 3), {0: 1, 2: 9, 3: 3})
    assert [(draw.task.id, draw.skip) for draw in (order.next() for _ in range(3))] == [("1", "no"), ("2", ""), ("3", "")]


def test_what_comes_back_overtakes_the_window() -> None:
    order = LongestFirst(EpochSampler(tasks_of(10), 0), 4)
    first = [order.next() for _ in range(3)]
    for draw in first[1:]:
        order.requeue(draw.task, draw.epoch)
    again = [order.next() for _ in range(2)]
    assert [(draw.task, draw.epoch) for draw in again] == [(draw.task, draw.epoch) for draw in first[1:]]


def test_longest_first_keeps_the_batch_policy_of_its_base() -> None:
    shape = BatchPolicy(0.25, "first_finished")
    assert LongestFirst(EpochSampler(tasks_of(2), 0, batch_policy=shape), 2).begin_step() == shape


def test_cut_tasks_make_a_round_of_their_own_that_is_waited_for() -> None:
    order = TailBatching(EpochSampler(tasks_of(20), 0), groups_per_step=2, oversample=0.5)
    cut: list[TaskDraw] = []
    for _ in range(2):
        assert order.begin_step() == BatchPolicy(0.5, "first_finished")
        cut.append([order.next() for _ in range(3)][1])
        order.requeue_unfinished(cut[-1].task)
    assert order.begin_step() == BatchPolicy(0.0, "in_order")
    round_of_tails = [order.next() for _ in range(2)]
    assert [(draw.task, draw.epoch, draw.again) for draw in round_of_tails] == [(draw.task, 0, True) for draw in cut]
    fresh = order.next()
    assert not fresh.again, "a replacement in the tail round"
    assert order.begin_step() == BatchPolicy(0.5, "first_finished")


def test_a_cut_task_keeps_its_epoch_though_the_next_one_has_begun() -> None:
    order = TailBatching(EpochSampler(tasks_of(2), 0), groups_per_step=2, oversample=0.5)
    order.begin_step()
    for draw in [order.next() for _ in range(2)]:
        order.requeue_unfinished(draw.task)
    assert [order.next().epoch for _ in range(2)] == [1, 1], "not yet: the round goes on"
    order.begin_step()
    assert [order.next().epoch for _ in range(3)] == [0, 0, 2]


def test_what_a_tail_round_did_not_take_waits_for_the_next() -> None:
    order = TailBatching(EpochSampler(tasks_of(9), 0), groups_per_step=3, oversample=1.0)
    order.begin_step()
    draws = [order.next() for _ in range(6)]
    for draw in draws[:4]:
        order.requeue_unfinished(draw.task)
    order.begin_step()
    assert order.next().task == draws[0].task
    assert order.begin_step().batch_selection == "in_order"
    assert [order.next().task for _ in range(3)] == [draw.task for draw in draws[1:4]]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 17), st.integers(0, 999))
@settings(max_examples=examples(60), deadline=None)
def test_every_draw_is_given_in_a_round_where_it_is_waited_for(need: int, surplus: int, size: int, seed: int) -> None:
    order = TailBatching(EpochSampler(tasks_of(size), 0), need, surplus / need)
    dice = random.Random(seed)
    drawn: Counter[tuple[str, int]] = Counter()
    trained: Counter[tuple[str, int]] = Counter()
    cut: list[tuple[str, int]] = []
    back: set[tuple[str, int]] = set()
    for _ in range(60):
        shape = order.begin_step()
        draws = [order.next() for _ in range(need + round(shape.oversample * need))]
        keys = [(draw.task.id, draw.epoch) for draw in draws]
        drawn.update(key for key, draw in zip(keys, draws, strict=True) if not draw.again)
        if shape.batch_selection == "in_order":
            assert keys == cut[:need], "the longest waiting, and nothing else"
            del cut[:need]
        else:
            assert len(cut) < need, "a round of those was due"
            assert set(keys[: len(back)]) == back, "what came back goes first"
            back = set()
        running = dice.sample(draws, len(draws) - need)
        for key, draw in zip(keys, draws, strict=True):
            if draw not in running:
                trained[key] += 1
            elif dice.random() < 0.8:
                order.requeue_unfinished(draw.task, draw.epoch)
                cut.append(key)
            else:
                order.requeue(draw.task, draw.epoch)
                back.add(key)
    assert set(drawn.values()) | set(trained.values()) == {1}
    assert set(drawn) - set(trained) == {*cut, *back}


def made(task_order: str = "in_order", **changes: Any) -> TaskSampler:
    sampler, weights = changes.pop("sampler", "epochs"), changes.pop("weights", {})
    root = changes.pop("root", None)
    settings = {"oversample": 0.25, "batch_selection": "first_finished", "lookahead": 3, "groups_per_step": 4}
    rollout = RolloutConfig.model_validate({"task_order": task_order, **settings, **changes})
    return make_task_sampler(tasks_of(5), 0, rollout, sampler=sampler, weights=weights, root=root)


def test_the_names_of_a_config_make_the_samplers() -> None:
    plain, ahead, tails = made(), made("longest_first"), made("tail_batching", sampler="solve_rate")
    assert isinstance(plain, EpochSampler)
    assert plain.begin_step() == BatchPolicy(0.25, "first_finished")
    assert isinstance(ahead, LongestFirst)
    assert isinstance(ahead.base, EpochSampler)
    assert isinstance(tails, TailBatching)
    assert isinstance(tails.base, SolveRateSampler)
    assert isinstance(made(sampler="solve_rate"), SolveRateSampler)
    for cuts in range(4):
        assert tails.begin_step() == BatchPolicy(0.25, "first_finished"), cuts
        tails.requeue_unfinished(tails.next().task)
    assert tails.begin_step() == BatchPolicy(0.0, "in_order")
    ahead.next()
    assert len(ahead.state()["waiting"]) == 2, "a window of three, one of them given out"
    weighted = made(weights={"default": 2})
    assert {weighted.next().task.id for _ in range(5)} == set("01234")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"task_order": "longest_frist"},
            "rollout.task_order 'longest_frist' is not known: write .*; did you mean 'longest_first'",
        ),
        (
            {"task_order": "tail_batching", "oversample": 0.0},
            "rollout.oversample is 0 of 4 groups, less than one: write 0.25 or",
        ),
        (
            {"task_order": "tail_batching", "oversample": 0.4, "groups_per_step": 2},
            "0.4 of 2 groups, less than one: write 0.5 or",
        ),
        ({"weights": {"math": 1}}, "tasks.domain_weights names 'math'"),
        (
            {"task_order": "orders.py:Nowhere"},
            "rollout.task_order 'orders.py:Nowhere': .*orders.py has no 'Nowhere'; it has SamplerWrapper, Backwards",
        ),
        (
            {"task_order": "orders.py:Half"},
            "has no method requeue_unfinished.task, epoch=None.: inherit from roll.scheduler.task_sampler.SamplerWrapper",
        ),
        ({"task_order": "orders.py:NoEpoch"}, "has no method requeue.task, epoch=None."),
        ({"task_order": "orders.py:NeedsEpoch"}, "has no method requeue.task, epoch=None."),
        (
            {"task_order": "orders.py:fails"},
            "'orders.py:fails', called with the task sampler to wrap, failed: KeyError: 'x'",
        ),
    ],
)
def test_invalid_task_orders_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orders.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        made(**changes)


def test_a_users_sampler_wraps_the_base(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(USERS)
    order, plain = made("orders.py:Backwards", root=tmp_path, sampler="solve_rate"), made()
    first, second, third, fourth = (plain.next() for _ in range(4))
    assert [order.next() for _ in range(4)] == [second, first, fourth, third]
    order.restore(order.state())


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "scheduling.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="not a source tree")
def test_the_examples_of_the_docs_do_what_they_say() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert round(float(names["kept"].mean() / names["lengths"].mean()), 2) == 0.86
    easy, hard = Task.ask("easy", "?", level=1), Task.ask("hard", "?", level=3)
    order = names["EasyFirst"](EpochSampler([easy, hard], 0))
    skipped = {(draw.task.id, draw.epoch) for draw in (order.next() for _ in range(6)) if draw.skip}
    assert skipped == {("hard", 0)}
    samples = [
        Sample(f"0.{n}", easy, 0, 1.0, state="scored", finish=finish) for n, finish in enumerate(["length", "stop"])
    ]
    assert names["not_too_long"](Group(0, easy, samples)) is None
    assert names["not_too_long"](Group(0, easy, samples[:1])) == "cut off: 1 samples"
    ids = np.zeros(200, np.int32)
    assert names["gave_up"](RunningResponse(easy, ids, lambda: "I cannot say")) == "gave up: said so"
    assert names["gave_up"](RunningResponse(easy, ids[:100], lambda: "I cannot say")) is None


USERS = """
from roll.scheduler.task_sampler import SamplerWrapper

class Backwards(SamplerWrapper):
    def __init__(self, base):
        super().__init__(base)
        self.kept = None

    def next(self):
        if self.kept is None:
            self.kept = self.base.next()
            return self.base.next()
        kept, self.kept = self.kept, None
        return kept

class Half:
    def __init__(self, base):
        self.begin_step, self.next, self.requeue = base.begin_step, base.next, base.requeue

class NoEpoch(SamplerWrapper):
    def requeue(self, task):
        pass

class NeedsEpoch(SamplerWrapper):
    def requeue(self, task, epoch):
        pass

def fails(base):
    return {}["x"]
"""
