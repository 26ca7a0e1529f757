"""A decoder's layers over rows: by the model's own code, or as few kernels.

Any decoder of `transformers` runs by its own code. Of those built like Llama (RMS norms, rotary positions, a gated inner
layer) the same parameters are used by a handful of kernels a layer, after both have been compared on a few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from roll.engine.paged.pages import BLOCK, PagedPlan, Pages, RowPlan, SpanPlan
from roll.engine.paged.rows import HEADER, PLACE, POSITION, TOKEN, Rows, Sheet
from roll.engine.reading import Reading, reading_of
from roll.model.adjoin import adjoin
from roll.model.attention import forward_rows
from roll.model.shape import ModelShape

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_PROBE = 40
"""Tokens on which both ways are compared."""

_log = logging.getLogger(__name__)


class Decoder(Protocol):
    def hidden(self, rows: Rows, last: Tensor, plan: PagedPlan) -> Tensor:
        """The last hidden state of every row, normed. [rows, hidden]"""
        ...


class PlainDecoder:
    """The model's own code."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def hidden(self, rows: Rows, last: Tensor, plan: PagedPlan) -> Tensor:
        return forward_rows(self._model, rows.ids(last), rows.positions.long(), plan)


@dataclass(frozen=True)
class _Layer:
    before: Tensor
    """Weight of the norm before attention."""
    mix: Tensor
    """Queries', keys' and values' matrices, one below the other."""
    mix_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    """Of queries and keys, by head."""
    output: Tensor
    output_bias: Tensor | None
    after: Tensor
    """Weight of the norm before the inner layer."""
    widen: Tensor
    """Gate's and up's matrices."""
    narrow: Tensor
    reading: Reading


class FusedDecoder:
    """Nine kernels a layer. Holds views of the model's parameters, so new values in their storage are used at once."""

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        decoder: Any = model.get_decoder()
        self._heads = int(model.config.num_attention_heads)
        self._embeddings: Tensor = decoder.embed_tokens.weight.detach()
        self._layers = [_layer(layer) for layer in decoder.layers]
        self._final: Tensor = decoder.norm.weight.detach()
        self._eps = float(decoder.norm.variance_epsilon)
        device = self._embeddings.device
        cosines, sines = decoder.rotary_emb(self._embeddings[:1, None], torch.arange(positions, device=device)[None])
        self._cosines, self._sines = cosines[0].contiguous(), sines[0].contiguous()

    def hidden(self, rows: Rows, last: Tensor, plan: PagedPlan) -> Tensor:
        from roll.engine.paged import layer_kernels as kernels

        _, stream = kernels.embed(rows, last, self._embeddings)
        change: Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = plan.pages.keys[number], plan.pages.values[number]
            normed = kernels.add_norm(stream, change, layer.before, self._eps)
            mixed = linear(normed, layer.mix, layer.mix_bias)
            kernels.rotate_and_keep(
                mixed, layer.norms, self._eps, self._cosines, self._sines, rows, keys, values, self._heads
            )
            seen = plan.read(number, mixed, self._heads, layer.reading)
            normed = kernels.add_norm(stream, linear(seen, layer.output, layer.output_bias), layer.after, self._eps)
            change = linear(kernels.gate(linear(normed, layer.widen)), layer.narrow)
        return kernels.add_norm(stream, change, self._final, self._eps)


def _layer(layer: Any) -> _Layer:
    attention, inner = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biased = parts[0].bias is not None
    norms = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach()) if hasattr(attention, "q_norm") else None
    return _Layer(
        before=layer.input_layernorm.weight.detach(),
        mix=adjoin([part.weight for part in parts]),
        mix_bias=adjoin([part.bias for part in parts]) if biased else None,
        norms=norms,
        output=attention.o_proj.weight.detach(),
        output_bias=attention.o_proj.bias.detach() if attention.o_proj.bias is not None else None,
        after=layer.post_attention_layernorm.weight.detach(),
        widen=adjoin([inner.gate_proj.weight, inner.up_proj.weight]),
        narrow=inner.down_proj.weight.detach(),
        reading=reading_of(attention, float(attention.scaling)),
    )


