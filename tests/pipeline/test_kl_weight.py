"""The weight of the KL penalty among a run's metrics: of each step the one it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, TINY, Remains
from thorough import but

from roll import load_config
from roll.config.errors import UserError
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter

SAMPLES = 8
START, TARGET, HORIZON = 0.1, 0.01, 40.0


def trained(path: Path, *settings: str) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    settings = (*SMALL, "train.steps=3", "train.lr=1e-2", "rollout.filter=none", "eval.samples=1", *settings)
    train(load_config(TINY, [*settings, f"run={path / 'run'}"]), reporter=SilentReporter())
    return [row for row in Remains(path / "run").metrics() if "train/loss" in row]


@pytest.mark.parametrize("penalised", but({"loss"}, ["loss", "reward"]))
def test_a_steered_weight_is_what_the_step_was_trained_with(tmp_path: Path, penalised: str) -> None:
    steered = (f"algorithm.kl_target={TARGET}", f"algorithm.kl_horizon={HORIZON}", f"algorithm.kl_in={penalised}")
    steps = trained(tmp_path, f"algorithm.kl_coef={START}", *steered)
    wanted = START
    for step in steps:
        assert step["train/kl_coef"] == pytest.approx(wanted, rel=1e-6)
        error = min(max(step["train/kl"] / TARGET - 1, -0.2), 0.2)
        wanted *= 1 + error * SAMPLES / HORIZON
    assert len({step["train/kl_coef"] for step in steps}) == len(steps) == 3


@pytest.mark.thorough
def test_a_fixed_weight_stands_as_it_is_also_while_only_the_critic_learns(tmp_path: Path) -> None:
    steps = trained(tmp_path, "algorithm=ppo", "algorithm.kl_coef=0.25", "algorithm.critic_warmup_steps=2")
    assert [step["train/updates"] for step in steps] == [0, 0, 1]
    assert [step["train/kl_coef"] for step in steps] == [0.25] * 3


def test_without_a_penalty_there_is_no_weight(tmp_path: Path) -> None:
    assert not [key for step in trained(tmp_path, "train.steps=1") for key in step if key.startswith("train/kl")]


@pytest.mark.thorough
def test_the_models_learning_rate_rises_from_its_own_first_step(tmp_path: Path) -> None:
    settings = ("algorithm=ppo", "algorithm.critic_warmup_steps=1", "train.warmup_steps=2", "train.lr=0.01")
    assert [step["train/lr"] for step in trained(tmp_path, *settings)] == [0, 0.005, 0.01]


@pytest.mark.thorough
def test_a_run_is_not_resumed_against_another_reference(tmp_path: Path) -> None:
    """A run's folder stands for its newest checkpoint, which is another one when it has trained on."""
    first = [*SMALL, f"run={tmp_path / 'first'}", "train.steps=1"]
    train(load_config(TINY, first), reporter=SilentReporter())
    trained(tmp_path, f"model={tmp_path / 'first'}", "algorithm.kl_coef=0.1")
    more = [*SMALL, "train.lr=1e-2", "rollout.filter=none", "eval.samples=1", f"model={tmp_path / 'first'}"]
    again = load_config(TINY, [*more, "algorithm.kl_coef=0.1", f"run={tmp_path / 'run'}", "train.steps=4"])
    train(again, resume=True, reporter=SilentReporter())
    train(load_config(TINY, [*first, "train.steps=2"]), resume=True, reporter=SilentReporter())
    again = load_config(TINY, [*more, "algorithm.kl_coef=0.1", f"run={tmp_path / 'run'}", "train.steps=5"])
    with pytest.raises(
        UserError, match=r"the reference of the run in .* was .*step-0*1/model, but is now .*step-0*2/model"
    ):
        train(again, resume=True, reporter=SilentReporter())
