"""Where the files and the code that a configuration names are looked for."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config import Config, changed_keys, dump_config, load_config
from roll.config.errors import UserError
from roll.config.root import find_local, names_in, with_absolute_paths, with_names
from roll.config.user_code import SENT_FOLDER, load_user_code, working_copy
from roll.data.chat_sources import load_chats
from roll.data.sources import load_tasks


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose configs lie in a folder of their own; the working directory is another one."""
    (tmp_path / "project" / "configs").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "mine"})
    return tmp_path / "project"


def written(file: Path, settings: dict[str, Any]) -> Path:
    file.write_text(json.dumps(settings))
    return file


def rows(file: Path, *questions: str) -> None:
    file.write_text("".join(json.dumps({"question": q, "answer": q}) + "\n" for q in questions))


EVERY_NAME: dict[str, Any] = {
    "model": {"path": "weights", "chat_template": "chat.jinja"},
    "reward": {"parts": {"a": "near.py:near", "b": "reward_model", "c": {"name": "pkg.mod:far"}}},
    "tasks": {"source": "train.jsonl", "options": {"held_out": "test.jsonl"}},
    "rollout": {
        "filter": "f.py:f",
        "task_order": "o:O",
        "policy": "stragglers=60",
        "early_stop": ["repetition", "e.py:e"],
    },
    "algorithm": {"name": "grpo", "loss": "my/loss.py:loss"},
    "roles": {"reward_model": {"model": "scorer"}},
}


def test_every_setting_that_names_a_file_or_code_is_listed_with_its_kind() -> None:
    found = {name.setting: (name.value, name.kind) for name in names_in(load_config(EVERY_NAME))}
    assert found == {
        "model.path": ("weights", "model"),
        "model.chat_template": ("chat.jinja", "file"),
        "tasks.source": ("train.jsonl", "file"),
        "tasks.options.held_out": ("test.jsonl", "file"),
        "reward.parts.a.name": ("near.py:near", "code"),
        "reward.parts.c.name": ("pkg.mod:far", "code"),
        "rollout.filter": ("f.py:f", "code"),
        "rollout.task_order": ("o:O", "code"),
        "rollout.early_stop[1]": ("e.py:e", "code"),
        "algorithm.loss": ("my/loss.py:loss", "code"),
        "roles.reward_model.model.path": ("scorer", "model"),
    }


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ("echo", {}),
        ("reasoning_gym:chain_sum", {}),
        ("hf:openai/gsm8k", {"tasks.source": "dataset"}),
        ("mine.py:tasks", {"tasks.source": "code"}),
        ({"source": "mine.py:tasks", "options": {"held_out": "x.jsonl", "data": "y"}}, {"tasks.source": "code"}),
        ({"source": "environment", "options": {"name": "hangman.py:Hangman"}}, {"tasks.options.name": "code"}),
        ({"source": "environment", "options": {"name": "webshop", "data": "shop"}}, {"tasks.options.data": "file"}),
        ({"source": "environment", "options": {"name": "mine.py:Env", "data": "shop"}}, {"tasks.options.name": "code"}),
        (
            {"source": "environment", "options": {"name": "gymnasium:Taxi-v4", "show": "s.py:show", "read": "s.py:read"}},
            {"tasks.options.show": "code", "tasks.options.read": "code"},
        ),
        (
            {"source": "environment", "options": {"name": "maths_retries", "problems": "p.jsonl"}},
            {"tasks.options.problems": "file"},
        ),
    ],
)
def test_options_of_sources_that_come_with_roll_may_name_files(tasks: Any, expected: dict[str, str]) -> None:
    assert {name.setting: name.kind for name in names_in(load_config({"tasks": tasks}))} == expected


def test_domains_and_runs_of_dagger_are_listed_too() -> None:
    domains = {"a": {"tasks": "a.jsonl", "reward": "r.py:r", "filter": "f.py:f"}}
    assert [name.setting for name in names_in(load_config({"domains": domains}))] == [
        "domains.a.filter",
        "domains.a.tasks.source",
        "domains.a.reward.name",
    ]
    dagger = {"source": "dagger", "options": {"runs": ["runs/a", "runs/b"]}}
    names = names_in(load_config({"pipeline": "sft", "data": dagger}))
    assert [(name.setting, name.value) for name in names] == [
        ("data.options.runs[0]", "runs/a"),
        ("data.options.runs[1]", "runs/b"),
    ]


