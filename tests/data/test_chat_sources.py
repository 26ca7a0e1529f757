"""Chat sources: the conversations they give, and what is said when they cannot."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config.errors import UserError
from roll.config.schema import DataConfig, TasksConfig
from roll.data import Chat, Task
from roll.data.chat_sources import ChatSet, ChatSource, load_chats
from roll.data.sources import load_tasks

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; imports made from it are undone after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def load(source: str, given: ChatSource | None = None, **options: Any) -> ChatSet:
    return load_chats(DataConfig(source=source, options=options), given)


def refusal(source: str, given: ChatSource | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        load(source, given, **options)
    return str(refused.value)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_files_hold_messages_or_prompts_with_responses_or_tokens(folder: Path) -> None:
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = write(
        folder / "a.jsonl",
        {"messages": TALK},
        {"prompt": "hi", "response": "hello"},
        {"prompt": system, "response": "hello"},
        {"ids": [3, 4, 5], "loss_mask": [0, 1, True]},
    )
    one, same, longer, tokens = load(path, held_out=0).train
    assert one.messages == same.messages == tuple(TALK)
    assert longer.messages == (*system, TALK[1])
    assert tokens.log is not None
    assert tokens.log.ids.tolist() == [3, 4, 5]
    assert tokens.log.loss_mask.tolist() == [False, True, True]
    assert [chat.id for chat in (one, same, longer, tokens)] == ["row-1", "row-2", "row-3", "row-4"]


def test_columns_have_the_names_that_are_written(folder: Path) -> None:
    path = write(folder / "a.jsonl", {"q": "hi", "a": "hello", "n": 7}, {"talk": TALK, "n": 8})
    chats = load(path, prompt="q", response="a", messages="talk", id="n", held_out=0).train
    assert [chat.messages for chat in chats] == [tuple(TALK)] * 2
    assert [chat.id for chat in chats] == ["7", "8"]


def test_json_files_are_lists(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps([{"messages": TALK}] * 3))
    assert len(load("a.json").train) == 3
    (folder / "a.json").write_text("{}")
    assert "takes a list of objects" in refusal("a.json")
    (folder / "a.json").write_text("[")
    assert "not JSON" in refusal("a.json")
    (folder / "a.json").write_text("[1]")
    assert "row 1: not an object" in refusal("a.json")


def test_parquet_files(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([{"messages": TALK}, {"messages": TALK}]), "a.parquet")
    assert [chat.messages for chat in load("a.parquet").train] == [tuple(TALK)] * 2


def test_a_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    assert "pip install pyarrow" in refusal(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(("rows", "share", "held"), [(10, 0.1, 1), (100, 0.05, 5), (7, 0, 0), (9, 0.5, 4), (3, 0.1, 0)])
def test_rows_are_held_out_at_even_distances(folder: Path, rows: int, share: float, held: int) -> None:
    path = write(folder / "a.jsonl", *({"prompt": str(n), "response": "x"} for n in range(rows)))
    chats = load(path, held_out=share)
    train, apart = ([int(chat.messages[0]["content"]) for chat in some] for some in (chats.train, chats.held_out))
    assert sorted(train + apart) == list(range(rows))
    assert len(apart) == held
    assert len({b - a for a, b in itertools.pairwise(apart)}) <= 1


def test_a_source_of_tasks_holds_out_the_same_tasks() -> None:
    options = {"high": 6, "seed": 3}
    chats, tasks = load("addition", **options), load_tasks(TasksConfig(source="addition", options=options))
    assert [chat.id for chat in chats.train] == [task.id for task in tasks.train]
    assert [chat.id for chat in chats.held_out] == [task.id for task in tasks.held_out]
    for chat, task in zip(chats.train, tasks.train, strict=True):
        assert chat.messages == (*task.messages, {"role": "assistant", "content": str(task.answer)})


def test_functions_give_chats_tasks_or_messages(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from roll import Chat, Task\n"
        "def chats(split, text='a'):\n"
        "    yield Chat.of('one', 'q', text, 'r', 'b')\n"
        "    yield Task.ask('two', 'q', 5)\n"
        f"    yield {TALK!r}\n"
    )
    one, two, three = load("mine.py:chats", text="x").train
    assert [message["content"] for message in one.messages] == ["q", "x", "r", "b"]
    assert two.messages[-1] == {"role": "assistant", "content": "5"}
    assert (three.id, three.messages) == ("train-2", tuple(TALK))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "there is no column 'prompt'; a conversation is in 'messages', 'ids' and 'loss_mask', or"),
        ({"prompt": "q"}, "there is no column 'response'"),
        ({"ids": [1]}, "there is no column 'loss_mask'"),
        ({"messages": []}, "nothing to imitate"),
        ({"messages": TALK[:1]}, "no message in it is the assistant's"),
        ({"messages": TALK[1:]}, "its first message is the assistant's"),
        ({"messages": "hi"}, "'h' is no message"),
        ({"messages": [{"role": "user"}]}, "write a role and a content"),
        ({"messages": [TALK[0], {"role": "assistant", "content": None}]}, "are text"),
        ({"prompt": "q", "response": 7}, "are text"),
        ({"ids": [1, 2], "loss_mask": [0]}, "2 token ids and 1 values"),
        ({"ids": [1, -2], "loss_mask": [0, 1]}, "whole numbers from 0 on"),
        ({"ids": [1, 2], "loss_mask": [0, 2]}, "the loss mask is of 0 and 1"),
        ({"ids": [1, 2], "loss_mask": [1, 1]}, "begins with its prompt"),
        ({"ids": [1, 2], "loss_mask": [0, 0]}, "no token of it is a response"),
        ([], "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_its_line(folder: Path, row: Any, message: str) -> None:
    path = write(folder / "a.jsonl", {"messages": TALK}, row)
    text = refusal(path, held_out=0)
    assert text.startswith(f"{path}:2: ")
    assert message in text


@pytest.mark.parametrize(
    ("source", "given", "options", "message"),
    [
        ("nowhere.jsonl", None, {}, "data.source: there is no file 'nowhere.jsonl'"),
        (
            "hmm",
            None,
            {},
            "data.source 'hmm' is not known: write addition, echo, last_character, reasoning_gym, demonstrations, ",
        ),
        ("nowhere:f", None, {}, "data.source 'nowhere:f': there is no module 'nowhere'"),
        ("addition", None, {"lower": 1}, "data.options: got an unexpected keyword argument 'lower'"),
        ("x", lambda split: [], {}, "has no conversations to train on"),
        ("x", lambda split: [5], {}, "gave 5: write a roll.Chat, a list of messages, or a roll.Task"),
        ("x", lambda split: ["hi"], {}, "gave 'hi'"),
        (
            "x",
            lambda split: [Task.ask("t", "q")],
            {},
            "train conversation 0 of the source '<lambda>': the task has no answer",
        ),
        ("x", lambda split: [Chat.of("a", "q", "b")] * 2, {}, "two train conversations with the id 'a'"),
        ("x", lambda split: [Chat("a", ())], {}, "nothing to imitate"),
        ("x", lambda split: 1 / 0, {}, "the source '<lambda>' raised ZeroDivisionError"),
    ],
)
def test_a_bad_source_is_refused(
    folder: Path, source: str, given: ChatSource | None, options: dict[str, Any], message: str
) -> None:
    assert message in refusal(source, given, **options)


def test_a_share_is_below_one(folder: Path) -> None:
    assert "held_out is 1: write a share" in refusal(write(folder / "a.jsonl", {"messages": TALK}), held_out=1)
