"""Trainers of tiny models, over ranks and in one process, that give their gradients instead of applying them.

How a trainer is made is here alone. Everything that ranks run must be importable, so it is here and not in the tests.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from roll.algorithm import LossSpec
from roll.algorithm.loss_inputs import token_weights
from roll.config.schema import TrainConfig
from roll.data import Batch, Sample, Task
from roll.data.tokenlog import branches
from roll.model import attention
from roll.model.experts import experts_of
from roll.model.routing import Routers
from roll.model.shape import ModelShape
from roll.model.tiny import character_tokenizer
from roll.model.value_head import ValueModel
from roll.strategy.train import policy
from roll.strategy.train.base import UpdateStats
from roll.strategy.train.critic import CriticStrategy, CriticTrainer
from roll.strategy.train.optimizer import MasterAdamW, OptimizerStep, total_norm
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.strategy import ShardedCritic, ShardedStrategy
from roll.strategy.train.single import SingleStrategy
from tests.strategy.train.sharded.mutants import with_defect

VOCAB = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
SPREAD: dict[str, Any] = {"initializer_range": 0.1}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **SPREAD, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, **SPREAD, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, **SPREAD, head_dim=8, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **SPREAD, **EXPERTS, head_dim=8, decoder_sparse_step=1, tie_word_embeddings=False
    ),
    "uneven": Qwen3MoeConfig(
        **SIZES, **SPREAD, **{**EXPERTS, "num_experts": 7}, head_dim=8, decoder_sparse_step=1, tie_word_embeddings=False
    ),
    "mixtral": MixtralConfig(**SIZES, **SPREAD, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        **SPREAD,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        kv_lora_rank=12,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        tie_word_embeddings=False,
    ),
    "sharp": Qwen3Config(**SIZES, initializer_range=0.3, head_dim=8, tie_word_embeddings=False),
}
KINDS = ("llama", "tied", "qwen3", "qwen3_moe")
MIXTURES = ("qwen3_moe", "uneven", "mixtral", "deepseek_v3")
"""Those whose gradients fp32 computes well. The weights of `sharp` are so large that log-probs of -10 and gradients that
nearly cancel are common."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """An update to be made, by ranks or by one process."""

    batch: Batch
    spec: LossSpec
    kind: str = "qwen3"
    dtype: torch.dtype = torch.float32
    extra_rows: int = 4096
    """How much larger than the longest sample a micro-batch may be."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the section `train`."""
    defect: str = ""
    """Which one the ranks have, of `mutants`."""
    value_clip: float | None = 0.2
    """Of a critic."""

    @property
    def config(self) -> TrainConfig:
        rows = int(self.batch.lengths.max()) + self.extra_rows
        return TrainConfig(**{"micro_batch_tokens": rows, "clip_grad_norm": 1e9, **self.settings})


@dataclass(frozen=True)
class Found:
    stats: UpdateStats
    gradients: list[Gradients]
    """Of each of the step's updates."""

    @property
    def loss(self) -> float:
        return self.stats.loss

    @property
    def metrics(self) -> dict[str, float]:
        return self.stats.metrics

    def counted(self) -> tuple[Any, ...]:
        """What ranks have exactly as one process has it."""
        stats = self.stats
        return stats.tokens, stats.updates, stats.skipped, stats.lr, stats.untrained, stats.not_finite


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights in every process. In fp64 all of it is computed in fp64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[kind]), dtype=torch.float32).eval()
    model.set_attn_implementation(attention.NAME)
    if dtype == torch.float64:
        model = _exact(model.double())
    return model


