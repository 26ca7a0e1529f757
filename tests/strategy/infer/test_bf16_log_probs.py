"""In bf16 an engine's log-probs are as near to a forward pass as those of a decoder of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import DEVICE, Served, forward_log_probs, model, plain, request
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from roll.engine.request import Completion
from roll.model.loading import cpu_multiplies_bf16

SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "initializer_range": 0.06,
}
SHAPE |= {"num_attention_heads": 9, "num_key_value_heads": 3}
"""Large enough for kernels to sum in another order when there are more rows."""
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not cpu_multiplies_bf16(), reason="needs bf16 instructions")


@torch.no_grad()
def decoded_log_probs(model: LlamaForCausalLM, prompt: Sequence[int], drawn: Sequence[int]) -> Tensor:
    """By the model's own decoding, one token at a time."""
    cache, ids = DynamicCache(config=model.config), [*prompt, *drawn]
    model(torch.tensor([prompt[:-1]], device=DEVICE), past_key_values=cache)
    found = []
    for position in range(len(prompt) - 1, len(ids) - 1):
        logits = model(torch.tensor([[ids[position]]], device=DEVICE), past_key_values=cache).logits[0, -1].float()
        found.append(torch.log_softmax(logits, -1)[ids[position + 1]])
    return torch.stack(found).cpu()


@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_bf16_log_probs_are_as_near_to_a_forward_pass_as_a_decoder_of_transformers(engine: str) -> None:
    served = Served.start(engine, torch.bfloat16, **SHAPE)
    try:
        values = model(1, torch.bfloat16, **SHAPE)
        asked = [request(str(n), 60, [5 + n, 9, 40, 41 + n], seed=n) for n in range(8)]

        async def main() -> dict[str, Completion]:
            await served.publish(values)
            return await served.generate(*asked)

        done, reference = served.run(main()), plain(values, "sdpa")
        ours, theirs = [], []
        for each in asked:
            prompt, drawn = each.ids.tolist(), done[each.id].ids.tolist()
            whole = forward_log_probs(reference, prompt, drawn)
            ours.append((torch.from_numpy(done[each.id].logprobs) - whole).abs())
            theirs.append((decoded_log_probs(reference, prompt, drawn) - whole).abs())
        mean, allowed = float(torch.cat(ours).mean()), float(torch.cat(theirs).mean())
        print(f"mean difference from a forward pass in bf16: {engine} {mean:.4f}, transformers' decoder {allowed:.4f}")
        assert mean <= 1.25 * allowed
    finally:
        served.close()
