"""Task orders: epochs, the mix of domains, what comes back, and skipping by solve rate."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import UserError
from roll.data import Task
from roll.scheduler.long_tail import LongestFirst, TailBatching
from roll.scheduler.task_sampler import BatchPolicy, EpochSampler, SamplerWrapper, SolveRateSampler, TaskDraw, TaskSampler

sizes = st.integers(1, 12)
seeds = st.integers(0, 5)
weights_of_domains = st.lists(st.integers(1, 40) | st.integers(1, 99).map(lambda n: n / 100), min_size=1, max_size=9)


def tasks_of(*counts: int) -> list[Task]:
    """So many tasks of each domain: a0 a1 … b0 b1 …"""
    return [
        Task.ask(f"{chr(97 + domain)}{n}", "?", domain=chr(97 + domain))
        for domain, count in enumerate(counts)
        for n in range(count)
    ]


def names(draws: Sequence[TaskDraw]) -> list[tuple[str, int]]:
    return [(draw.task.id, draw.epoch) for draw in draws]


def take(order: TaskSampler, count: int) -> list[TaskDraw]:
    return [order.next() for _ in range(count)]


@given(sizes, seeds)
@settings(deadline=None)
def test_without_weights_an_epoch_is_one_shuffle_of_all_tasks(size: int, seed: int) -> None:
    tasks = tasks_of(size, size)
    expected = []
    for epoch in range(3):
        order = list(range(len(tasks)))
        random.Random(f"{seed}/tasks/{epoch}").shuffle(order)
        expected += [(tasks[index].id, epoch) for index in order]
    assert names(take(EpochSampler(tasks, seed), len(expected))) == expected


@given(weights_of_domains, st.integers(1, 4), seeds)
@settings(max_examples=examples(30), deadline=None)
def test_with_weights_the_mix_is_exact_after_every_draw(weights: list[float], size: int, seed: int) -> None:
    domains = [chr(97 + domain) for domain in range(len(weights))]
    order = EpochSampler(tasks_of(*[size] * len(weights)), seed, dict(zip(domains, weights, strict=True)))
    exact = {domain: Fraction(str(weight)) for domain, weight in zip(domains, weights, strict=True)}
    had: Counter[str] = Counter()
    for n in range(1, 120):
        had[order.next().task.domain] += 1
        for domain in domains:
            due = n * exact[domain] / sum(exact.values())
            assert floor(due) <= had[domain] <= ceil(due)


def test_a_mix_that_taking_the_furthest_behind_would_miss() -> None:
    weights = {chr(97 + n): float(w) for n, w in enumerate([11, 1, 7, 1, 23, 25, 1])}
    order = EpochSampler(tasks_of(*[1] * 7), 0, weights)
    had: Counter[str] = Counter()
    for n in range(1, 139):
        had[order.next().task.domain] += 1
        assert all(floor(n * w / 69) <= had[domain] <= ceil(n * w / 69) for domain, w in weights.items())


@given(st.lists(st.tuples(sizes, st.integers(1, 5)), min_size=1, max_size=4), seeds)
@settings(deadline=None)
def test_every_domain_has_epochs_of_its_own(domains: list[tuple[int, int]], seed: int) -> None:
    counts, weights = zip(*domains, strict=True)
    order = EpochSampler(tasks_of(*counts), seed, {chr(97 + n): w for n, w in enumerate(weights)})
    draws = take(order, 120)
    for n, count in enumerate(counts):
        of_domain = [draw for draw in draws if draw.task.domain == chr(97 + n)]
        for start in range(0, len(of_domain) - count + 1, count):
            epoch = of_domain[start : start + count]
            assert {draw.epoch for draw in epoch} == {start // count}
            assert len({draw.task.id for draw in epoch}) == count


def test_domains_and_epochs_are_shuffled_each_on_its_own() -> None:
    draws = take(EpochSampler(tasks_of(20, 20), 0, {"a": 1, "b": 1}), 80)
    orders = [
        [draw.task.id[1:] for draw in draws if (draw.task.domain, draw.epoch) == key]
        for key in (("a", 0), ("a", 1), ("b", 0), ("b", 1))
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_in_which_weights_are_written_does_not_matter() -> None:
    one, other = (EpochSampler(tasks_of(3, 3), 0, weights) for weights in ({"a": 1, "b": 1}, {"b": 1, "a": 1}))
    assert names(take(one, 20)) == names(take(other, 20))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 1, "b": 1, "z": 1}, "names 'z', but no task is of that domain: the tasks are of 'a', 'b'"),
        ({"a": 1}, "has no entry for 'b', of which there are 3 tasks"),
        ({"a": 1, "b": 0}, "tasks.domain_weights.b is 0: write a number above 0"),
        ({"a": 1, "b": float("nan")}, "tasks.domain_weights.b is nan"),
        ({"a": 1, "b": float("inf")}, "tasks.domain_weights.b is inf"),
    ],
)
def test_weights_that_do_not_fit_the_tasks_are_refused(weights: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        EpochSampler(tasks_of(2, 3), 0, weights)


def test_a_shuffle_an_epoch_not_one_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted(random.Random):
        def __init__(self, seed: str) -> None:
            made.append(seed)
            super().__init__(seed)

    order = EpochSampler(tasks_of(50), 7)
    monkeypatch.setattr(random, "Random", Counted)
    for draw in take(order, 125):
        order.requeue(draw.task)
        order.next()
    assert made == ["7/tasks/0", "7/tasks/1", "7/tasks/2"]


def test_what_comes_back_goes_first_in_the_order_it_came_and_with_its_epoch() -> None:
    order, undisturbed = EpochSampler(tasks_of(3), 0), names(take(EpochSampler(tasks_of(3), 0), 9))
    first = take(order, 4)  # three of epoch 0, one of epoch 1
    for draw in (first[3], first[1], first[2]):
        order.requeue(draw.task)
    again = take(order, 3)
    assert names(again) == [undisturbed[3], *_newest(first, first[1], first[2])]
    assert all(draw.again for draw in again)
    assert names(take(order, 5)) == undisturbed[4:]


def _newest(drawn: list[TaskDraw], *draws: TaskDraw) -> list[tuple[str, int]]:
    return [(draw.task.id, max(d.epoch for d in drawn if d.task.id == draw.task.id)) for draw in draws]


def test_several_draws_of_one_task_come_back_as_several_epochs() -> None:
    order = EpochSampler(tasks_of(1), 0)
    first = take(order, 3)
    for draw in first:
        order.requeue(draw.task)
    assert names(take(order, 4)) == [("a0", 2), ("a0", 1), ("a0", 0), ("a0", 3)]
    order.requeue(first[0].task, 1)
    order.requeue(first[0].task, 0)
    assert names(take(order, 3)) == [("a0", 1), ("a0", 0), ("a0", 4)]


def test_what_comes_back_takes_no_turn_of_its_domain() -> None:
    order, undisturbed = (EpochSampler(tasks_of(3, 3), 0, {"a": 1, "b": 1}) for _ in range(2))
    for _ in range(5):
        order.requeue(order.next().task)
        order.next()
    take(undisturbed, 5)
    assert names(take(order, 12)) == names(take(undisturbed, 12))


def test_a_task_that_was_not_drawn_cannot_come_back() -> None:
    order = EpochSampler(tasks_of(2), 0)
    drawn = order.next()
    other = next(task for task in tasks_of(2) if task.id != drawn.task.id)
    with pytest.raises(AssertionError, match="was not drawn"):
        order.requeue(other)
    order.requeue(drawn.task, 0)
    with pytest.raises(AssertionError, match="was requeued twice"):
        order.requeue(drawn.task, 0)


def test_a_run_does_not_continue_with_other_tasks() -> None:
    state = EpochSampler(tasks_of(3), 0).state()
    with pytest.raises(UserError, match=r"then 3 tasks, .* now 4 tasks, "):
        EpochSampler(tasks_of(4), 0).restore(state)


def test_the_ground_gives_the_shape_it_was_made_with() -> None:
    shape = BatchPolicy(0.5, "first_finished")
    assert SamplerWrapper(EpochSampler(tasks_of(1), 0, batch_policy=shape)).begin_step() == shape
    assert EpochSampler(tasks_of(1), 0).begin_step() == BatchPolicy(0.0, "in_order")


def judge(order: TaskSampler, task: Task, reward: float, steps: int = 1) -> None:
    for _ in range(steps):
        order.on_group_judged(task, [reward, reward], [1, 1])
        order.begin_step()


def skipped_share(order: SolveRateSampler, epochs: int = 400) -> float:
    return sum(bool(draw.skip) for draw in take(order, epochs)) / epochs


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([], 0.0),
        ([1.0], 0.375),
        ([1.0, 1.0], 0.5625),
        ([0.0, 0.0], 0.5625),
        ([1.0] * 20, 0.75),
        ([1.0] * 20 + [0.5], 0.0),
        ([1.0] * 20 + [0.0], 0.375),
        ([0.0] * 20 + [1.0, 1.0], 0.5625),
        ([1.5, 3.0], 0.5625),
        ([-1.0, -1.0], 0.5625),
    ],
)
def test_certainty_makes_a_visit_likelier_to_be_skipped(rewards: list[float], share: float) -> None:
    order = SolveRateSampler(EpochSampler(tasks_of(1), 0), seed=0)
    for reward in rewards:
        judge(order, tasks_of(1)[0], reward)
    assert skipped_share(order) == pytest.approx(share, abs=0.07 if share else 0)


def test_a_skipped_visit_says_why_and_is_the_same_in_every_run() -> None:
    def draws(seed: int) -> list[TaskDraw]:
        order = SolveRateSampler(EpochSampler(tasks_of(2), 0), seed)
        judge(order, tasks_of(2)[0], 1.0, steps=9)
        judge(order, tasks_of(2)[1], 0.0, steps=9)
        return take(order, 40)

    assert draws(0) == draws(0) != draws(1)
    epochs = [[draw.epoch for draw in draws(0) if draw.skip and draw.task.id == id] for id in ("a0", "a1")]
    assert epochs[0] != epochs[1]
    reasons = {(draw.task.id, draw.skip) for draw in draws(0) if draw.skip}
    assert reasons == {
        ("a0", "solve rate 1.00: nothing to learn from it now"),
        ("a1", "solve rate 0.00: nothing to learn from it now"),
    }


def test_skipping_changes_no_draw_but_its_reason_and_spares_what_comes_back() -> None:
    order = SolveRateSampler(EpochSampler(tasks_of(4), 0), seed=0)
    for task in tasks_of(4):
        judge(order, task, 1.0, steps=30)
    draws = take(order, 40)
    assert names(draws) == names(take(EpochSampler(tasks_of(4), 0), 40))
    for draw in draws[-4:]:
        order.requeue(draw.task)
    assert [draw.skip for draw in take(order, 4)] == [""] * 4


def test_rates_forget_old_visits_and_are_of_the_steps_before() -> None:
    task = tasks_of(1)[0]
    order = SolveRateSampler(EpochSampler([task], 0), seed=0, low=0.0, high=2.0)
    order.on_group_judged(task, [], [])
    order.on_group_judged(task, [1.0, 2.0], [5, 5])
    assert order.rates() == {}
    order.begin_step()
    assert order.rates() == {"a0": 0.75}
    judge(order, task, 2.0)
    judge(order, task, 0.0)
    assert order.rates() == {"a0": 0.4375}


def test_draws_of_a_step_do_not_depend_on_when_its_groups_finish() -> None:
    tasks = tasks_of(3)
    news = [(tasks[0], 1.0, 40), (tasks[1], 0.0, 10), (tasks[0], 0.5, 90), (tasks[2], 1.0, 70)]

    def draws(news: list[tuple[Task, float, int]], early: int) -> list[TaskDraw]:
        order = LongestFirst(SolveRateSampler(EpochSampler(tasks, 0), seed=0), 3)
        found = []
        for _ in range(3):
            order.begin_step()
            for task, reward, tokens in news[:early]:
                order.on_group_judged(task, [reward], [tokens])
            found += take(order, 6)
            for task, reward, tokens in news[early:]:
                order.on_group_judged(task, [reward], [tokens])
        return found

    assert draws(news, 0) == draws(news[::-1], 4) == draws(news, 2)


def made(kind: str, seed: int = 0) -> TaskSampler:
    epochs = EpochSampler(tasks_of(4, 2), seed, {"a": 1, "b": 2}, BatchPolicy(0.5, "first_finished"))
    match kind:
        case "epochs":
            return epochs
        case "solve_rate":
            return SolveRateSampler(epochs, seed)
        case "longest_first":
            return LongestFirst(SolveRateSampler(epochs, seed), 5)
        case _:
            return TailBatching(SolveRateSampler(epochs, seed), 3, 0.5)


class Life:
    """Drives an order as a scheduler may, and counts what became of every draw."""

    def __init__(self, order: TaskSampler) -> None:
        self.order = order
        self.running: list[TaskDraw] = []
        self.issued: Counter[tuple[str, int]] = Counter()
        self.came_back: Counter[tuple[str, int]] = Counter()
        self.shape = order.begin_step()

    def act(self, what: str, pick: int) -> TaskDraw | None:
        if what == "step":
            self.shape = self.order.begin_step()
        elif what == "next" or not self.running:
            draw = self.order.next()
            self.issued[draw.task.id, draw.epoch] += 1
            if not draw.skip:
                self.running.append(draw)
            return draw
        else:
            self._end(what, self.running.pop(pick % len(self.running)), pick)
        return None

    def _end(self, what: str, draw: TaskDraw, pick: int) -> None:
        if what == "on_group_judged":
            self.order.on_group_judged(draw.task, [float(pick % 2)] * 2, [pick, pick + 1])
            return
        assert what in ("requeue", "requeue_unfinished")
        self.came_back[draw.task.id, draw.epoch] += 1
        use = (
            self.order.requeue_unfinished
            if what == "requeue_unfinished" and self.shape.batch_selection == "first_finished"
            else self.order.requeue
        )
        use(draw.task, draw.epoch)


moves = st.lists(
    st.tuples(
        st.sampled_from(["next", "next", "next", "on_group_judged", "requeue", "requeue_unfinished", "step"]),
        st.integers(0, 99),
    ),
    max_size=60,
)
kinds = st.sampled_from(["epochs", "solve_rate", "longest_first", "tail_batching"])


@given(kinds, moves)
@settings(max_examples=examples(80), deadline=None)
def test_no_draw_is_lost_or_doubled_whatever_happens(kind: str, moves: list[tuple[str, int]]) -> None:
    life = Life(made(kind))
    for what, pick in moves:
        life.act(what, pick)
    for _ in range(120):  # in which what came back, and what was held, must come
        life.act("step", 0)
        life.act("next", 0)
        life.act("next", 0)
        life.act("requeue_unfinished", 1)
    extra = Counter({key: count - 1 - life.came_back[key] for key, count in life.issued.items()})
    assert max(extra.values()) == 0, "given out once more than it came back"
    whole = [epoch for epoch in range(5) if all((task.id, epoch) in life.issued for task in tasks_of(4, 2))]
    assert whole == list(range(5)), "an early epoch misses a task"
    waiting = sum(-count for count in extra.values())
    assert waiting <= 5, "what came back comes again, but for the last few"


@given(kinds, moves, moves)
@settings(max_examples=examples(80), deadline=None)
def test_a_restored_sampler_continues_with_the_same_draws(
    kind: str, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    life = Life(made(kind))
    for what, pick in before:
        life.act(what, pick)
    state: dict[str, Any] = json.loads(json.dumps(life.order.state()))
    assert state == life.order.state()
    other = Life(made(kind))
    for what in ("next", "next", "requeue", "on_group_judged", "step"):  # whatever it did before, `restore` forgets
        other.act(what, 0)
    other.order.restore(json.loads(json.dumps(state)))
    other.running, other.shape = list(life.running), life.shape
    for what, pick in [*after, *[("next", 0)] * 20]:
        assert life.act(what, pick) == other.act(what, pick)
    assert life.order.state() == other.order.state()


@pytest.mark.parametrize("kind", ["solve_rate", "longest_first", "tail_batching"])
def test_wrappers_pass_every_call_on(kind: str) -> None:
    order = made(kind)
    assert isinstance(order, SamplerWrapper)
    heard: list[str] = []

    class Ear(SamplerWrapper):
        def requeue(self, task: Task, epoch: int | None = None) -> None:
            heard.append(f"requeue {task.id} {epoch}")

        def on_group_judged(self, task: Task, rewards: Sequence[float], tokens: Sequence[int]) -> None:
            heard.append(f"on_group_judged {task.id} {list(rewards)} {list(tokens)}")

        def begin_step(self) -> BatchPolicy:
            heard.append("begin_step")
            return super().begin_step()

    order.base = Ear(order.base)
    task = order.next().task
    order.requeue(task, 0)
    order.on_group_judged(task, [0.5], [7])
    order.begin_step()
    assert heard == [f"requeue {task.id} 0", f"on_group_judged {task.id} [0.5] [7]", "begin_step"]
