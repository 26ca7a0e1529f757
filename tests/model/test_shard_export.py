"""Exporting a model from shards needs room for a tensor, never for the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import LlamaConfig, LlamaForCausalLM

from roll.model.safetensors_writer import SafeFile, TensorForm

LARGE = LlamaConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=10,
    num_attention_heads=4,
    tie_word_embeddings=False,
)
"""Of 28 million parameters, the largest tensor of one."""
EXPORT = """
import sys
from pathlib import Path
from roll.model.shard_export import export_shards

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10

small, large, out = map(Path, sys.argv[1:])
export_shards(small / "model", small / "shards", out / "small")  # all code that is needed is imported now
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = status("VmRSS:")
export_shards(large / "model", large / "shards", out / "large")
print(status("VmHWM:") - before)
"""


def shards_of_one_rank(folder: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    model = LlamaForCausalLM(config)
    settings = model.config
    settings.dtype = torch.float32
    settings.save_pretrained(folder / "model")
    weights = dict(model.state_dict())
    save({f"master/{name}": tensor for name, tensor in weights.items()}, checkpoint_id=folder / "shards", no_dist=True)
    return weights


@pytest.mark.thorough
def test_a_model_is_exported_tensor_by_tensor(tmp_path: Path) -> None:
    small = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    shards_of_one_rank(tmp_path / "few", small)
    weights = shards_of_one_rank(tmp_path / "many", LARGE)
    whole = sum(tensor.nbytes for tensor in weights.values())
    largest = max(tensor.nbytes for tensor in weights.values())
    assert whole > 25 * largest
    command = [sys.executable, "-c", EXPORT, *map(str, (tmp_path / "few", tmp_path / "many", tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < 5 * largest, "read, unpacked, put together and written, each once"
    written = load_file(tmp_path / "large" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)


def test_tensors_of_several_precisions_lie_where_their_elements_can_be_read(tmp_path: Path) -> None:
    made = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5).to(torch.bfloat16),
        "number": torch.tensor(7),
        "none": torch.empty(0, 4),
        "whole": torch.randn(3, 4).T,
        "flags": torch.tensor([True, False, True]),
    }
    forms = {name: TensorForm.of(tensor) for name, tensor in made.items()}
    with SafeFile(tmp_path / "file", forms) as file:
        for name, tensor in reversed(made.items()):
            file.write(name, tensor)
    read = load_file(tmp_path / "file")
    assert read.keys() == made.keys()
    for name, tensor in made.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
