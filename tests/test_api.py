"""The Python interface: every form that an argument may have, the error for those it may not, and what `help` shows."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

import roll
from roll import Chat, Response, Task, UserError, load_config
from roll.api import Arguments, arguments
from roll.config import changed_keys
from roll.config.hints import command_line, option, resume_command
from roll.pipeline.prepare import prepare
from roll.run import RunFolder

ROOT = Path(roll.__file__).parent
TINY = ROOT.parent / "examples" / "tiny.yaml"
ROWS = [{"question": f"{n} and {n}?", "answer": 2 * n} for n in range(20)]
TASKS = [Task.ask(f"task-{n}", f"{n}?", n) for n in range(20)]
CHAT = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "3"}]
TRUE = Response("4", 1, "stop")


def right(task: Task, response: Response) -> float:
    return float(response.text == str(task.answer))


def half(task: Task, response: Response) -> float:
    return 0.5


class Instance:
    def __call__(self, task: Task, response: Response) -> float:
        return 0.25


def some(split: str, count: int = 3) -> Iterable[Task]:
    return TASKS[:count]


def given(config: Any = None, overrides: Any = (), **passed: Any) -> Arguments:
    named = {name: passed.pop(name, None) for name in ("model", "tasks", "reward", "chats")}
    return arguments(config, overrides=overrides, settings=passed, **named)


@pytest.mark.parametrize("config", [str(TINY), TINY, load_config(TINY)])
def test_a_config_is_a_path_or_a_config(config: Any) -> None:
    assert given(config).config == load_config(TINY)


def test_a_config_is_a_dict_or_nothing() -> None:
    assert given().config == load_config({})
    made = given({"model": "tiny", "train": {"steps": 3}}).config
    assert (made.model.path, made.train.steps) == ("tiny", 3)


@pytest.mark.parametrize(
    ("passed", "changes"),
    [
        ({"model": "tiny"}, {"model.path": "tiny"}),
        ({"model": Path("my/model")}, {"model.path": "my/model"}),
        ({"model": {"path": "tiny", "dtype": "fp32"}}, {"model.path": "tiny", "model.dtype": "fp32"}),
        ({"train": {"steps": 3, "lr": 0.5}}, {"train.steps": 3, "train.lr": 0.5}),
        ({"train": {"steps": np.int64(3)}}, {"train.steps": 3}),
        ({"run": Path("runs/a"), "seed": 7}, {"seed": 7, "run.dir": "runs/a"}),
        ({"algorithm": "rloo"}, {"algorithm.name": "rloo"}),
        ({"overrides": ["train.lr=0.5", "seed=3"]}, {"seed": 3, "train.lr": 0.5}),
        ({"overrides": {"train.lr": 0.5, "rollout": {"group_size": 4}}}, {"rollout.group_size": 4, "train.lr": 0.5}),
        ({"train": {"lr": 0.1}, "overrides": ["train.lr=0.5"]}, {"train.lr": 0.5}),
        ({"tasks": "echo"}, {"tasks.source": "echo"}),
        ({"tasks": Path("a.jsonl")}, {"tasks.source": "a.jsonl"}),
        ({"tasks": {"source": "a", "options": {"b": 1}}}, {"tasks.source": "a", "tasks.options": {"b": 1}}),
        ({"tasks": {"too_long": "drop"}}, {"tasks.too_long": "drop"}),
        ({"reward": "math"}, {"reward.name": "math"}),
        ({"reward": {"name": "exact", "workers": 2}}, {"reward.name": "exact", "reward.workers": 2}),
        ({"pipeline": "sft", "chats": "echo"}, {"pipeline": "sft", "data.source": "echo"}),
    ],
)  # fmt: skip
def test_what_a_config_can_say_is_in_the_config(passed: dict[str, Any], changes: dict[str, Any]) -> None:
    made = given(**passed)
    assert made.objects == {}
    changed = [key for key in changed_keys(load_config({}), made.config) if not key.startswith("algorithm.")]
    assert changed == [key for key in changes if not key.startswith("algorithm.")]
    for key, value in changes.items():
        found: Any = made.config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value


def test_a_name_replaces_the_options_of_the_one_before() -> None:
    config = {
        "tasks": {"source": "addition", "options": {"high": 9}},
        "reward": {"parts": {"a": "number", "b": "math"}},
    }
    made = given(config, tasks="echo", reward="math").config
    assert made == load_config({"tasks": "echo", "reward": "math"})


def _splits(tasks: Any) -> tuple[list[Task], list[Task]]:
    made = given(tasks=tasks)
    assert made.tasks is not None
    options = made.config.tasks.options
    return list(made.tasks("train", **options)), list(made.tasks("held_out", **options))


@pytest.mark.parametrize(
    "tasks",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        datasets.Dataset.from_list(ROWS),
        pandas.DataFrame(ROWS),
        {"source": ROWS},
        {"train": ROWS},
        {"source": {"train": ROWS}},
    ],
    ids=["list", "tuple", "iterator", "dataset", "frame", "settings", "splits", "splits in settings"],
)
def test_rows_are_a_table(tasks: Any) -> None:
    train, held_out = _splits(tasks)
    assert (len(train), len(held_out)) == (18, 2)
    assert train[0] == Task.ask("row-1", "0 and 0?", 0)
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)


def test_rows_have_the_options_of_a_table() -> None:
    rows = [{"problem": "2+2", "solution": "so\n#### 4", "level": 1}] * 4
    options = {
        "question": "problem",
        "answer": "solution",
        "answer_pattern": "#### (.*)",
        "held_out": 0,
        "prompt": "{question}=?",
    }
    train, held_out = _splits({"source": rows, "options": options})
    assert [task.question for task in train] == ["2+2=?"] * 4
    assert train[0].answer == "4"
    assert held_out == []


@pytest.mark.parametrize("name", ["held_out", "test", "validation"])
def test_splits_are_kept_apart(name: str) -> None:
    for train, other in ((ROWS, ROWS[:3]), (TASKS, TASKS[:3]), (ROWS, lambda split: TASKS[:3])):
        found, held_out = _splits({"train": train, name: other})
        assert (len(found), len(held_out)) == (20, 3)
        assert {task.id for task in found}.isdisjoint(task.id for task in held_out)
    dataset = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), name: datasets.Dataset.from_list(ROWS[:3])}
    )
    assert [len(tasks) for tasks in _splits(dataset)] == [20, 3]


def test_tasks_are_a_list_or_a_function() -> None:
    train, held_out = _splits(TASKS)
    assert (len(train), len(held_out)) == (18, 2)
    assert sorted([*train, *held_out], key=TASKS.index) == TASKS
    assert [len(tasks) for tasks in _splits({"source": TASKS, "options": {"held_out": 5}})] == [15, 5]
    assert [len(tasks) for tasks in _splits(some)] == [3, 3]
    assert [len(tasks) for tasks in _splits({"source": some, "options": {"count": 2}})] == [2, 2]


@pytest.mark.parametrize(
    ("chats", "train"),
    [
        ([Chat.of("a", "2?", "3")], 1),
        ([CHAT, CHAT], 2),
        ([{"messages": CHAT}, {"prompt": "2?", "response": "3"}], 2),
        (datasets.Dataset.from_list([{"prompt": "2?", "response": "3"}] * 40), 38),
        ({"train": [CHAT], "test": [CHAT]}, 1),
    ],
)
def test_conversations(chats: Any, train: int) -> None:
    made = given(pipeline="sft", chats=chats)
    assert made.chats is not None
    assert len(list(made.chats("train"))) == train


@pytest.mark.parametrize(
    ("reward", "worth"),
    [
        (right, 1.0),
        (Instance(), 0.25),
        (functools.partial(right), 1.0),
        ([right, half, "number"], 2.5),
        ((right, half), 1.5),
        ({"right": "number", "brief": half}, 1.5),
        ({"a": {"name": right, "weight": 2}, "b": half}, 2.5),
        ({"a": {"name": half, "gate": True, "gate_at": 0.9, "gate_value": -1}, "b": right}, -1.0),
        ({"parts": {"a": half, "b": Instance()}, "workers": 3}, 0.75),
        ({"name": right, "workers": 3}, 1.0),
    ],
)
def test_rewards_that_are_functions(reward: Any, worth: float) -> None:
    made = given(reward=reward)
    assert made.reward is not None
    value = made.reward(Task.ask("a", "2+2?", 4), TRUE)
    assert (value["reward"] if isinstance(value, dict) else value) == worth
    assert made.config.reward.workers == (3 if isinstance(reward, dict) and "workers" in reward else 1)


def test_rewards_by_name_are_parts_of_the_config() -> None:
    assert given(reward=["math", "number"]).config == load_config(
        {"reward": {"parts": {"math": "math", "number": "number"}}}
    )
    parts = {"right": {"name": "math", "weight": 2}, "form": "json"}
    assert given(reward=parts).config.reward.parts["right"].weight == 2


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "config": ({"config": 3}, r"a configuration is 3 \(int\): write the path of a YAML file, a dict or a roll.Config"),
    "no file": ({"config": "examples/tny.yaml"}, "examples/tny.yaml does not exist"),
    "model": ({"model": 3}, r"model is 3 \(int\): write the name, the path or the hub id"),
    "no such setting": ({"trian": {}}, "trian is not a setting; did you mean train?"),
    "setting of a section": ({"steps": 3}, "did you mean train.steps?"),
    "in a section": ({"train": {"lrr": 1}}, "did you mean train.lr?"),
    "not a section": ({"train": 3}, "train is 3, but takes settings of its own"),
    "overrides": ({"overrides": "train.lr=1"}, "overrides is 'train.lr=1': write a list"),
    "overrides of numbers": ({"overrides": [1]}, "overrides has 1: write a list"),
    "tasks": ({"tasks": 3}, r"tasks is 3 \(int\): write the name of a source"),
    "no tasks": ({"tasks": []}, "tasks is empty"),
    "texts": ({"tasks": ["2+2?"]}, r"tasks\[0\] is '2\+2\?' \(str\): write a roll.Task, or a dict"),
    "kinds mixed": ({"tasks": [TASKS[0], ROWS[0]]}, r"tasks\[1\] is a dict, but others are roll.Task"),
    "columns": ({"tasks": [{1: 2}]}, r"tasks\[0\] has the key 1"),
    "splits": ({"tasks": {"train": ROWS, "test": ROWS, "validation": ROWS}}, "leave out all but the one"),
    "other splits": ({"tasks": {"one": ROWS}}, "tasks is a dict with 'one': write train"),
    "setting of tasks": ({"tasks": {"source": "echo", "optoins": {}}}, "did you mean tasks.options?"),
    "a stream": ({"tasks": datasets.Dataset.from_list(ROWS).to_iterable_dataset()}, r"list\(dataset.take\(1000\)\)"),
    "reward": ({"reward": 3}, r"reward is 3 \(int\): write the name of a reward, a function"),
    "no rewards": ({"reward": []}, "reward is empty"),
    "no parts": ({"reward": {}}, "reward is empty"),
    "the same name": ({"reward": [right, right]}, "two rewards named 'right'"),
    "no name": ({"reward": [lambda task, response: 1]}, "write a dict of rewards by name"),
    "a model's": ({"reward": {"a": right, "b": "judge"}}, "cannot be combined with functions"),
    "a weight": ({"reward": {"a": {"name": right, "wieght": 2}}}, "did you mean reward.parts.a.weight?"),
    "not a reward": ({"reward": {"a": right, "b": 3}}, "reward.parts.b.name is 3"),
    "not known": ({"reward": [right, "nummer"]}, "did you mean 'number'?"),
    "not of two": ({"reward": {"a": lambda task: 1, "b": right}}, r"called as \(task, response\)"),
    "chats": ({"chats": 3}, r"chats is 3 \(int\)"),
    "chats and data": ({"chats": [CHAT], "data": "echo"}, "write one of them"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_no_argument_can_be_is_refused(case: str) -> None:
    passed, message = WRONG[case]
    with pytest.raises(UserError, match=message):
        given(**passed)


def test_rows_without_a_column_are_refused_by_their_place() -> None:
    made = given(model="tiny", tasks=[*ROWS, {"question": "?"}])
    with pytest.raises(UserError, match=r"tasks\[20\]: there is no column 'answer'"):
        prepare(made.config, **made.objects)


def test_messages_name_the_objects_that_were_given() -> None:
    def nothing(split: str) -> list[Task]:
        return []

    for passed, named in (
        ({"tasks": nothing}, "the source '.*nothing' has no tasks"),
        ({"tasks": [TASKS[0], TASKS[0]] * 5}, "the source 'a list of 10' gave two train tasks"),
        (
            {"pipeline": "sft", "chats": {"source": [CHAT], "options": {"held": 1}}},
            "source 'a list of 1' takes: held_out",
        ),
        (
            {"pipeline": "sft", "chats": {"source": [{"prompt": "a", "response": "b"}], "options": {"promt": "c"}}},
            "the source '1 rows'",
        ),
    ):
        made = given(model="tiny", **passed)
        with pytest.raises(UserError, match=named):
            prepare(made.config, **made.objects)


def test_no_model_object_is_taken() -> None:
    class Pretrained:
        def save_pretrained(self) -> None: ...

    with pytest.raises(UserError, match=r"model.save_pretrained\(folder\)"):
        given(model=Pretrained())


def test_errors_are_spelled_as_the_user_writes(tmp_path: Path) -> None:
    assert option("resume") == "resume=True"
    assert option("code", "run") == 'code="run"'
    assert resume_command("a.yaml") == 'roll.train("a.yaml", resume=True)'
    with command_line():
        assert option("resume") == "--resume"
        assert option("code", "run") == "--code run"
        assert resume_command("a.yaml") == "roll train a.yaml --resume"
    RunFolder.create(tmp_path / "run", "").ledger_path.touch()
    with pytest.raises(UserError, match="write resume=True to continue it, restart=True to move it"):
        roll.train(model="tiny", tasks="echo", run=tmp_path / "run")
    with pytest.raises(UserError, match="leave out resume=True to start one"):
        roll.train(model="tiny", tasks="echo", run=tmp_path / "none", resume=True)
    with pytest.raises(UserError, match="resume=True continues a run and restart=True"):
        roll.train(model="tiny", resume=True, restart=True)


def test_no_message_of_the_library_names_an_option_of_the_command_line() -> None:
    """`roll.config.hints` says how it is written. The files left out speak to other programs, or print."""
    others = ("config/hints.py", "sandbox/launch.py")
    found = []
    for file in ROOT.rglob("*.py"):
        if str(file.relative_to(ROOT)) in others or file.is_relative_to(ROOT / "cli"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = re.sub(r"pip install --no-deps|nvidia-smi|--query-gpu\S*|--format\S*", "", node.value)
                if re.search(r"(?<![\w-])--[a-z]", text):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.value!r}")
    assert found == []


def public() -> Iterator[tuple[str, Any]]:
    """All public names, and the public methods and properties of classes among them."""
    for name in roll.__all__:
        value = getattr(roll, name)
        yield name, value
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                yield f"{name}.{attribute}", member


def _shown(name: str, value: Any) -> str | None:
    """What `help` shows of a function or a method; one that has no text of its own has that of its base."""
    owner, _, attribute = name.partition(".")
    return inspect.getdoc(getattr(getattr(roll, owner), attribute) if attribute else value)


def test_every_public_name_has_a_docstring() -> None:
    without = []
    for name, value in public():
        text = vars(value).get("__doc__") if inspect.isclass(value) else _shown(name, value)
        if not text or text.startswith(f"{name}("):  # what a dataclass writes by itself
            without.append(name)
    assert without == []


@pytest.mark.parametrize("function", [roll.train, roll.evaluate, roll.play, roll.load_config])
def test_help_names_every_argument_that_users_pass(function: Any) -> None:
    text = inspect.getdoc(roll.train if function is not roll.load_config else function) or ""
    for name in inspect.signature(function).parameters:
        assert name in text or name == "episodes"


README = (ROOT.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_trains_a_hub_model_in_eight_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"## GRPO in eight lines.*?```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    assert len(code[1].strip().splitlines()) <= 8
    made: list[Arguments] = []
    monkeypatch.setattr(roll, "train", lambda **passed: made.append(given(**passed)))
    exec(code[1], {})
    assert made[0].config.reward.name == "math"
    assert made[0].objects == {}
