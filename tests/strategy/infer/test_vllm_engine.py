"""What is vLLM's alone: other shapes and precisions, and processes that end with the one that started them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import DEVICE, MAX_RUNNING, THREADS, TOKENIZER, forward_log_probs, model, plain, request, shape
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from roll.config.errors import UserError
from roll.engine.request import Completion, Request
from roll.engine.routes import ExpertLayers, RouteRecorder
from roll.weight_sync.weights import QUANTIZED_TOLERANCE, Weights, probe_ids

pytestmark = pytest.mark.vllm


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


def answered(model: PreTrainedModel, asked: Request, tensor_parallel: int = 1, **args: Any) -> Completion:
    """What an engine that is started with these arguments draws by the weights of the model."""
    from roll.strategy.infer.vllm import VllmStrategy
    from roll.strategy.infer.vllm_engine import VllmSettings

    probe = probe_ids(len(TOKENIZER))
    said = forward_log_probs(model, probe[:1].tolist(), probe[1:].tolist())
    weights = Weights(1, model, dict(model.named_parameters()), probe, said)
    args |= {"kv_cache_memory_bytes": 16 << 20, "enforce_eager": True}
    args |= {} if DEVICE == "cpu" else {"gpu_memory_utilization": 0.02}
    settings = VllmSettings(
        None, model.config, model.dtype, MAX_RUNNING, DEVICE, tensor_parallel, args=args, environment=THREADS
    )

    async def main() -> Completion:
        engine = VllmStrategy(TOKENIZER, settings)
        try:
            await engine.load_weights(weights)
            engine.submit([asked])
            (done,) = await asyncio.wait_for(engine.results(), 60)
            return done
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_mixture_of_experts_is_served_from_tensors_as_transformers_holds_them(tensor_parallel: int) -> None:
    if DEVICE == "cuda" and torch.cuda.device_count() < tensor_parallel:
        pytest.skip("an engine of two GPUs")
    experts, asked = mixture(), request("a", 40)
    assert "model.layers.0.mlp.experts.gate_up_proj" in experts.state_dict()  # fused, as no checkpoint has them
    done = answered(experts, asked, tensor_parallel)
    expected = forward_log_probs(experts, asked.ids.tolist(), done.ids.tolist())
    worst = float((torch.from_numpy(done.logprobs) - expected).abs().max())
    print(f"a mixture of experts: log-probs differ from transformers' by at most {worst:.1e}")
    assert worst <= 1e-4


@pytest.mark.gpu
def test_weights_of_fewer_bits_are_the_trainers_to_their_rounding() -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    values, asked = plain(model(1, torch.bfloat16, **wide)), request("a", 40)
    done = answered(values, asked, quantization="fp8")
    expected = forward_log_probs(values, asked.ids.tolist(), done.ids.tolist())
    mean = float((torch.from_numpy(done.logprobs) - expected).abs().mean())
    print(f"FP8: log-probs differ from bf16's by {mean:.3f} on average")
    assert mean < QUANTIZED_TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="vLLM tells of experts on GPUs only")
def test_completions_say_which_experts_their_tokens_were_sent_to() -> None:
    """Of a prompt that is partly in the cache, and of a response that ended at a stop string, too."""
    from roll.strategy.infer.vllm import VllmStrategy
    from roll.strategy.infer.vllm_args import route_args
    from roll.strategy.infer.vllm_engine import VllmSettings

    model = mixture()
    layers = ExpertLayers.of(model.config)
    probe = probe_ids(len(TOKENIZER))
    said = forward_log_probs(model, probe[:1].tolist(), probe[1:].tolist())
    weights = Weights(1, model, dict(model.named_parameters()), probe, said)
    args = {"kv_cache_memory_bytes": 16 << 20, "enforce_eager": True, "gpu_memory_utilization": 0.02}
    args |= route_args(layers, DEVICE, "actor_infer")
    settings = VllmSettings(None, model.config, model.dtype, MAX_RUNNING, DEVICE, args=args, layers=layers)

    async def main() -> list[tuple[Request, Completion]]:
        engine, told = VllmStrategy(TOKENIZER, settings), list[tuple[Request, Completion]]()

        async def ask(asked: Request) -> Completion:
            engine.submit([asked])
            (done,) = await asyncio.wait_for(engine.results(), 60)
            told.append((asked, done))
            return done

        try:
            await engine.load_weights(weights)
            first = request("a", 9, list(range(5, 45)), temperature=0.0)
            done = await ask(first)
            whole = [*first.ids.tolist(), *done.ids.tolist()]
            await ask(replace(request("b", 5, [*whole, 7, 8, 9], temperature=0.0), routes_from=len(whole) - 1))
            text = str(TOKENIZER.decode(done.ids[:4].tolist()))
            ended = await ask(
                replace(request("c", 9, first.ids.tolist(), temperature=0.0, stop=(text[-1],)), routes_from=3)
            )
            assert ended.finish == "stop"
            return told
        finally:
            await engine.close()

    for asked, done in asyncio.run(main()):
        assert asked.routes_from is not None
        ids = torch.tensor([[*asked.ids.tolist(), *done.ids.tolist()]], device=model.device)
        with torch.inference_mode():
            _, expected = RouteRecorder(model).record(lambda ids=ids: model(ids).logits)
        assert done.routes is not None
        assert len(done.routes) == ids.shape[1] - 1 - asked.routes_from
        own, others = (
            np.sort(rows.reshape(len(rows), 2, 2), axis=2)
            for rows in (done.routes, expected[asked.routes_from : -1].cpu().numpy())
        )
        assert (own == others).all()
