"""From what the user wrote as `model` to weights and a tokenizer, and what is said when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from roll.config.errors import UserError
from roll.config.schema import ModelConfig
from roll.model import attention, find, loading
from roll.model.find import ModelSource, find_model
from roll.model.loading import (
    choose_dtype,
    cpu_multiplies_bf16,
    load_model,
    load_model_config,
    load_tokenizer,
    stop_ids_of,
)
from roll.model.tiny import CHARACTERS, character_tokenizer, tiny_config, tiny_model

CHOICES = "write smollm2-135m, tiny, a model folder, a run folder, a .gguf file, or a hub id such as owner/name"


def small_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=len(character_tokenizer()),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=None,
        **{"tie_word_embeddings": True, **changes},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(shape)


def save(folder: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def write_config(folder: Path, shape: dict[str, Any]) -> ModelSource:
    """A model folder with that config and a file that stands for the weights."""
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(b"")
    return find_model(str(folder))


def refusal(function: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        function(*arguments)
    return str(refused.value)


def test_the_tiny_model_is_fixed_by_its_seed_and_leaves_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    one, again, other = tiny_model(3), tiny_model(3), tiny_model(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same_weights(one, again)
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)
    torch.rand(1)
    assert_same_weights(one, tiny_model(3))
    assert 0.5e6 < sum(p.numel() for p in one.parameters()) < 2e6


def test_the_tiny_model_needs_no_files() -> None:
    source = find_model("tiny")
    assert source == ModelSource("tiny", None)
    model = load_model(source, torch.float32, seed=3)
    assert_same_weights(model, tiny_model(3))
    assert model.config._attn_implementation == attention.NAME
    assert not model.training
    assert load_model(source, torch.bfloat16, seed=0).dtype == torch.bfloat16
    tokenizer = load_tokenizer(source, ModelConfig(path="tiny"))
    assert load_model_config(source).vocab_size == len(tokenizer)
    assert stop_ids_of(tokenizer, source) == (tokenizer.eos_token_id,)


def test_every_character_is_one_token_and_comes_back() -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer("<|end|>")["input_ids"] == [tokenizer.eos_token_id]
    assert tiny_config().vocab_size == len(tokenizer)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_loaded_with_the_same_weights(tmp_path: Path, tied: bool) -> None:
    model = small_model(tie_word_embeddings=tied)
    folder = save(tmp_path / "model", model)
    source = find_model(str(folder))
    assert source == ModelSource(str(folder), str(folder))
    loaded = load_model(source, torch.float32, seed=99)
    assert_same_weights(loaded, model)
    assert loaded.dtype == torch.float32
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied
    half = load_model(source, torch.bfloat16, seed=0)
    assert_same_weights(half, model.to(torch.bfloat16))
    tokenizer = load_tokenizer(source, ModelConfig(path=str(folder)))
    talk = [{"role": "user", "content": "2 + 2?\n"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert ids == character_tokenizer().apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>2 + 2?\n<|end|><|assistant|>"


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (8, 20, 100):
        save(tmp_path / "checkpoints" / f"step-{step:06d}" / "model", small_model(step))
    for step in (8, 20):
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text("{}")
    source = find_model(str(tmp_path))
    assert source.location == str(tmp_path / "checkpoints" / "step-000020" / "model")
    assert_same_weights(load_model(source, torch.float32, seed=0), small_model(20))


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    write_config(tmp_path / "model", {})
    assert find_model("~/model").location == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["smollm", "gpt-5", "./nothing", "nothing/at/all", "model.gguf", "existing/nothing", ""])
def test_an_unknown_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "existing").mkdir()
    if name == "":
        assert "neither a model folder" in refusal(find_model, name)  # the current folder
    else:
        assert refusal(find_model, name) == f"model: there is no model {name!r}: {CHOICES}"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000001" / "model").mkdir(parents=True)  # no manifest: never became real
    assert refusal(find_model, str(tmp_path)) == (
        f"model: {str(tmp_path)!r} is neither a model folder (no config.json) nor a run folder with a checkpoint: "
        f"{CHOICES}"
    )
    (tmp_path / "config.yaml").touch()
    assert f"the run in {str(tmp_path)!r} has no checkpoint yet" in refusal(find_model, str(tmp_path))


@pytest.mark.parametrize(
    ("error", "first"),
    [(OSError("not there\nand a long explanation"), "not there"), (TimeoutError(), "TimeoutError")],
)
def test_a_hub_model_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception, first: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(find, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(find, "get_hf_file_metadata", fail)
    says = refusal(find_model, "owner/name-1.5")
    assert says.startswith(
        f"model: 'owner/name-1.5' is no folder here, and the model hub did not give it: {first}. Write "
    )
    # One that is in the cache may still be broken.
    monkeypatch.setattr(find, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    source = find_model("owner/name-1.5")
    assert source == ModelSource("owner/name-1.5", "owner/name-1.5")
    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    says = refusal(load_model_config, source)
    assert says.startswith(f"model: 'owner/name-1.5' could not be loaded: {first}. Write smollm2-135m, tiny, ")


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    small_model().config.save_pretrained(tmp_path)
    assert refusal(find_model, str(tmp_path)).startswith(f"model: {str(tmp_path)!r} has a config.json but no weights")


def test_broken_weights_are_named(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:100])
    source = find_model(str(tmp_path))
    assert load_model_config(source).hidden_size == 16
    assert refusal(load_model, source, torch.float32, 0).startswith(f"model: {str(tmp_path)!r} could not be loaded: ")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    source = write_config(tmp_path, {"model_type": "no-such-architecture"})
    assert refusal(load_model_config, source).startswith(f"model: {str(tmp_path)!r} could not be loaded: ")


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, "uses sliding_window=32, which ROLL does not compute yet"),
        ({"model_type": "gemma2"}, "has layers without full attention, which ROLL does not train yet"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "uses logits_scaling=8.0"),
        ({"model_type": "cohere", "logit_scale": 0.0625}, "uses logit_scale=0.0625"),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, None),
        ({"model_type": "granite", "logits_scaling": 1.0}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_what_attention_plans_do_not_compute_is_refused(tmp_path: Path, shape: dict[str, Any], says: str | None) -> None:
    source = write_config(tmp_path, shape)
    if says is None:
        assert load_model_config(source).model_type == shape["model_type"]
    else:
        assert says in refusal(load_model_config, source)


@pytest.mark.parametrize("name", ["GPTJ", "Falcon", "Bloom", "StableLm", "Nemotron"])
def test_models_that_attend_by_themselves_are_refused(tmp_path: Path, name: str) -> None:
    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, f"{name}Config")(**shape)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    said = refusal(load_model, find_model(str(tmp_path)), torch.float32, 0)
    assert f"is a {name}ForCausalLM, whose attention ROLL cannot compute yet" in said


@pytest.mark.parametrize("name", ["Qwen3", "Phi3", "GPTNeoX", "Olmo2", "Granite"])
def test_models_whose_attention_asks_a_plan_are_taken(tmp_path: Path, name: str) -> None:
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**shape, intermediate_size=16)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    assert load_model(find_model(str(tmp_path)), torch.float32, 0).config.num_hidden_layers == 2


def test_stop_tokens_are_the_tokenizers_and_the_models(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    for named, expected in (([5, 3], (0, 3, 5)), (7, (0, 7)), (None, (0,)), (0, (0,))):
        source = write_config(tmp_path, {**small_model().config.to_dict(), "eos_token_id": named})
        assert stop_ids_of(tokenizer, source) == expected


def test_a_model_without_a_chat_template_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    save(tmp_path / "model", small_model())
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    for template in (tmp_path / "model").glob("chat_template*"):
        template.unlink()
    tokenizer.save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    source = find_model(path)
    assert refusal(load_tokenizer, source, ModelConfig(path=path)) == (
        f"model: {path!r} has no chat template, and tasks are conversations: write model.chat_template=FILE with a "
        "Jinja template, or choose an instruction-tuned model"
    )
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %} é")
    loaded = load_tokenizer(source, ModelConfig(path=path, chat_template=str(file)))
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi] é"


def test_a_chat_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(find_model("tiny"), ModelConfig(path="tiny", chat_template=str(file)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    missing = str(tmp_path / "other.jinja")
    says = refusal(load_tokenizer, find_model("tiny"), ModelConfig(path="tiny", chat_template=missing))
    assert says == f"model.chat_template: there is no file {missing!r}"


def test_precision_is_what_was_asked_for() -> None:
    for device in ("cpu", "cuda:0"):
        assert choose_dtype("fp32", device) == torch.float32
        assert choose_dtype("bf16", device) == torch.bfloat16


@pytest.mark.parametrize(("multiplies", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_where_the_hardware_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, multiplies: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(loading, "cpu_multiplies_bf16", lambda: multiplies)

    def supported(including_emulation: bool = True) -> bool:
        return multiplies or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert choose_dtype("auto") == expected
    assert choose_dtype("auto", "cuda:1") == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_tile\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_fp16\n\nprocessor\t: 1\nflags\t\t: avx512_bf16\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\ncpu\t\t: POWER9\n", False),
        (None, False),
    ],
)
def test_a_cpu_says_whether_it_multiplies_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: str | None, expected: bool
) -> None:
    file = tmp_path / "cpuinfo"
    if info is not None:
        file.write_text(info)
    monkeypatch.setattr(loading, "Path", lambda _: file)
    assert cpu_multiplies_bf16() is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_model_is_the_same_once_it_was_saved_and_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also its buffers: in bf16 the angles of far positions would be other ones."""
    fresh = load_model(find_model("tiny"), dtype, 3)
    fresh.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    again = load_model(find_model(str(tmp_path)), dtype, 0)
    assert_same_weights(fresh, again)
    for (name, one), (_, other) in zip(fresh.named_buffers(), again.named_buffers(), strict=True):
        assert one.dtype == other.dtype == torch.float32, name
        assert torch.equal(one, other), name
