"""Chooses how the experts of an MoE model are computed, for one of several users of the same model."""

from __future__ import annotations

import copy
from itertools import chain

from torch import nn
from transformers import PreTrainedModel


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer, whose implementation `transformers` selects by name."""
    return [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "num_experts")]


def with_experts(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model with its experts computed by the implementation of this name. Parameters and buffers are shared, modules
    are new, so that other users of the model compute as before. A model without experts is returned unchanged."""
    if not experts_of(model):
        return model
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, dict(shared))
    twin.set_experts_implementation(name)
    return twin