def test_names_can_be_replaced_wherever_they_are() -> None:
    config = load_config(EVERY_NAME)
    other = with_names(config, {name.keys: f"x{name.value}" for name in names_in(config)})
    assert [name.value for name in names_in(other)] == [f"x{name.value}" for name in names_in(config)]
    assert (config.model.path, other.model.path) == ("weights", "xweights")
    assert other.rollout.early_stop == ("repetition", "xe.py:e")


def test_names_in_a_file_are_relative_to_its_folder(project: Path) -> None:
    rows(project / "configs" / "train.jsonl", "1", "2")
    rows(project / "test.jsonl", "3")
    (project / "near.py").write_text("def near(task, response): return 0.25\n")
    tasks = {"source": "train.jsonl", "options": {"held_out": "../test.jsonl"}}
    config = load_config(written(project / "configs" / "a.yaml", {"tasks": tasks, "reward": "../near.py:near"}))
    found = load_tasks(config.tasks, root=config.root)
    assert [task.question for task in (*found.train, *found.held_out)] == ["1", "2", "3"]
    assert load_user_code(config.reward.name, what="reward", root=config.root)(None, None) == 0.25


def test_names_in_a_mapping_are_relative_to_the_working_directory(project: Path) -> None:
    rows(Path("train.jsonl"), "1", "2")
    config = load_config({"tasks": "train.jsonl"})
    assert config.root == os.getcwd()
    assert len(load_tasks(config.tasks, root=config.root).train) == 2
    assert len(load_tasks(Config(tasks=config.tasks).tasks).train) == 2


def test_names_in_overrides_are_relative_to_the_working_directory(project: Path) -> None:
    rows(project / "configs" / "train.jsonl", "not this")
    rows(Path("train.jsonl"), "this", "and this")
    for name in ("near.py", "nearer.py"):
        Path(name).write_text("def near(task, response): return 0.5\n")
    file = written(project / "configs" / "a.yaml", {"tasks": "train.jsonl", "reward": "number"})
    for reward in ("near.py:near", "nearer:near", f"{os.getcwd()}/near.py:near"):
        config = load_config(file, ["tasks=train.jsonl", f"reward={reward}", "rollout.early_stop=[near.py:near]"])
        assert [task.question for task in load_tasks(config.tasks, root=config.root).train] == ["this", "and this"]
        assert load_user_code(config.reward.name, what="reward", root=config.root)(None, None) == 0.5
        assert load_user_code(config.rollout.early_stop[0], what="x", root=config.root)(None, None) == 0.5
    assert load_config(file).tasks.source == "train.jsonl"


@pytest.mark.parametrize("override", ["model=org/name", "model=tiny", "tasks=hf:openai/gsm8k", "tasks=addition"])
def test_an_override_that_names_no_file_is_taken_as_it_is(project: Path, override: str) -> None:
    file = written(project / "configs" / "a.yaml", {})
    key, _, value = override.partition("=")
    config = load_config(file, [override])
    assert (config.model.path if key == "model" else config.tasks.source) == value


def test_a_model_and_a_run_are_looked_for_beside_the_file_and_then_in_the_working_directory(project: Path) -> None:
    beside, here = project / "configs" / "weights", Path("weights").absolute()
    file = written(project / "configs" / "a.yaml", {"model": {"path": "weights", "chat_template": "t.jinja"}})
    assert with_absolute_paths(load_config(file)).model.path == "weights"
    here.mkdir()
    assert with_absolute_paths(load_config(file)).model.path == str(here)
    beside.mkdir()
    assert with_absolute_paths(load_config(file)).model.path == str(beside)
    assert with_absolute_paths(load_config(file, ["model=weights"])).model.path == str(here)
    assert with_absolute_paths(load_config(file)).model.chat_template == str(project / "configs" / "t.jinja")
    assert find_local("weights", project / "configs") == beside
    assert find_local("tiny", project / "configs") is None


