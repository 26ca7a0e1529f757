"""Whole runs whose trainer is spread over ranks: they learn what one process learns, and go on in the same bits.

The ranks of one run take about a second of processor time each to start, so runs are few and many tests read them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import ONE, RANKS, SMALL, TINY, Remains
from torch import Tensor

from roll.config import load_config
from roll.model.shard_folder import ShardFolder
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter

FOUR = "roles.actor_train={strategy: sharded, replicas: 4, parallel: {replicate: 2}}"


def go_on(run: Remains, *overrides: str, base: tuple[str, ...] = ONE) -> Remains:
    train(load_config(TINY, [*base, f"run={run.path}", *overrides]), resume=True, reporter=SilentReporter())
    return run


def tensors(run: Remains) -> dict[str, Tensor]:
    """All that the ranks saved, by name."""
    shards = ShardFolder(run.checkpoint.path / "shards")
    return {name: shards.whole(name) for name in shards}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def losses(run: Remains) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in run.metrics() if "train/loss" in row}


def test_two_ranks_learn_what_one_process_learns(over_ranks: Remains, run_small: Callable[..., Remains]) -> None:
    alone = run_small(base=ONE)
    assert losses(over_ranks) == pytest.approx(losses(alone), rel=2e-3, abs=1e-6)
    rewards = [[row["reward/mean"] for row in run.metrics() if "reward/mean" in row] for run in (over_ranks, alone)]
    assert rewards[0] == rewards[1]
    assert all(row["train/imbalance"] >= 0 for row in over_ranks.metrics() if "train/loss" in row)
    assert not any("train/imbalance" in row for row in alone.metrics())
    assert {state for state, *_ in over_ranks.lineage().values()} >= {"trained"}


@pytest.mark.thorough
def test_a_resumed_run_on_as_many_ranks_ends_in_the_same_bits(over_ranks: Remains, tmp_path: Path) -> None:
    begun = Remains(tmp_path / "begun")
    train(load_config(TINY, [*ONE, RANKS, "train.steps=4", f"run={begun.path}"]), reporter=SilentReporter())
    for ranks in ("one", "four"):
        shutil.copytree(begun.path, tmp_path / ranks)
    go_on(begun, RANKS)
    assert_same_bits(tensors(begun), tensors(over_ranks))
    assert begun.lineage() == over_ranks.lineage()

    one = go_on(Remains(tmp_path / "one"), "roles.actor_train={}")
    assert (one.checkpoint.path / "model" / "model.safetensors").is_file()
    four = go_on(Remains(tmp_path / "four"), FOUR)
    for run in (one, four):
        assert losses(run) == pytest.approx(losses(over_ranks), rel=2e-3, abs=1e-6)
    back = go_on(one, RANKS, "train.steps=7")
    assert set(tensors(back)) == set(tensors(over_ranks))


SHARDED = "{strategy: sharded, replicas: 2}"
OTHERS = [
    pytest.param(
        (
            *(RANKS, f"roles.critic={SHARDED}", f"roles.reference={SHARDED}"),
            *("algorithm=ppo", "algorithm.kl_coef=0.1", "train.updates_per_step=2", "train.activation_checkpointing=on"),
        ),
        id="all roles",
    ),
    pytest.param(("algorithm=ppo", f"roles.critic={SHARDED}"), id="critic alone", marks=pytest.mark.slow),
]


@pytest.mark.thorough
@pytest.mark.parametrize("overrides", OTHERS)
def test_other_roles_and_settings_train_and_go_on(run_small: Callable[..., Remains], overrides: tuple[str, ...]) -> None:
    exact = (*SMALL, "deterministic=true", "model.dtype=fp32", "run.checkpoint_every=1", *overrides)
    alone = run_small(*(each for each in overrides if "sharded" not in each), name="alone", base=exact[: len(SMALL) + 3])
    run = run_small(base=exact)
    assert losses(run) == pytest.approx(losses(alone), rel=2e-3, abs=1e-6)
    go_on(run, "train.steps=3", base=exact)
    assert sorted(losses(run)) == [1, 2, 3]
