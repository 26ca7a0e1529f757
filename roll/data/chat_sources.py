"""Chat sources: where conversations for SFT come from.

A source is a function `(split, **options)` called with the split `train` and with `held_out`. It returns chats, lists of
messages, or tasks, whose answers then are the assistant's messages: so the tasks that a later run is evaluated on were
never trained on. A source returns the same at every call.

Example: the line `{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}` of a
`.jsonl` file and the line `{"prompt": "2+2?", "response": "4"}` are the same chat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.errors import UserError
from roll.config.schema import DataConfig
from roll.config.secrets import resolved
from roll.config.user_code import load_user_code
from roll.data.chat import Chat
from roll.data.file_layout import ROW_MB, FileLayout
from roll.data.row_task import name_in
from roll.data.rows import TABLES, GivenRows, is_table, read_rows
from roll.data.sources import SOURCES, Split, call_source, check_options, find_generator, source_name
from roll.data.task import Message, Task
from roll.data.tokenlog import TokenLog

ChatSource = Callable[..., Iterable[Any]]
EXTERNAL_SOURCES = {"demonstrations": "roll.env.demonstrations:demonstrations", "dagger": "roll.env.dagger:dagger"}
"""Sources that other folders implement."""


@dataclass(frozen=True)
class ChatSet:
    """All conversations of a run. Held-out ones are never trained on; there may be none."""

    train: tuple[Chat, ...]
    held_out: tuple[Chat, ...]


def load_chats(config: DataConfig, source: ChatSource | None = None, root: str = "") -> ChatSet:
    """All conversations of a source; `source` replaces the one the config names, whose files are resolved from `root`."""
    options, name = dict(config.options), source_name(config.source, source)
    if source is None:
        source, options = _find_source(config.source, options, root)
    check_options("data", name, source, options)
    options = resolved(options, "data.options")
    chats: dict[Split, tuple[Chat, ...]] = {}
    for split in ("train", "held_out"):
        conversations = call_source("data", name, source, split, options)
        chats[split] = tuple(_as_chat(name, split, number, one) for number, one in enumerate(conversations))
        _check_ids(name, split, chats[split])
    if not chats["train"]:
        raise UserError(f"data: the source {name!r} has no conversations to train on")
    return ChatSet(chats["train"], chats["held_out"])


def chat_file(
    split: Split,
    path: str | GivenRows,
    messages: str = "messages",
    prompt: str = "prompt",
    response: str = "response",
    ids: str = "ids",
    loss_mask: str = "loss_mask",
    id: str = "",
    held_out: float = 0.05,
    subset: str = "",
    part: str = "",
    columns: Sequence[str] = (),
    rows: str = "",
    delimiter: str = "",
    quotes: bool = True,
    row_mb: int = ROW_MB,
    root: str = "",
) -> Iterator[Chat]:
    """A file with one conversation per row. The options name its columns: a list of `messages`; or token `ids` and their
    `loss_mask`, as runs write them to `samples/`; or a `prompt` (text or messages) and a `response`. A share `held_out`
    of the rows, evenly spaced, is held out. `subset` and `part` are a dataset's configuration and split; `columns`,
    `rows`, `delimiter`, `quotes` and `row_mb` describe the file's layout, as for tasks."""
    if not 0 <= held_out < 1:
        raise UserError(f"data.options: held_out is {held_out}: write a share from 0 to below 1")
    layout = FileLayout(tuple(columns), rows, delimiter, quotes, row_mb=row_mb)
    rows_read = read_rows(path, "data.source", subset=subset, part=part, layout=layout, root=root)
    for position, (location, row) in enumerate((row.location, row.values) for row in rows_read):
        if (int((position + 1) * held_out) > int(position * held_out)) != (split == "held_out"):
            continue
        name = f"row-{position + 1}"
        try:
            if id:
                name = name_in(location, id, row[id])
            if messages in row:
                yield Chat(name, tuple(row[messages]))
            elif ids in row:
                yield Chat(name, log=_token_log(row[ids], row[loss_mask]))
            else:
                question, answer = row[prompt], Message(role="assistant", content=row[response])
                opening = (Message(role="user", content=question),) if isinstance(question, str) else tuple(question)
                yield Chat(name, (*opening, answer))
        except KeyError as error:
            named = f"{messages!r}, {ids!r} and {loss_mask!r}, or {prompt!r} and {response!r}"
            raise UserError(
                f"{location}: there is no column {error}; a conversation is in {named}, and the row has "
                f"{', '.join(row)}: write the names of its columns in data.options"
            ) from error
        except (TypeError, ValueError) as error:
            raise UserError(f"{location}: {error}") from error


def _find_source(name: str, options: dict[str, Any], root: str) -> tuple[ChatSource, dict[str, Any]]:
    if (found := find_generator(name, options)) is not None:
        return found
    if is_table(name, root):
        return functools.partial(chat_file, root=root), {"path": name, **options}
    if name in EXTERNAL_SOURCES:
        return functools.partial(load_user_code(EXTERNAL_SOURCES[name], what="data.source"), root=root), options
    return load_user_code(name, what="data.source", known=[*SOURCES, *EXTERNAL_SOURCES, *TABLES], root=root), options


def _as_chat(source: str, split: Split, number: int, given: Any) -> Chat:
    """The given object as a chat; without an id of its own, its position is the id."""
    try:
        if isinstance(given, Chat):
            return given
        if isinstance(given, Task):
            return Chat.of_task(given)
        if isinstance(given, Sequence) and not isinstance(given, str):
            return Chat(f"{split}-{number}", tuple(given))
    except ValueError as error:
        raise UserError(f"data: {split} conversation {number} of the source {source!r}: {error}") from error
    raise UserError(
        f"data: the source {source!r} gave {given!r:.100}: write a roll.Chat, a list of messages, or a roll.Task"
    )


def _check_ids(source: str, split: Split, chats: Sequence[Chat]) -> None:
    seen: set[str] = set()
    for chat in chats:
        if chat.id in seen:
            raise UserError(f"data: the source {source!r} gave two {split} conversations with the id {chat.id!r}")
        seen.add(chat.id)


def _token_log(ids: Sequence[int], loss_mask: Sequence[bool]) -> TokenLog:
    if len(ids) != len(loss_mask):
        raise ValueError(f"it has {len(ids)} token ids and {len(loss_mask)} values of the loss mask")
    if not all(type(i) is int and i >= 0 for i in ids) or not all(m in (0, 1) for m in loss_mask):
        raise ValueError("token ids are whole numbers from 0 on, and the loss mask is of 0 and 1")
    return TokenLog.from_loss_mask(ids, [bool(m) for m in loss_mask])
