"""Whole runs of episodes whose turns are contexts of their own, and rollouts that are only looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from small_runs import EXAMPLES
from thorough import but

from roll.cli import main
from roll.cli.transcripts import print_transcripts
from roll.config import UserError, load_config
from roll.pipeline.entrypoints import play, train
from roll.run import Metrics, RunFolder, read_samples

pytestmark = pytest.mark.usefixtures("elsewhere")

TURNS = str(EXAMPLES / "turns.yaml")
QUICK = (
    *("threads=1", "train.steps=2", "eval.every=0", "eval.samples=4", "run.tensorboard=false"),
    "run.curve=false",
    *("rollout.groups_per_step=4", "rollout.group_size=8", "rollout.filter=none"),
)
FORGETFUL = (
    "{% for m in messages[-3:] %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}<|assistant|>"
)
VOWELS = """
class Vowels:
    def reset(self, seed):
        self.turn = 0
        return "say something"
    def step(self, action):
        self.turn += 1
        return "again", sum(c in "aeiou0123456789" for c in action), self.turn == 3, False, {}
"""


@pytest.mark.parametrize("how", but({"window"}, ["window", "template"]))
def test_turns_in_contexts_of_their_own_are_trained_on(how: str, tmp_path: Path) -> None:
    """A window of one turn, and a template that forgets by itself what is older."""
    template = tmp_path / "template.jinja"
    template.write_text(FORGETFUL)
    chosen = "env.window=1" if how == "window" else f"model.chat_template={template}"
    (tmp_path / "vowels.py").write_text(VOWELS)
    world = f"tasks.options={{name: '{tmp_path}/vowels.py:Vowels', count: 20, held_out: 4}}"
    run = tmp_path / "run"
    summary = train(load_config(TURNS, [*QUICK, chosen, world, f"run.dir={run}"]))
    assert summary["steps"] == 2
    steps = [row for row in Metrics.read(RunFolder.open(run).metrics_path) if "train/grad_norm" in row]
    assert [row["train/grad_norm"] > 0 for row in steps] == [True, True]
    rows = list(read_samples(RunFolder.open(run), 1))
    assert len(rows) == 32
    assert all(len(row["branches"]) == 2 for row in rows), "the third turn forks"
    assert all(sum(row["loss_mask"]) == 3 for row in rows)


def test_what_environments_did_is_told_with_every_step(tmp_path: Path) -> None:
    """Failed calls, processes replaced and seconds, where tasks are played in environments, and only there."""
    (tmp_path / "vowels.py").write_text(
        VOWELS.replace('return "say', 'if seed == 1: raise KeyError\n        return "say')
    )
    world = f"tasks.options={{name: '{tmp_path}/vowels.py:Vowels', count: 4, held_out: 0}}"
    few = (*QUICK, "train.steps=1", "rollout.group_size=2")
    train(load_config(TURNS, [*few, world, f"run.dir={tmp_path / 'played'}"]))
    train(load_config(EXAMPLES / "tiny.yaml", [*few, f"run.dir={tmp_path / 'asked'}"]))
    played, asked = (
        next(row for row in Metrics.read(RunFolder.open(tmp_path / run).metrics_path) if "reward/mean" in row)
        for run in ("played", "asked")
    )
    assert played["environments/failed"] > 0
    assert 0 < played["environments/step_s"] < 1
    assert 0 < played["environments/reset_s"] < 1
    assert [played[f"environments/{what}"] for what in ("deadlines", "lost", "restarts")] == [0, 0, 0]
    assert not [name for name in asked if name.startswith("environments/")]


def test_rollouts_are_shown_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", TURNS, "--episodes", "3", "--json", "threads=1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [len(transcript["passages"]) for transcript in shown] == [6, 6, 6]
    kinds = [passage["kind"] for passage in shown[0]["passages"]]
    assert kinds == ["prompt", "response", "observation", "response", "observation", "response"]
    assert list(tmp_path.iterdir()) == []


def test_a_transcript_says_who_spoke_and_what_would_be_trained_on(tmp_path: Path) -> None:
    (tmp_path / "sulky.py").write_text(
        "class Sulky:\n"
        "    def reset(self, seed):\n"
        "        self.turn = 0\n"
        "        return 'hello'\n"
        "    def step(self, action):\n"
        "        self.turn += 1\n"
        "        if self.turn == 3:\n"
        "            raise RuntimeError('enough')\n"
        "        return f'you said {len(action)}', 0.25, False, False, {}\n"
    )
    options = f"tasks.options={{name: '{tmp_path}/sulky.py:Sulky', count: 2, held_out: 0}}"
    transcripts = play(load_config(TURNS, [options, "threads=1", "env.window=1", "rollout.max_new_tokens=2"]), 2)
    console = Console(width=100, record=True, file=open(tmp_path / "shown", "w"))  # noqa: SIM115
    print_transcripts(console, transcripts)
    said = console.export_text()
    assert "0 of 2 episodes judged" in said
    assert "failed, environment raised: RuntimeError: enough" in said
    assert said.count("reward 0.25") == 4
    assert said.count("from here on the model sees only what follows") == 2
    assert sum(line.startswith("▌") for line in said.splitlines()) >= 6


def test_a_pipeline_without_rollouts_says_so() -> None:
    with pytest.raises(UserError, match="pipeline sft makes no rollouts"):
        play(load_config(str(EXAMPLES / "sft.yaml"), ["model=tiny", "data.source=echo", "data.options={}"]), 1)
