"""A KL penalty in the reward is one number for a token: actor and critic take it from the same log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import SMALL, TINY

from roll import load_config
from roll.algorithm.credit import TokenCredit, token_credit
from roll.algorithm.loss_inputs import CreditSpec
from roll.data.batch import Batch
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter
from roll.strategy.train import critic, policy

STEPS = 2


def credits_of(path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[tuple[str, Batch, TokenCredit]]:
    """(who, batch, credit) of each credit of tokens in a run, in order."""
    seen: list[tuple[str, Batch, TokenCredit]] = []

    def spy(who: str) -> Any:
        def credited(batch: Batch, spec: CreditSpec) -> TokenCredit:
            found = token_credit(batch, spec)
            seen.append((who, batch, found))
            return found

        return credited

    monkeypatch.setattr(policy, "token_credit", spy("actor"))
    monkeypatch.setattr(critic, "token_credit", spy("critic"))
    penalty = ("algorithm.kl_coef=0.5", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1")
    several = ("rollout.filter=none", "train.lr=0.05", f"train.steps={STEPS}", "eval.samples=1", *settings)
    config = load_config(TINY, [*SMALL, "algorithm=ppo", *penalty, *several, f"run={path / 'run'}"])
    train(config, reporter=SilentReporter())
    return seen


@pytest.mark.parametrize(
    "updates",
    [
        ("train.updates_per_step=2",),
        pytest.param(("train.epochs_per_step=3",), marks=pytest.mark.thorough),
        pytest.param((), marks=pytest.mark.thorough),
    ],
)
def test_actor_and_critic_learn_from_the_same_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: tuple[str, ...]
) -> None:
    seen = credits_of(tmp_path, monkeypatch, *updates)
    assert [who for who, _, _ in seen] == ["critic", "actor"] * STEPS
    for (_, theirs, critics), (_, ours, actors) in zip(seen[::2], seen[1::2], strict=True):
        assert critics.returns is not None
        assert actors.returns is not None
        np.testing.assert_array_equal(critics.returns, actors.returns)
        assert ("proximal" in theirs) == ("proximal" in ours) == bool(updates)
        if updates:
            np.testing.assert_array_equal(theirs["proximal"], ours["proximal"])
    assert np.abs(seen[-1][1]["ref"] - seen[-1][1]["behaviour"]).max() > 1e-3, "there was no penalty to differ in"


def test_a_sample_is_penalised_by_the_same_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("algorithm=rloo", "algorithm.kl_coef=0.5", "train.updates_per_step=2")
    _, batch, _ = credits_of(tmp_path, monkeypatch, *settings)[-1]
    kl = batch.sum_tokens(np.where(batch.loss_mask, batch["proximal"].astype(np.float64) - batch["ref"], 0.0))
    np.testing.assert_allclose(batch["kl"], kl, rtol=1e-9)
