"""Environments with a short name of their own, in processes that never ran the module that gave it to them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config import UserError, load_config
from roll.data.task import EnvSpec
from roll.env import register
from roll.env.resolve import portable_spec
from roll.pipeline.prepare import check

names = importlib.import_module("roll.env.resolve")
EXAMPLES = Path(__file__).parents[2] / "examples"
WORLD = """
from roll.env import Step, register

@register("one word")
class OneWord:
    def reset(self, seed): return f"word {seed}"
    def step(self, action): return Step(action * 2, 1.0, terminated=True)
"""
INSIDE = """
from roll.env import Step, register

def give(word):
    @register("one word")
    class OneWord:
        def reset(self, seed): return f"{word} {seed}"
        def step(self, action): return Step(action * 2, 1.0, terminated=True)

give("word")
"""
PLAYS = """
import asyncio
from roll.data.task import EnvSpec
from roll.env.pool import EnvPool

async def main():
    async with EnvPool() as pool:
        opened = await pool.reset("a game", EnvSpec("one word", 7))
        step = await pool.step("a game", "ho")
        print(opened.messages[0]["content"], step.observation, sep=", ")

if __name__ == "__main__":
    asyncio.run(main())
"""
SCRIPTS = {
    "in the script": {"run.py": WORLD + PLAYS},
    "run again, as a cell is": {"run.py": WORLD + WORLD + PLAYS},
    "in a file beside it": {"run.py": "import worlds\n" + PLAYS, "worlds.py": "import words\n" + WORLD, "words.py": ""},
    "in a package": {"run.py": "import mine.worlds\n" + PLAYS, "mine/__init__.py": "", "mine/worlds.py": WORLD},
    "inside of a function": {"run.py": INSIDE + PLAYS},
}


@pytest.mark.parametrize("files", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_registered_environment_is_played_in_another_process(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "word 7, hoho\n", done.stderr


@pytest.mark.parametrize("start", [["-"], ["-c", WORLD + PLAYS]], ids=["typed in", "on the command line"])
def test_code_that_is_in_no_file_travels_itself(start: list[str], tmp_path: Path) -> None:
    typed = WORLD + PLAYS if start == ["-"] else None
    done = subprocess.run(
        [sys.executable, *start], cwd=tmp_path, input=typed, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "word 7, hoho\n", done.stderr


def test_names_that_every_process_knows_stay_as_they_are() -> None:
    for spec in (EnvSpec("guess", 3), EnvSpec("worlds.py:World", 3), EnvSpec("nobody knows")):
        assert portable_spec(spec) is spec


def test_what_cannot_travel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_REGISTRY", {})
    held = (number for number in range(3))

    @register("held")
    class Held:
        numbers = held

        def reset(self, seed: int) -> str:
            return ""

    with pytest.raises(UserError, match=r"'held' cannot be sent to a process \(.*generator.*`path/to/file.py:name`"):
        portable_spec(EnvSpec("held"))


SOURCE = """
import worlds
from roll import Task
from roll.data.task import EnvSpec

def episodes(split, name="one word", **options):
    yield Task("first", (), environment=EnvSpec(name, 7, options))
"""


def test_a_source_may_register_what_its_tasks_are_played_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_REGISTRY", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "worlds.py").write_text(WORLD)
    (tmp_path / "mine.py").write_text(SOURCE)
    source = f"tasks.source={tmp_path}/mine.py:episodes"
    tasks, _ = check(load_config(EXAMPLES / "tiny.yaml", [source]))
    for task in (*tasks.train, *tasks.held_out):
        assert task.environment == EnvSpec("one word", 7, code=f"{tmp_path}/worlds.py:OneWord")
    refused = {"{name: one wort}": "'one wort' is not known.* did you mean 'one word'", "{size: 3}": "argument 'size'"}
    for options, says in refused.items():
        with pytest.raises(UserError, match=says):
            check(load_config(EXAMPLES / "tiny.yaml", [source, f"tasks.options={options}"]))
