"""From a name to a function, and the errors on the way."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from roll.config.errors import UserError
from roll.data import Response, Task
from roll.reward import RewardSpec, make
from roll.reward.maths import Math
from roll.reward.numbers import Number

TASK, RESPONSE = Task.ask("t", "?", 5), Response("5", 1, "stop")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a few modules in it; imports of a test are undone after it."""
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 0.5\n")
    (tmp_path / "my_rewards.py").write_text(
        "from helper_of_mine import VALUE\n"
        "def score(task, response): return VALUE\n"
        "def needs_three(a, b, c): return 1.0\n"
        "async def later(task, response): return 1.0\n"
        "class Judge:\n    @staticmethod\n    def score(task, response): return 2.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_built_ins() -> None:
    assert make("number") == Number()
    assert make("number", {"tolerance": 1}) == Number(tolerance=1)
    assert make("math", {"boxed": True}) == Math(boxed=True)


@pytest.mark.parametrize("place", ["my_rewards", "my_rewards.py", "./my_rewards.py", "{}/my_rewards.py"])
def test_a_function_by_module_or_file(folder: Path, place: str) -> None:
    assert make(f"{place.format(folder)}:score")(TASK, RESPONSE) == 0.5
    assert make(f"{place.format(folder)}:Judge.score")(TASK, RESPONSE) == 2.0


def test_a_source_is_bound_to_the_folder_it_was_made_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RewardSpec.of("my_rewards.py:score")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(source)).load()(TASK, RESPONSE) == 0.5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nubmer", "reward 'nubmer' is not known: write .*math.*; did you mean 'number'"),
        ("no_such_module:score", "reward 'no_such_module:score': there is no module"),
        ("my_rewards:needs_three", r"takes \(a, b, c\)"),
        ("my_rewards:later", "`async def`"),
    ],
)
def test_a_name_that_cannot_work_is_refused_with_what_is_near(folder: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        RewardSpec.of(name).check()


def test_functions_travel_by_value() -> None:
    bonus = 0.25
    for reward in (lambda task, response: bonus, Judge(0.25).score, Judge(0.25)):
        source = RewardSpec.of(reward)
        source.check()
        assert pickle.loads(pickle.dumps(source)).load()(TASK, RESPONSE) == 0.25


def test_a_function_that_cannot_travel_is_refused_early() -> None:
    lock = threading.Lock()

    def locked(task: Task, response: Response) -> float:
        with lock:
            return 1.0

    with pytest.raises(UserError, match=r"'.*locked' cannot be sent to a grader process"):
        RewardSpec.of(locked)
    with pytest.raises(UserError, match="reward 'int' is a int, not a function"):
        RewardSpec.of(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="called as"):
        RewardSpec.of(lambda response: 1.0)  # type: ignore[arg-type, misc]


class Judge:
    def __init__(self, value: float) -> None:
        self.value = value

    def score(self, task: Task, response: Response) -> float:
        return self.value

    def __call__(self, task: Task, response: Response) -> Any:
        return self.value
