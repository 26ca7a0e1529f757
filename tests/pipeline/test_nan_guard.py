"""Updates that are not finite: what a run says of them, and when it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import SMALL, TINY, Remains
from thorough import but

from roll.algorithm import Algorithm
from roll.config import load_config
from roll.config.errors import RunError, UserError
from roll.data import Batch
from roll.pipeline.entrypoints import train
from roll.pipeline.nan_guard import NanGuard
from roll.pipeline.report import SilentReporter
from roll.strategy.train.base import NotFinite, UpdateStats
from roll.strategy.train.critic import CriticStrategy
from roll.strategy.train.microbatch import MicroBatch
from roll.strategy.train.single import SingleStrategy


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warned(self, text: str) -> None:
        self.said.append(text)


def stats(skipped: int, updates: int = 1) -> UpdateStats:
    names = NotFinite(("3.0", "3.1", "3.0", "4.0", "5.0"), ("model.norm.weight",)) if skipped else NotFinite()
    return UpdateStats(0.0, 1.0, 1e-3, 10, 10, updates, skipped, names)


def test_a_pass_that_was_done_again_for_want_of_memory_is_said() -> None:
    reporter = Warnings()
    health = NanGuard(reporter, max_skipped_in_a_row=3)
    health.check(4, stats(0).with_memory(2048, 1), "critic")
    health.check(5, stats(0).with_memory(2048, 0), "critic")
    assert len(reporter.said) == 1
    assert reporter.said[0].startswith("step 4: the GPU ran out of memory: the pass was repeated with at most 2048 ")
    assert "train.micro_batch_tokens=2048" in reporter.said[0]


def test_only_steps_in_a_row_stop_a_run() -> None:
    reporter = Warnings()
    health = NanGuard(reporter, max_skipped_in_a_row=3)
    for step, skipped in enumerate([1, 1, 0, 1, 1, 0]):
        health.check(step, stats(skipped))
        health.check(step, stats(1 - skipped), "critic")
    assert len(reporter.said) == 6
    assert reporter.said[0] == (
        "step 0: the update was skipped: the loss of 3.0, 3.1, 4.0 and 1 more and the gradient of model.norm.weight was "
        "not finite (actor_train)"
    )
    health.check(6, stats(2, updates=4))
    assert "2 of 4 updates were skipped" in reporter.said[-1]
    health.check(7, stats(1))
    with pytest.raises(RunError, match=r"in 3 steps in a row .*step 8, where the loss of 3\.0, .*model\.norm\.weight"):
        health.check(8, stats(1))


def sick(inputs):  # type: ignore[no-untyped-def]
    """A loss that is never finite."""
    from roll.algorithm.loss_inputs import TokenLoss

    return TokenLoss(inputs.current / 0)


class WithoutEpsilon(Algorithm):
    def relative(self, batch: Batch, scores: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return (scores - scores.mean()) / scores.std()


class Fickle(Algorithm):
    """Sound in its first step only."""

    steps = 0

    def relative(self, batch: Batch, scores: Any) -> Any:
        self.steps += 1
        return super().relative(batch, scores)[: len(batch) if self.steps == 1 else 1]


def test_advantages_that_are_not_finite_end_a_run_and_are_named(tmp_path: Path) -> None:
    settings = [*SMALL, f"run.dir={tmp_path / 'run'}", f"algorithm={__file__}:WithoutEpsilon", "rollout.filter=none"]
    message = (
        r"algorithm.name '.*:WithoutEpsilon' gave the advantage nan to sample 0\.0 of task '\d+' \(reward 1\) and to 7"
    )
    with pytest.raises(RunError, match=message):
        train(load_config(TINY, settings), reward=lambda task, response: 1.0, reporter=SilentReporter())


def test_a_run_refused_after_a_step_keeps_what_it_has(tmp_path: Path) -> None:
    settings = [*SMALL, f"run.dir={tmp_path / 'run'}", f"algorithm={__file__}:Fickle", "run.checkpoint_every=1"]
    with pytest.raises(UserError, match="Fickle': `relative` gave advantages of shape"):
        train(load_config(TINY, settings), reporter=SilentReporter())
    assert Remains(tmp_path / "run").checkpoint.step == 1


def test_a_run_that_only_skips_stops_and_says_where(tmp_path: Path) -> None:
    reporter = Warnings()
    settings = [*SMALL, f"run.dir={tmp_path / 'run'}", "train.steps=9", "train.max_skipped_in_a_row=2"]
    settings += [f"algorithm.loss={__file__}:sick", "algorithm.kl_coef=0.1"]
    with pytest.raises(RunError, match=r"actor_train skipped updates in 2 steps in a row.* the loss of \d+\.\d"):
        train(load_config(TINY, settings), reporter=reporter)
    assert [text.partition(":")[0] for text in reporter.said] == ["step 1", "step 2"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/skipped"] for row in rows if "train/skipped" in row] == [1]


@pytest.mark.parametrize("algorithm", but({"grpo"}, ["grpo", "ppo"]))
def test_memory_that_runs_out_is_on_screen_and_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """In the second step the first micro-batch of the actor, and of the critic if there is one, is refused."""
    strategy = (SingleStrategy, "_current") if algorithm == "grpo" else (CriticStrategy, "_values")
    real, refused = getattr(*strategy), []

    def full(self: Any, micro: MicroBatch, **more: Any) -> Any:
        if torch.is_grad_enabled() and self._optimizer._adamw.state and not refused:
            refused.append(micro.rows)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB.")
        return real(self, micro, **more)

    monkeypatch.setattr(*strategy, full)
    settings = (f"algorithm={algorithm}", "train.steps=3", "rollout.filter=none", "eval.samples=1")
    reporter = Warnings()
    train(load_config(TINY, [*SMALL, *settings, f"run={tmp_path / 'run'}"]), reporter=reporter)
    steps = [row for row in Remains(tmp_path / "run").metrics() if "train/loss" in row]
    prefix = "train/" if algorithm == "grpo" else "train/critic_"
    assert [step[f"{prefix}oom_retries"] for step in steps] == [0, 1, 0]
    first, *later = [step[f"{prefix}micro_batch_tokens"] for step in steps]
    assert first == 4096
    assert later[0] == later[1] < refused[0] <= first
    role = "actor_train" if algorithm == "grpo" else "critic"
    said = [text for text in reporter.said if "ran out of memory" in text]
    assert len(said) == 1
    assert said[0].startswith("step 2: ")
    assert f"write train.micro_batch_tokens={later[0]:.0f} to start with it ({role})" in said[0]
