"""Task sources: what they give, and what is said when they cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import UserError
from roll.config.schema import TasksConfig
from roll.data import Task
from roll.data.sources import TaskSet, load_tasks
from roll.data.task import EnvSpec


def load(source: str, **options: Any) -> TaskSet:
    return load_tasks(TasksConfig(source=source, options=options))


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        load(source, **options)
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; imports made from it are undone after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def pairs(tasks: Iterable[Task]) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in (task.id.split("+") for task in tasks)}


def unordered(found: set[tuple[int, int]]) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in found}


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    low=st.integers(0, 9), size=st.integers(1, 15), seed=st.integers(0, 99), share=st.sampled_from([0, 0.1, 1 / 3, 0.9])
)
def test_addition_holds_out_unordered_pairs(low: int, size: int, seed: int, share: float) -> None:
    tasks = load("addition", low=low, high=low + size, seed=seed, held_out=share)
    train, held_out = pairs(tasks.train), pairs(tasks.held_out)
    numbers = range(low, low + size + 1)
    assert train | held_out == {(a, b) for a in numbers for b in numbers}
    assert not unordered(train) & unordered(held_out)
    assert {(b, a) for a, b in train} == train
    whole = len(numbers) * (len(numbers) + 1) // 2
    assert len(unordered(held_out)) == round(whole * share)
    for task in (*tasks.train, *tasks.held_out):
        a, b = map(int, task.id.split("+"))
        assert task.answer == a + b
        assert task.domain == "addition"
        assert f"{a} + {b}" in task.question
    assert len({task.id for task in (*tasks.train, *tasks.held_out)}) == len(tasks.train) + len(tasks.held_out)


def test_addition_by_default_holds_out_a_third_and_stays_the_same() -> None:
    tasks = load("addition")
    assert len(tasks.train) + len(tasks.held_out) == 400
    assert len(unordered(pairs(tasks.held_out))) == 70
    assert tasks == load("addition")
    assert tasks != load("addition", seed=1)


def test_addition_uses_its_question_option() -> None:
    tasks = load("addition", question="{b} and {a}?", low=1, high=2, held_out=0)
    assert {task.question for task in tasks.train} == {"1 and 1?", "2 and 1?", "1 and 2?", "2 and 2?"}


def test_echo_has_every_symbol_in_both_splits() -> None:
    tasks = load("echo", symbols="ab")
    assert tasks.train == tasks.held_out
    assert [(t.id, t.question, t.answer, t.domain) for t in tasks.train] == [
        ("a", "a", "a", "echo"),
        ("b", "b", "b", "echo"),
    ]
    assert len(load("echo").train) == 10


def test_last_character_holds_out_questions_but_no_symbols() -> None:
    tasks = load("last_character")
    assert (len(tasks.train), len(tasks.held_out)) == (80, 20)
    assert not {task.question for task in tasks.train} & {task.question for task in tasks.held_out}
    for split in (tasks.train, tasks.held_out):
        assert all(task.question[-1] == task.answer for task in split)
        assert {task.answer for task in split} == set("0123456789")


def test_last_character_holds_out_the_share_that_is_asked_for() -> None:
    tasks = load("last_character", symbols="01", prefixes="abcde", held_out=0.2)
    assert [task.id for task in tasks.held_out] == ["a0", "b1"]
    assert len(load("last_character", prefixes="ab", held_out=0.01).held_out) == 10
    assert len(load("last_character", prefixes="ab", held_out=0.99).train) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefixes": "a"}, "prefixes is 'a': write two or more different characters"),
        ({"prefixes": "aa"}, "prefixes is 'aa': write two or more"),
        ({"held_out": 0}, "held_out is 0: write a share above 0 and below 1"),
        ({"held_out": 1.0}, "held_out is 1.0: write a share"),
    ],
)
def test_last_character_refuses_options_that_leave_a_split_empty(options: dict[str, object], message: str) -> None:
    assert message in refusal("last_character", **options)


def test_a_task_set_knows_whether_it_takes_place_in_environments() -> None:
    plain, played = Task.ask("a", "?"), Task("b", (), environment=EnvSpec("guess"))
    assert not TaskSet((plain,), (plain,)).has_environments
    assert TaskSet((plain, played), ()).has_environments
    assert TaskSet((plain,), (played,)).has_environments


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    )
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": i, "level": "easy", "n": i} for i in range(10)]
    tasks = load(write_lines(tmp_path / "a.jsonl", *rows[:5], "", "   ", *rows[5:]))
    assert [task.question for task in tasks.train] == [f"q{i}" for i in range(9)]
    assert [task.answer for task in tasks.train] == list(range(9))
    assert [task.id for task in tasks.train] == [f"line-{i}" for i in (1, 2, 3, 4, 5, 8, 9, 10, 11)]
    assert [(task.id, task.question) for task in tasks.held_out] == [("line-12", "q9")]
    assert dict(tasks.train[3].info) == {"level": "easy", "n": 3}


def test_jsonl_columns_messages_and_share(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    rows = [{"ask": talk, "key": "a", "gold": [1, 2]}, {"ask": "two", "key": 7, "gold": None}]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    tasks = load(path, question="ask", answer="gold", id="key", held_out=0.5)
    (first,), (second,) = tasks.train, tasks.held_out
    assert first.messages == tuple(talk)
    assert first.question == "hi"
    assert (first.id, first.answer) == ("a", [1, 2])
    assert (second.id, second.answer, second.question) == ("7", None, "two")


def test_jsonl_lines_end_only_at_line_ends(tmp_path: Path) -> None:
    """Unicode has more line separators than files do; JSON strings may hold them as they are."""
    question = "a\u2028b\u2029c\x85d — ü"
    tasks = load(write_lines(tmp_path / "a.jsonl", {"question": question, "answer": 1}, {"question": "q", "answer": 2}))
    assert [task.question for task in tasks.train] == [question, "q"]
    (tmp_path / "b.jsonl").write_bytes(b'{"question": "q", "answer": 1}\r\n{"question": "r", "answer": 2}')
    assert [task.question for task in load(str(tmp_path / "b.jsonl")).train] == ["q", "r"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "q", ', ":2: not JSON: "),
        ("[1, 2]", ":2: not a JSON object"),
        ('{"question": "q", "anser": 1}', ":2: there is no column 'answer'; the line has question, anser"),
        (
            '{"answer": 1}',
            ":2: there is no column 'question'; the line has answer (the option `question` names the column)",
        ),
        (
            '{"question": "q"}',
            ":2: there is no column 'answer'; the line has question (the option `answer` names the column; ''",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, says: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"question": "q", "answer": 1}, line)
    assert refusal(path).startswith(path + says)


def test_a_missing_id_column_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"question": "q", "answer": 1})
    assert "there is no column 'name'" in refusal(path, id="name")
    assert refusal(str(tmp_path / "b.jsonl")) == f"tasks.source: there is no file '{tmp_path / 'b.jsonl'}'"
    empty = write_lines(tmp_path / "c.jsonl")
    assert refusal(empty) == f"tasks: the source {empty!r} has no tasks to train on"


SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from roll.data import Task

@dataclass
class Riddle:
    text: str

def riddles(split, count=2):
    made = [Riddle(f"{split} {i}") for i in range(count)]
    return [Task.ask(r.text, r.text) for r in made]

def twins(split):
    return [Task.ask("a", "?"), Task.ask("b", "?"), Task.ask("a", "!")]

def strings(split):
    yield "what is this?"

def nothing(split):
    return []
"""