def _exact(model: PreTrainedModel) -> PreTrainedModel:
    """`transformers` computes norms in fp32, whatever the model is in."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, leaf = name.rpartition(".")
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            setattr(model.get_submodule(parent), leaf, norm)
    if experts_of(model):
        model.set_experts_implementation("eager")  # grouped matrix products have no fp64
    return model


class Kept(MasterAdamW):
    """An optimizer that keeps the gradients it is given and changes nothing."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        super().__init__(model, config)
        self.kept: list[Gradients] = []

    def step(self, step: int, loss: Tensor | None = None) -> OptimizerStep:
        gradients = self.gradients()
        norm = float(total_norm(gradients.values()))
        self.kept.append({name: whole(gradient).clone() for name, gradient in gradients.items()})
        self.zero_grad()
        return OptimizerStep(norm, True)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def single_trainer(job: Job) -> SingleStrategy:
    return SingleStrategy(make_model(job.kind, job.dtype), character_tokenizer(), job.config)


def sharded_trainer(group: RankGroup, job: Job) -> ShardedStrategy:
    model = make_model(job.kind, job.dtype)
    module = TrainModule(model)
    shard(module, model.get_decoder(), group.meshes, job.dtype)
    return ShardedStrategy(ShardedModel(module, model, job.dtype), job.config, group)


def sharded_update(group: RankGroup, job: Job) -> Found:
    with with_defect(job.defect, group, ModelShape.of_model(make_model(job.kind))):
        return _update(sharded_trainer(group, job), job)


def single_update(job: Job) -> Found:
    return _update(single_trainer(job), job)


def _update(trainer: SingleStrategy | ShardedStrategy, job: Job) -> Found:
    trainer._optimizer = kept = Kept(trainer.model, job.config)
    return Found(trainer.update(job.batch, job.spec, 0), kept.kept)


def single_critic(job: Job) -> CriticStrategy:
    critic = CriticStrategy(make_model(job.kind, job.dtype), job.config, job.value_clip)
    _learned(critic.model)
    return critic


def sharded_critic(group: RankGroup, job: Job) -> ShardedCritic:
    model = make_model(job.kind, job.dtype)
    value = _learned(ValueModel(model))
    module = TrainModule(value)
    shard(module, model.get_decoder(), group.meshes, job.dtype, exact=(value.head,))
    return ShardedCritic(ShardedModel(module, model, job.dtype, value), job.config, job.value_clip, group)


def _learned(value: ValueModel) -> ValueModel:
    """With a head that is not zero: the decoder has no gradient from one that is."""
    rng = np.random.default_rng(5)
    with torch.no_grad():
        value.head.weight.copy_(torch.from_numpy(rng.normal(0, 0.3, value.head.weight.shape)))
        value.head.bias.fill_(0.1)
    return value


def sharded_critic_update(group: RankGroup, job: Job) -> Found:
    return _critic_update(sharded_critic(group, job), job)


def single_critic_update(job: Job) -> Found:
    return _critic_update(single_critic(job), job)


def _critic_update(critic: CriticTrainer, job: Job) -> Found:
    critic._optimizer = kept = Kept(critic.model, job.config)
    return Found(critic.update(job.batch, job.spec.credit, 0), kept.kept)


@dataclass(frozen=True)
class Trained:
    """What a trainer is after some steps."""

    stats: list[UpdateStats]
    weights: Gradients


def sharded_steps(group: RankGroup, job: Job, steps: int) -> Trained:
    return _steps(sharded_trainer(group, job), job, steps)


def single_steps(job: Job, steps: int) -> Trained:
    return _steps(single_trainer(job), job, steps)


def _steps(trainer: SingleStrategy | ShardedStrategy, job: Job, steps: int) -> Trained:
    stats = [trainer.update(job.batch, job.spec, step) for step in range(steps)]
    return Trained(stats, {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()})


