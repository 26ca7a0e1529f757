"""Policies: user code that controls in-flight groups through a narrow interface.

The scheduler calls a policy's `on_group_judged` for every judged group, and its `poll` when a step begins and every few
seconds while the step waits for groups. A policy sees copies and acts through `SchedulerControl`.

Invariants: a method of `SchedulerControl` has no effect on a group that has ended or is being trained on, and returns
False; whatever a policy does, each sample ends exactly once, and the ledger records it.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from roll.config.errors import RunError, UserError
from roll.config.user_code import load_user_code
from roll.data.sample import Group, Sample
from roll.data.task import Task
from roll.scheduler.batch_selection import BatchSelector

POLL_S = 2.0
"""Seconds between calls of `Policy.poll` while a step waits."""


@dataclass(frozen=True)
class SampleView:
    id: str
    state: str
    """As in docs/guides/scheduling.md, *The life of a sample*."""
    entered_s: float
    """When it entered its state, in seconds since the epoch."""
    tries: int
    oldest: int | None
    """Version of the weights of its oldest token; None before its first lease."""
    tokens: int | None
    """Response tokens; None while it is not finished."""
    reward: float | None
    """None until it is scored."""


@dataclass(frozen=True)
class GroupView:
    index: int
    task: Task
    state: Literal["open", "ready", "ended"]
    """`open`: not all samples are judged; `ready`: waits to be trained on; `ended`: judged and dropped."""
    priority: int
    version: int
    """Version of the weights when it was issued."""
    age: int
    """Versions published since then."""
    waited_for: bool
    """Whether the batch of the step cannot be complete without it."""
    samples: tuple[SampleView, ...]


class GroupActions(Protocol):
    """What `SchedulerControl` needs of the scheduler."""

    def add(self, task: Task, priority: int = 0) -> Group: ...

    def drop(self, group: Group, reason: str) -> None: ...

    def reprioritise(self, group: Group, priority: int) -> None: ...

    def drop_sample(self, sample: Sample, reason: str) -> bool: ...

    def end_response(self, sample: Sample, reason: str) -> bool: ...

    def requeue(self, sample: Sample, reason: str) -> bool: ...


class SchedulerControl:
    """The interface of a policy to the scheduler. Groups are identified by index, samples by id."""

    def __init__(self, scheduler: GroupActions, batch_selector: Callable[[], BatchSelector]) -> None:
        self._scheduler = scheduler
        self._batch_selector = batch_selector

    @property
    def version(self) -> int:
        """Version of the weights that the engines serve."""
        return self._batch_selector().version

    @property
    def max_staleness(self) -> int:
        return self._batch_selector().config.max_staleness

    @property
    def groups_per_step(self) -> int:
        return self._batch_selector().config.groups_per_step

    @property
    def now_s(self) -> float:
        """A monotonic clock."""
        return asyncio.get_running_loop().time()

    @property
    def groups(self) -> list[GroupView]:
        """All groups that are open or ready, in the order they were issued."""
        batch_selector = self._batch_selector()
        waited_for = {group.index for group in batch_selector.awaited_groups()}
        groups = sorted(batch_selector.table.waiting, key=lambda group: group.index)
        return [self.view(group, group.index in waited_for) for group in groups]

    def view(self, group: Group, waited_for: bool = False) -> GroupView:
        table = self._batch_selector().table
        state: Literal["open", "ready", "ended"] = "ready" if group.index in table.ready else "ended"
        state = "open" if group.index in table.open else state
        samples = tuple(map(_view, group.samples))
        age = self.version - group.version
        return GroupView(group.index, group.task, state, group.priority, group.version, age, waited_for, samples)

    def add(self, task: Task, priority: int = 0) -> int:
        """Issues a group of a task now, outside the task sampler's order; returns its index."""
        return self._scheduler.add(task, priority).index

    def drop(self, group: int, reason: str) -> bool:
        """Drops a group that is open or ready; the scheduler issues a replacement."""
        if (found := self._group(group)) is None:
            return False
        self._scheduler.drop(found, reason)
        return True

    def reprioritise(self, group: int, priority: int) -> bool:
        """Sets a group's priority. Groups with a higher priority get engine slots first."""
        if (found := self._group(group)) is None:
            return False
        if found.priority != priority:
            self._scheduler.reprioritise(found, priority)
        return True

    def drop_sample(self, sample: str, reason: str) -> bool:
        """Drops one sample; its group continues without it."""
        return (found := self._sample(sample)) is not None and self._scheduler.drop_sample(found, reason)

    def end_response(self, sample: str, reason: str) -> bool:
        """Ends a response that is being generated; it is scored as it stands."""
        return (found := self._sample(sample)) is not None and self._scheduler.end_response(found, reason)

    def requeue(self, sample: str, reason: str) -> bool:
        """Aborts a response on its engine and requeues it; it resumes from its prefix when it gets a slot again."""
        return (found := self._sample(sample)) is not None and self._scheduler.requeue(found, reason)

    def _group(self, index: int) -> Group | None:
        table = self._batch_selector().table
        return table.open.get(index) or table.ready.get(index)

    def _sample(self, id: str) -> Sample | None:
        group = self._group(int(id.partition(".")[0]))
        return None if group is None else next((sample for sample in group.samples if sample.id == id), None)


