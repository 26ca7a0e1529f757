"""ROLL's trainers, as backends of the registry: `single` on one device, `sharded` over the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.cluster.worker import WorkerPlacement
from roll.config.schema import Config, TrainConfig
from roll.model.classifier import load_classifier
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model, load_tokenizer
from roll.model.lora import Adapters
from roll.model.rope import longest_sequence
from roll.strategy.registry import TrainBackend
from roll.strategy.train.base import RewardStrategy, TrainStrategy, ValueStrategy

if TYPE_CHECKING:
    from roll.strategy.train.sharded.build import Purpose, ShardedModel
    from roll.strategy.train.sharded.process_group import RankGroup


class SingleBackend(TrainBackend):
    @classmethod
    def policy(
        cls, config: Config, placement: WorkerPlacement, group: RankGroup | None, *, trainable: bool
    ) -> TrainStrategy:
        from roll.strategy.train.single import SingleStrategy

        source, lora = find_model(config.model.path), config.model.adapters if trainable else None
        dtype, tokenizer = choose_dtype(config.model.dtype, placement.device), load_tokenizer(source, config.model)
        model = load_model(source, dtype, config.seed).to(placement.device)
        adapters = Adapters(model, lora, source.base(config.seed), config.seed) if lora is not None else None
        return SingleStrategy(model, tokenizer, _policy_settings(config), trainable=trainable, adapters=adapters)

    @classmethod
    def critic(cls, config: Config, placement: WorkerPlacement, group: RankGroup | None) -> ValueStrategy:
        from roll.strategy.train.critic import CriticStrategy

        dtype = choose_dtype(config.model.dtype, placement.device)
        model = load_model(find_model(config.model.path), dtype, config.seed).to(placement.device)
        return CriticStrategy(model, _critic_settings(config), config.algorithm.value_clip)

    @classmethod
    def scorer(
        cls, config: Config, placement: WorkerPlacement, group: RankGroup | None
    ) -> tuple[RewardStrategy, Tokenizer, int]:
        from roll.strategy.train.reward_model import RewardModelStrategy

        role = config.roles.reward_model
        source = find_model(role.model.path)
        model = load_classifier(source, choose_dtype(role.model.dtype, placement.device)).to(placement.device)
        strategy = RewardModelStrategy(model, _scorer_settings(config), exact=config.deterministic)
        return strategy, load_tokenizer(source, role.model), _longest(config, longest_sequence(model.config))


class ShardedBackend(TrainBackend):
    over_ranks = True

    @classmethod
    def warm_up(cls) -> None:
        from roll.strategy.train.sharded import build, checkpoint, strategy  # noqa: F401

    @classmethod
    def policy(
        cls, config: Config, placement: WorkerPlacement, group: RankGroup | None, *, trainable: bool
    ) -> TrainStrategy:
        from roll.strategy.train.sharded.strategy import ShardedStrategy

        assert group is not None, "ranks join their group first"
        sharded = cls._build(config, placement, group, "policy" if trainable else "frozen")
        tokenizer = load_tokenizer(find_model(config.model.path), config.model)
        return ShardedStrategy(sharded, _policy_settings(config), group, tokenizer=tokenizer, trainable=trainable)

    @classmethod
    def critic(cls, config: Config, placement: WorkerPlacement, group: RankGroup | None) -> ValueStrategy:
        from roll.strategy.train.sharded.strategy import ShardedCritic

        assert group is not None, "ranks join their group first"
        sharded = cls._build(config, placement, group, "critic")
        return ShardedCritic(sharded, _critic_settings(config), config.algorithm.value_clip, group)

    @classmethod
    def scorer(
        cls, config: Config, placement: WorkerPlacement, group: RankGroup | None
    ) -> tuple[RewardStrategy, Tokenizer, int]:
        from roll.strategy.train.sharded.strategy import ShardedScorer

        assert group is not None, "ranks join their group first"
        sharded, model = cls._build(config, placement, group, "scorer"), config.roles.reward_model.model
        strategy = ShardedScorer(sharded, _scorer_settings(config), group, exact=config.deterministic)
        tokenizer = load_tokenizer(find_model(model.path), model)
        return strategy, tokenizer, _longest(config, longest_sequence(sharded.model.config))

    @staticmethod
    def _build(config: Config, placement: WorkerPlacement, group: RankGroup, purpose: Purpose) -> ShardedModel:
        from roll.strategy.train.sharded.build import build_sharded

        model = config.roles.reward_model.model if purpose == "scorer" else config.model
        source, dtype = find_model(model.path), choose_dtype(model.dtype, placement.device)
        lora = config.model.adapters if purpose == "policy" else None
        on_host = getattr(config.roles, placement.role).parallel.cpu_offload
        return build_sharded(source, purpose, dtype, config.seed, group, lora=lora, on_host=on_host)


def _policy_settings(config: Config) -> TrainConfig:
    """Its learning-rate schedule starts at the actor's first update."""
    return config.train.model_copy(update={"steps": config.train.steps - config.algorithm.critic_warmup_steps})


def _critic_settings(config: Config) -> TrainConfig:
    return config.train.model_copy(update={"lr": config.algorithm.critic_lr})


def _scorer_settings(config: Config) -> TrainConfig:
    rows = config.roles.reward_model.micro_batch_tokens
    return TrainConfig(micro_batch_tokens=rows, activation_checkpointing="off", compile=config.train.compile)


def _longest(config: Config, context: int) -> int:
    """The longest conversation that the reward model takes, in tokens."""
    return min(config.roles.reward_model.micro_batch_tokens or context, context)
