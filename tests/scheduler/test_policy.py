"""Policies: what they see, what they do, and when they are asked."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout_toys import Moves, ToyRunner, go, party, tasks, until

from roll.config.errors import RunError, UserError
from roll.config.schema import Config, RolloutConfig
from roll.data import Sample, Task
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import make_filter
from roll.scheduler.policy import GroupView, Policy, SchedulerControl, StragglerPolicy, make_policy
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import EpochSampler

TASKS = tasks(9)
DOCS = Path(__file__).parents[2] / "docs" / "guides" / "scheduling.md"


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def scheduler_of(pool: RolloutPool, policy: Policy | None, moves: Any, **config: Any) -> RolloutScheduler:
    settings = RolloutConfig(policy="mine", **config)
    keep = make_filter(settings.filter)
    return RolloutScheduler(EpochSampler(TASKS.train, 5), pool, Lifecycle(moves), settings, keep, policy=policy)


def spread(sample: Sample) -> float:
    return float(sample.id.endswith(".0"))


class Watching(Policy):
    def __init__(self) -> None:
        self.looks: list[tuple[float, list[GroupView]]] = []
        self.ends: list[GroupView] = []

    def poll(self, control: SchedulerControl) -> None:
        self.looks.append((control.now_s, control.groups))

    def on_group_judged(self, control: SchedulerControl, group: GroupView) -> None:
        self.ends.append(group)


def test_a_policy_sees_the_groups_in_flight_when_a_step_begins_and_while_it_waits() -> None:
    async def main() -> None:
        policy, moves = Watching(), Moves()
        runner = ToyRunner(lambda s: 1.0 if s.group == 1 else spread(s), lambda s: 10.0 if s.group == 2 else 1.0)
        pool = await runner.pool()
        run = scheduler_of(pool, policy, moves, groups_per_step=2, group_size=2, max_staleness=1)
        first = run.add(Task.ask("mine", "?"), priority=3)
        rollout = await run.next_rollout()
        assert [group.index for group in rollout.kept] == [0, 2]
        assert [at for at, _ in policy.looks] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        at_first, later = policy.looks[0][1], policy.looks[2][1]
        assert [(g.index, g.state, g.priority, g.age, g.waited_for) for g in at_first] == [
            (0, "open", 3, 0, True),
            (1, "open", 0, 0, True),
            (2, "open", 0, 0, False),
            (3, "open", 0, 0, False),
        ]
        assert at_first[0].task is first.task
        assert [(s.id, s.state, s.tokens, s.reward) for s in at_first[0].samples] == [
            ("0.0", "queued", None, None),
            ("0.1", "queued", None, None),
        ]
        assert [(g.index, g.state, g.waited_for) for g in later] == [
            (0, "ready", False),
            (2, "open", True),
            (3, "ready", False),
            (4, "ready", False),
        ]
        assert [(s.state, s.tokens, s.reward) for s in later[0].samples] == [("scored", 1, 1.0), ("scored", 1, 0.0)]
        assert {group.index: group.state for group in policy.ends} == {
            0: "ready",
            1: "ended",
            2: "ready",
            3: "ready",
            4: "ready",
        }
        run.before_publish(1)
        run.after_publish(1)
        run.mark_trained(rollout, 1)
        assert {group.age for group in run._policy.control.groups if group.index < 5} == {1}
        await run.close()

    go(main())


class Doing(Policy):
    """Does something once, when polled the second time."""

    def __init__(self, what: Callable[[SchedulerControl], Any]) -> None:
        self.what, self.count, self.said = what, 0, None

    def poll(self, control: SchedulerControl) -> None:
        self.count += 1
        if self.count == 2:
            self.said = self.what(control)


def test_every_verb_does_what_the_schedulers_does() -> None:
    async def main() -> None:
        policy = Doing(
            lambda control: [
                control.drop_sample("0.0", "not wanted"),
                control.end_response("0.1", "long enough"),
                control.requeue("0.2", "make room"),
                control.drop(1, "away: with it"),
                control.reprioritise(0, 2),
                control.add(TASKS.train[0], 1),
                *(control.end_response("7.0", "?"), control.drop(7, "?"), control.reprioritise(7, 1)),
            ]
        )
        run = await party(2)
        scheduler = scheduler_of(run.pool, policy, run.moves, groups_per_step=2, group_size=4, filter="none")
        call = asyncio.create_task(scheduler.next_rollout())
        await until(lambda: len(run.running) == 8)
        for toy in run.toys:
            for id in toy.running:
                toy.draw(id, 20, 21)
        await until(lambda: policy.said is not None)
        assert policy.said == [True, True, True, True, True, 3, False, False, False]  # group 2 is in the place of 1
        group = scheduler._group_table.open[0]
        await until(lambda: {"0.2", "0.3"} <= run.running and not {"0.0", "0.1"} & run.running)
        assert group.priority == 2
        assert run.moves.reasons("1.0")[-1] == ("dropped", "away: with it")
        while not call.done():
            run.answer()
            await asyncio.sleep(0.5)
        rollout = await call
        assert [g.index for g in rollout.kept] == [0, 2]
        assert [s.finish for s in group.samples] == [None, "ended", "stop", "stop"]
        assert [s.state for s in group.samples] == ["dropped", "kept", "kept", "kept"]
        assert run.moves.reasons("0.2")[2] == ("queued", "make room")
        await scheduler.close()

    go(main())


def test_what_is_being_trained_on_is_left_alone() -> None:
    async def main() -> None:
        moves: Any = Moves()
        pool = await ToyRunner(spread).pool()
        run = scheduler_of(pool, Policy(), moves, groups_per_step=2, group_size=2)
        rollout = await run.next_rollout()
        assert not run._policy.control.drop(0, "?")
        assert not run._policy.control.drop_sample("0.0", "?")
        assert {sample.state for sample in rollout.trained_samples} == {"kept"}

    go(main())


@pytest.mark.parametrize("method", ["poll", "on_group_judged"])
def test_a_policy_that_raises_ends_the_run_and_is_named(method: str) -> None:
    async def main() -> None:
        policy = Policy()
        setattr(policy, method, lambda *about: 1 / 0)
        pool = await ToyRunner(spread).pool()
        run = scheduler_of(pool, policy, Moves(), groups_per_step=2, group_size=2)
        with pytest.raises(RunError, match=rf"the policy 'mine' failed in {method}: ZeroDivisionError: division by zero"):
            await run.next_rollout()

    go(main())


@pytest.mark.parametrize(("staleness", "alone"), [(0, True), (1, True), (0, False)])
def test_the_last_responses_of_a_step_are_ended_after_a_while(staleness: int, alone: bool) -> None:
    async def main() -> None:
        run = await party(1, judge=lambda task, response: float(response.tokens))
        config = {"groups_per_step": 4, "group_size": 2, "filter": "none", "max_staleness": staleness}
        scheduler = scheduler_of(run.pool, StragglerPolicy(30), run.moves, **config)
        call = asyncio.create_task(scheduler.next_rollout())
        await until(lambda: len(run.running) == 8 * (staleness + 1))
        slow = {"3.0", "3.1"} if alone else {"2.0", "3.0"}
        for id in slow:
            run.toys[0].draw(id, 20, 21)
        began_s = asyncio.get_running_loop().time()
        run.answer(*(run.running - slow))
        if not alone:  # two of four are too many to be stragglers
            await asyncio.sleep(500)
            assert not call.done()
            run.answer()
        rollout = await call
        finish = {sample.id: sample.finish for sample in rollout.trained_samples if sample.id in slow}
        assert set(finish.values()) == ({"ended"} if alone else {"stop"})
        if alone:
            assert 30 <= asyncio.get_running_loop().time() - began_s < 40
            reason = "straggler: its step has waited 30 s for its group"
            assert ("scoring", reason) in run.moves.reasons("3.0")
        await scheduler.close()

    go(main())


def test_the_example_of_the_docs_works_as_it_is(tmp_path: Path) -> None:
    """A task that nobody solved is tried once more, and what has waited for a version has a higher priority."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "Policy" in block)
    (tmp_path / "mine.py").write_text(code)

    async def main() -> None:
        policy = make_policy(str(tmp_path / "mine.py:SecondChance"))
        assert policy is not None
        hopeless = {TASKS.train[0].id}
        moves: Any = Moves()
        runner = ToyRunner(
            lambda s: 0.0 if s.task.id in hopeless else spread(s), lambda s: 50.0 if s.group == 17 else 1.0
        )
        pool = await runner.pool()
        run = scheduler_of(pool, policy, moves, groups_per_step=3, group_size=2, max_staleness=1, max_replacements=9)
        tried: list[str] = []
        for number in range(4):
            rollout = await run.next_rollout()
            tried += [group.task.id for group in rollout.groups if group.task.id in hopeless]
            run.after_publish(number + 1)
            run.mark_trained(rollout, number + 1)
        await run.close()
        issued = [r for r in moves.records if r.state == "queued" and r.info.get("task") in hopeless]
        epochs = (run.next_group - 1) // len(TASKS.train) + 1
        assert len({r.info["group"] for r in issued}) <= epochs + 1
        assert tried.count(*hopeless) >= 2

    go(main())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("straglers", "did you mean 'stragglers'"),
        ("stragglers=soon", "needs a number of seconds: write 'stragglers=60'"),
        ("stragglers=-1", "needs a number of seconds"),
        ("collections:Counter", "made a Counter: write a class that inherits from roll.scheduler.policy.Policy"),
        ("roll.scheduler.policy:SchedulerControl", "could not be made: TypeError"),
        ("roll.scheduler.policy:Policy", "would never be called: Policy overrides neither `on_group_judged"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        make_policy(name)


def test_policies_go_by_their_names() -> None:
    assert make_policy("none") is None
    made = make_policy("stragglers=2.5")
    assert isinstance(made, StragglerPolicy)
    assert made._seconds == 2.5
    with pytest.raises(ValueError, match=r"rollout\.policy make a batch depend on timing"):
        Config.model_validate({"model": {"path": "tiny"}, "deterministic": True, "rollout": {"policy": "stragglers"}})
