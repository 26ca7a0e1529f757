"""The environment role, and its page of the documentation."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from roll.cluster import Cluster, LocalExecutor, WorkerPlacement
from roll.cluster.worker_runtime import CallResult, WorkerRuntime
from roll.config import load_config
from roll.config.errors import RunError, UserError
from roll.config.schema import EnvConfig
from roll.config.yaml_document import parse
from roll.data.chat_sources import load_chats
from roll.data.sources import load_tasks
from roll.data.task import EnvSpec
from roll.env import EnvFailure, ResetResult, resolve
from roll.env.resolve import BUILT_IN
from roll.pipeline.prepare import prepare
from roll.workers.env import EnvWorker

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "environments.md").read_text()
WORLDS = str(Path(__file__).with_name("worlds.py"))


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[number]


def test_the_role_plays_episodes() -> None:
    async def main() -> None:
        config = EnvConfig(processes=1, per_process=2, step_deadline_s=0.5, memory_mb=500)
        executor = LocalExecutor()
        role = await Cluster.start(executor, lambda place: EnvWorker(place, config), [WorkerPlacement("env")])
        await role.call(EnvWorker.start)
        for name in "ab":
            assert (await role.call(EnvWorker.reset, name, EnvSpec("echo_turns", 1, {"turns": 1}))).messages
        assert (await role.call(EnvWorker.step, "a", "?")).terminated
        assert (await role.call(EnvWorker.take_stats)).open == 1
        await role.call(EnvWorker.close_episodes, ["a", "b", "c"])
        await role.call(EnvWorker.reset, "a", EnvSpec(f"{WORLDS}:World"))
        with pytest.raises(EnvFailure, match="deadline: step of episode 'a' took more than"):
            await role.call(EnvWorker.step, "a", '["sleep", 60]')
        assert (await role.call(EnvWorker.take_stats)).deadline == 1
        await executor.close()
        with pytest.raises(RunError, match="closed"):
            await role.call(EnvWorker.reset, "a", EnvSpec("guess"))

    asyncio.run(main())


def test_the_role_keeps_the_limits_of_the_config() -> None:
    async def main() -> None:
        executor, config = LocalExecutor(), EnvConfig(limits={"guess": 1})
        role = await Cluster.start(executor, lambda place: EnvWorker(place, config), [WorkerPlacement("env")])
        await role.call(EnvWorker.start)
        await role.call(EnvWorker.reset, "a", EnvSpec("guess"))
        second = asyncio.create_task(role.call(EnvWorker.reset, "b", EnvSpec("guess")))
        await role.call(EnvWorker.reset, "c", EnvSpec("echo_turns"))
        assert (await role.call(EnvWorker.take_stats)).waiting == 1
        await role.call(EnvWorker.close_episodes, ["a"])
        assert (await second).messages
        await executor.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ({"source": "environment", "options": {"name": "guess"}}, "tasks are played in guess; did you mean 'guess'?"),
        ({"source": "echo"}, "no task is played in an environment"),
    ],
)
def test_a_limit_for_what_nobody_plays_is_refused(tasks: dict[str, object], says: str) -> None:
    config = load_config({"model": "tiny", "tasks": tasks, "env": {"limits": {"gess": 8}}})
    with pytest.raises(UserError, match=re.escape(f"env.limits names 'gess', but {says}")):
        prepare(config)
    if tasks["source"] == "environment":
        prepare(load_config({"model": "tiny", "tasks": tasks, "env": {"limits": {"guess": 8}}}))


def test_a_failure_reaches_the_caller_from_another_process_as_itself() -> None:
    async def main() -> None:
        host = WorkerRuntime(WorkerPlacement("env"), None, get=None, put=None)  # type: ignore[arg-type]
        await host.start(lambda place: EnvWorker(place, EnvConfig()))
        await host.call("start", (), {})
        opened = await host.call("reset", ("a", EnvSpec("guess")), {})
        assert isinstance(opened, CallResult)
        assert isinstance(opened.value, ResetResult)
        refused = await host.call("reset", ("a", EnvSpec("gess")), {})
        assert isinstance(refused, CallResult)
        assert isinstance(refused.error, EnvFailure)
        assert refused.error.kind == "invalid"
        await host.close()

    asyncio.run(main())


def test_the_role_does_not_import_the_training_stack() -> None:
    script = "import sys, roll.workers.env; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


PLAY = """\
import asyncio

from roll.data.task import EnvSpec
from roll.env.pool import EnvPool


async def main():
    async with EnvPool() as pool:
        opened = await pool.reset("a game", EnvSpec("hangman.py:Hangman", seed=1))
        print(opened.messages[0]["content"])
        for letter in "rewadpolicygnt":
            step = await pool.step("a game", letter)
            print(letter, "→", step.observation)
            if step.done:
                break


asyncio.run(main())
"""


def test_the_example_works_when_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangman.py").write_text(block("python"))
    (tmp_path / "play.py").write_text(PLAY)
    assert len(block("python").splitlines()) <= 32
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    played = subprocess.run(
        [sys.executable, "play.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert played[0].startswith("Guess a word, one letter at a time: _ _")
    assert re.search(r"→ Yes, \w+\.$", played[-1])

    monkeypatch.chdir(tmp_path)
    config = load_config(parse(block("yaml")).data)
    tasks = load_tasks(config.tasks)
    assert (len(tasks.train), len(tasks.held_out)) == (1000, 100)
    assert tasks.train[7].environment == EnvSpec("hangman.py:Hangman", 7, {"misses": 6})


def test_the_page_says_the_options_as_they_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| `([^`]*)` \|$", PAGE, re.MULTILINE)
    assert {"frozen_lake", "sokoban", "maths_retries", "guess", "echo_turns"} <= {name for name, _ in rows}
    for name, options in [row for row in rows if row[0] in BUILT_IN]:
        parameters = inspect.signature(resolve(name)).parameters.values()
        defaults = {p.name: json.dumps(p.default) if isinstance(p.default, str) else p.default for p in parameters}
        assert options == ", ".join(f"{key}={default}" for key, default in defaults.items())


def test_every_built_in_is_on_some_page() -> None:
    pages = "".join(page.read_text() for page in (Path(__file__).parents[2] / "docs").rglob("*.md"))
    assert [name for name in BUILT_IN if f"`{name}`" not in pages] == []


def test_the_pages_settings_load() -> None:
    gymnasium = load_config(parse(block("yaml", 1)).data)
    assert len(load_tasks(gymnasium.tasks).train) == 1000
    shown = load_config(parse(block("yaml", 2)).data)
    options = {**shown.data.options, "count": 2, "held_out": 1}
    assert len(load_chats(shown.data.model_copy(update={"options": options})).train) == 2


def test_the_commands_of_the_page_name_files_that_are_there_and_what_can_be_set() -> None:
    lines = [line for line in block("bash").replace("\\\n", "").splitlines() if line]
    for line in lines:
        command, path, *overrides = shlex.split(line, comments=True)[1:]
        assert command == "train"
        load_config(Path(__file__).parents[2] / path, overrides)
    assert len(lines) == 5


def test_the_page_says_the_deadlines_as_they_are() -> None:
    config = EnvConfig()
    assert f"| `reset` | {config.reset_deadline_s:g} | `env.reset_deadline_s` |" in PAGE
    assert f"| `step`, `close` | {config.step_deadline_s:g} | `env.step_deadline_s` |" in PAGE
