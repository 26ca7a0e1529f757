"""The forward pass over columns beside the model's own, and which models take it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from small_models import SHAPE, build, llama, random_ids, under_plans
from test_engine_greedy import family
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from roll.config.schema import LoraConfig
from roll.engine.cache import CachePlan, DecodeRows, PrefillChunk, SlotCache
from roll.engine.cpu_forward import column_logits, forward_columns, supported
from roll.engine.kv_sizing import CacheShape
from roll.model.attention import forward_rows, logits_of
from roll.model.lora import inject


@torch.inference_mode()
def passed(model: PreTrainedModel, columns: bool) -> tuple[torch.Tensor, torch.Tensor, SlotCache]:
    """Hidden states and logits of a pass with chunks of two prompts and two decoding rows, and the cache after it."""
    cache = SlotCache(model.config, model.dtype, torch.device("cpu"))
    cache.reshape(CacheShape(4, 40))
    noise = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.normal_(generator=noise)
    chunks, decoding = [PrefillChunk(2, 5, 9), PrefillChunk(3, 0, 4)], [DecodeRows(0, 30), DecodeRows(1, 12)]
    ids = torch.from_numpy(random_ids(np.random.default_rng(3), 15)).long()
    positions = torch.tensor([*range(5, 14), *range(4), 29, 11])
    hidden = (forward_columns if columns else forward_rows)(model, ids, positions, CachePlan(cache, chunks, decoding))
    return hidden, (column_logits if columns else logits_of)(model, hidden), cache


@pytest.mark.parametrize("name", ["llama", "llama, scaled rotary, tied", "mistral", "mistral, window", "qwen2", "qwen3"])
def test_columns_compute_what_the_models_own_code_does(name: str) -> None:
    model = under_plans(family(name))
    assert supported(model)
    (hidden, logits, cache), (own_hidden, own_logits, own_cache) = passed(model, True), passed(model, False)
    torch.testing.assert_close(hidden, own_hidden, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(logits, own_logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache.layers, own_cache.layers, atol=2e-5, rtol=2e-5)


def test_in_bf16_columns_are_as_near_to_fp32_as_the_models_own_code() -> None:
    model = under_plans(family("qwen3"))
    _, true, _ = passed(model, False)
    model = model.to(torch.bfloat16)
    errors = [float((passed(model, columns)[1] - true).square().mean().sqrt()) for columns in (True, False)]
    assert errors[0] < 1.5 * errors[1]


def test_weights_are_read_where_they_lie() -> None:
    model = copy.deepcopy(llama())
    before = passed(model, True)[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = passed(model, True)[1]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, passed(model, False)[1], atol=1e-4, rtol=1e-4)


def test_models_of_another_kind_go_through_their_own_code() -> None:
    adapted = build(LlamaForCausalLM, LlamaConfig(**SHAPE))
    assert supported(adapted)
    inject(adapted, LoraConfig(rank=2))
    hooked = build(LlamaForCausalLM, LlamaConfig(**SHAPE))
    hooked.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)
    replaced = build(LlamaForCausalLM, LlamaConfig(**SHAPE))
    replaced.lm_head = nn.Sequential(replaced.lm_head)
    for other in (adapted, hooked, replaced, family("gemma"), family("smollm3"), family("gemma3")):
        assert not supported(other)
