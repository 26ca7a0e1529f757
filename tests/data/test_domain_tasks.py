"""The tasks of several domains: whose they are, what they are called, and that nobody's are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config import UserError, load_config
from roll.data import Task
from roll.data.domains import domains_of, first_of_each, load_domains
from roll.data.sources import TaskSet

SOURCE = """
from roll.data import Task

def labelled(split, labels=("a", "b", "default")):
    return [Task.ask(f"{label} {split}", "?", 1, domain=label) for label in labels]

def held_out_only(split):
    return [Task.ask("x", "?", 1)] if split == "held_out" else []
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of sources; imports made from it are undone after the test."""
    (tmp_path / "my_domains.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def load(**domains: Any) -> TaskSet:
    return load_domains(load_config({"domains": domains}).domains)


def refusal(**domains: Any) -> str:
    with pytest.raises(UserError) as refused:
        load(**domains)
    return str(refused.value)


def test_a_sections_tasks_are_of_its_domain_and_their_ids_never_meet() -> None:
    tasks = load(
        digits={"tasks": "echo"},
        letters={"tasks": {"source": "echo", "options": {"symbols": "ab0"}}},
        game={"tasks": {"source": "environment", "options": {"name": "echo_turns", "count": 2, "held_out": 1}}},
    )
    assert domains_of(tasks.train) == domains_of(tasks.held_out) == ["digits", "game", "letters"]
    assert [task.id for task in tasks.train if task.domain == "letters"] == ["letters/a", "letters/b", "letters/0"]
    assert [task.id for task in tasks.train if task.domain == "game"] == ["game/echo_turns#0", "game/echo_turns#1"]
    assert len({task.id for task in tasks.train}) == len(tasks.train) == 15
    assert tasks == load(
        digits={"tasks": "echo"},
        letters={"tasks": {"source": "echo", "options": {"symbols": "ab0"}}},
        game={"tasks": {"source": "environment", "options": {"name": "echo_turns", "count": 2, "held_out": 1}}},
    )


def test_a_source_may_say_whose_its_tasks_are() -> None:
    tasks = load(a={"tasks": "my_domains.py:labelled"}, b={"reward": "math"})
    assert [(task.id, task.domain) for task in tasks.train] == [
        ("a/a train", "a"),
        ("a/b train", "b"),
        ("a/default train", "a"),
    ]


def test_so_may_the_rows_of_a_table(folder: Path) -> None:
    rows = [{"question": "q", "answer": 1, "subject": subject} for subject in ("maths", "code", "maths")]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"domain": "subject", "held_out": 0}
    tasks = load(maths={"tasks": {"source": "a.jsonl", "options": options}}, code={})
    assert [task.domain for task in tasks.train] == ["maths", "code", "maths"]
    said = refusal(maths={"tasks": {"source": "a.jsonl", "options": options}})
    assert "its source gave the task 'line-2' of the domain 'code', which has no section: write domains.code" in said


def test_a_domain_nobody_handles_is_refused_in_either_split() -> None:
    said = refusal(aa={"tasks": "my_domains.py:labelled"}, b={})
    assert said.startswith("domains.aa: its source gave the task 'a train' of the domain 'a', which has no section; did")


def test_what_is_measured_only_has_nothing_to_train_on() -> None:
    tasks = load(
        a={"tasks": "echo"}, b={"tasks": "addition", "weight": 0}, c={"tasks": "my_domains.py:held_out_only", "weight": 0}
    )
    assert {task.domain for task in tasks.train} == {"a"}
    assert {task.domain for task in tasks.held_out} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("domains", "says"),
    [
        ({"a": {"tasks": "echo"}, "b": {}}, "domains.b has no tasks to train on: write domains.b.tasks, or let another"),
        (
            {"a": {"tasks": "my_domains.py:held_out_only"}},
            "has no tasks to train on: the source 'my_domains.py:held_out_on",
        ),
        ({"a": {"tasks": "echo"}, "b": {"weight": 0}}, "domains.b has weight 0 and no held-out tasks"),
        ({"a": {"tasks": "gone.jsonl"}}, "domains.a.tasks.source: there is no file 'gone.jsonl'"),
        ({"a": {"tasks": {"source": "echo", "options": {"x": 1}}}}, "domains.a.tasks.options: got an unexpected keyword"),
        ({"a": {"tasks": "ehco"}}, "domains.a.tasks.source 'ehco' is not known"),
    ],
)
def test_what_cannot_work_is_reported_with_its_domain(domains: dict[str, Any], says: str) -> None:
    assert says in refusal(**domains)


def test_a_bad_line_of_a_domains_file_is_named(folder: Path) -> None:
    (folder / "a.jsonl").write_text("{}\n")
    assert refusal(a={"tasks": "a.jsonl"}).startswith("domains.a: a.jsonl:1: there is no column 'question'")


def test_some_of_each_domain() -> None:
    tasks = [Task.ask(f"{domain}{i}", "?", domain=domain) for domain in "ab" for i in range(3)]
    assert [task.id for task in first_of_each(tasks, 2)] == ["a0", "a1", "b0", "b1"]
