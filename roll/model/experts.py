"""How the experts of a mixture are computed, for a user of a model that others use too."""

from __future__ import annotations

import copy
from itertools import chain

from torch import nn
from transformers import PreTrainedModel


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold the experts of a layer together, as `transformers` computes them by name."""
    return [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "num_experts")]


def with_experts(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model with its experts computed by the implementation of this name: the same parameters and buffers, in modules
    of their own, so that whoever else has the model computes as before. A model without experts is returned as it is."""
    if not experts_of(model):
        return model
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, dict(shared))
    twin.set_experts_implementation(name)
    return twin
