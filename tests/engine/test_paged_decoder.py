"""Decoders as few kernels against the model's own code. They need a GPU, or Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from small_models import MIXTURES, llama, mixture, under_plans
from transformers import PreTrainedModel

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from roll.engine.paged import decoder, expert_products  # noqa: E402
from roll.engine.paged.decoder import (  # noqa: E402
    Decoder,
    FusedDecoder,
    PlainDecoder,
    _input_rows,
    _is_fusible,
    _probes,
    _span,
    make_decoder,
)
from roll.engine.paged.kv_cache import PagedKVCache  # noqa: E402
from roll.model.experts import with_experts  # noqa: E402
from roll.model.shape import ModelShape  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FUSED = [name for name in MIXTURES if name != "deepseek_v3"]


def ready(name: str) -> PreTrainedModel:
    return under_plans(mixture(name)).to(DEVICE)


@pytest.mark.parametrize("name", FUSED)
def test_the_kernels_of_a_mixture_compute_what_its_own_code_does(name: str) -> None:
    model = ready(name)
    assert _is_fusible(model)
    expected, found = _probes(PlainDecoder(model), FusedDecoder(model, 64), model, DEVICE)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUSED)
def test_routes_are_those_that_the_models_own_code_chooses(name: str) -> None:
    model = ready(name)
    plain, fused = PlainDecoder(model, record_routes=True), FusedDecoder(model, 64, record_routes=True)
    assert fused.routes is not None
    fused.routes.fill_(-1)
    expected = passed(plain, model)
    torch.testing.assert_close(passed(fused, model), expected, rtol=1e-4, atol=1e-4)
    assert plain.routes is not None
    own = plain.routes.int().view(20, *fused.routes.shape[1:])
    assert torch.equal(fused.routes[: len(own)].sort(-1).values, own.sort(-1).values)
    assert (fused.routes[len(own) :] == -1).all()


def test_routes_of_a_pass_with_too_many_rows_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "ROUTED_ROWS", 10)
    model = ready("mixtral")
    fused = FusedDecoder(model, 64, record_routes=True)
    assert fused.routes is not None
    torch.testing.assert_close(passed(fused, model), passed(PlainDecoder(model), model), rtol=1e-4, atol=1e-4)
    assert not fused.routes.any()


def test_new_values_of_parameters_are_used_at_once() -> None:
    model = ready("qwen3_moe")
    fused = FusedDecoder(model, 64)
    before = passed(fused, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    expected = passed(PlainDecoder(model), model)
    torch.testing.assert_close(passed(fused, model), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_by_the_engines_kernels_in_the_models_own_code(name: str) -> None:
    model = ready(name)
    twin = with_experts(model, expert_products.NAME)
    assert model.config._experts_implementation != expert_products.NAME
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    ids = torch.arange(40, device=DEVICE)[None] * 7 % 120
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        twin.set_attn_implementation("sdpa")
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_model_without_experts_is_not_copied() -> None:
    assert with_experts(llama(), expert_products.NAME) is llama()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_kernels_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    made = make_decoder(ready(name).to(dtype), 64, record_routes=True)
    assert isinstance(made, FusedDecoder if name in FUSED else PlainDecoder)


@torch.inference_mode()
def passed(through: Decoder, model: PreTrainedModel) -> torch.Tensor:
    """Hidden states of a prompt of 20 tokens."""
    rows = _input_rows(1 + np.arange(20) * 7 % 119, 0, 20, DEVICE)
    cache = PagedKVCache(ModelShape.of_model(model), 4, torch.float32, DEVICE)
    return through.hidden(rows, torch.zeros(1, dtype=torch.int32, device=DEVICE), _span(cache, rows, 20, 20, DEVICE))
