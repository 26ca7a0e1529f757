"""Publishing weights: what is not the trainer's is refused, by the storage and by the numbers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roll.config.errors import RunError
from roll.weight_sync.weights import PROBE_TOKENS, Weights, check_probe, check_shared, named_tensors, probe_ids


def small_model() -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape))


def published(model: LlamaForCausalLM, version: int = 3) -> Weights:
    log_probs = torch.linspace(-5, -1, PROBE_TOKENS - 1)
    return Weights(version, model, dict(model.named_parameters()), probe_ids(50), log_probs)


@pytest.mark.parametrize("vocab", [2, 50, 7919, 49_152, 151_936])
def test_the_probe_is_fixed_and_within_the_vocabulary(vocab: int) -> None:
    probe = probe_ids(vocab)
    assert len(probe) == PROBE_TOKENS
    assert ((probe >= 0) & (probe < vocab)).all()
    assert torch.equal(probe, probe_ids(vocab))
    if vocab > 10_000:
        assert len(probe.unique()) == PROBE_TOKENS


def test_the_same_storage_is_accepted() -> None:
    model = small_model()
    check_shared(published(model), model)


def test_a_copy_with_equal_values_is_not_the_same_storage() -> None:
    model = small_model()
    with pytest.raises(RunError, match=r"'model.embed_tokens.weight' is not the trainer's: version 3"):
        check_shared(published(model), copy.deepcopy(model))


def test_one_replaced_tensor_is_noticed() -> None:
    model = small_model()
    weights = published(model)
    name = "model.layers.0.mlp.up_proj.weight"
    others = {**weights.parameters, name: weights.parameters[name].detach().clone()}
    with pytest.raises(RunError, match=name):
        check_shared(replace(weights, parameters=others), model)


def test_a_missing_tensor_is_noticed() -> None:
    model = small_model()
    weights = published(model)
    rest = {name: tensor for name, tensor in weights.parameters.items() if name != "model.norm.weight"}
    with pytest.raises(RunError, match=r"model\.norm\.weight"):
        check_shared(replace(weights, parameters=rest), model)


def test_kernel_noise_passes_and_other_weights_do_not() -> None:
    weights = published(small_model())
    check_probe(weights, weights.log_probs)
    check_probe(weights, weights.log_probs + 1e-5)
    with pytest.raises(RunError, match=r"version 3 .* differ by 0\.0100 on average"):
        check_probe(weights, weights.log_probs - 0.01)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probs_that_are_no_numbers_are_refused(value: float) -> None:
    weights = published(small_model())
    broken = weights.log_probs.clone()
    broken[4] = value
    with pytest.raises(RunError, match="not the trainer's"):
        check_probe(weights, broken)


def test_half_precision_is_allowed_more_noise() -> None:
    weights = published(small_model().bfloat16())
    check_probe(weights, weights.log_probs + 0.05)
    with pytest.raises(RunError):
        check_probe(weights, weights.log_probs + 0.5)
    check_probe(weights, weights.log_probs + 0.5, quantized=True)
    with pytest.raises(RunError, match="differ by"):
        check_probe(weights, weights.log_probs + 2.0, quantized=True)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.alias = torch.nn.Parameter(self.embed.weight.data)
        self.register_buffer("angles", torch.ones(3), persistent=False)
        self.none = torch.nn.Parameter(torch.empty(0))
        self.also_none = torch.nn.Parameter(torch.empty(0))


def test_a_model_s_tensors_come_once_by_their_first_name() -> None:
    model = Tied()
    tensors = named_tensors(model)
    running = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert sorted(tensors) == sorted(["alias", "none", "also_none", *running])
    assert tensors["alias"].data_ptr() == model.head.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_a_language_model_s_tensors_are_its_parameters() -> None:
    model = small_model()
    assert list(named_tensors(model)) == [name for name, _ in model.named_parameters()]


def test_views_of_one_storage_are_all_there() -> None:
    model = torch.nn.Module()
    flat = torch.zeros(8)
    model.a, model.b = torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])
    assert list(named_tensors(model)) == ["a", "b"]