def largest_of_a_sample(job: Job, name: str) -> float:
    """The norm of the most that a sample's tokens add to the gradient of a parameter, under the weights of the whole
    batch. It is larger than the norm of the gradient where samples cancel each other."""
    batch, found = job.batch, []
    whole_weights = token_weights(batch, job.spec.aggregation, job.spec.length)
    for sample in np.flatnonzero(batch.sum_tokens(batch.loss_mask)):
        own = np.zeros_like(whole_weights)
        own[batch.offsets[sample] : batch.offsets[sample + 1]] = 1.0
        with patch.object(policy, "token_weights", lambda *_, own=own: whole_weights * own):
            found.append(float(single_update(job).gradients[0][name].norm()))
    return max(found)


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """By parameter, the norm of the difference as a share of the gradient's norm."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - gradient.double()).norm() / gradient.double().norm().clamp_min(1e-30))
        for name, gradient in expected.items()
    }


@dataclass(frozen=True)
class Groups:
    """What a random batch is like."""

    seed: int = 0
    groups: int = 4
    most_samples: int = 4
    """Of a group: from one up to so many."""
    longest: int = 12
    """Sampled tokens in a turn."""
    turns: int = 3
    """Most of a sample; each begins with an observation, or, as often, a fork."""
    untrained: float = 0.2
    """How many samples have no sampled token."""
    equal: float = 0.2
    """How many groups have the prompt of the one before, and samples the answer of the one before."""
    proximal: bool = True
    noise: float = 0.2
    """By how much the sampler's, the reference's and the proximal log-probs differ from the trainer's."""


def make_batch(shape: Groups, kind: str = "qwen3") -> Batch:
    """A batch with every column that a loss may read. At least one sample has a sampled token."""
    rng = np.random.default_rng(shape.seed)
    samples: list[Sample] = []
    prompt = answer = _tokens(rng, 3)
    for group in range(shape.groups):
        prompt = prompt if rng.random() < shape.equal else _tokens(rng, int(rng.integers(2, 10)))
        for number in range(int(rng.integers(1, shape.most_samples + 1))):
            answer = answer if rng.random() < shape.equal else _tokens(rng, int(rng.integers(1, shape.longest + 1)))
            sample = Sample(f"{group}.{number}", Task.ask("t", "?"), group, (1.0, 0.7)[int(rng.integers(2))])
            sample.log.prompt(prompt)
            if not samples or rng.random() >= shape.untrained:
                _respond(sample, answer)
                for _ in range(int(rng.integers(1, shape.turns + 1)) - 1):
                    _continue(sample, prompt, rng)
            samples.append(sample)
    batch = Batch.from_samples(samples)
    now = single_trainer(Job(batch, LossSpec("nll"), kind, torch.float64)).log_probs(batch)
    columns = ["behaviour", "ref", "values", *(["proximal"] if shape.proximal else [])]
    near = {name: (now + rng.normal(0, shape.noise, batch.tokens)).astype(np.float32) for name in columns}
    return batch.with_columns(advantage=rng.normal(0, 1, len(batch)), **near)


def with_routes(batch: Batch, kind: str, unknown: float = 0.2) -> Batch:
    """The batch with random experts for every token, the same for tokens after the same others, some of them unknown."""
    routers = Routers(make_model(kind))
    layers, experts, chosen = routers.layers, routers.experts, routers.chosen
    rows: list[Any] = []
    for ids, turn in zip(batch.rows("ids"), batch.rows("turn"), strict=True):
        for span in branches(turn):
            for end in range(span.start, span.stop):
                rng = np.random.default_rng([1, *ids[span.start : end + 1].tolist()])
                known = rng.random() >= unknown
                found = [rng.permutation(experts)[:chosen] for _ in range(layers)]
                rows.append(np.concatenate(found) if known else np.full(layers * chosen, 255))
    return batch.with_columns(routes=np.array(rows, np.uint8))


def _continue(sample: Sample, prompt: list[int], rng: np.random.Generator) -> None:
    if rng.random() < 0.5:
        sample.log.observe(_tokens(rng, 3))
    else:
        sample.log.fork([*prompt, *_tokens(rng, 2)])
    _respond(sample, _tokens(rng, int(rng.integers(1, 5))))


def _respond(sample: Sample, ids: list[int]) -> None:
    sample.log.respond(ids, [0.0] * len(ids), [0] * len(ids))


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    found: list[int] = rng.integers(0, VOCAB, count).tolist()
    return found
