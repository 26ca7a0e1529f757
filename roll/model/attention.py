"""Replaces the attention of any `transformers` decoder by a plan.

A forward pass of ROLL has no batch dimension and no padding: it is one row of tokens, and an `AttentionPlan` decides
which tokens attend to which keys. The trainer's plan is a tree of shared prefixes, the engine's a KV cache. The plan is
passed as a keyword argument through the model's own forward, so the model's code is used unchanged.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "roll"


class AttentionPlan(Protocol):
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [heads, rows, dim], key and value [kv_heads, rows, dim] → output [rows, heads, dim].

        `module` is the calling layer. Only a plan that must distinguish layers should read its index: a compiled layer
        that reads it is recompiled for every index.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    roll_plan: AttentionPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    return roll_plan.attend(module, query[0], key[0], value[0], scaling).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def forward_rows(model: PreTrainedModel, ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """The last hidden state of every row. ids, positions [rows] → [rows, hidden]."""
    decoder = model.get_decoder()
    output = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, roll_plan=plan)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def takes_plans(model: PreTrainedModel) -> bool:
    """Whether the model's own code calls the plan instead of attending by itself: tried on one layer on the meta
    device."""
    config = deepcopy(model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    plan = _ProbePlan()
    try:
        with torch.device("meta"):
            layer = type(model)(config)
            layer.set_attn_implementation(NAME)
            rows = torch.zeros(2, dtype=torch.int64)
            forward_rows(layer, rows, rows, plan)
    except TypeError as error:
        return "roll_plan" not in str(error)
    except Exception:  # a model that cannot be tried this way may still work, if its class claims to
        return bool(getattr(type(model), "_supports_attention_backend", False))
    return plan.called


class _ProbePlan:
    def __init__(self) -> None:
        self.called = False

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.called = True
        return query.transpose(0, 1)


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """[rows, hidden] → fp32 logits [rows, vocab]."""
    logits: Tensor = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits
