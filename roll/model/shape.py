"""The shape of a model: what of it its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from roll.config.schema import LoraConfig
from roll.model.lora import inject


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    output: int
    """Parameters of the output layer."""
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    normed_heads: bool = False
    """Whether queries and keys are normalised (Qwen3)."""
    adapters: int = 0
    """Parameters of the trainer's adapters, which are then all that learns; 0 without."""

    @property
    def trained(self) -> int:
        """Parameters that have gradients and moments."""
        return self.adapters or self.parameters

    @classmethod
    def of(cls, config: PretrainedConfig, lora: LoraConfig | None = None) -> ModelShape:
        """Counted on a model without storage."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            plain = cls.of_model(model)
            if lora is None:
                return plain
            inject(model, lora)
        return replace(plain, adapters=sum(p.numel() for p in model.parameters() if p.requires_grad))

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelShape:
        config = model.config
        heads = config.num_attention_heads
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            output=model.get_output_embeddings().weight.numel(),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            normed_heads=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        )

    @property
    def queries(self) -> int:
        """The size of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim
