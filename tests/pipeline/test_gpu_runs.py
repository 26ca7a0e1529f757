"""Whole runs on one GPU: in one process and on Ray, with everything resident and in turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load
from small_runs import SMALL, Remains

pytestmark = pytest.mark.gpu

KL = ("algorithm.kl_coef=0.1", "rollout.filter=none", "train.steps=3", "model.dtype=fp32")


def test_turns_change_nothing_but_memory(run_small: Callable[..., Remains]) -> None:
    """To the rounding of sums whose order a GPU does not fix."""
    stayed = run_small(*KL, "offload=never", "train.steps=1", name="stayed")
    turned = run_small(*KL, "offload=always", "train.steps=1", name="turned")
    assert stayed.samples() == turned.samples()
    before, after = load(stayed.weights()), load(turned.weights())
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("path", ["cuda_ipc", "shared_memory"])
def test_a_run_on_ray_shares_the_gpu(run_small: Callable[..., Remains], offload: str, path: str) -> None:
    pytest.importorskip("ray")
    run = run_small(*SMALL, *KL, "executor=ray", f"offload={offload}", f"weight_sync={path}")
    steps = [row for row in run.metrics() if "reward/mean" in row]
    assert len(steps) == 3
    assert all(row["train/rollout_logprob_diff"] < 1e-3 for row in steps)
    assert all(row["memory/actor_infer_gib"] > 0 for row in steps)
    assert torch.cuda.is_available()
