"""Defects that a sharded trainer could have, each of which the tests of its gradient must notice.

A defect is patched into the modules of a rank while it makes a trainer and an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from roll.algorithm.loss_inputs import Aggregation, token_weights
from roll.data import Batch
from roll.model.shape import ModelShape
from roll.strategy.train import forward, policy
from roll.strategy.train.balance import balance
from roll.strategy.train.microbatch import micro_batches
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.work_split import OverRanks

DEFECTS = (
    "mean_over_ranks",
    "default_divide_factor",
    "no_forced_sum",
    "weights_of_the_part",
    "wrong_precision",
    "no_idle_passes",
    "one_leaves",
)


@contextmanager
def with_defect(name: str, group: RankGroup, model: ModelShape) -> Iterator[None]:
    """Without a name there is none."""
    with ExitStack() as patches:
        for target, attribute, replacement in _patches(name, group, model) if name else ():
            patches.enter_context(patch.object(target, attribute, replacement))
        yield


def _patches(name: str, group: RankGroup, model: ModelShape) -> list[tuple[Any, str, Any]]:
    def weights_of_the_part(batch: Batch, aggregation: Aggregation, length: int = 0) -> Any:
        weights = np.zeros(batch.tokens)
        for part in balance(batch, group.ranks, model).parts:
            weights[batch.token_indices(part)] = token_weights(batch.select(part), aggregation, length)
        return weights

    return {
        "mean_over_ranks": [
            (FSDPModule, "set_gradient_divide_factor", _nothing),
            (FSDPModule, "set_force_sum_reduction_for_comms", _nothing),
        ],
        "default_divide_factor": [(FSDPModule, "set_gradient_divide_factor", _nothing)],
        "no_forced_sum": [(FSDPModule, "set_force_sum_reduction_for_comms", _nothing)],
        "weights_of_the_part": [(policy, "token_weights", weights_of_the_part)],
        "wrong_precision": [(forward, "micro_batches", _in_single_precision)],
        "no_idle_passes": [(OverRanks, "in_lockstep", _own_only)],
        "one_leaves": [(OverRanks, "in_lockstep", _left)],
    }[name]


def _nothing(*_: Any, **__: Any) -> None: ...


def _in_single_precision(
    batch: Batch, limit: int, model: Any, share: bool, dtype: Any, device: torch.device, **options: bool
) -> Any:
    return micro_batches(batch, limit, model, share, torch.float32, device, **options)


def _own_only(ranks: OverRanks, micros: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Ranks with fewer micro-batches than others stop earlier."""
    own = list(micros)
    ranks.group.most(len(own))
    return ((micro, True) for micro in own)


def _left(ranks: OverRanks, micros: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """The second rank leaves the first one alone in its passes."""
    if ranks.group.rank == 1:
        raise RuntimeError("left")
    return ((micro, True) for micro in micros)
