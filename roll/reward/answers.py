"""Checks before a run starts whether tasks can be solved: whether the reward accepts their own answers.

Numbers, letters, texts and tests are checked for every task. If only judging can tell (the LaTeX of `math`, about 50 ms
each), a number of tasks, evenly spaced, are judged in a grader process with their own answer as the response: it must be
worth 1. The error names a task whose answer no response satisfies.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roll.config.errors import UserError
from roll.data.task import Response, Task
from roll.process.structured_gather import structured_gather
from roll.reward.base import RewardFn, ScoreFailure, check_answer
from roll.reward.pool import GraderPool
from roll.reward.reward_spec import RewardSpec

MAX_JUDGED = 256
"""Maximum number of tasks per reward whose answers are judged."""
_MAX_NAMED = 3
_RAISED = re.compile(r"^ValueError: | \([\w.]+:\d+\)$")
"""What a grader adds around an exception's message."""

T = TypeVar("T")


@dataclass(frozen=True)
class AnswersChecked:
    """The number of tasks whose answers were checked."""

    checked: int
    tasks: int

    def __str__(self) -> str:
        count = f"all {self.tasks}" if self.checked == self.tasks else f"{self.checked} of {self.tasks}"
        return f"checked the answers of {count} tasks"


def check_answers(source: RewardSpec, tasks: Sequence[Task], deadline_s: float = 10.0) -> AnswersChecked | None:
    """The number of tasks whose answers were checked; None if the reward does not use answers. A `UserError` names a task
    whose answer no response satisfies, and says what to write instead."""
    parts = source.parts()
    judged = [task for task in tasks if task.environment is None]
    unresolved: dict[int, list[Task]] = {}
    faults: dict[str, str] = {}
    unchecked: set[int] = set()
    uses_answers = False
    for number, task in enumerate(judged):
        for part_index, part in enumerate(parts):
            if part.domain != source.key_of(task.domain) or not hasattr(part.reward, "check_answer"):
                continue
            uses_answers = True
            try:
                is_valid = check_answer(part.reward, task)
            except ValueError as error:
                faults.setdefault(task.id, f"{part.setting}: {error}")
                continue
            if not is_valid:
                unresolved.setdefault(part_index, []).append(task)
                unchecked.add(number)
    _raise_for_faults(faults)
    for part_index, part_tasks in unresolved.items():
        chosen = _spread(part_tasks, MAX_JUDGED)
        if hasattr(parts[part_index].reward, "model_answer"):
            _raise_for_faults(
                _run(
                    _judge_answers(
                        parts[part_index].source, parts[part_index].setting, parts[part_index].reward, chosen, deadline_s
                    )
                )
            )
            judged_ids = set(map(id, chosen))
            unchecked -= {number for number, task in enumerate(judged) if id(task) in judged_ids}
    return AnswersChecked(len(judged) - len(unchecked), len(judged)) if uses_answers else None


def _raise_for_faults(faults: dict[str, str]) -> None:
    if not faults:
        return
    first, *other_ids = faults
    shown_ids = ", ".join(map(repr, other_ids[:_MAX_NAMED])) + (" …" if len(other_ids) > _MAX_NAMED else "")
    more = f" (the same holds for {len(other_ids)} more: {shown_ids})" if other_ids else ""
    raise UserError(f"{faults[first]}{more}")


async def _judge_answers(
    source: RewardSpec, setting: str, reward: RewardFn, tasks: Sequence[Task], deadline_s: float
) -> dict[str, str]:
    """What is wrong with the answers of tasks, by task id."""
    faults: dict[str, str] = {}

    async def attempt(pool: GraderPool, task: Task) -> None:
        text: str = reward.model_answer(task)  # type: ignore[attr-defined]
        try:
            verdict = await pool.score(task, Response(text, 1, "stop"))
        except ScoreFailure as failure:
            faults[task.id] = f"{setting}: {_RAISED.sub('', failure.reason)}"
            return
        if verdict.reward < 1:
            faults[task.id] = (
                f"{setting}: the answer of task {task.id!r}, {task.answer!r}, is not worth 1 as a response to itself: "
                "write it in another form, or choose another reward"
            )

    async with GraderPool(source, deadline_s=deadline_s, tries=1, log=Path(os.devnull)) as pool:
        await structured_gather(attempt(pool, task) for task in tasks)
    return {task.id: faults[task.id] for task in tasks if task.id in faults}


def _spread(tasks: Sequence[Task], limit: int) -> list[Task]:
    """At most `limit` of the tasks, evenly spaced."""
    count = min(limit, len(tasks))
    return [tasks[index * len(tasks) // count] for index in range(count)]


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, also if an event loop is already running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
