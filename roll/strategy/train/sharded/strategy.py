"""The `sharded` strategies: they compute what `single` computes, split over ranks (`work_split`) with FSDP2 shards. No
process holds all parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.schema import TrainConfig
from roll.strategy.offload import Residency
from roll.strategy.train.critic import CriticTrainer
from roll.strategy.train.forward import ForwardRunner
from roll.strategy.train.microbatch import sequence
from roll.strategy.train.policy import PolicyTrainer
from roll.strategy.train.reward_model import SETTING, RewardModelTrainer
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.state import ShardedState
from roll.strategy.train.sharded.work_split import OverRanks
from roll.weight_sync.stream import TensorSource
from roll.weight_sync.weights import probe_ids


class _Rank:
    """One rank of a role, with its state: shards on the device, in host memory and in checkpoints."""

    group: RankGroup
    _state: ShardedState

    def set_residency(self, level: Residency) -> None:
        self._state.set_residency(level)

    def save(self, folder: Path) -> None:
        self._state.save(folder)

    def saved(self) -> dict[str, str]:
        return self._state.saved()

    def load(self, folder: Path) -> None:
        self._state.load(folder)

    def close(self) -> None:
        self.group.close()


class ShardedStrategy(_Rank, PolicyTrainer):
    """A policy over the ranks of a mesh; without `trainable`, a reference."""

    def __init__(
        self,
        sharded: ShardedModel,
        config: TrainConfig,
        group: RankGroup,
        *,
        tokenizer: Tokenizer | None = None,
        trainable: bool = True,
    ) -> None:
        """If the model has adapters, only they are trained and saved. The tokenizer is saved beside the model."""
        model = sharded.model
        split = OverRanks(group, sharded.module, model, sharded.dtype)
        runner = ForwardRunner(model, config, dtype=sharded.dtype, device=group.device, retries=False, group=group)
        super().__init__(model, config, split, runner, trainable=trainable, adapters=sharded.adapters)
        self.group, self._dtype = group, sharded.dtype
        self._state = ShardedState(sharded, self._optimizer, runner, group, tokenizer=tokenizer)
        self._prompt = probe_ids(int(model.config.vocab_size))

    def published(self) -> TensorSource:
        return self._state.published()

    @torch.no_grad()
    def probe(self) -> tuple[Tensor, Tensor]:
        inputs = sequence(self._prompt.numpy(), self.model, self._dtype, self.group.device)
        return self._prompt, self._current(inputs)[0].cpu()


class ShardedCritic(_Rank, CriticTrainer):
    """A critic over the ranks of a mesh."""

    def __init__(self, sharded: ShardedModel, config: TrainConfig, value_clip: float | None, group: RankGroup) -> None:
        assert sharded.value is not None, "a critic's model has a head of its own"
        split = OverRanks(group, sharded.module, sharded.model, sharded.dtype)
        runner = ForwardRunner(
            sharded.model, config, dtype=sharded.dtype, device=group.device, retries=False, group=group
        )
        super().__init__(sharded.value, config, value_clip, split, runner)
        self.group = group
        self._state = ShardedState(sharded, self._optimizer, runner, group)


class ShardedScorer(_Rank, RewardModelTrainer):
    """A reward model over the ranks of a mesh."""

    def __init__(self, sharded: ShardedModel, config: TrainConfig, group: RankGroup, *, exact: bool = False) -> None:
        split = OverRanks(group, sharded.module, sharded.model, sharded.dtype)
        runner = ForwardRunner(
            sharded.model, config, setting=SETTING, dtype=sharded.dtype, device=group.device, retries=False, group=group
        )
        super().__init__(sharded.model, split, runner, exact=exact)
        self.group = group
        self._state = ShardedState(sharded, None, runner, group)
