"""The value head of a critic: one number from a hidden state."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.model.shard_loading import SafeFolder, copy_from, load_shards

HEAD_FILE = "head.safetensors"


class ValueModel(nn.Module):
    """A decoder with a head of one output, in fp32 (for an fp64 decoder, in fp64), initialised to zero, so that all
    values are 0 before training. The decoder's output layer is frozen unless it is tied to the embedding."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        dtype = torch.promote_types(model.dtype, torch.float32)
        self.head = nn.Linear(int(model.config.hidden_size), 1, device=model.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        output_layer = model.get_output_embeddings()
        tied = output_layer.weight is model.get_input_embeddings().weight
        if not tied:
            output_layer.requires_grad_(False)

    def read(self, hidden: Tensor) -> Tensor:
        """hidden [rows, dim] → [rows], in the head's precision"""
        value: Tensor = self.head(hidden.to(self.head.weight.dtype))[:, 0]
        return value

    def save(self, folder: Path) -> None:
        """Writes the decoder as `transformers` does to `model`, and the head beside it."""
        self.model.save_pretrained(folder / "model", max_shard_size="1TB")
        save_file(self.head.state_dict(), folder / HEAD_FILE)

    def load(self, folder: Path) -> None:
        """Reads a checkpoint written by `save` into the existing storage of the parameters, of which this process may
        have shards."""
        load_shards(self.model, folder / "model")
        saved = SafeFolder(folder, HEAD_FILE)
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                copy_from(saved, name, parameter)
