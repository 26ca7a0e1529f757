"""A decoder's forward pass for CPUs with hidden states as columns: [features, rows], so that a product is weight @
hidden.

CPU matrix libraries repack the right operand of a product before they multiply. With rows of tokens on the left, as in
`transformers`, that is the weight in every call; with columns it is the small hidden state. The weights are the model's
own, read in place, and the outputs of several products are written next to each other without a copy.

Invariant: the result equals that of the model's own forward pass up to the order of sums. In bf16 it is rounded where the
model's own code rounds, although fewer roundings would be more accurate: the trainer runs the model's own code, and the
engine's log-probs should differ from the trainer's as little as possible. `supported` refuses models whose layers are not
known to be of the plain kind; they run by their own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.model.attention import AttentionPlan

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""Decoder families with layers of norm, attention, norm and gated MLP, and the same attribute names in all of them."""


def supported(model: PreTrainedModel) -> bool:
    """Whether the model is one of the plain families, on a CPU, with no wrapper or hook on its linear layers."""
    layers, config = getattr(model.get_decoder(), "layers", None), model.config
    if config.model_type not in _FAMILIES or not layers or next(model.parameters()).device.type != "cpu":
        return False
    linears = [model.get_output_embeddings(), *(m for layer in layers for m in _linears(layer))]
    return all(type(m) is nn.Linear and not m._forward_hooks and not m._forward_pre_hooks for m in linears)


def _linears(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    names = [(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    return [getattr(part, name) for part, name in names]


def forward_columns(model: PreTrainedModel, ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """The last hidden state of every row. ids, positions [rows] → [rows, hidden], a view of the columns."""
    decoder: Any = model.get_decoder()
    embedded = decoder.embed_tokens(ids)
    cos, sin = decoder.rotary_emb(embedded, positions[None])
    half = cos.shape[-1] // 2
    rotary = cos[0, :, :half].t().contiguous(), sin[0, :, :half].t().contiguous()  # [dim / 2, rows]
    hidden = embedded.t().contiguous()
    for layer in decoder.layers:
        _attend(layer.self_attn, _normed(layer.input_layernorm, hidden), hidden, rotary, plan)
        _gate(layer.mlp, _normed(layer.post_attention_layernorm, hidden), hidden)
    return _normed(decoder.norm, hidden).t()


def column_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """[rows, hidden] → fp32 logits [rows, vocab]."""
    return _product(model.get_output_embeddings(), hidden.t().contiguous()).t().contiguous().float()


def _attend(attention: Any, normed: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan) -> None:
    """Adds the attention's output to the hidden state. Queries, keys and values are computed into one buffer."""
    dim, rows = attention.head_dim, normed.shape[1]
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [part.out_features for part in parts]
    qkv = normed.new_empty(sum(sizes), rows)
    for part, out in zip(parts, torch.split(qkv, sizes), strict=True):
        _product(part, normed, out)
    heads = qkv.view(-1, dim, rows)
    rotated, counts = heads[: sum(sizes[:2]) // dim], [size // dim for size in sizes]
    if hasattr(attention, "q_norm"):
        for norm, part in zip((attention.q_norm, attention.k_norm), torch.split(rotated, counts[:2]), strict=True):
            part.copy_(_normed(norm, part))
    _rotate(rotated, *rotary)
    query, key, value = torch.split(heads.permute(0, 2, 1).contiguous(), counts)  # [heads, rows, dim]
    attended = plan.attend(attention, query, key, value, attention.scaling)  # [rows, heads, dim]
    _add_product(attention.o_proj, attended.flatten(1).t().contiguous(), hidden)


def _gate(mlp: Any, normed: Tensor, hidden: Tensor) -> None:
    gate = mlp.act_fn(_product(mlp.gate_proj, normed))
    _add_product(mlp.down_proj, gate.mul_(_product(mlp.up_proj, normed)), hidden)


def _normed(norm: Any, columns: Tensor) -> Tensor:
    """RMS norm over the features. [..., features, rows]"""
    wide = columns.float()
    scale = torch.rsqrt(wide.square().mean(-2, keepdim=True) + norm.variance_epsilon)
    return (wide * scale).to(columns.dtype).mul_(norm.weight[:, None])


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place. heads [heads, dim, rows], cos and sin [dim / 2, rows]"""
    first, second = heads.chunk(2, dim=1)
    turned = (first * cos).sub_(second * sin)
    second.mul_(cos).add_(first * sin)
    first.copy_(turned)


def _product(linear: nn.Linear, columns: Tensor, out: Tensor | None = None) -> Tensor:
    bias: Tensor | None = linear.bias
    if bias is None:
        return torch.mm(linear.weight, columns, out=out)
    return torch.addmm(bias[:, None], linear.weight, columns, out=out)


def _add_product(linear: nn.Linear, columns: Tensor, hidden: Tensor) -> None:
    hidden.add_(_product(linear, columns))