def make_decoder(model: PreTrainedModel, positions: int) -> Decoder:
    """The fastest that computes what the model's own code does. `positions` is the longest sequence it will see."""
    plain = PlainDecoder(model)
    device = next(model.parameters()).device
    if device.type != "cuda" or not _is_fusible(model):
        return plain
    fused = FusedDecoder(model, positions)
    expected, found = (_probe(decoder, model, device) for decoder in (plain, fused))
    allowed = 1e-3 if expected.dtype == torch.float32 else 0.1
    error = float((found - expected).float().norm() / expected.float().norm())
    if not error <= allowed:
        _log.warning("the engine's kernels differ from %s by %.3g: its own code is used", type(model).__name__, error)
        return plain
    return fused


def _is_fusible(model: PreTrainedModel) -> bool:
    """Whether it is built like the families that the kernels are written for."""
    config, decoder = model.config, model.get_decoder()
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in _FAMILIES or rope.get("rope_type", "default") not in _STATIC_ROPE:
        return False
    if config.hidden_act != "silu" or float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        return False
    layer: Any = decoder.layers[0]
    products = [getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"]
    inner = [getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    plain = all(type(module) is nn.Linear for module in products + inner)  # not so under adapters
    return plain and all(module.bias is None for module in inner)


@torch.inference_mode()
def _probe(decoder: Decoder, model: PreTrainedModel, device: torch.device) -> Tensor:
    """Hidden states of a few tokens: most of them as a prompt, the others row by row."""
    shape = ModelShape.of_model(model)
    pages = Pages(shape, _PROBE // BLOCK + 2, next(model.parameters()).dtype, device)
    last = torch.zeros(1, dtype=torch.int32, device=device)
    tokens = np.arange(1, _PROBE + 1) * 7919 % shape.vocab
    cut = _PROBE - 8
    return torch.cat(
        [
            decoder.hidden(rows := _sheet_rows(tokens, 0, cut, device), last, _span(pages, rows, cut, cut, device)),
            decoder.hidden(rows := _sheet_rows(tokens, cut, _PROBE, device), last, RowPlan(pages, rows)),
        ]
    )


def _sheet_rows(tokens: Any, start: int, end: int, device: torch.device) -> Rows:
    """Rows of one sequence alone in its cache, in blocks 1 and on."""
    blocks = -(-len(tokens) // BLOCK)
    sheet: Sheet = np.zeros((HEADER + blocks, end - start), np.int32)
    sheet[POSITION] = np.arange(start, end)
    sheet[PLACE] = BLOCK + sheet[POSITION]
    sheet[TOKEN] = tokens[start:end]
    sheet[HEADER:] = np.arange(1, blocks + 1)[:, None]
    return Rows(torch.from_numpy(sheet).to(device))


def _span(pages: Pages, rows: Rows, count: int, keys: int, device: torch.device) -> SpanPlan:
    return SpanPlan(pages, rows, [(count, keys)], torch.arange(BLOCK, BLOCK + keys, device=device))


@torch.inference_mode()
def log_probs_of(
    decoder: Decoder, logits_of: Callable[[Tensor], Tensor], shape: ModelShape, ids: Any, like: Tensor
) -> Tensor:
    """fp32 log-probs of a sequence's tokens after the first, in a cache of its own."""
    pages = Pages(shape, -(-len(ids) // BLOCK) + 1, like.dtype, like.device)
    last = torch.zeros(1, dtype=torch.int32, device=like.device)
    rows = _sheet_rows(ids, 0, len(ids), like.device)
    hidden = decoder.hidden(rows, last, _span(pages, rows, len(ids), len(ids), like.device))
    found = torch.log_softmax(logits_of(hidden), dim=-1)
    targets = torch.from_numpy(np.asarray(ids[1:], np.int64)).to(like.device)
    return found[:-1].gather(1, targets[:, None])[:, 0].cpu()
