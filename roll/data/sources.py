"""Task sources: where tasks come from.

A source is a function `(split, **options) -> iterable of Task` called with the split `train` and with `held_out`. It
returns the same tasks at every call, so that a task of a run can be found again by its id.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.errors import UserError
from roll.config.schema import SourceConfig, TasksConfig
from roll.config.secrets import resolved
from roll.config.user_code import load_user_code
from roll.data.reasoning_gym import PREFIX, reasoning_gym
from roll.data.rows import TABLES, is_table
from roll.data.table_source import TableRows, check_table_options, table
from roll.data.task import Task

Split = Literal["train", "held_out"]
TaskSource = Callable[..., Iterable[Task]]


@dataclass(frozen=True)
class TaskSet:
    """All tasks of a run. Held-out ones are never trained on; there may be none."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    left_out: tuple[str, ...] = ()
    """Ids of the tasks that were removed because their prompts are too long."""
    skipped: tuple[str, ...] = ()
    """Positions of the rows that options skip."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For held-out tasks of evaluation sets: the domain that their source gave them, by id."""
    answers: str = ""
    """How many answers were checked, in words; empty if the reward does not use answers."""

    @property
    def has_environments(self) -> bool:
        """Whether some tasks have an environment."""
        return any(task.environment is not None for task in (*self.train, *self.held_out))


_MAX_RANGE = 3000
"""Maximum range of the numbers of `addition`: some five million pairs, all of which are in memory."""


def addition(
    split: Split,
    low: int = 1,
    high: int = 20,
    held_out: float = 1 / 3,
    seed: int = 0,
    question: str = "What is {a} + {b}? Answer with just the number.",
) -> Iterable[Task]:
    """Sums of two numbers from low to high. A share of the unordered pairs is held out, so b + a never leaks."""
    if high - low > _MAX_RANGE:
        raise UserError(f"tasks.options: low is {low} and high is {high}: write numbers at most {_MAX_RANGE} apart")
    pairs = [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]
    random.Random(f"addition/{seed}").shuffle(pairs)
    cut = round(len(pairs) * held_out)
    for a, b in pairs[:cut] if split == "held_out" else pairs[cut:]:
        for x, y in sorted({(a, b), (b, a)}):
            yield Task.ask(f"{x}+{y}", question.format(a=x, b=y), x + y, domain="addition")


def echo(split: Split, symbols: str = "0123456789") -> Iterable[Task]:
    """Repeat the given character: a toy for models trained from scratch. Every task is in both splits."""
    for symbol in symbols:
        yield Task.ask(symbol, symbol, symbol, domain="echo")


def last_character(
    split: Split, symbols: str = "0123456789", prefixes: str = "abcdefghij", held_out: float = 0.2
) -> Iterable[Task]:
    """Repeat the last character of the question: a toy for models trained from scratch, with held-out tasks of its own.

    A question is a prefix and a symbol, as in "c7". Of each symbol, a share of the prefixes is held out, at least one and
    not all: with the prefixes "abcde", the question "a0" is held out and "b0", "c0", "d0" and "e0" are trained on; of the
    symbol 1, the question "b1" is held out."""
    if len(set(prefixes)) < max(len(prefixes), 2):
        raise UserError(f"tasks.options: prefixes is {prefixes!r}: write two or more different characters")
    if not 0 < held_out < 1:
        raise UserError(f"tasks.options: held_out is {held_out}: write a share above 0 and below 1")
    count = min(max(round(len(prefixes) * held_out), 1), len(prefixes) - 1)
    for row, symbol in enumerate(symbols):
        for column, prefix in enumerate(prefixes):
            is_held_out = (column - row * count) % len(prefixes) < count
            if is_held_out == (split == "held_out"):
                yield Task.ask(prefix + symbol, prefix + symbol, symbol, domain="last_character")


SOURCES: dict[str, TaskSource] = {
    "addition": addition,
    "echo": echo,
    "last_character": last_character,
    "reasoning_gym": reasoning_gym,
}
EXTERNAL_SOURCES = {"environment": "roll.env.tasks:environment_tasks"}
"""Sources that other folders implement."""


