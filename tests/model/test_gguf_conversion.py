"""A `.gguf` file is converted once, whole or not at all, into a model folder with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from roll.config.errors import UserError
from roll.config.schema import ModelConfig
from roll.model.find import find_model
from roll.model.loading import load_model, load_tokenizer

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
TOKENS = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
HEADS, KV_HEADS = 4, 2


def make_model() -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(shape)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the rows of queries and keys in the order of the original rotary embedding."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    shape = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(shape.hidden_size // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    tensors = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        tensors |= {
            f"blk.{i}.attn_norm.weight": layer.input_layernorm.weight,
            f"blk.{i}.ffn_norm.weight": layer.post_attention_layernorm.weight,
            f"blk.{i}.attn_q.weight": interleaved(attention.q_proj.weight, HEADS),
            f"blk.{i}.attn_k.weight": interleaved(attention.k_proj.weight, KV_HEADS),
            f"blk.{i}.attn_v.weight": attention.v_proj.weight,
            f"blk.{i}.attn_output.weight": attention.o_proj.weight,
            f"blk.{i}.ffn_gate.weight": mlp.gate_proj.weight,
            f"blk.{i}.ffn_up.weight": mlp.up_proj.weight,
            f"blk.{i}.ffn_down.weight": mlp.down_proj.weight,
        }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_model_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, file = make_model(), tmp_path / "small.gguf"
    write_gguf(file, model)
    source = find_model(str(file))
    assert source.location is not None
    assert Path(source.location).parent == tmp_path / "cache" / "roll" / "models"
    loaded = load_model(source, torch.float32, seed=0)
    for (name, expected), (other, got) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(expected, got), name
    tokenizer = load_tokenizer(source, ModelConfig(path=str(file)))
    talk = [{"role": "user", "content": "ab 1"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<s>ab 1</s><s>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == [0, TOKENS.index("ab"), TOKENS.index("Ġ"), TOKENS.index("1"), 1, 0]
    assert tokenizer.decode(ids) == text

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert find_model(str(file)) == source


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF and then nothing of the kind")
    with pytest.raises(UserError, match=r"model: '.*broken\.gguf' could not be"):
        find_model(str(file))
    assert list((tmp_path / "cache" / "roll" / "models").iterdir()) == []
