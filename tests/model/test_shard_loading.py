"""A checkpoint's slices in a sharded model are those of the model that `transformers` loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.model.shard_loading import SafeFolder, load_shards
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup
from tests.ranks import Ranks, ranks_of
from tests.thorough import but

SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=1, tie_word_embeddings=False),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(MeshShape(shard=3)) as made:
        yield made


def saved(folder: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size="20KB")
    return folder


def loaded(group: RankGroup, folder: Path) -> dict[str, bool]:
    """Whether each parameter and buffer, put together from the ranks, is the one that `transformers` loads."""
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module = TrainModule(model)
    shard(module, model.get_decoder(), group.meshes, torch.float32)
    module._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    model.tie_weights()
    load_shards(model, folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    found = {name: tensor.full_tensor() for name, tensor in model.named_parameters()} | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    return {name: torch.equal(tensor, expected[name]) for name, tensor in found.items()}


@pytest.mark.parametrize("kind", but(["qwen3_moe"], CONFIGS))
def test_the_shards_are_those_of_the_whole_model(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Over three ranks, which divide none of the sizes of the vocabulary and the experts."""
    folder = saved(tmp_path, CONFIGS[kind])
    for equal in ranks.run(loaded, folder):
        assert [name for name, same in equal.items() if not same] == []


def refused(group: RankGroup, folder: Path) -> str:
    try:
        loaded(group, folder)
    except UserError as error:
        return str(error)
    return ""


def test_weights_that_are_not_there_are_named(ranks: Ranks, tmp_path: Path) -> None:
    folder = saved(tmp_path, CONFIGS["llama"])
    for file in folder.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.up_proj" not in name}
        save_file(kept, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text("\n".join(line for line in index.read_text().splitlines() if "layers.1.mlp.up_proj" not in line))
    for said in ranks.run(refused, folder):
        assert "has no weights for 'model.layers.1.mlp.up_proj.weight'" in said


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which a sharded trainer reads slices of: save the model with save_pretrained"):
        SafeFolder(tmp_path)
