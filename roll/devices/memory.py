"""How much memory a run will take: an estimate by role, before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from roll.config.schema import Config
from roll.engine.cache import SlotCache
from roll.strategy.train.logprobs import CHUNK_ELEMENTS

RUNTIME_BYTES = 700 << 20
"""The interpreter, torch, transformers and their libraries."""


@dataclass(frozen=True)
class Part:
    """What one thing takes, and whose it is."""

    role: str
    what: str
    bytes: int


def count_parameters(shape: PretrainedConfig) -> int:
    """Parameters of a model of that shape, without making it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    return sum(p.numel() for p in model.parameters())


def estimate(
    config: Config, shape: PretrainedConfig, dtype: torch.dtype, prompt_tokens: int, reference: bool
) -> list[Part]:
    """The parts of a run in one process, for its longest prompt."""
    parameters = count_parameters(shape)
    positions = prompt_tokens + config.rollout.max_new_tokens
    cache = SlotCache(shape, config.rollout.max_running, dtype, torch.device("cpu"))
    parts = [
        Part("actor_train", "weights", parameters * dtype.itemsize),
        Part("actor_train", "gradients, fp32", parameters * 4),
        Part("actor_train", "optimizer moments, fp32", parameters * 8),
        Part("actor_train", "activations of a micro-batch", activation_bytes(config, shape, dtype, prompt_tokens)),
        Part("actor_infer", "weights (the actor's own)", 0),
        Part("actor_infer", "key-value cache", cache.slots * cache.rounded(positions) * cache.bytes_a_token),
    ]
    if dtype != torch.float32:
        parts.insert(1, Part("actor_train", "master weights, fp32", parameters * 4))
    if reference:
        parts.append(Part("reference", "weights", parameters * dtype.itemsize))
    return [*parts, Part("controller", "interpreter and libraries", RUNTIME_BYTES)]


def activation_bytes(config: Config, shape: PretrainedConfig, dtype: torch.dtype, prompt_tokens: int) -> int:
    """What the backward pass of the largest micro-batch keeps: vectors of every token and layer, a chunk of logits."""
    samples = config.rollout.groups_per_step * config.rollout.group_size
    step_rows = samples * config.rollout.max_new_tokens + config.rollout.groups_per_step * prompt_tokens
    rows = min(config.train.micro_batch_tokens, step_rows)
    hidden, inner = shape.hidden_size, getattr(shape, "intermediate_size", 4 * shape.hidden_size)
    a_row = shape.num_hidden_layers * (14 * hidden + 4 * inner)
    logits = min(CHUNK_ELEMENTS, rows * shape.vocab_size) * 4 * 4
    return int(rows * a_row * dtype.itemsize + logits)


def available_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
