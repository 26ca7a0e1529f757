"""From what a user wrote to the code it names, and the errors on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roll.config.errors import UserError
from roll.config.user_code import load_user_code

MINE = """
from dataclasses import dataclass
from neighbour_of_mine import VALUE

@dataclass
class Box:
    value: int = VALUE

    @staticmethod
    def open(): return VALUE

def score(): return VALUE

constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a few modules in it; imports of a test are undone after it."""
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7\n")
    (tmp_path / "my_code.py").write_text(MINE)
    (tmp_path / "broken_code.py").write_text("def score():\nreturn 1\n")
    (tmp_path / "needy_code.py").write_text("import a_library_that_is_not_there\n")
    (tmp_path / "my_text.txt").write_text("score = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


@pytest.mark.parametrize("place", ["my_code", "my_code.py", "./my_code.py", "{}/my_code.py"])
def test_a_module_or_a_file_that_may_import_its_neighbours(folder: Path, place: str) -> None:
    for attribute in ("score", "Box.open"):
        assert load_user_code(f"{place.format(folder)}:{attribute}", what="reward")() == 7
    assert load_user_code(f"{place.format(folder)}:Box", what="reward")().value == 7


def test_names_are_looked_up_from_the_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for name in ("my_code:score", "my_code.py:score"):
        assert load_user_code(name, what="reward", root=folder)() == 7
    for root in (None, "/a/folder/of/another/machine"):
        with pytest.raises(UserError, match=r"there is no file /my_code\.py"):
            load_user_code("my_code.py:score", what="reward", root=root)


def test_a_file_in_a_folder_of_the_root_imports_from_its_own_folder_first_and_then_from_the_root(folder: Path) -> None:
    inner = folder / "rewards"
    inner.mkdir()
    (inner / "deep_code.py").write_text("from neighbour_of_mine import VALUE\ndef score(): return VALUE\n")
    assert load_user_code("rewards/deep_code.py:score", what="reward", root=folder)() == 7
    (inner / "neighbour_of_mine.py").write_text("VALUE = 8\n")
    (inner / "other_code.py").write_text("from neighbour_of_mine import VALUE\ndef score(): return VALUE\n")
    assert load_user_code("rewards/other_code.py:score", what="reward", root=folder)() == 8


def test_a_file_runs_once_whoever_names_it_and_again_if_it_failed(folder: Path) -> None:
    path = folder / "counts.py"
    path.write_text("1 / 0")
    with pytest.raises(UserError, match=r"running .*counts\.py failed: ZeroDivisionError: division by zero"):
        load_user_code("counts.py:seen.append", what="reward")
    path.write_text("seen = []\n")
    load_user_code("counts.py:seen.append", what="reward")(1)
    load_user_code(f"{path}:seen.append", what="rollout.filter")(2)
    assert load_user_code("counts.py:seen.copy", what="loss")() == [1, 2]


def test_an_interrupted_file_is_not_left_half_run(folder: Path) -> None:
    (folder / "stopped.py").write_text("def score(): pass\nraise KeyboardInterrupt\n")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            load_user_code("stopped.py:score", what="reward")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "nubmer",
            "is not known: write number, math, `package.module:name` or `path/to/file.py:name`; did you mean 'num",
        ),
        ("", "reward '' is not known: write number, math, `package.module:name` or `path/to/file.py:name`"),
        (":score", "reward ':score' is not known: write"),
        ("my_code:", "reward 'my_code:' is not known: write"),
        ("no_such_module:score", "reward 'no_such_module:score': there is no module 'no_such_module' in /"),
        ("my_code.deeper:score", "there is no module 'my_code.deeper'"),
        ("my_cod.py:score", "/my_cod.py; did you mean 'my_code.py'?"),
        ("nowhere/x.py:score", "/nowhere/x.py"),
        ("./my_text.txt:score", "my_text.txt is not a Python file: write `package.module:name` or"),
        ("my_code:scor", "my_code.py has no 'scor'; did you mean 'score'?"),
        ("my_code.py:Box.opened", "my_code.py has no 'opened'; did you mean 'open'?"),
        ("my_code.py:zzz", "my_code.py has no 'zzz'; it has dataclass, Box, score"),
        ("my_code.py:constant", "constant of {}/my_code.py is a int, not a function or class"),
        ("broken_code:score", "importing broken_code failed: IndentationError: "),
        ("broken_code.py:score", "running {}/broken_code.py failed: IndentationError: "),
        ("needy_code:score", "importing needy_code failed: ModuleNotFoundError: No module named 'a_library_that"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(folder: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        load_user_code(text, what="reward", known=["number", "math"])
    assert str(refused.value).startswith(f"reward {text!r}")
    assert says.format(folder) in str(refused.value)
