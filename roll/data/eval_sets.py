"""The tasks of a run's evaluation sets, `eval.sets`.

Invariants: every task of a set has the set's own domain, which no training task has, and an id that begins with the set's
name: it is judged and sampled as its set says, and its id never collides with a task of another source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roll.config.errors import UserError
from roll.config.evaluation import EvalSetConfig, domain_of, set_of
from roll.data.domains import prefix_errors
from roll.data.rows import is_table
from roll.data.sources import TaskSet, load_splits
from roll.data.task import Task


def with_eval_sets(tasks: TaskSet, sets: Mapping[str, EvalSetConfig], root: str = "") -> TaskSet:
    """The training tasks, with the tasks of the sets as the only held-out tasks; unchanged if there are no sets. Files
    are resolved from `root`."""
    if not sets:
        return tasks
    for task in tasks.train:
        if set_of(task.domain) in sets:
            raise UserError(
                f"task {task.id!r} is to be trained on, but its domain {task.domain!r} is that of the tasks of "
                f"eval.sets.{set_of(task.domain)}: give it another"
            )
    held_out: list[Task] = []
    labels: dict[str, str] = {}
    skipped = list(tasks.skipped)
    for name, config in sets.items():
        found = _load(name, config, root)
        skipped += found.skipped
        for task in found.held_out:
            set_task = replace(task, id=f"{name}/{task.id}", domain=domain_of(name))
            labels[set_task.id] = task.domain
            held_out.append(set_task)
    return replace(tasks, held_out=tuple(held_out), labels=labels, skipped=tuple(dict.fromkeys(skipped)))


def _load(name: str, config: EvalSetConfig, root: str) -> TaskSet:
    """All rows of a table without a `held_out` option, otherwise the held-out tasks of the source, as held out."""
    whole = is_table(config.source, root) and "held_out" not in config.options
    if whole:
        config = config.model_copy(update={"options": {**config.options, "held_out": 0}})
    with prefix_errors(f"eval.sets.{name}", f"eval.sets.{name}"):
        found = load_splits(config, root=root)
    tasks = found.train if whole else found.held_out
    if not tasks:
        what = "has no rows" if whole else "gave no held-out tasks"
        raise UserError(f"eval.sets.{name}: the source {config.source!r} {what} to evaluate on")
    return TaskSet((), tasks, skipped=found.skipped)
