"""What a model with adapters publishes is the merged model, under its plain names, one tensor at a time."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from roll.config.schema import LoraConfig
from roll.model.lora import Adapters, BaseModelRef, is_adapter
from roll.weight_sync.digest import digests
from roll.weight_sync.layout import pack, unpack
from roll.weight_sync.merged_state_dict import MergedTensors, published_tensors
from roll.weight_sync.stream import Sender
from roll.weight_sync.weights import named_tensors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def plain_model(dtype: torch.dtype = torch.float32, *, tied: bool = True) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(shape).to(dtype).eval()


def learned_model(
    dtype: torch.dtype = torch.float32, *, tied: bool = True, saved_in: Path | None = None
) -> LlamaForCausalLM:
    model = plain_model(dtype, tied=tied)
    adapters = Adapters(model, LoraConfig(rank=3, targets=("q_proj", "down_proj")), BaseModelRef("x"), 0)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.2)
    if saved_in is not None:
        adapters.save(saved_in)
    return model


def merged_by_peft(folder: Path, dtype: torch.dtype, tied: bool) -> dict[str, Tensor]:
    loaded = PeftModel.from_pretrained(plain_model(dtype, tied=tied), folder, autocast_adapter_dtype=False)
    return named_tensors(loaded.merge_and_unload())


@DTYPES
@pytest.mark.parametrize("tied", [True, False])
def test_it_is_what_peft_merges(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    model, plain = learned_model(dtype, tied=tied, saved_in=tmp_path), named_tensors(plain_model(dtype, tied=tied))
    published = published_tensors(model)
    assert list(published) == list(plain)
    expected = merged_by_peft(tmp_path, dtype, tied)
    for name, tensor in published.items():
        assert (tensor.dtype, tensor.shape) == (plain[name].dtype, plain[name].shape)
        assert torch.equal(tensor, expected[name]), name
        changed = name.endswith(("q_proj.weight", "down_proj.weight"))
        assert torch.equal(tensor, plain[name]) != changed, name


def test_a_model_without_adapters_publishes_its_own_tensors() -> None:
    model = plain_model()
    assert {name: tensor.data_ptr() for name, tensor in published_tensors(model).items()} == {
        name: tensor.data_ptr() for name, tensor in named_tensors(model).items()
    }


@DTYPES
def test_the_bits_that_are_sent_are_those_of_the_digest(dtype: torch.dtype) -> None:
    """In buckets so small that tensors are cut."""
    tensors = published_tensors(learned_model(dtype))
    sender = Sender(tensors, bucket_bytes=1000)
    manifest = sender.manifest(1, torch.zeros(2), torch.zeros(1))
    received = named_tensors(plain_model(dtype))
    manifest.layout.check(received)
    slot = torch.empty(manifest.layout.slot_bytes, dtype=torch.uint8)
    for spans in manifest.layout.buckets:
        pack(slot, spans, tensors)
        unpack(slot, spans, received)
    assert digests(received) == manifest.digests
    engine = plain_model(dtype)
    engine.load_state_dict({**engine.state_dict(), **received})
    ids = torch.arange(12)[None]
    with torch.no_grad():
        difference = (engine(ids).logits - learned_model(dtype)(ids).logits).abs().max()
    assert difference < (1e-5 if dtype == torch.float32 else 0.1)


def test_one_merged_tensor_is_kept_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def watched(layer: object) -> Tensor:
        nonlocal most
        tensor = merge(layer)
        alive.add(tensor)
        gc.collect()
        most = max(most, len(alive))
        return tensor

    from roll.weight_sync import merged_state_dict

    merge = merged_state_dict.merged_weight
    monkeypatch.setattr(merged_state_dict, "merged_weight", watched)
    tensors = published_tensors(learned_model())
    assert isinstance(tensors, MergedTensors)
    sender = Sender(tensors, bucket_bytes=1000)
    sender.manifest(1, torch.zeros(2), torch.zeros(1))
    sender.open("shared_memory")
    for bucket in range(len(sender.layout.buckets)):
        sender.write(bucket)
    sender.close()
    assert 1 <= most <= 2, "one, and the one that a loop over them still names"