@pytest.mark.parametrize("place", ["my_tasks.py", "./my_tasks.py", "{}/my_tasks.py", "my_tasks"])
def test_a_function_of_the_users(folder: Path, place: str) -> None:
    (folder / "my_tasks.py").write_text(SOURCE)
    name = f"{place.format(folder)}:riddles"
    assert [task.id for task in load(name).train] == ["train 0", "train 1"]
    assert [task.id for task in load(name, count=1).held_out] == ["held_out 0"]


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("my_tasks.py:twins", {}, "gave two train tasks with the id 'a'"),
        ("my_tasks.py:strings", {}, "gave 'what is this?', which is not a roll.Task"),
        ("my_tasks.py:nothing", {}, "the source 'my_tasks.py:nothing' has no tasks to train on"),
        ("my_tasks.py:riddles", {"number": 3}, "tasks.options: got an unexpected keyword argument 'number'"),
        ("my_tasks.py:riddles", {"number": 3}, "(source 'my_tasks.py:riddles' takes: count)"),
        ("my_tasks.py:twins", {"number": 3}, "(source 'my_tasks.py:twins' takes: none)"),
        ("my_tasks.py:twins", {"split": "test"}, "tasks.options: multiple values for argument 'split'"),
        ("other.py:riddles", {}, "tasks.source 'other.py:riddles': there is no file"),
        (
            "additon",
            {},
            "tasks.source 'additon' is not known: write addition, echo, last_character, reasoning_gym, environment, ",
        ),
        ("addition", {"hihg": 3}, "takes: low, high, held_out, seed, question"),
        ("addition", {"low": 9, "high": 3}, "the source 'addition' has no tasks to train on"),
    ],
)
def test_what_cannot_work_is_reported(folder: Path, source: str, options: dict[str, Any], says: str) -> None:
    (folder / "my_tasks.py").write_text(SOURCE)
    assert says in refusal(source, **options)


def test_a_function_may_be_given_in_place_of_a_name() -> None:
    tasks = load_tasks(TasksConfig(options={"word": "hi"}), lambda split, word: [Task.ask(split, word)])
    assert (tasks.train[0].id, tasks.held_out[0].id) == ("train", "held_out")


def test_the_question_is_the_last_user_message() -> None:
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    assert Task("t", talk).question == "c"
    assert Task("t", ({"role": "system", "content": "s"},)).question == ""
    assert Task.ask("t", "q", 3, level=2).info == {"level": 2}
