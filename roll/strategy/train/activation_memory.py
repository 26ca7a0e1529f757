"""Activation memory of a trainer's passes for a decoder of the Llama kind, tensor by tensor.

Sizes are per packed token ("row"). In every layer it keeps two norms (the input in fp32, the normalised and the scaled
vector), the attention's output, and gate, activation, up and product of the MLP. Attention keeps its queries and outputs,
the keys and values gathered along every sequence's path, and the sums of its exponentials. If attention is padded, the
spans that share a prefix have a mask, which all layers share. With activation checkpointing, a packed token keeps each
layer's input, and one layer at a time is there in full. A compiled layer keeps less: of a norm its input and output, of
the MLP gate, up and product. A layer with experts also keeps the tokens sorted by expert and the experts' outputs, once
per chosen expert.

Tests compare these sizes with what autograd keeps on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll.model.shape import ModelShape
from roll.strategy.train.logprobs import CHUNK_ELEMENTS
from roll.strategy.train.tree_attention import attends_in, attends_varlen
from roll.strategy.train.vocabulary import BLOCK_ELEMENTS


@dataclass(frozen=True)
class Spans:
    """Attentions of one size: `count` of them, each of `queries` new packed tokens over the `keys` packed tokens of its
    path."""

    count: int
    queries: int
    keys: int

    @property
    def pairs(self) -> int:
        return self.count * self.queries * self.keys


@dataclass(frozen=True)
class PackedSize:
    """The size of a packed micro-batch: packed tokens, those from which a token is predicted, and the attentions over
    them."""

    rows: int
    predicting: int
    spans: tuple[Spans, ...]

    @property
    def masked(self) -> list[Spans]:
        """The spans that share a prefix."""
        return [span for span in self.spans if span.queries < span.keys]


@dataclass(frozen=True)
class Footprint:
    model: ModelShape
    dtype: torch.dtype
    device: str
    """`cpu` or `cuda`."""
    compiled: bool = False
    """Whether the decoder's layers are compiled."""

    @property
    def varlen(self) -> bool:
        return attends_varlen(self.device, self.dtype)

    def row_bytes(self, *, checkpointed: bool) -> int:
        """Bytes of a packed token that shares nothing: what it keeps until its backward pass, and its part of the current
        layer."""
        layer = self._row_in_a_layer() + self._attention_bytes(Spans(1, 1, 1))
        if checkpointed:
            return self.model.layers * self._input_bytes() + 2 * layer
        return (self.model.layers + 1) * layer

    def kept_bytes(self, size: PackedSize, *, checkpointed: bool = False) -> int:
        """Bytes that the decoder's layers keep in the forward pass of a micro-batch for its backward pass."""
        layer = size.rows * self._input_bytes() if checkpointed else self.layer_bytes(size)
        return self.model.layers * layer + self.mask_bytes(size)

    def layer_bytes(self, size: PackedSize) -> int:
        """Bytes that one layer keeps without checkpointing."""
        return size.rows * self._row_in_a_layer() + sum(self._attention_bytes(span) for span in size.spans)

    def ends_bytes(self, size: PackedSize) -> int:
        """Bytes kept before and after the layers, without the logits: rotary angles, the last norm and the hidden states
        that tokens are predicted from."""
        model, item = self.model, self.dtype.itemsize
        return size.rows * (self._norm_bytes() + 2 * item * model.head_dim) + size.predicting * item * model.hidden

    def mask_bytes(self, size: PackedSize) -> int:
        return 0 if self.varlen else sum(span.pairs * self._item(span) for span in size.masked)

    def working_bytes(self, size: PackedSize) -> int:
        """Working memory of one layer that it does not keep: hidden states, and the larger of attention and MLP."""
        model, item = self.model, self.dtype.itemsize
        return self.attending_bytes(size) + max(0, size.rows * 3 * item * model.inner - self._attention_working(size))

    def attending_bytes(self, size: PackedSize) -> int:
        """Working memory of its attention, with hidden states."""
        return size.rows * (2 * self.dtype.itemsize + 4) * self.model.hidden + self._attention_working(size)

    def dispatching_bytes(self, size: PackedSize) -> int:
        """Working memory of a layer with experts at the peak of its forward pass, besides what it keeps: two hidden
        states, and copies of packed tokens for their experts."""
        model = self.model
        return size.rows * self.dtype.itemsize * (2 * model.hidden + (model.routed_tensors - 2) * model.routed)

    def routed_bytes(self, size: PackedSize) -> int:
        """Working memory of a layer with experts in a pass that keeps nothing."""
        model = self.model
        return size.rows * self.dtype.itemsize * (2 * model.hidden + model.routed_tensors * model.routed)

    def inner_bytes(self, size: PackedSize) -> int:
        """Bytes that a layer keeps of its MLP or its experts."""
        model = self.model
        return size.rows * self.dtype.itemsize * ((3 if self.compiled else 4) * model.inner + 2 * model.routed)

    def norming_bytes(self, size: PackedSize) -> int:
        """Working memory of the backward pass of a norm that is not compiled: five hidden states in fp32 and the
        gradient, minus the two kept tensors that are already freed."""
        return size.rows * self.model.hidden * (5 * 4 - self.dtype.itemsize)

    def _attention_working(self, size: PackedSize) -> int:
        model, attention = self.model, 0
        for span in size.spans:
            wide = self._item(span)
            gathered = 4 if self.varlen and size.masked else wide
            attention += span.count * 2 * (span.queries * wide * model.queries + span.keys * gathered * model.keys)
        return attention

    def chunk_logits(self, predicting: int) -> tuple[int, bool]:
        """Logits held at once if tokens are predicted from `predicting` packed tokens, and whether they are computed in
        several chunks."""
        rows = max(1, CHUNK_ELEMENTS[self.device] // self.model.vocab)
        return min(rows, predicting) * self.model.vocab, predicting > rows

    def logits_bytes(self, logits: int) -> int:
        """Bytes of this many logits while they are turned into log-probs. Plain torch also holds one block of them scaled
        in fp32, with its exponentials."""
        block = 0 if self.device == "cuda" else min(logits, max(BLOCK_ELEMENTS, self.model.vocab))
        return logits * self.dtype.itemsize + 8 * block

    def _row_in_a_layer(self) -> int:
        """Bytes per packed token of a layer, without the attention's own queries, keys and outputs."""
        model, item = self.model, self.dtype.itemsize
        row = 2 * (2 * item * model.hidden if self.compiled else self._norm_bytes())
        row += item * ((3 if self.compiled else 4) * model.inner + 2 * model.routed)
        # outputs are exchanged back or selected, so the output projection gets a copy
        if model.swaps_heads or not self.varlen:
            row += item * model.queries
        if model.normed_heads:
            row += (item if self.compiled else 4 + item) * (model.queries + model.keys)
        return row

    def _norm_bytes(self) -> int:
        return (4 + 2 * self.dtype.itemsize) * self.model.hidden

    def _attention_bytes(self, span: Spans) -> int:
        """Queries and outputs, keys and values, and the sums of exponentials."""
        model, item = self.model, self._item(span)
        query, key = 2 * item * model.queries + 4 * model.heads, 2 * item * model.keys
        return span.count * (span.queries * query + span.keys * key)

    def _item(self, span: Spans) -> int:
        """Bytes per number in the attention."""
        return self.dtype.itemsize if self.varlen else attends_in(self.device, self.dtype, span.keys).itemsize

    def _input_bytes(self) -> int:
        return self.dtype.itemsize * self.model.hidden
