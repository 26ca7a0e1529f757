"""Builds the strategy of a role that trains or scores, from the config and the worker's placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.cluster.worker import WorkerPlacement
from roll.config.schema import Config, TrainConfig
from roll.model import loading
from roll.model.classifier import load_classifier
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model, load_tokenizer
from roll.model.lora import Adapters
from roll.strategy.train.base import RewardStrategy, TrainStrategy, ValueStrategy
from roll.strategy.train.critic import CriticStrategy
from roll.strategy.train.reward_model import RewardModelStrategy
from roll.strategy.train.single import SingleStrategy

if TYPE_CHECKING:
    from roll.strategy.train.sharded.process_group import RankGroup


def warm_up(path: str, over_ranks: bool) -> None:
    """Imports the modules that a trainer of this model needs, without loading weights; with `over_ranks` also those of
    `sharded`."""
    loading.warm_up(path)
    if over_ranks:
        from roll.strategy.train.sharded import build, checkpoint, strategy  # noqa: F401


def make_trainer(
    config: Config, placement: WorkerPlacement, group: RankGroup | None, *, trainable: bool
) -> TrainStrategy:
    """The strategy of the actor; without `trainable`, that of the reference. `group` is this rank's process group if the
    role is sharded."""
    source = find_model(config.model.path)
    dtype, tokenizer = choose_dtype(config.model.dtype, placement.device), load_tokenizer(source, config.model)
    lora = config.model.adapters if trainable else None
    own_steps = config.train.steps - config.algorithm.critic_warmup_steps
    train = config.train.model_copy(update={"steps": own_steps})  # the lr schedule starts at the actor's first update
    if group is not None:
        from roll.strategy.train.sharded.build import Purpose, build_sharded
        from roll.strategy.train.sharded.strategy import ShardedStrategy

        purpose: Purpose = "policy" if trainable else "frozen"
        on_host = (config.roles.actor_train if trainable else config.roles.reference).parallel.cpu_offload
        sharded = build_sharded(source, purpose, dtype, config.seed, group, lora=lora, on_host=on_host)
        return ShardedStrategy(sharded, train, group, tokenizer=tokenizer, trainable=trainable)
    model = load_model(source, dtype, config.seed).to(placement.device)
    adapters = Adapters(model, lora, source.base(config.seed), config.seed) if lora is not None else None
    return SingleStrategy(model, tokenizer, train, trainable=trainable, adapters=adapters)


def make_critic(config: Config, placement: WorkerPlacement, group: RankGroup | None) -> ValueStrategy:
    source = find_model(config.model.path)
    dtype = choose_dtype(config.model.dtype, placement.device)
    train = config.train.model_copy(update={"lr": config.algorithm.critic_lr})
    if group is not None:
        from roll.strategy.train.sharded.build import build_sharded
        from roll.strategy.train.sharded.strategy import ShardedCritic

        on_host = config.roles.critic.parallel.cpu_offload
        sharded = build_sharded(source, "critic", dtype, config.seed, group, on_host=on_host)
        return ShardedCritic(sharded, train, config.algorithm.value_clip, group)
    model = load_model(source, dtype, config.seed).to(placement.device)
    return CriticStrategy(model, train, config.algorithm.value_clip)


def make_scorer(
    config: Config, placement: WorkerPlacement, group: RankGroup | None
) -> tuple[RewardStrategy, Tokenizer, int]:
    """The reward model's strategy, its tokenizer, and the longest conversation it takes in tokens."""
    from roll.model.rope import longest_sequence

    role = config.roles.reward_model
    source = find_model(role.model.path)
    dtype, rows = choose_dtype(role.model.dtype, placement.device), role.micro_batch_tokens
    train = TrainConfig(micro_batch_tokens=rows, activation_checkpointing="off", compile=config.train.compile)
    tokenizer = load_tokenizer(source, role.model)
    strategy: RewardStrategy
    if group is not None:
        from roll.strategy.train.sharded.build import build_sharded
        from roll.strategy.train.sharded.strategy import ShardedScorer

        sharded = build_sharded(source, "scorer", dtype, config.seed, group, on_host=role.parallel.cpu_offload)
        strategy, model = ShardedScorer(sharded, train, group, exact=config.deterministic), sharded.model
    else:
        model = load_classifier(source, dtype).to(placement.device)
        strategy = RewardModelStrategy(model, train, exact=config.deterministic)
    context = longest_sequence(model.config)
    return strategy, tokenizer, min(rows or context, context)
