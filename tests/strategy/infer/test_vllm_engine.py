"""What is vLLM's alone: other shapes and precisions, and processes that end with the one that started them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engines import DEVICE, MAX_RUNNING, THREADS, TOKENIZER, Served, model, plain, request, shape
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from roll.config.errors import UserError
from roll.engine.request import Completion
from roll.model.loading import cpu_multiplies_bf16
from roll.transfer.weights import Weights, probe_ids

pytestmark = pytest.mark.vllm


@torch.no_grad()
def log_probs(model: PreTrainedModel, prompt: list[int], drawn: list[int]) -> torch.Tensor:
    """By the model's own forward pass over all tokens."""
    ids = torch.tensor([[*prompt, *drawn]], device=DEVICE)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


@torch.no_grad()
def decoded_log_probs(model: LlamaForCausalLM, prompt: list[int], drawn: list[int]) -> torch.Tensor:
    """By the model's own decoding, one token at a time."""
    cache, ids = DynamicCache(config=model.config), [*prompt, *drawn]
    model(torch.tensor([prompt[:-1]], device=DEVICE), past_key_values=cache)
    found = []
    for position in range(len(prompt) - 1, len(ids) - 1):
        logits = model(torch.tensor([[ids[position]]], device=DEVICE), past_key_values=cache).logits[0, -1].float()
        found.append(torch.log_softmax(logits, -1)[ids[position + 1]])
    return torch.stack(found).cpu()


@pytest.mark.skipif(DEVICE == "cpu" and not cpu_multiplies_bf16(), reason="vLLM needs a CPU with bf16 instructions")
def test_bf16_log_probs_are_as_near_to_a_forward_pass_as_a_decoder_of_transformers() -> None:
    served = Served.start("vllm", torch.bfloat16)
    try:
        values = model(1, torch.bfloat16)
        asked = [request(str(n), 60, [5 + n, 9, 40, 41 + n], seed=n) for n in range(8)]

        async def main() -> dict[str, Completion]:
            await served.publish(values)
            return await served.generate(*asked)

        done, reference = served.run(main()), plain(values)
        engine, decoder = [], []
        for each in asked:
            prompt, drawn = each.ids.tolist(), done[each.id].ids.tolist()
            whole = log_probs(reference, prompt, drawn)
            engine.append((torch.from_numpy(done[each.id].logprobs) - whole).abs())
            decoder.append((decoded_log_probs(reference, prompt, drawn) - whole).abs())
        ours, theirs = float(torch.cat(engine).mean()), float(torch.cat(decoder).mean())
        print(f"mean difference from a forward pass in bf16: vLLM {ours:.4f}, transformers' decoder {theirs:.4f}")
        assert ours <= 1.25 * theirs
    finally:
        served.close()


def test_an_argument_with_a_value_that_vllm_refuses_is_the_users_to_mend() -> None:
    from roll.strategy.infer.vllm import VllmStrategy
    from roll.strategy.infer.vllm_engine import VllmSettings

    async def main() -> None:
        VllmStrategy(TOKENIZER, VllmSettings(None, shape(), torch.float32, 4, DEVICE, args={"quantization": "gzip"}))

    with pytest.raises(UserError, match=r"vLLM refuses its arguments \{'quantization': 'gzip'\}"):
        asyncio.run(main())


def mixture() -> Qwen2MoeForCausalLM:
    config = Qwen2MoeConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=128,
        intermediate_size=96,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        architectures=["Qwen2MoeForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Qwen2MoeForCausalLM(config).to(DEVICE).eval()


def test_a_mixture_of_experts_is_served_from_tensors_as_transformers_holds_them() -> None:
    from roll.strategy.infer.vllm import VllmStrategy
    from roll.strategy.infer.vllm_engine import VllmSettings

    experts = mixture()
    assert "model.layers.0.mlp.experts.gate_up_proj" in experts.state_dict()  # fused, as no checkpoint has them
    probe = probe_ids(len(TOKENIZER))
    said = log_probs(experts, probe[:1].tolist(), probe[1:].tolist())
    weights = Weights(1, experts, dict(experts.named_parameters()), probe, said)
    memory: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 20, "enforce_eager": True}
    memory |= {} if DEVICE == "cpu" else {"gpu_memory_utilization": 0.02}
    settings = VllmSettings(None, experts.config, torch.float32, MAX_RUNNING, DEVICE, args=memory, environment=THREADS)
    asked = request("a", 40)

    async def main() -> Completion:
        engine = VllmStrategy(TOKENIZER, settings)
        try:
            await engine.load_weights(weights)
            engine.submit([asked])
            (done,) = await asyncio.wait_for(engine.results(), 60)
            return done
        finally:
            await engine.close()

    done = asyncio.run(main())
    expected = log_probs(experts, asked.ids.tolist(), done.ids.tolist())
    worst = float((torch.from_numpy(done.logprobs) - expected).abs().max())
    print(f"a mixture of experts: log-probs differ from transformers' by at most {worst:.1e}")
    assert worst <= 1e-4
