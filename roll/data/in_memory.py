"""Tasks and conversations that a program passes as objects: a list of them, rows of a table, a dataset, a data frame.

Example: `given_tasks([{"question": "2 and 2?", "answer": 4}])` is a source of one task, and
`given_tasks({"train": rows, "test": others})` is one whose held-out tasks are `others`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from roll.config.errors import UserError
from roll.data.chat import Chat
from roll.data.chat_sources import ChatSource, chat_file
from roll.data.rows import GivenRows
from roll.data.sources import TaskSource
from roll.data.table_source import held_out_rows, table
from roll.data.task import Task

Source: TypeAlias = Callable[..., Iterable[Any]]

HELD_OUT = ("held_out", "test", "validation")
"""Possible keys of the held-out part, next to `train`."""
_TASK_FORMS = (
    "write the name of a source, a path, a list of roll.Task or of dicts with question and answer, a datasets.Dataset, a "
    "dict with train and held_out of these, or a function (split) that gives tasks"
)
_CHAT_FORMS = (
    "write the name of a source, a path, a list of roll.Chat, of lists of messages or of dicts with messages, a "
    "datasets.Dataset, a dict with train and held_out of these, or a function (split) that gives conversations"
)


def given_tasks(given: Any) -> TaskSource:
    """The source of tasks passed as objects."""
    return _source("tasks", given, _tasks)


def given_chats(given: Any) -> ChatSource:
    """The source of conversations passed as objects."""
    return _source("chats", given, _chats)


def are_splits(given: Mapping[Any, Any]) -> bool:
    """Whether a mapping is one of splits: `train`, and optionally a held-out part."""
    return "train" in given and set(given) <= {"train", *HELD_OUT}


def _source(what: str, given: Any, of_items: Callable[[list[Any]], Source]) -> Source:
    if not isinstance(given, Mapping):
        return given if _is_function(given) else of_items(_items(what, given))
    if not are_splits(given):
        names = ", ".join(map(repr, given))
        raise UserError(
            f"{what} is a dict with {names}: write train and one of {', '.join(HELD_OUT)}, or the settings of a source"
        )
    held_out_keys = [name for name in HELD_OUT if name in given]
    if len(held_out_keys) > 1:
        raise UserError(f"{what} has {' and '.join(held_out_keys)}: leave out all but the one that is held out")
    train = _source(f"{what}['train']", given["train"], of_items)
    if not held_out_keys:
        return train
    return _Splits(what, train, _source(f"{what}[{held_out_keys[0]!r}]", given[held_out_keys[0]], of_items))


def _is_function(given: Any) -> bool:
    return callable(given) and not isinstance(given, Iterable)


def _tasks(items: list[Any]) -> Source:
    if not any(isinstance(item, Task) for item in items):
        return _Table(table, _rows("tasks", "roll.Task", '{"question": "2 and 2?", "answer": 4}', items))
    for position, item in enumerate(items):
        if not isinstance(item, Task):
            raise UserError(f"tasks[{position}] is a {type(item).__name__}, but others are roll.Task: write one kind")
    return _Listed(tuple(items), 0.1)


def _chats(items: list[Any]) -> Source:
    if all(isinstance(item, Chat | Task | Sequence) and not isinstance(item, str) for item in items):
        return _Listed(tuple(items), 0.05)
    return _Table(chat_file, _rows("chats", "roll.Chat", '{"prompt": "2 and 2?", "response": "4"}', items))


def _rows(what: str, kind: str, example: str, items: list[Any]) -> GivenRows:
    for position, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise UserError(
                f"{what}[{position}] is {item!r:.60} ({type(item).__name__}): write a {kind}, or a dict such as {example}"
            )
        for key in item:
            if not isinstance(key, str):
                raise UserError(f"{what}[{position}] has the key {key!r}: the names of columns are text")
    return GivenRows(what, tuple(map(dict, items)))


def _items(what: str, given: Any) -> list[Any]:
    """The items of a list, a dataset, a data frame or any other iterable."""
    library = type(given).__module__.partition(".")[0]
    if library == "pandas" and hasattr(given, "to_dict"):
        return list(given.to_dict("records"))
    if library == "polars" and hasattr(given, "to_dicts"):
        return list(given.to_dicts())
    if library == "datasets" and not hasattr(given, "__len__"):
        raise UserError(
            f"{what} is a stream ({type(given).__name__}): write a part of it, as in list(dataset.take(1000))"
        )
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        forms = _TASK_FORMS if what.startswith("tasks") else _CHAT_FORMS
        raise UserError(f"{what} is {given!r:.100} ({type(given).__name__}): {forms}")
    items = list(given)
    if not items:
        raise UserError(f"{what} is empty")
    return items


@dataclass(frozen=True)
class _Table:
    """Rows, and the function that turns them into tasks or conversations."""

    read: Source
    rows: GivenRows

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", f"{len(self.rows.rows)} rows")  # its name in messages

    def __call__(self, split: str, **options: Any) -> Iterable[Any]:
        return self.read(split, path=self.rows, **options)


@dataclass(frozen=True)
class _Listed:
    """A list of tasks or conversations, of which a share is held out: the same at every call."""

    items: tuple[Any, ...]
    share: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", f"a list of {len(self.items)}")

    def __call__(self, split: str, held_out: float | int | None = None) -> Iterable[Any]:
        chosen = held_out_rows(len(self.items), self.share if held_out is None else held_out)
        return [item for position, item in enumerate(self.items) if (position in chosen) == (split == "held_out")]


@dataclass(frozen=True)
class _Splits:
    """A training source and a held-out source."""

    what: str
    train: Source
    held_out: Source

    def __post_init__(self) -> None:
        names = [getattr(source, "__qualname__", "a function") for source in (self.train, self.held_out)]
        object.__setattr__(self, "__qualname__", f"{names[0]} and {names[1]} held out")

    def __call__(self, split: str, **options: Any) -> Iterable[Any]:
        if "held_out" in options:
            raise UserError(
                f"{self.what} names its own held-out items, so the option held_out has no meaning: leave it out"
            )
        if split == "train":
            return _all_of(self.train, options)
        return [_with_held_out_id(item) for item in _all_of(self.held_out, options)]


def _all_of(source: Source, options: Mapping[str, Any]) -> Iterable[Any]:
    """All items of a list or a table; for a function, its training items."""
    return source("train", **options) if _is_user_source(source) else source("train", held_out=0, **options)


def _is_user_source(source: Source) -> bool:
    return not isinstance(source, _Listed | _Table)


def _with_held_out_id(item: Any) -> Any:
    """The item with an id that no training row has."""
    return replace(item, id=f"held_out/{item.id}") if isinstance(item, Task | Chat) else item
