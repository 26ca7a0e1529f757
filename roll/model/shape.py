"""The shape of a model: the sizes that its memory depends on."""

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
    """Parameters of the output layer; 0 for a reward model."""
    layers: int
    hidden: int
    inner: int
    """Inner size of the MLP; with experts, the sum over all experts that a token uses."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    normed_heads: bool = False
    """Whether queries and keys are normalised (Qwen3)."""
    adapters: int = 0
    """Parameters of adapters, which are then the only trained ones."""
    divides_heads: bool = True
    """Whether `transformers` divides the attention heads over ranks."""
    experts: int = 0
    """Experts per layer; 0 for a model without experts."""
    chosen: int = 0
    """Experts that a token is routed to, in all layers together."""
    routed: int = 0
    """With experts, the size of a packed token's copies for all its experts."""
    routed_tensors: int = 4
    """Largest number of tensors of that size in a layer with experts: tokens sorted by expert, the experts' outputs,
    weighted, and in the original order again."""
    swaps_heads: bool = False
    """Whether ranks exchange tokens for heads around attention, and its outputs back."""

    @classmethod
    def of(cls, config: PretrainedConfig, adapters: LoraConfig | None = None) -> ModelShape:
        """Counted on a model on the meta device."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            if adapters is not None:
                inject(model, adapters)
        return cls.of_model(model)

    @classmethod
    def of_classifier(cls, config: PretrainedConfig) -> ModelShape:
        """The shape of a reward model."""
        with torch.device("meta"):
            return cls.of_model(AutoModelForSequenceClassification.from_config(config))

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelShape:
        config, output_layer = model.config, model.get_output_embeddings()
        heads = config.num_attention_heads
        routers: list[Any] = routers_of(model)
        adapters = sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
        return cls(
            parameters=sum(p.numel() for p in model.parameters()) - adapters,
            output=0 if output_layer is None else output_layer.weight.numel(),
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
        """Trained parameters."""
        return self.adapters or self.parameters

    @property
    def trained_output(self) -> int:
        """Trained parameters of the output layer."""
        return 0 if self.adapters else self.output

    @property
    def queries(self) -> int:
        """The size of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim


def head_dim_of(config: PretrainedConfig) -> int:
    """The size of a head; the larger one of keys and values if they differ (DeepSeek)."""
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
