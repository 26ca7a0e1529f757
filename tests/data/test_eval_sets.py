"""The tasks of `eval.sets`: which they are, and that they never meet those to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config import Config
from roll.config.errors import UserError
from roll.data.eval_sets import with_eval_sets
from roll.data.sources import TaskSet, load_tasks
from roll.data.task import Task


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    lines = [{"question": f"{i}?", "answer": i, "kind": "even" if i % 2 == 0 else "odd"} for i in range(20)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def held_out(tasks: TaskSet | None = None, **sets: Any) -> TaskSet:
    config = Config.model_validate({"tasks": "addition", "eval": {"sets": sets}})
    return with_eval_sets(tasks or load_tasks(config.tasks), config.eval.sets)


def test_without_sets_the_runs_own_tasks_are_held_out() -> None:
    tasks = load_tasks(Config().tasks)
    assert with_eval_sets(tasks, {}) is tasks


def test_sets_are_held_out_in_place_of_the_runs_own_tasks_and_training_stays() -> None:
    found = held_out(file="rows.jsonl", sums={"source": "addition", "options": {"high": 3}})
    assert found.train == load_tasks(Config().tasks).train
    assert {task.domain for task in found.held_out} == {"eval/file", "eval/sums"}
    assert all(task.id.startswith(task.domain.removeprefix("eval/") + "/") for task in found.held_out)


def test_all_of_a_file_is_evaluated_unless_it_says_what_is_held_out() -> None:
    assert len(held_out(file="rows.jsonl").held_out) == 20
    assert len(held_out(file={"source": "rows.jsonl", "options": {"held_out": 5}}).held_out) == 5


def test_of_any_other_source_only_held_out_tasks_are_evaluated() -> None:
    trained = {task.id for task in load_tasks(Config().tasks).train}
    asked = {task.id.removeprefix("sums/") for task in held_out(sums="addition").held_out}
    assert asked
    assert not asked & trained


def test_domains_that_a_source_gives_are_kept_as_labels() -> None:
    found = held_out(file={"source": "rows.jsonl", "options": {"domain": "kind"}})
    assert {found.labels[task.id] for task in found.held_out} == {"even", "odd"}


def test_two_sets_of_one_source_are_apart() -> None:
    found = held_out(one="rows.jsonl", two="rows.jsonl")
    assert len({task.id for task in found.held_out}) == len(found.held_out) == 40


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ({"x": "gone.jsonl"}, "eval.sets.x.source: there is no file 'gone.jsonl'"),
        ({"x": "ehco"}, "eval.sets.x.source 'ehco' is not known"),
        ({"x": {"source": "echo", "options": {"y": 1}}}, "eval.sets.x.options: got an unexpected keyword"),
        ({"x": {"source": "none.py:none"}}, "eval.sets.x: the source 'none.py:none' gave no held-out tasks"),
        ({"x": {"source": "rows.jsonl", "options": {"held_out": 0}}}, "the source 'rows.jsonl' gave no held-out tasks"),
        ({"x": {"source": "empty.jsonl"}}, "eval.sets.x"),
    ],
)
def test_a_set_without_tasks_is_refused_by_name(sets: Any, says: str) -> None:
    Path("none.py").write_text("def none(split):\n    return []\n")
    Path("empty.jsonl").write_text("")
    with pytest.raises(UserError) as refused:
        held_out(**sets)
    assert says in str(refused.value)


def test_a_task_to_train_on_cannot_be_of_a_sets_domain() -> None:
    sneaky = TaskSet((Task.ask("a", "?", "1", domain="eval/file"),), ())
    with pytest.raises(
        UserError, match=r"task 'a' is to be trained on, but its domain 'eval/file' is that of the tasks of"
    ):
        held_out(sneaky, file="rows.jsonl")
    assert held_out(sneaky, other="rows.jsonl").train == sneaky.train


def test_rows_that_a_set_skips_are_counted() -> None:
    found = held_out(file={"source": "rows.jsonl", "options": {"skip": {"kind": "odd"}}})
    assert (len(found.held_out), len(found.skipped)) == (10, 10)
    assert found.skipped[0].endswith("rows.jsonl:2")