def test_a_written_config_finds_the_same_files_from_anywhere(project: Path) -> None:
    rows(project / "configs" / "train.jsonl", "1", "2")
    config = load_config(written(project / "configs" / "a.yaml", {"tasks": "train.jsonl"}))
    again = Path("again.yaml")
    again.write_text(dump_config(config))
    assert load_config(again) == config
    assert len(load_tasks(load_config(again).tasks, root=load_config(again).root).train) == 2
    assert changed_keys(config, config.model_copy(update={"root": "/other"})) == []


def test_a_root_may_be_written(project: Path) -> None:
    rows(project / "train.jsonl", "1", "2")
    file = written(project / "configs" / "a.yaml", {"root": "..", "tasks": "train.jsonl"})
    assert load_config(file).root == str(project)
    assert load_config(file, ["root=."]).root == os.getcwd()


@pytest.mark.parametrize(
    ("settings", "file", "write"),
    [
        ({"tasks": "train.jsonl"}, "train.jsonl", "write ../../elsewhere/train.jsonl"),
        ({"tasks": "mine.py:tasks"}, "mine.py", "write ../../elsewhere/mine.py"),
        ({"tasks": "mine:tasks"}, "mine.py", "write ../../elsewhere/mine.py"),
        ({"tasks": "sub/mine.py:tasks"}, "sub/mine.py", "write ../../elsewhere/sub/mine.py"),
    ],
)
def test_a_file_of_the_working_directory_that_a_yaml_does_not_see_is_pointed_out(
    project: Path, settings: dict[str, Any], file: str, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = [path for path in sys.path if path and (Path(path) / "mine.py").exists()]  # other tests' files
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in elsewhere])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("def tasks(split): return []\n")
    config = load_config(written(project / "configs" / "a.yaml", settings))
    with pytest.raises(UserError) as refused:
        load_tasks(config.tasks, root=config.root)
    assert f"there is {file} in the working directory" in str(refused.value)
    assert write in str(refused.value)


def test_conversations_are_found_beside_the_file(project: Path) -> None:
    file = written(project / "configs" / "a.yaml", {"pipeline": "sft", "data": "chats.jsonl"})
    row = {"prompt": "q", "response": "a"}
    (project / "configs" / "chats.jsonl").write_text(json.dumps(row) + "\n")
    config = load_config(file)
    assert len(load_chats(config.data, root=config.root).train) == 1


def test_a_module_that_the_program_has_imported_stays_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another folder imports its own neighbour of the same name; the program keeps the one it has."""
    for name in ("mine", "theirs"):
        (project / name).mkdir()
        (project / name / "neighbour_of_two.py").write_text(f"WHOSE = {name!r}\n")
    (project / "theirs" / "judging.py").write_text("from neighbour_of_two import WHOSE\ndef judge(): return WHOSE\n")
    monkeypatch.syspath_prepend(str(project / "mine"))
    program = importlib.import_module("neighbour_of_two")
    assert load_user_code("theirs/judging.py:judge", what="reward", root=project)() == "theirs"
    assert importlib.import_module("neighbour_of_two") is program
    assert program.WHOSE == "mine"


def test_files_of_the_same_name_in_two_folders_import_their_own_neighbours(project: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (project / folder).mkdir()
        (project / folder / "helper.py").write_text(f"VALUE = {value}\n")
        (project / folder / "near.py").write_text("import helper\ndef near(task, response): return helper.VALUE\n")
        (project / folder / "module_of_both.py").write_text(f"def near(task, response): return {value}\n")
    for _ in range(2):
        assert [load_user_code(f"{f}/near.py:near", what="reward", root=project)(0, 0) for f in "ab"] == [1, 2]
        assert [load_user_code("module_of_both:near", what="reward", root=project / f)(0, 0) for f in "ab"] == [1, 2]


def test_another_machine_looks_in_its_copy_of_the_folder_that_was_sent(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.cwd()
    assert working_copy(project) == project
    assert working_copy("/not/on/this/machine") == here
    monkeypatch.setenv(SENT_FOLDER, "/not/on")
    assert working_copy("/not/on/this/machine") == here / "this/machine"
    assert working_copy("/not/on") == here
    assert working_copy("/another") == here
    assert working_copy("") == working_copy(None) == here
