"""Folders with adapters as models: what they belong to is found, and they are merged into it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from transformers import PreTrainedModel

from roll.config import UserError, load_config
from roll.config.schema import LoraConfig, ModelConfig
from roll.model.find import find_model
from roll.model.loading import load_model, load_tokenizer, write_merged
from roll.model.lora import Adapters, BaseModelRef, adapted_layers, inject, is_adapter
from roll.model.shape import ModelShape
from roll.model.tiny import character_tokenizer, tiny_model


def learn(model: PreTrainedModel, seed: int = 1) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.1)


def logits(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(12)[None]).logits
    return found


def save_adapters(folder: Path, model: PreTrainedModel, base: BaseModelRef) -> PreTrainedModel:
    adapters = Adapters(model, LoraConfig(rank=2), base, 0)
    learn(model)
    adapters.save(folder)
    return model


def test_a_model_made_from_scratch_is_made_again_by_its_own_seed(tmp_path: Path) -> None:
    learned = save_adapters(tmp_path / "a", tiny_model(7), find_model("tiny").base(7))
    source = find_model(str(tmp_path / "a"))
    loaded = load_model(source, torch.float32, seed=0)
    assert not adapted_layers(loaded)
    assert not hasattr(loaded, "peft_config")
    torch.testing.assert_close(logits(loaded), logits(learned), atol=1e-4, rtol=0)
    assert (logits(loaded) - logits(tiny_model(7))).abs().max() > 0.01
    assert load_tokenizer(source, ModelConfig()).chat_template == character_tokenizer().chat_template


def test_adapters_of_a_model_with_adapters(tmp_path: Path) -> None:
    """As a second run leaves them: both are merged, in order, and the first are what the second belong to."""
    save_adapters(tmp_path / "a", tiny_model(7), BaseModelRef("tiny", 7))
    first = find_model(str(tmp_path / "a"))
    assert first.base(0) == BaseModelRef(str(tmp_path / "a"), 7)
    second = save_adapters(tmp_path / "b", load_model(first, torch.float32, 0), first.base(0))
    source = find_model(str(tmp_path / "b"))
    assert source.adapters == (str(tmp_path / "a"), str(tmp_path / "b"))
    torch.testing.assert_close(logits(load_model(source, torch.float32, 0)), logits(second), atol=1e-4, rtol=0)


def test_adapters_that_peft_alone_wrote(tmp_path: Path) -> None:
    tiny_model(3).save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    model = type(tiny_model(3)).from_pretrained(tmp_path / "base")
    trained = get_peft_model(model, PeftLora(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    learn(trained)
    trained.save_pretrained(tmp_path / "adapter")
    source = find_model(str(tmp_path / "adapter"))
    assert load_tokenizer(source, ModelConfig()).eos_token == character_tokenizer().eos_token
    torch.testing.assert_close(logits(load_model(source, torch.float32, 0)), logits(trained), atol=1e-4, rtol=0)


def test_a_base_that_is_gone_is_named(tmp_path: Path) -> None:
    save_adapters(tmp_path / "a", tiny_model(0), BaseModelRef("/nowhere/model", 0))
    with pytest.raises(UserError, match=r"holds adapters of '/nowhere/model', which is not there: .*there is no model"):
        find_model(str(tmp_path / "a"))
    (tmp_path / "a" / "roll_base.json").unlink()
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(UserError, match="do not say what model they are for"):
        find_model(str(tmp_path / "a"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_folder_is_a_plain_model(tmp_path: Path, dtype: torch.dtype) -> None:
    learned = save_adapters(tmp_path / "a", tiny_model(7).to(dtype), BaseModelRef("tiny", 7))
    character_tokenizer().save_pretrained(tmp_path / "a")
    write_merged(tmp_path / "a", tmp_path / "merged")
    plain = type(learned).from_pretrained(tmp_path / "merged", dtype="auto")
    assert plain.dtype == dtype
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in tiny_model(0).named_parameters()]
    torch.testing.assert_close(logits(plain), logits(learned), atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("wq",), r"'wq'.* not found in the base model.* some of down_proj, gate_proj, k_proj, o_proj"),
        (("lm_head",), "lm_head gives the logits, and adapters go to the linear layers inside the decoder"),
        (("embed_tokens",), r"model.embed_tokens is no linear layer \(Embedding\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_layers_that_take_no_adapters_are_refused(targets: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=rf"model\.lora\.targets: .*{said}"):
        inject(tiny_model(0), LoraConfig(rank=2, targets=targets))


def test_without_peft_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model\.lora needs the package peft.*pip install -e '\.\[lora\]'"):
        inject(tiny_model(0), LoraConfig(rank=2))
    assert adapted_layers(tiny_model(0)) == {}


def test_short_forms_and_what_they_mean() -> None:
    lora = load_config({"model": {"lora": 8}}).model.lora
    assert (lora.rank, lora.scale, lora.targets) == (8, 2.0, ("all-linear",))
    written = {"model": {"lora": {"rank": 4, "alpha": 2, "targets": "q_proj"}}}
    assert load_config(written).model.lora.scale == 0.5
    assert load_config(written).model.lora.targets == ("q_proj",)
    assert load_config(written, ["model.lora=0"]).model.adapters is None
    assert load_config({}).model.adapters is None
    with pytest.raises(UserError, match=r"model\.lora\.alpha is set, but there are no adapters"):
        load_config({"model": {"lora": {"alpha": 2}}})


def test_a_shape_counts_adapters_apart() -> None:
    model = tiny_model(0)
    plain = ModelShape.of(model.config)
    assert (plain.trained, plain.trained_output) == (plain.parameters, plain.output)
    counted = ModelShape.of(model.config, LoraConfig(rank=2))
    inject(model, LoraConfig(rank=2))
    assert counted == ModelShape.of_model(model)
    assert counted.parameters == plain.parameters
    assert counted.trained == counted.adapters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted.trained_output == 0
