"""Runs a decoder's layers over the rows of a step: by the model's own code, or by fused kernels.

Any decoder of `transformers` runs by its own code. For models built like Llama (RMS norms, rotary positions, a gated MLP
or a mixture of such experts), a handful of kernels per layer use the same parameters, after a comparison of both on a few
tokens. Two ways of rounding may route a token to different experts if two experts have nearly the same probability, so
the comparison makes the kernels use the experts that the model's own code chose.

On CUDA, the engine's kernels compute experts in both cases: a captured step cannot ask the host how many rows an expert
gets.
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

from roll.engine.attention_params import AttentionParams, attention_params_of
from roll.engine.paged.kv_cache import BLOCK, DecodeMetadata, PagedKVCache, PagedPlan, PrefillMetadata
from roll.engine.paged.step_inputs import CACHE_POSITION, HEADER, POSITION, TOKEN, InputTable, StepInputs
from roll.engine.routes import RouteRecorder
from roll.model.attention import forward_rows
from roll.model.experts import experts_of, with_experts
from roll.model.fuse_params import fuse_parameters
from roll.model.shape import ModelShape

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_PROBE = 40
"""Number of tokens on which both are compared."""

ROUTED_ROWS = 16384
"""Most rows of a pass whose routes are recorded; a larger pass records none."""

_log = logging.getLogger(__name__)


class Decoder(Protocol):
    routes: Tensor | None
    """Where the decoder records routes: the experts of row i of the last pass, for every layer with experts. [rows or
    more, layers, chosen] or [rows, layers · chosen]"""

    def hidden(self, rows: StepInputs, last: Tensor, plan: PagedPlan) -> Tensor:
        """The last hidden state of every row, after the final norm. [rows, hidden]"""
        ...


class PlainDecoder:
    """The model's own code."""

    def __init__(self, model: PreTrainedModel, record_routes: bool = False) -> None:
        self.routes: Tensor | None = None
        self._model = _capturable(model)
        self._recorder = RouteRecorder(self._model)
        self._records = record_routes

    def hidden(self, rows: StepInputs, last: Tensor, plan: PagedPlan) -> Tensor:
        if not self._records:
            return self._forward(rows, last, plan)
        hidden, self.routes = self.recorded(rows, last, plan)
        return hidden

    def recorded(self, rows: StepInputs, last: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        """As `hidden`, and the routes of the rows, [rows, layers · chosen]."""
        return self._recorder.record(lambda: self._forward(rows, last, plan))

    def _forward(self, rows: StepInputs, last: Tensor, plan: PagedPlan) -> Tensor:
        return forward_rows(self._model, rows.ids(last), rows.positions.long(), plan)


def _capturable(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with expert layers that can be captured in a CUDA graph."""
    found: list[Any] = experts_of(model)
    if not found or next(model.parameters()).device.type != "cuda":
        return model
    plain = all(each.has_gate and each.is_concatenated and not each.has_bias and not each.is_transposed for each in found)
    if plain and model.config.hidden_act == "silu":
        from roll.engine.paged import expert_products

        return with_experts(model, expert_products.NAME)
    # In other precisions, grouped products synchronise with the host.
    return model if model.dtype == torch.bfloat16 else with_experts(model, "batched_mm")


@dataclass(frozen=True)
class _Dense:
    """A gated MLP."""

    gate_up: Tensor
    """The matrices of gate and up."""
    down: Tensor


@dataclass(frozen=True)
class _Mixture:
    """A router and its experts."""

    number: int
    """Index among the layers with experts."""
    router: Tensor
    chosen: int
    normalised: bool
    """Whether the weights of the chosen experts sum to one."""
    weights: torch.dtype
    """Precision of the chosen experts' weights."""
    gate_up: Tensor
    """[experts, 2 · inner, hidden]"""
    down: Tensor
    """[experts, hidden, inner]"""


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    """Weight of the norm before attention."""
    qkv: Tensor
    """The matrices of queries, keys and values, concatenated."""
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    """Weights of the per-head norms of queries and keys."""
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    """Weight of the norm before the MLP."""
    inner: _Dense | _Mixture
    attention: AttentionParams


class FusedDecoder:
    """Nine kernels per layer, ten with experts. Holds views of the model's parameters, so updates in place take effect at
    once."""

    def __init__(self, model: PreTrainedModel, positions: int, record_routes: bool = False) -> None:
        decoder: Any = model.get_decoder()
        self._heads = int(model.config.num_attention_heads)
        self._embeddings: Tensor = decoder.embed_tokens.weight.detach()
        self._layers: list[_Layer] = []
        self._mixtures: list[_Mixture] = []
        for layer in decoder.layers:
            inner = _inner(layer.mlp, len(self._mixtures), model.config.model_type)
            self._layers.append(_layer(layer, inner))
            if isinstance(inner, _Mixture):
                self._mixtures.append(inner)
        self._final: Tensor = decoder.norm.weight.detach()
        self._eps = float(decoder.norm.variance_epsilon)
        device = self._embeddings.device
        cosines, sines = decoder.rotary_emb(self._embeddings[:1, None], torch.arange(positions, device=device)[None])
        self._cosines, self._sines = cosines[0].contiguous(), sines[0].contiguous()
        self.routes: Tensor | None = None
        if record_routes and self._mixtures:
            size = (ROUTED_ROWS, len(self._mixtures), self._mixtures[0].chosen)
            self.routes = torch.zeros(size, dtype=torch.int32, device=device)
        self.given: Tensor | None = None
        """If set, the experts that the rows of the next pass are routed to, instead of those that the routers would
        choose. [rows, layers, chosen], int32"""

    @property
    def mixtures(self) -> int:
        """Number of layers with experts."""
        return len(self._mixtures)

    def hidden(self, rows: StepInputs, last: Tensor, plan: PagedPlan) -> Tensor:
        from roll.engine.paged import layer_kernels as kernels

        _, stream = kernels.embed(rows, last, self._embeddings)
        counts = self._counts()
        delta: Tensor | None = None
        shares: Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = plan.cache.keys[number], plan.cache.values[number]
            normed = kernels.add_norm(stream, delta, layer.input_norm, self._eps, shares)
            qkv = linear(normed, layer.qkv, layer.qkv_bias)
            kernels.rotate_and_store(
                qkv, layer.norms, self._eps, self._cosines, self._sines, rows, keys, values, self._heads
            )
            attended = plan.read(number, qkv, self._heads, layer.attention)
            normed = kernels.add_norm(
                stream, linear(attended, layer.output, layer.output_bias), layer.post_norm, self._eps
            )
            if isinstance(layer.inner, _Mixture):
                delta, shares = self._expert_outputs(layer.inner, normed, counts)
            else:
                delta, shares = linear(kernels.gate(linear(normed, layer.inner.gate_up)), layer.inner.down), None
        return kernels.add_norm(stream, delta, self._final, self._eps, shares)

    def _counts(self) -> Tensor:
        """Zeros for the row counts of all experts in all layers: one launch."""
        experts = max((len(mixture.gate_up) for mixture in self._mixtures), default=0)
        return torch.zeros(len(self._mixtures), experts, dtype=torch.int32, device=self._final.device)

    def _expert_outputs(self, mixture: _Mixture, normed: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of each row's experts, [rows · chosen, hidden], and their weights, [rows, chosen]."""
        from roll.engine.paged import expert_kernels as kernels

        number, recorded = mixture.number, self.routes is not None and len(normed) <= ROUTED_ROWS
        routes = self.routes[:, number] if recorded and self.routes is not None else None
        given = self.given[:, number].contiguous() if self.given is not None else None
        logits = linear(normed, mixture.router)
        how = (mixture.chosen, mixture.normalised, mixture.weights)
        lines, weights = kernels.route(logits, *how, counts[number], routes, given)
        return kernels.experts(normed, lines, mixture.gate_up, mixture.down), weights


def _layer(layer: Any, inner: _Dense | _Mixture) -> _Layer:
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biased = parts[0].bias is not None
    norms = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach()) if hasattr(attention, "q_norm") else None
    return _Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=fuse_parameters([part.weight for part in parts]),
        qkv_bias=fuse_parameters([part.bias for part in parts]) if biased else None,
        norms=norms,
        output=attention.o_proj.weight.detach(),
        output_bias=attention.o_proj.bias.detach() if attention.o_proj.bias is not None else None,
        post_norm=layer.post_attention_layernorm.weight.detach(),
        inner=inner,
        attention=attention_params_of(attention, float(attention.scaling)),
    )


def _inner(inner: Any, number: int, family: str) -> _Dense | _Mixture:
    """`number`: how many layers before this one have experts."""
    if not hasattr(inner, "experts"):
        return _Dense(fuse_parameters([inner.gate_proj.weight, inner.up_proj.weight]), inner.down_proj.weight.detach())
    router, experts = inner.gate, inner.experts
    return _Mixture(
        number,
        router.weight.detach(),
        int(router.top_k),
        normalised=bool(getattr(router, "norm_topk_prob", True)),
        weights=torch.float32 if family == "mixtral" else router.weight.dtype,  # each family rounds them differently
        gate_up=experts.gate_up_proj.detach(),
        down=experts.down_proj.detach(),
    )


def make_decoder(model: PreTrainedModel, positions: int, record_routes: bool = False) -> Decoder:
    """The fastest decoder that agrees with the model's own code. `positions` is the longest sequence it supports. With
    `record_routes` it records the experts of every row."""
    plain = PlainDecoder(model, record_routes)
    device = next(model.parameters()).device
    if device.type != "cuda" or not _is_fusible(model):
        return plain
    fused = FusedDecoder(model, positions, record_routes)
    expected, found = _probes(plain, fused, model, device)
    allowed = 1e-3 if expected.dtype == torch.float32 else 0.1
    error = float((found - expected).float().norm() / expected.float().norm())
    if not error <= allowed:
        _log.warning("the engine's kernels differ from %s by %.3g: its own code is used", type(model).__name__, error)
        return plain
    return fused


def _is_fusible(model: PreTrainedModel) -> bool:
    """Whether the model is built like the families that the kernels support."""
    config, decoder = model.config, model.get_decoder()
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in _FAMILIES or rope.get("rope_type", "default") not in _STATIC_ROPE:
        return False
    if config.hidden_act != "silu" or float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        return False
    layers: Any = decoder.layers
    products = [getattr(layers[0].self_attn, f"{name}_proj") for name in "qkvo"]
    dense = [layer.mlp for layer in layers if not hasattr(layer.mlp, "experts")]
    inner = [getattr(mlp, f"{name}_proj") for mlp in dense for name in ("gate", "up", "down")]
    plain = all(type(module) is nn.Linear for module in products + inner)  # false for layers with adapters
    return plain and all(module.bias is None for module in inner)


@torch.inference_mode()
def _probes(
    plain: PlainDecoder, fused: FusedDecoder, model: PreTrainedModel, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Hidden states of a few tokens, most of them prefilled, the last 8 as single rows: by the model's own code, and by
    the kernels with the experts that the model's own code chose."""
    shape = ModelShape.of_model(model)
    dtype = next(model.parameters()).dtype
    model_cache, kernel_cache = (PagedKVCache(shape, _PROBE // BLOCK + 2, dtype, device) for _ in range(2))
    last = torch.zeros(1, dtype=torch.int32, device=device)
    tokens = np.arange(1, _PROBE + 1) * 7919 % shape.vocab
    expected: list[Tensor] = []
    found: list[Tensor] = []
    cut = _PROBE - 8
    for start, end in ((0, cut), (cut, _PROBE)):
        rows = _input_rows(tokens, start, end, device)

        def plan(cache: PagedKVCache, rows: StepInputs = rows, whole: bool = start == 0) -> PagedPlan:
            return _span(cache, rows, cut, cut, device) if whole else DecodeMetadata(cache, rows)

        if fused.mixtures:
            hidden, routes = plain.recorded(rows, last, plan(model_cache))
            fused.given = routes.int().view(rows.count, fused.mixtures, -1)
        else:
            hidden = plain.hidden(rows, last, plan(model_cache))
        expected.append(hidden)
        found.append(fused.hidden(rows, last, plan(kernel_cache)))
    fused.given = None
    return torch.cat(expected), torch.cat(found)


def _input_rows(tokens: Any, start: int, end: int, device: torch.device) -> StepInputs:
    """Inputs for a sequence that is alone in its cache, in blocks 1 and up."""
    blocks = -(-len(tokens) // BLOCK)
    table: InputTable = np.zeros((HEADER + blocks, end - start), np.int32)
    table[POSITION] = np.arange(start, end)
    table[CACHE_POSITION] = BLOCK + table[POSITION]
    table[TOKEN] = tokens[start:end]
    table[HEADER:] = np.arange(1, blocks + 1)[:, None]
    return StepInputs(torch.from_numpy(table).to(device))


def _span(cache: PagedKVCache, rows: StepInputs, count: int, keys: int, device: torch.device) -> PrefillMetadata:
    return PrefillMetadata(cache, rows, [(count, keys)], torch.arange(BLOCK, BLOCK + keys, device=device))


@torch.inference_mode()
def log_probs_of(
    decoder: Decoder, logits_of: Callable[[Tensor], Tensor], shape: ModelShape, ids: Any, like: Tensor
) -> Tensor:
    """fp32 log-probs of the tokens after the first, computed in a separate cache."""
    cache = PagedKVCache(shape, -(-len(ids) // BLOCK) + 1, like.dtype, like.device)
    last = torch.zeros(1, dtype=torch.int32, device=like.device)
    rows = _input_rows(ids, 0, len(ids), like.device)
    hidden = decoder.hidden(rows, last, _span(cache, rows, len(ids), len(ids), like.device))
    found = torch.log_softmax(logits_of(hidden), dim=-1)
    targets = torch.from_numpy(np.asarray(ids[1:], np.int64)).to(like.device)
    return found[:-1].gather(1, targets[:, None])[:, 0].cpu()
