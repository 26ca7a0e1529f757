"""Imitation of experts as runs: demonstrations, then a DAgger round on the states of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import Remains

from roll.config import UserError, load_config
from roll.config.schema import DataConfig
from roll.data.chat_sources import load_chats
from roll.model.tiny import character_tokenizer
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter

pytestmark = pytest.mark.usefixtures("elsewhere")

GAME = {"name": "echo_turns", "turns": 2, "symbols": "0123"}
COMMON: dict[str, Any] = {
    "model": "tiny",
    "threads": 1,
    "eval": {"every": 0, "samples": 8},
    "run": {"checkpoint_every": 0, "tensorboard": False},
}
IMITATE = {
    **COMMON,
    "pipeline": "sft",
    "data": {"source": "demonstrations", "options": {**GAME, "count": 40, "held_out": 8}, "samples_per_step": 8},
    "train": {"lr": 2e-3, "steps": 3},
}
PLAY = {
    **COMMON,
    "pipeline": "rlvr",
    "tasks": {"source": "environment", "options": {**GAME, "count": 20, "held_out": 4}},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 2, "filter": "none"},
    "train": {"lr": 1e-5, "steps": 2},
}


def run(settings: dict[str, Any], path: Path, *overrides: str) -> Remains:
    train(load_config(settings, [f"run.dir={path}", *overrides]), reporter=SilentReporter())
    return Remains(path)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    """A run that was taught by demonstrations, a little, and then played."""
    folder = tmp_path_factory.mktemp("experts")
    taught = run(IMITATE, folder / "taught")
    losses = [row["eval/loss"] for row in taught.metrics() if "eval/loss" in row]
    assert losses[-1] < losses[0]
    return run(PLAY, folder / "played", f"model={taught.path}")


def test_every_state_that_the_run_came_to_is_labelled(played: Remains) -> None:
    rows = [row for rows in played.samples().values() for row in rows]
    options = {"runs": str(played.path), "held_out": 0.2}
    chats = load_chats(DataConfig(source="dagger", options=options))
    both = (*chats.train, *chats.held_out)
    said = [[tuple(m["content"] for m in chat.messages[:-1]) for chat in part] for part in (chats.train, chats.held_out)]
    assert [len(set(part)) for part in said] == [len(part) for part in said], "each once"
    histories = {history for part in said for history in part}
    assert {len(history) for history in histories} == {1, 3}
    for chat in both:
        assert chat.learn == "last"
        assert chat.messages[-1]["content"] == chat.messages[-2]["content"], "the expert says what it is shown"
    assert any(history[1] not in "0123" for history in histories if len(history) == 3), "also where the policy erred"
    tasks = [{chat.id.partition("/")[0] for chat in part} for part in (chats.train, chats.held_out)]
    assert tasks[0].isdisjoint(tasks[1])
    assert tasks[0] | tasks[1] == {row["task"] for row in rows}
    last = load_chats(DataConfig(source="dagger", options={**options, "last_steps": 1}))
    assert {chat.id.partition("/")[0] for chat in (*last.train, *last.held_out)} == {
        row["task"] for row in played.samples()[2]
    }


@pytest.mark.thorough
def test_what_a_run_with_a_window_saw_is_what_is_labelled(tmp_path: Path) -> None:
    """Its logs fork at every turn."""
    remains = run(PLAY, tmp_path / "run", "tasks.options.turns=4", "env.window=1", "train.steps=1")
    rows = remains.samples()[1]
    assert any(len(row["branches"]) > 2 for row in rows)
    chats = load_chats(DataConfig(source="dagger", options={"runs": str(remains.path), "held_out": 0}))
    assert {len(chat.messages) for chat in chats.train} == {2, 4}
    tokenizer = character_tokenizer()
    said = {str(tokenizer.decode(row["ids"])) for row in rows}
    for chat in chats.train:
        if len(chat.messages) == 4:
            _, before, now, _ = (message["content"] for message in chat.messages)
            assert any(f"<|assistant|>{before}" in text and f"<|user|>{now}<|end|>" in text for text in said)
    for chat in chats.train:
        assert chat.messages[-1]["content"] == chat.messages[-2]["content"]


@pytest.mark.thorough
def test_runs_with_domains_are_labelled_where_they_have_environments(tmp_path: Path) -> None:
    settings = {key: value for key, value in PLAY.items() if key != "tasks"}
    domains = {"games": {"tasks": PLAY["tasks"]}, "plain": {"tasks": "echo", "reward": "number"}}
    remains = run({**settings, "domains": domains}, tmp_path / "run", "train.steps=1")
    rows = remains.samples()[1]
    assert len({row["task"].partition("#")[0] for row in rows}) > 1, "of both kinds"
    options = {"runs": str(remains.path), "held_out": 0, "demonstrations": 2}
    chats = load_chats(DataConfig(source="dagger", options=options)).train
    played = {row["task"] for row in rows if row["turns"] > 1}
    assert {chat.id.rpartition("/")[0] for chat in chats if chat.learn == "last"} == played
    assert sum(chat.learn == "all" for chat in chats) == 2


def test_a_round_of_dagger(played: Remains, tmp_path: Path) -> None:
    settings = {**IMITATE, "data": {"source": "dagger", "options": {"runs": [str(played.path)], "demonstrations": 5}}}
    remains = run(settings, tmp_path / "round", f"model={played.path}", "data.options.held_out=0.2", "train.steps=8")
    losses = [row["eval/loss"] for row in remains.metrics() if "eval/loss" in row]
    assert losses[-1] < losses[0]
    tasks = {life[0].info["task"] for life in remains.histories().values()}
    assert any(task.endswith("/shown") for task in tasks)


def test_runs_that_teach_nothing_are_refused(played: Remains, tmp_path: Path) -> None:
    def load(**options: Any) -> None:
        load_chats(DataConfig(source="dagger", options=options))

    with pytest.raises(UserError, match="there is no run"):
        load(runs=str(tmp_path / "none"))
    with pytest.raises(UserError, match="names no run"):
        load(runs=[])
    with pytest.raises(UserError, match="held_out=1"):
        load(runs=str(played.path), held_out=1)
    plain = run({**PLAY, "tasks": "echo", "reward": {"name": "number"}}, tmp_path / "plain", "train.steps=1")
    with pytest.raises(UserError, match=r"no task of the run .* is played in an environment"):
        load(runs=str(plain.path))


@pytest.mark.thorough
def test_what_an_environment_counts_is_a_metric(tmp_path: Path) -> None:
    game = {"source": "environment", "options": {"name": "sokoban", "count": 4, "held_out": 2, "turns": 2}}
    (step,) = [
        row for row in run({**PLAY, "tasks": game}, tmp_path / "run", "train.steps=1").metrics() if "train/lr" in row
    ]
    assert (step["reward/invalid"], step["reward/success"], step["reward/turns"]) == (2.0, 0.0, 2.0)
    assert "reward/state" not in step
