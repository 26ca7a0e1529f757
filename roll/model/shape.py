"""The shape of a model: what of it its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from roll.config.schema import LoraConfig
from roll.model.lora import inject, is_adapter
from roll.model.routing import routers_of


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    output: int
    """Parameters of the output layer; a reward model has none."""
    layers: int
    hidden: int
    inner: int
    """The size of an MLP's inner vector; with experts, of all that a token goes through."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    normed_heads: bool = False
    """Whether queries and keys are normalised (Qwen3)."""
    adapters: int = 0
    """Parameters of adapters, which are then all that learns."""
    divides_heads: bool = True
    """Whether `transformers` divides the heads of attention over ranks."""
    experts: int = 0
    """Of a layer; 0 for a model that is no mixture."""
    chosen: int = 0
    """Experts that a token is sent to, in all layers together."""
    routed: int = 0
    """With experts, the size of a row's copies for all experts that it goes to."""
    routed_tensors: int = 4
    """Tensors of that size in a layer with experts, at most: the rows sorted by expert, what experts make of them,
    weighted, and in the order of the rows again."""
    swaps_heads: bool = False
    """Whether ranks exchange rows for heads around attention, and its outputs once more as rows."""

    @classmethod
    def of(cls, config: PretrainedConfig, adapters: LoraConfig | None = None) -> ModelShape:
        """Counted on a model without storage."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            if adapters is not None:
                inject(model, adapters)
        return cls.of_model(model)

    @classmethod
    def of_classifier(cls, config: PretrainedConfig) -> ModelShape:
        """Of a reward model."""
        with torch.device("meta"):
            return cls.of_model(AutoModelForSequenceClassification.from_config(config))

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelShape:
        config, words = model.config, model.get_output_embeddings()
        heads = config.num_attention_heads
        routers: list[Any] = routers_of(model)
        adapters = sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
        return cls(
            parameters=sum(p.numel() for p in model.parameters()) - adapters,
            output=0 if words is None else words.weight.numel(),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=_inner(config),
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim_of(config),
            vocab=config.vocab_size,
            normed_heads=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
            adapters=adapters,
            divides_heads=any(".q_proj" in name for name in model.tp_plan or {}),
            experts=max((router.num_experts for router in routers), default=0),
            chosen=sum(router.top_k for router in routers),
            routed=config.hidden_size * config.num_experts_per_tok if names_experts(config) else 0,
        )

    @property
    def trained(self) -> int:
        """Parameters that learn."""
        return self.adapters or self.parameters

    @property
    def trained_output(self) -> int:
        """Those of the output layer."""
        return 0 if self.adapters else self.output

    @property
    def queries(self) -> int:
        """The size of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim


def head_dim_of(config: PretrainedConfig) -> int:
    """The size of a head, the larger of keys and values where they differ (DeepSeek)."""
    if getattr(config, "qk_nope_head_dim", None):
        return int(max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim))
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def names_experts(config: PretrainedConfig) -> bool:
    """Whether the model may be a mixture of experts."""
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _inner(config: PretrainedConfig) -> int:
    dense: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if not names_experts(config):
        return dense
    of_one: int = getattr(config, "moe_intermediate_size", None) or dense
    shared: int = getattr(config, "shared_expert_intermediate_size", None) or 0
    active: int = config.num_experts_per_tok + (getattr(config, "n_shared_experts", None) or 0)
    return of_one * active + shared
