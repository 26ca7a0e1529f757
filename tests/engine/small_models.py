"""Small decoders with random weights, and ways to drive an engine over them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.data.tokenlog import IntArray
from roll.engine.kv_sizing import FreeBytes
from roll.engine.memory import free_bytes
from roll.engine.paged.engine import PagedEngine
from roll.engine.request import Completion, Request, SamplingParams
from roll.engine.slot_engine import SlotEngine
from roll.model import attention
from roll.model.rope import fix_angles
from roll.model.tiny import character_tokenizer

CONTEXT = 160
SHAPE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # sharp enough that the likeliest token leads by more than kernels differ
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


MIXTURES = ["qwen3_moe", "qwen3_moe, a dense layer, weights as they are", "mixtral", "deepseek_v3"]


def build(kind: type[PreTrainedModel], config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model in fp32 with fresh weights; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which start as ones and zeros
                parameter.data += torch.randn_like(parameter) * 0.1
        return model


def under_plans(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same weights whose attention is computed by plans."""
    twin = copy.deepcopy(model)
    fix_angles(twin)
    twin.set_attn_implementation(attention.NAME)
    return twin


@cache
def plain_llama() -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**SHAPE))


@cache
def llama() -> PreTrainedModel:
    """The same weights as `plain_llama`, ready for an engine. Not to be changed: tests share it."""
    return under_plans(plain_llama())


@cache
def mixture(name: str) -> PreTrainedModel:
    """One of MIXTURES. Not to be changed: tests share it."""
    shape = {**SHAPE, "hidden_size": 48, "num_hidden_layers": 3, "num_experts_per_tok": 3}
    if name == "mixtral":
        return build(MixtralForCausalLM, MixtralConfig(**shape, num_local_experts=5))
    shape |= {"moe_intermediate_size": 24}
    if name == "deepseek_v3":
        experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
        heads = {"num_key_value_heads": 4}  # as many as of queries
        return build(DeepseekV3ForCausalLM, DeepseekV3Config(**{**shape, **heads}, **experts, **ranks))
    shape |= {"head_dim": 16, "num_experts": 8, "norm_topk_prob": name == "qwen3_moe"}
    dense = [] if name == "qwen3_moe" else [1]
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**shape, mlp_only_layers=dense))


@cache
def awkward_llama() -> PreTrainedModel:
    """Sizes that fill no vector register: what is left over at the end of a row is computed by other instructions."""
    sizes = {"vocab_size": 117, "hidden_size": 42, "intermediate_size": 51, "num_attention_heads": 3}
    return under_plans(build(LlamaForCausalLM, LlamaConfig(**{**SHAPE, **sizes, "num_key_value_heads": 3})))


@cache
def wide_llama() -> PreTrainedModel:
    """Matrices large enough that two threads share one product."""
    sizes = {"vocab_size": 2000, "hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 1}
    return under_plans(build(LlamaForCausalLM, LlamaConfig(**{**SHAPE, **sizes, "initializer_range": 0.1})))


@cache
def tokenizer() -> Tokenizer:
    return character_tokenizer()


def engine(
    max_running: int = 4,
    *,
    exact: bool = False,
    model: PreTrainedModel | None = None,
    kv_tokens: int = 0,
    version: int = 0,
    free_bytes: FreeBytes = free_bytes,
) -> SlotEngine:
    return SlotEngine(
        model or llama(),
        tokenizer(),
        max_running=max_running,
        exact=exact,
        kv_tokens=kv_tokens,
        version=version,
        free_bytes=free_bytes,
    )


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


def random_ids(rng: np.random.Generator, length: int, vocab: int = 120) -> IntArray:
    return rng.integers(0, vocab, length).astype(np.int32)


def request(id: str, prompt: Sequence[int] | IntArray, max_new_tokens: int = 8, **sampling: object) -> Request:
    return Request(id, np.asarray(prompt, np.int32), SamplingParams(max_new_tokens, **sampling))  # type: ignore[arg-type]


def run(engine: SlotEngine | PagedEngine, requests: Iterable[Request] = ()) -> dict[str, Completion]:
    """Adds the requests and steps until nothing is left. Every request may finish once only."""
    for each in requests:
        engine.add(each)
    finished: dict[str, Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            assert completion.id not in finished
            finished[completion.id] = completion
    return finished


def same_bits(a: Completion, b: Completion) -> bool:
    return a.ids.tolist() == b.ids.tolist() and a.logprobs.tobytes() == b.logprobs.tobytes() and a.finish == b.finish
