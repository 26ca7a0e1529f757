"""RAFT++ against its paper's loss (arXiv 2504.11343), written out in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roll.algorithm import Algorithm
from roll.algorithm.loss_inputs import LossInputs, token_weights
from roll.algorithm.losses import resolve_loss
from roll.config.algorithm import AlgorithmConfig
from roll.data import Batch

REWARDS = [1.0, 0.0, 1.0]
LOG_RATIOS = [[0.5, -0.5, 0.1, 0.05], [0.3], [-0.2, 0.0]]


def paper(log_ratios: list[list[float]], rewards: list[float], clip: float = 0.2) -> float:
    """The mean over the right answers of the mean over their tokens of min(s, clip(s, 1 - e, 1 + e)), negated."""
    answers = []
    for row, reward in zip(log_ratios, rewards, strict=True):
        if reward > 0:
            ratios = [math.exp(x) for x in row]
            answers.append(sum(min(s, min(max(s, 1 - clip), 1 + clip)) for s in ratios) / len(ratios))
    return -sum(answers) / len(answers)


def test_the_recipe_averages_within_each_answer_first() -> None:
    lengths = [1 + len(row) for row in LOG_RATIOS]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    moved = np.zeros(offsets[-1])
    moved[mask] = [x for row in LOG_RATIOS for x in row]
    columns = {"ids": np.zeros(offsets[-1]), "loss_mask": mask, "returns": moved}
    batch = Batch(offsets, columns).with_columns(
        group=np.zeros(3, np.int64), domain=np.array([""] * 3), reward=np.array(REWARDS)
    )
    algorithm = Algorithm(AlgorithmConfig(name="raft_pp"), 8)
    batch, spec = algorithm.credit(batch), algorithm.loss
    assert batch["advantage"].tolist() == [1.0, 1.0]
    here = batch.loss_mask
    current = torch.from_numpy(batch["returns"][here])
    sample = torch.from_numpy(np.repeat(np.arange(len(batch)), np.diff(batch.offsets) - 1))
    zeros, ones = torch.zeros_like(current), torch.ones_like(current)
    inputs = LossInputs(current, zeros, zeros, ones, sample, sample, entropy=zeros)
    weights = torch.from_numpy(token_weights(batch, spec.aggregation, spec.length)[here])
    got = float((resolve_loss(spec)(inputs).values * weights).sum())
    assert got == pytest.approx(paper(LOG_RATIOS, REWARDS), rel=1e-5)
