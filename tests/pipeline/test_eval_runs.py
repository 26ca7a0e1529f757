"""Evaluation over several sets, of a whole run and by `roll eval`: one way of counting, everywhere the same numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, TINY, Remains, start_roll

from roll.cli import main
from roll.config import UserError, load_config
from roll.pipeline.entrypoints import evaluate, train
from roll.pipeline.report import SilentReporter

MINE = """
print("this module prints when it is loaded")
from roll import Task

def hard(split):
    if split == "held_out":
        for i in range(4):
            yield Task.ask(str(i), str(i), i, domain="odd" if i % 2 else "even")

def judge(task, response):
    return {"reward": 7.5 if str(task.answer) in response.text else 0.5, "short": float(len(response.text) < 2)}
"""
CONFIG = """
model: tiny
tasks: echo
reward: number
eval:
  attempts: 4
  samples: 16
  pass_at: [1, 4]
  majority_at: [2, 4]
  show: 1
  sets:
    plain: {source: echo, max_new_tokens: 1}
    rows: {source: rows.jsonl, reward: exact, attempts: 2, pass_at: [], majority_at: []}
    mine:
      source: evaluated.py:hard
      reward: evaluated.py:judge
      pass_at: 4
      majority_at: []
      solved_at: 7.5
      temperature: 0.5
"""
QUICK = [setting for setting in SMALL if not setting.startswith(("reward", "eval.samples"))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    here = tmp_path_factory.mktemp("sets")
    before = Path.cwd()
    os.chdir(here)
    Path("evaluated.py").write_text(MINE)
    Path("rows.jsonl").write_text('{"question": "3", "answer": "3"}\n{"question": "4", "answer": "4"}\n')
    Path("sets.yaml").write_text(CONFIG)
    train(load_config("sets.yaml", [*QUICK, "run=run", "run.curve=true"]), reporter=SilentReporter())
    yield here
    os.chdir(before)


def test_metrics_summary_and_eval_have_the_same_numbers_of_every_set(
    made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in Remains(made / "run").metrics() if "eval/reward" in row]
    summary = json.loads((made / "run" / "summary.json").read_text())
    assert [row["step"] for row in rows] == [0, 2]
    for row, when in zip(rows, ("before", "after"), strict=True):
        for name, numbers in summary[f"sets_{when}"].items():
            for of, value in numbers.items():
                assert row.get(f"eval/{name}/{of}") == value
    last = rows[-1]
    assert last["eval/reward"] == pytest.approx(
        sum(last[f"eval/{name}/reward"] for name in ("plain", "rows", "mine")) / 3
    )
    assert {"eval/mine/odd/reward", "eval/mine/reward/short", "eval/plain/maj@2", "eval/plain/pass@4_low"} <= last.keys()
    assert summary["measures"]["mine"] == summary["measure"] == "reward"
    assert (made / "run" / "curve.png").stat().st_size > 0
    capfd.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    printed = capfd.readouterr()
    told = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    assert "this module prints" in printed.err
    assert (Path(told["model"]).name, told["step"], set(told["sets"])) == ("run", 2, {"plain", "rows", "mine"})
    plain, mine = told["sets"]["plain"], told["sets"]["mine"]
    assert (plain["tasks"], plain["attempts"], plain["samples"], plain["temperature"]) == (4, 4, 16, 1.0)
    assert plain["tokens_mean"] == 1.0, "its own limit"
    assert set(plain["pass_at"]) == {"1", "4"}
    assert set(plain["majority_at"]) == {"2", "4"}
    assert plain["pass_at"]["1"]["value"] == pytest.approx(plain["reward"]["value"])
    assert plain["reward"]["low"] <= plain["reward"]["value"] <= plain["reward"]["high"]
    assert (mine["temperature"], mine["measure"], set(mine["domains"])) == (0.5, "reward", {"odd", "even"})
    assert told["sets"]["rows"]["samples"] == 4


def test_python_gets_the_same_as_an_object(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = load_config("sets.yaml", [*QUICK, "model=run"])
    found = evaluate(config)
    capfd.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert found.to_dict() == told


def test_a_person_gets_a_table_of_the_sets(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "run"]) == 0
    said = capfd.readouterr().out
    assert all(name in said for name in ("pass@4", "maj@2", "95 % interval", "plain", "mine", "mine: odd: "))
    assert main(["eval", "sets.yaml", *QUICK, "eval.sets={only: {source: echo}}", "eval.show=0"]) == 0
    assert "only accuracy" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("eval.sets.mine.majority_at=[2]", "eval.sets.mine.majority_at is set, but eval.sets.mine.reward does not say"),
        ("reward=fuzzy", "eval.sets.plain.majority_at is set, but the reward does not say which answer a response"),
        ("eval.sets.rows.source=gone.jsonl", "eval.sets.rows.source: there is no file 'gone.jsonl'"),
        ("eval.sets.rows.reward=exat", "eval.sets.rows.reward 'exat' is not known"),
        ("eval.sets.rows.reward.options={nix: 1}", "eval.sets.rows.reward.options.nix is not an option of 'exact'"),
        (
            "eval.sets.plain.max_new_tokens=100000",
            "eval.sets.plain.max_new_tokens is 100000 and the prompt of task 'plain/",
        ),
        (
            "eval.sets.mine={source: environment, options: {name: frozen_lake}, majority_at: [2]}",
            "eval.sets.mine.reward is 'evaluated.py:judge', but all its tasks are played in environments",
        ),
        (
            "eval.sets.game={source: environment, options: {name: frozen_lake}, majority_at: [2]}",
            "eval.sets.game.majority_at is set, but its tasks are played in environments, where there is no answer",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(made: Path, override: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        evaluate(load_config("sets.yaml", [*QUICK, override]))
    assert says in str(refused.value)


def test_supervised_fine_tuning_prints_json_too(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("sft.yaml").write_text("pipeline: sft\nmodel: tiny\ndata: echo\n")
    assert main(["eval", "sft.yaml", "eval.samples=0", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert {"loss", "perplexity", "token_probability", "tokens", "model", "step", "pipeline"} == told.keys()
    assert told["step"] is None


@pytest.mark.thorough
def test_after_an_interrupt_nothing_is_told_as_measured_that_was_not(tmp_path: Path) -> None:
    path = tmp_path / "run"
    overrides = [*SMALL, f"run={path}", "train.steps=1000000"]
    child = start_roll(["train", TINY, *overrides], tmp_path / "out")
    child.wait_for(lambda: len(list(path.glob("samples/step-*.jsonl"))) >= 1)
    os.kill(child.pid, 2)
    child.end()
    summary = json.loads((path / "summary.json").read_text())
    assert summary["stopped"]
    assert summary["reward_after"] is None
    assert (summary["reward_last"], summary["reward_last_step"]) == (summary["reward_before"], 0)
    assert f"at step 0, not measured after step {summary['steps']}" in child.said
    assert "finished" not in child.said