def load_tasks(config: TasksConfig, source: TaskSource | None = None, root: str = "") -> TaskSet:
    """All tasks of a source; `source` replaces the one the config names, whose files are resolved from `root`."""
    tasks = load_splits(config, source, root)
    if not tasks.train:
        raise UserError(f"tasks: the source {source_name(config.source, source)!r} has no tasks to train on")
    return tasks


def load_splits(config: SourceConfig, source: TaskSource | None = None, root: str = "") -> TaskSet:
    """Same as `load_tasks`, but there may be no training tasks."""
    options, name = dict(config.options), source_name(config.source, source)
    if source is None:
        source, options = _find_source(config.source, options, root)
    check_options("tasks", name, source, options)
    if config.source not in EXTERNAL_SOURCES:  # an environment's options are resolved in its process
        options = resolved(options, "tasks.options")
    tasks: dict[Split, tuple[Task, ...]] = {}
    skipped: dict[str, None] = {}
    for split in ("train", "held_out"):
        source_tasks = call_source("tasks", name, source, split, options)
        tasks[split] = tuple(source_tasks)
        _check_tasks(name, split, tasks[split])
        skipped |= dict.fromkeys(source_tasks.skipped if isinstance(source_tasks, TableRows) else ())
    return TaskSet(tasks["train"], tasks["held_out"], skipped=tuple(skipped))


def source_name(written: str, given: Callable[..., Any] | None) -> str:
    """The name of a source in messages: as written in the config, or that of the object that replaces it."""
    return written if given is None else getattr(given, "__qualname__", type(given).__qualname__)


def _find_source(name: str, options: dict[str, Any], root: str) -> tuple[TaskSource, dict[str, Any]]:
    if (found := find_generator(name, options)) is not None:
        return found
    if is_table(name, root):
        check_table_options(options)
        return functools.partial(table, root=root), {"path": name, **options}
    if name in EXTERNAL_SOURCES:
        return functools.partial(load_user_code(EXTERNAL_SOURCES[name], what="tasks.source"), root=root), options
    return load_user_code(name, what="tasks.source", known=[*SOURCES, *EXTERNAL_SOURCES, *TABLES], root=root), options


def find_generator(name: str, options: dict[str, Any]) -> tuple[TaskSource, dict[str, Any]] | None:
    """The built-in generator of that name and its options; None if there is none."""
    if name.startswith(PREFIX):
        return reasoning_gym, {"families": name.removeprefix(PREFIX), **options}
    return (SOURCES[name], options) if name in SOURCES else None


def call_source(
    section: str, name: str, source: Callable[..., Iterable[Any]], split: Split, options: dict[str, Any]
) -> Sequence[Any]:
    """Everything that a source returns for a split; `section` is the config section that names it."""
    try:
        items = source(split, **options)
        return items if isinstance(items, TableRows) else tuple(items)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{section}: the source {name!r} raised {type(error).__name__}: {error}") from error


def check_options(section: str, name: str, source: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuses options that the source does not take."""
    try:
        inspect.signature(source).bind("train", **options)
    except TypeError as error:
        takes = ", ".join(name for name in list(inspect.signature(source).parameters)[1:] if name != "root") or "none"
        raise UserError(f"{section}.options: {error} (source {name!r} takes: {takes})") from error


def _check_tasks(name: str, split: Split, tasks: tuple[Task, ...]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if not isinstance(task, Task):
            raise UserError(f"tasks: the source {name!r} gave {task!r}, which is not a roll.Task")
        _check_messages(name, task)
        if task.id in seen:
            raise UserError(f"tasks: the source {name!r} gave two {split} tasks with the id {task.id!r}")
        seen.add(task.id)


def _check_messages(name: str, task: Task) -> None:
    """Refuses a task whose id or messages are not text: a template would write anything into the prompt."""
    if not isinstance(task.id, str):
        raise UserError(f"tasks: the source {name!r} gave a task with the id {task.id!r:.60}: ids are text")
    for number, message in enumerate(task.messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                kind = type(message.get(key) if isinstance(message, Mapping) else message).__name__
                raise UserError(
                    f"tasks: message {number} of the task {task.id!r} of the source {name!r} has a {key} that is a "
                    f"{kind}: write a text"
                )