class Policy:
    """Base class that does nothing; a policy overrides what it needs. One instance is created per run, and a new one when
    the run is resumed."""

    def on_group_judged(self, control: SchedulerControl, group: GroupView) -> None:
        """Called when a group's last sample was judged: the group is ready, or was dropped and has ended."""

    def poll(self, control: SchedulerControl) -> None:
        """Called when a step begins and every `POLL_S` while it waits."""


class PolicyRunner:
    """Calls a policy, if there is one. A policy that raises ends the run."""

    def __init__(self, policy: Policy | None, name: str, control: SchedulerControl) -> None:
        self._policy = policy
        self._name = name
        self.control = control
        self._next_poll_s = 0.0

    @property
    def next_poll_in_s(self) -> float | None:
        """Seconds until the next `poll`; None without a policy."""
        return None if self._policy is None else max(self._next_poll_s - self.control.now_s, 0.0)

    def poll(self) -> None:
        if self._policy is not None:
            self._next_poll_s = self.control.now_s + POLL_S
            with self._named("poll"):
                self._policy.poll(self.control)

    def on_group_judged(self, group: Group) -> None:
        if self._policy is not None:
            with self._named("on_group_judged"):
                self._policy.on_group_judged(self.control, self.control.view(group))

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise RunError(f"the policy {self._name!r} failed in {method}: {type(error).__name__}: {error}") from error


class StragglerPolicy(Policy):
    """Ends the responses of the last groups that a step waits for.

    When the step waits for at most a tenth of its groups (at least one), each of them has `seconds` left; then those of
    its responses that are still being generated are ended and scored as they stand.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._since: dict[int, float] = {}

    def poll(self, control: SchedulerControl) -> None:
        now_s, last = control.now_s, [group for group in control.groups if group.waited_for]
        if len(last) > max(1, control.groups_per_step // 10):
            last = []
        self._since = {group.index: self._since.get(group.index, now_s) for group in last}
        for group in last:
            if now_s - self._since[group.index] >= self._seconds:
                for sample in group.samples:
                    if sample.state == "generating":
                        control.end_response(
                            sample.id, f"straggler: its step has waited {self._seconds:g} s for its group"
                        )


def make_policy(name: str, root: str | os.PathLike[str] | None = None) -> Policy | None:
    """Creates the policy of that name: `stragglers`, `stragglers=30` (seconds), a user's class, or None for `none`."""
    kind, equals, value = name.partition("=")
    if name == "none":
        return None
    if kind == "stragglers":
        return StragglerPolicy(_seconds(name, value)) if equals else StragglerPolicy()
    factory = load_user_code(name, what="rollout.policy", known=["none", "stragglers"], root=root)
    try:
        policy = factory()
    except Exception as error:
        raise UserError(f"rollout.policy: {name!r} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(policy, Policy):
        raise UserError(
            f"rollout.policy: {name!r} made a {type(policy).__name__}: write a class that inherits from "
            "roll.scheduler.policy.Policy and overrides `on_group_judged` or `poll`"
        )
    if all(getattr(type(policy), method) is getattr(Policy, method) for method in ("on_group_judged", "poll")):
        raise UserError(
            f"rollout.policy: {name!r} would never be called: {type(policy).__name__} overrides neither "
            "`on_group_judged(control, group)` nor `poll(control)`"
        )
    return policy


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UserError(f"rollout.policy: {name!r} needs a number of seconds: write 'stragglers=60'")
    return seconds


def _view(sample: Sample) -> SampleView:
    finished = sample.finish is not None
    judged = sample.state in ("scored", "kept", "trained")
    return SampleView(
        sample.id,
        sample.state,
        sample.entered_s,
        sample.tries,
        sample.oldest,
        sample.response_tokens if finished else None,
        sample.reward if judged else None,
    )
