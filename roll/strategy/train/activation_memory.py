"""What a trainer's pass keeps and works in, for a decoder of the Llama kind, tensor by tensor.

A row is a token of a packed micro-batch. In every layer it keeps two norms (the input in fp32, the normalised and the
scaled vector), the attention's output, and gate, activation, up and product of the MLP. An attention keeps its queries
and outputs, the keys and values gathered along every sequence's path, and the sums of its exponentials. Where attention
is padded, the spans that share a prefix have a mask, once for all layers. With checkpointing a row keeps each layer's
input, and one layer at a time is there in full. A compiled layer keeps less: of a norm what went in and what came out, of
the MLP gate, up and product. A layer with experts also keeps the rows that were sorted by expert and what experts made of
them, each as often as a row has experts.

Tests compare the sizes with what autograd keeps on a CPU.
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
    """Attentions of one size: `count` of them, each of `queries` new rows over `keys` rows of its path."""

    count: int
    queries: int
    keys: int

    @property
    def pairs(self) -> int:
        return self.count * self.queries * self.keys


@dataclass(frozen=True)
class PackedSize:
    """The size of a packed micro-batch: distinct rows, those a token is predicted from, and the attentions over them."""

    rows: int
    predicting: int
    spans: tuple[Spans, ...]

    @property
    def masked(self) -> list[Spans]:
        """Those that share a prefix."""
        return [span for span in self.spans if span.queries < span.keys]


@dataclass(frozen=True)
class Footprint:
    model: ModelShape
    dtype: torch.dtype
    device: str
    """`cpu` or `cuda`."""
    compiled: bool = False
    """Whether the decoder's layers are."""

    @property
    def varlen(self) -> bool:
        return attends_varlen(self.device, self.dtype)

    def row_bytes(self, *, checkpointed: bool) -> int:
        """What a row that shares nothing keeps until its backward pass, and its part of the layer at work."""
        layer = self._row_in_a_layer() + self._attention_bytes(Spans(1, 1, 1))
        if checkpointed:
            return self.model.layers * self._input_bytes() + 2 * layer
        return (self.model.layers + 1) * layer

    def kept_bytes(self, size: PackedSize, *, checkpointed: bool = False) -> int:
        """What the decoder's layers keep in the forward pass of a micro-batch for its backward pass."""
        layer = size.rows * self._input_bytes() if checkpointed else self.layer_bytes(size)
        return self.model.layers * layer + self.mask_bytes(size)

    def layer_bytes(self, size: PackedSize) -> int:
        """What one layer keeps in full."""
        return size.rows * self._row_in_a_layer() + sum(self._attention_bytes(span) for span in size.spans)

    def ends_bytes(self, size: PackedSize) -> int:
        """What is kept before and after the layers, without the logits: angles, the last norm and the rows it is read
        from."""
        model, item = self.model, self.dtype.itemsize
        return size.rows * (self._norm_bytes() + 2 * item * model.head_dim) + size.predicting * item * model.hidden

    def mask_bytes(self, size: PackedSize) -> int:
        return 0 if self.varlen else sum(span.pairs * self._item(span) for span in size.masked)

    def working_bytes(self, size: PackedSize) -> int:
        """What one layer works in without keeping it: hidden states, the larger of attention and MLP."""
        model, item = self.model, self.dtype.itemsize
        return self.attending_bytes(size) + max(0, size.rows * 3 * item * model.inner - self._attention_working(size))

    def attending_bytes(self, size: PackedSize) -> int:
        """What its attention works in, and hidden states."""
        return size.rows * (2 * self.dtype.itemsize + 4) * self.model.hidden + self._attention_working(size)

    def dispatching_bytes(self, size: PackedSize) -> int:
        """What a layer with experts works in beside what it keeps, when its forward pass is at its fullest: two hidden
        states, and copies of rows for their experts."""
        model = self.model
        return size.rows * self.dtype.itemsize * (2 * model.hidden + (model.routed_tensors - 2) * model.routed)

    def routed_bytes(self, size: PackedSize) -> int:
        """What a layer with experts works in if it keeps nothing."""
        model = self.model
        return size.rows * self.dtype.itemsize * (2 * model.hidden + model.routed_tensors * model.routed)

    def inner_bytes(self, size: PackedSize) -> int:
        """What a layer keeps of its MLP or its experts."""
        model = self.model
        return size.rows * self.dtype.itemsize * ((3 if self.compiled else 4) * model.inner + 2 * model.routed)

    def norming_bytes(self, size: PackedSize) -> int:
        """What the backward pass of a norm works in that is not compiled: five hidden states in fp32 and the gradient,
        while of those that the norm has kept two are gone."""
        return size.rows * self.model.hidden * (5 * 4 - self.dtype.itemsize)

    def _attention_working(self, size: PackedSize) -> int:
        model, attention = self.model, 0
        for span in size.spans:
            wide = self._item(span)
            gathered = 4 if self.varlen and size.masked else wide
            attention += span.count * 2 * (span.queries * wide * model.queries + span.keys * gathered * model.keys)
        return attention

    def chunk_logits(self, predicting: int) -> tuple[int, bool]:
        """Logits held at once when tokens are predicted from so many rows, and whether they come in several chunks."""
        rows = max(1, CHUNK_ELEMENTS[self.device] // self.model.vocab)
        return min(rows, predicting) * self.model.vocab, predicting > rows

    def logits_bytes(self, logits: int) -> int:
        """What so many logits take while they become log-probs: in plain torch a block of them is scaled in fp32, and
        the exponentials are beside it."""
        block = 0 if self.device == "cuda" else min(logits, max(BLOCK_ELEMENTS, self.model.vocab))
        return logits * self.dtype.itemsize + 8 * block

    def _row_in_a_layer(self) -> int:
        """Without the attention's own queries, keys and outputs."""
        model, item = self.model, self.dtype.itemsize
        row = 2 * (2 * item * model.hidden if self.compiled else self._norm_bytes())
        row += item * ((3 if self.compiled else 4) * model.inner + 2 * model.routed)
        if model.swaps_heads or not self.varlen:  # outputs are exchanged back or picked: the next matrix takes a copy
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
        """Bytes of a number in the attention."""
        return self.dtype.itemsize if self.varlen else attends_in(self.device, self.dtype, span.keys).itemsize

    def _input_bytes(self) -> int:
        return self.dtype.itemsize * self.model.hidden
