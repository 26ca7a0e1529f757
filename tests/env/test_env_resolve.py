"""From a name to what makes the environment, and the errors on the way."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from roll.config.errors import UserError
from roll.data.task import EnvSpec
from roll.env import check, register, resolve
from roll.env.builtin import EchoTurns, Guess
from roll.env.resolve import BUILT_IN


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a few modules in it; imports and names of a test are undone after it."""
    (tmp_path / "neighbour_of_mine.py").write_text("WORD = 'go'\n")
    (tmp_path / "my_worlds.py").write_text(
        "from neighbour_of_mine import WORD\n"
        "from roll.env import Environment\n"
        "class Maze:\n"
        "    def __init__(self, width: int = 3, height: int = 3): pass\n"
        "    def reset(self, seed): return WORD\n"
        "    def step(self, action): return action, 0.0, True, False, {}\n"
        "class Later(Maze):\n"
        "    async def reset(self, seed): return WORD\n"
        "class Unseeded(Maze):\n"
        "    def reset(self): return WORD\n"
        "class Deaf(Maze):\n"
        "    def step(self): return WORD\n"
        "class Half(Environment):\n"
        "    def reset(self, seed): return WORD\n"
        "class Outer:\n    Maze = Maze\n"
        "class Empty: pass\n"
        "def make(size): return Maze(size, size)\n"
        "async def make_later(): return Maze()\n"
    )
    (tmp_path / "broken_worlds.py").write_text("class Maze:\nreturn 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    names = importlib.import_module("roll.env.resolve")
    monkeypatch.setattr(names, "_REGISTRY", dict(names._REGISTRY))
    return tmp_path


def test_built_ins() -> None:
    assert resolve("guess") is Guess
    assert resolve("echo_turns") is EchoTurns


def test_only_what_is_asked_for_is_imported() -> None:
    script = "import sys; from roll.env import resolve; resolve('guess'); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {module for module in BUILT_IN.values() if module in done.stdout.split()}
    assert loaded == {BUILT_IN["guess"]}


def test_every_built_in_is_where_the_table_says() -> None:
    for name, module in BUILT_IN.items():
        assert resolve(name).__module__ == module


def test_a_package_that_is_missing_is_named_with_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lake_of_nobody.py").write_text("import package_of_nobody.envs\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(BUILT_IN, "lake", "lake_of_nobody")
    says = r"'lake' needs the package package_of_nobody: run `pip install -e '\.\[envs\]'`"
    with pytest.raises(UserError, match=says):
        resolve("lake")


def test_a_built_ins_name_is_not_for_others(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'guess' is taken by roll\.env\.builtin"):

        @register("guess")
        class Mine(Guess):
            pass


def test_a_registered_name_is_one_classs(folder: Path) -> None:
    @register("mine")
    class Mine(Guess):
        pass

    assert resolve("mine") is Mine
    assert register("mine")(Mine) is Mine
    with pytest.raises(ValueError, match=r"'mine' is taken by .*Mine"):
        register("mine")(Guess)


@pytest.mark.parametrize("place", ["my_worlds", "my_worlds.py", "./my_worlds.py", "{}/my_worlds.py"])
def test_a_class_by_module_or_file(folder: Path, place: str) -> None:
    for attribute in ("Maze", "Outer.Maze", "Later"):
        assert resolve(f"{place.format(folder)}:{attribute}").__name__ == attribute.split(".")[-1]
    assert resolve(f"{place.format(folder)}:make")(3).reset(0) == "go"


def test_names_are_looked_up_from_the_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert resolve("my_worlds.py:Maze", folder)(2, 2).reset(0) == "go"
    with pytest.raises(UserError, match=r"there is no file /my_worlds\.py"):
        resolve("my_worlds.py:Maze")
    with pytest.raises(UserError, match=r"there is no file /my_worlds\.py"):
        resolve("my_worlds.py:Maze", "/a/folder/of/another/machine")


def test_an_installed_package_may_offer_environments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(group: str) -> list[EntryPoint]:
        assert group == "roll.environments"
        offers = {"maze": "my_worlds:Maze", "broken": "broken_worlds:Maze", "empty": "my_worlds:Empty"}
        return [EntryPoint(name, value, group) for name, value in offers.items()]

    monkeypatch.setattr("importlib.metadata.entry_points", offered)
    monkeypatch.syspath_prepend(folder)
    assert resolve("maze").__name__ == "Maze"
    with pytest.raises(UserError, match="'broken' of an installed package, at 'broken_worlds:Maze': importing"):
        resolve("broken")
    with pytest.raises(UserError, match="the class Empty has no method reset"):
        resolve("empty")
    with pytest.raises(UserError, match=r"write broken, .*maze, .*; did you mean 'maze'\?"):
        resolve("mase")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gess", "environment 'gess' is not known: write echo_turns, .*guess, .*; did you mean 'guess'"),
        ("no_such_module:Maze", "environment 'no_such_module:Maze': there is no module"),
        ("my_worlds:Empty", "the class Empty has no method reset"),
        ("my_worlds:Half", "the class Half has no method step"),
        ("my_worlds:Unseeded", r"reset takes \(self\), but is called as reset\(seed=…\)"),
        ("my_worlds:Deaf", r"step takes \(self\), but is called as step\(action\)"),
        ("my_worlds:make_later", "`async def`"),
    ],
)
def test_a_name_that_cannot_work_is_refused_with_what_is_near(folder: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("my_worlds:Maze", {"widht": 3}, "'widht'; its options are: width, height; did you mean 'width'"),
        ("my_worlds:make", {}, "missing a required argument: 'size'; its options are: size"),
        ("my_worlds:Empty", {}, "has no method reset"),
    ],
)
def test_options_are_checked_without_making_an_environment(
    folder: Path, name: str, options: dict[str, Any], says: str
) -> None:
    check(EnvSpec("my_worlds:Maze", 0, {"width": 4}))
    with pytest.raises(UserError, match=says):
        check(EnvSpec(name, 0, options))
