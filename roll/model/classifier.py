"""Reward models: a decoder with a head of one output, as `transformers` saves `AutoModelForSequenceClassification`.

Invariants: a missing head is an error, never initialised at random; the score is what the class itself reads, the output
at the last token that is not padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from roll.config.errors import UserError
from roll.data.tokenlog import IntArray
from roll.model.find import ModelSource
from roll.model.loading import from_pretrained, load_model_config
from roll.model.rope import fix_angles

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_KIND = "ForSequenceClassification"
_REMEDY = (
    "write a folder or hub id of a decoder with a head of one output (AutoModelForSequenceClassification with "
    "num_labels=1)"
)


def load_classifier_config(source: ModelSource) -> PretrainedConfig:
    """The config of a reward model, checked; without its weights."""
    from transformers import AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification

    if source.adapters:
        raise UserError(f"model: {source.name!r} holds adapters, which score nothing by themselves: {_REMEDY}")
    shape = load_model_config(source)
    if source.location is None or not any(name.endswith(_KIND) for name in shape.architectures or ()):
        raise UserError(f"model: {source.name!r} has no head that scores: {_REMEDY}")
    if shape.num_labels != 1:
        raise UserError(f"model: {source.name!r} has a head of {shape.num_labels} outputs: {_REMEDY}")
    kind = AutoModelForSequenceClassification._model_mapping[type(shape)]
    if not issubclass(kind, GenericForSequenceClassification):
        raise UserError(f"model: {source.name!r} is a {kind.__name__}, which is read in another way: {_REMEDY}")
    return shape


def load_classifier(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """The model and its head (`score`), with its attention replaced by ROLL's plans."""
    from transformers import AutoModelForSequenceClassification

    from roll.model import attention

    load_classifier_config(source)
    loader = AutoModelForSequenceClassification
    model, found = from_pretrained(loader, source, dtype=dtype, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"model: {source.name!r} has no weights of {missing[0]!r}: {_REMEDY}")
    fix_angles(model)
    model.set_attn_implementation(attention.NAME)
    return model.eval().requires_grad_(False)


def without_padding(ids: IntArray, shape: PretrainedConfig) -> IntArray:
    """The tokens up to the one whose output is the score: without padding at the end, which some models also use as the
    end of a turn."""
    tokens = np.flatnonzero(ids != (-1 if shape.pad_token_id is None else shape.pad_token_id))
    return ids[: tokens[-1] + 1] if len(tokens) else ids[:1]
