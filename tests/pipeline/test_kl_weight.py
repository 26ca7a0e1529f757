"""The weight of the KL penalty among a run's metrics: of each step the one it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, TINY, Remains

from roll import load_config
from roll.pipeline.launch import train
from roll.pipeline.report import SilentReporter

SAMPLES = 8
START, TARGET, HORIZON = 0.1, 0.01, 40.0


def trained(path: Path, *settings: str) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    settings = (*SMALL, "train.steps=3", "train.lr=1e-2", "rollout.filter=none", "eval.samples=1", *settings)
    train(load_config(TINY, [*settings, f"run={path / 'run'}"]), reporter=SilentReporter())
    return [row for row in Remains(path / "run").metrics() if "train/loss" in row]


@pytest.mark.parametrize("penalised", ["loss", "reward"])
def test_a_steered_weight_is_what_the_step_was_trained_with(tmp_path: Path, penalised: str) -> None:
    steered = (f"algorithm.kl_target={TARGET}", f"algorithm.kl_horizon={HORIZON}", f"algorithm.kl_in={penalised}")
    steps = trained(tmp_path, f"algorithm.kl_coef={START}", *steered)
    wanted = START
    for step in steps:
        assert step["train/kl_coef"] == pytest.approx(wanted, rel=1e-6)
        error = min(max(step["train/kl"] / TARGET - 1, -0.2), 0.2)
        wanted *= 1 + error * SAMPLES / HORIZON
    assert len({step["train/kl_coef"] for step in steps}) == len(steps) == 3


def test_a_fixed_weight_stands_as_it_is_also_while_only_the_critic_learns(tmp_path: Path) -> None:
    steps = trained(tmp_path, "algorithm=ppo", "algorithm.kl_coef=0.25", "algorithm.critic_warmup_steps=2")
    assert [step["train/updates"] for step in steps] == [0, 0, 1]
    assert [step["train/kl_coef"] for step in steps] == [0.25] * 3


def test_without_a_penalty_there_is_no_weight(tmp_path: Path) -> None:
    assert not [key for step in trained(tmp_path, "train.steps=1") for key in step if key.startswith("train/kl")]
