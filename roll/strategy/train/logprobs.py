"""Log-probs of given tokens and the entropies of their distributions, without ever holding [packed tokens, vocab].

Hidden states go through the output layer in chunks. Per distribution, a chunk keeps its normaliser, its entropy and the
requested log-probs; the backward pass recomputes the logits and turns them into their gradient in place.

With z = logits / T, p = softmax(z) and H the entropy, a chunk's gradient is

    dz_j = Σ g_t [j = token t] - p_j (Σ g_t + e (log p_j + H)),    dlogits = dz / T

for gradients g_t of the log-probs of the distribution's tokens and e of its entropy.

If the vocabulary is divided over ranks, each computes the logits of its own part. From every rank's normaliser n_r and
entropy H_r, with N = log Σ exp(n_r) and q_r = exp(n_r - N), the whole has the normaliser N and the entropy
Σ q_r (H_r - log q_r); a token's log-prob comes from the rank that has its logit. The gradients of the hidden states are
summed over the ranks; logits are never sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from roll.strategy.train.target_index import TargetChunk, TargetIndex
from roll.strategy.train.vocabulary import Kernels, computed_in, kernels_for

CHUNK_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Largest number of logits held at once: 256 MiB in fp32, 1 GiB in bf16. Chunks are large because each adds to the
gradient of the whole output weight."""


@dataclass(frozen=True)
class Head:
    """The output layer: logits = cap(hidden · weightᵀ + bias)."""

    weight: Tensor
    bias: Tensor | None
    cap: float | None
    """A tanh limits the logits to (-cap, cap)."""
    first: int = 0
    """The token id of the weight's first row."""
    group: dist.ProcessGroup | None = None
    """The ranks that have the rest of the vocabulary; None if this rank has all of it."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        layer = model.get_output_embeddings()
        if type(layer) is not nn.Linear:
            raise TypeError(f"the output layer is a {type(layer).__name__}: only a plain linear layer can be trained")
        cap = getattr(model.config, "final_logit_softcapping", None)
        if not isinstance(layer.weight, DTensor):
            return cls(layer.weight, layer.bias, cap)
        mesh, vocab_rows = layer.weight.device_mesh, len(layer.weight)
        each = -(-vocab_rows // mesh.size())
        bias = layer.bias.to_local() if isinstance(layer.bias, DTensor) else layer.bias
        first = min(mesh.get_local_rank() * each, vocab_rows)
        return cls(layer.weight.to_local(), bias, cap, first, mesh.get_group())

    def chunk_rows(self) -> int:
        return max(1, CHUNK_ELEMENTS[self.weight.device.type] // len(self.weight))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary, in the model's precision, before the cap. If the vocabulary is
        divided, there is one more row, a dummy for targets that belong to other ranks."""
        if self.group is None:
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        found = hidden.new_zeros(len(hidden) + 1, len(self.weight))
        torch.mm(hidden, self.weight.t(), out=found[:-1])
        return found if self.bias is None else found.add_(self.bias)

    def joined(self, normalisers: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """Normalisers and entropies over the whole vocabulary, from those over this rank's part."""
        if self.group is None:
            return normalisers, entropies
        own = torch.stack([normalisers, entropies])
        parts = own.new_empty(dist.get_world_size(self.group), *own.shape)
        dist.all_gather(list(parts.unbind()), own, group=self.group)
        whole = torch.logsumexp(parts[:, 0], 0)
        shares = parts[:, 0] - whole
        return whole, (shares.exp() * (parts[:, 1] - shares)).sum(0)

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that have the rest of the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


def token_log_probs(
    model: PreTrainedModel, hidden: Tensor, predictions: TargetIndex, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of the predicted tokens under softmax(logits / temperature), and the entropies of those distributions.

    hidden [rows, dim] → two tensors [tokens], in fp32, or in fp64 for an fp64 model. The entropies have a gradient only
    with `entropy_gradient`.
    """
    if not len(predictions):
        nothing = hidden.new_zeros(0, dtype=computed_in(hidden.dtype))
        return nothing, nothing
    head = Head.of(model)
    picked = hidden.index_select(0, predictions.rows)
    log_probs, entropies = _LogProbs.apply(picked, head.weight, head.bias, head, predictions)  # type: ignore[no-untyped-call]
    if not entropy_gradient:
        entropies = entropies.detach()
    tokens = predictions.pair_of
    return log_probs[tokens], entropies[predictions.sources[tokens]]


class _LogProbs(torch.autograd.Function):
    """hidden [distributions, dim] → log-probs [pairs], entropies [distributions]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, predictions: TargetIndex
    ) -> tuple[Tensor, Tensor]:
        kernels, chunks = kernels_for(hidden.device), predictions.chunks(head.chunk_rows())
        precise = computed_in(hidden.dtype)
        log_probs = hidden.new_empty(len(predictions.targets), dtype=precise)
        normalisers, entropies = hidden.new_empty(2, len(predictions), dtype=precise)
        kept = None
        for chunk in chunks:
            view = _View(chunk, predictions, head)
            logits = head.logits(hidden[view.rows])
            summary = kernels.summarise(logits[: view.size], view.temperatures, head.cap)
            normalisers[view.rows], entropies[view.rows] = head.joined(*summary)
            chosen = _capped(logits[view.at].to(precise), head.cap) / view.temperatures[view.local]
            log_probs[view.pairs] = view.own(chosen - normalisers[view.rows][view.local])
            kept = logits if len(chunks) == 1 else None
        head.summed(log_probs)
        ctx.save_for_backward(hidden, weight, bias, log_probs, normalisers, entropies, kept)
        ctx.head, ctx.predictions, ctx.chunks = head, predictions, chunks
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_probs, normalisers, entropies, kept = ctx.saved_tensors
        slope = slopes[0] if slopes[0] is not None else torch.zeros_like(log_probs)
        entropy_slope = slopes[1]
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        kernels: Kernels = kernels_for(hidden.device)
        predictions: TargetIndex = ctx.predictions
        totals = torch.zeros_like(normalisers).index_add_(0, predictions.sources, slope)
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = _Sum(weight, len(ctx.chunks)) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=log_probs.dtype) if bias is not None and wants_bias else None
        for chunk in ctx.chunks:
            view = _View(chunk, predictions, ctx.head)
            rows, local = view.rows, view.local
            logits = kept if kept is not None else ctx.head.logits(hidden[rows])
            # The gradient of a likely token's own logit is a small difference of large terms: compute it in fp32 before
            # rounding.
            log_p = log_probs[view.pairs]
            pulled = totals[rows][local]
            if entropy_slope is not None:
                pulled = pulled + entropy_slope[rows][local] * (log_p + entropies[rows][local])
            own = (slope[view.pairs] - log_p.exp() * pulled) / view.temperatures[local]
            if ctx.head.cap:
                own *= 1 - (_capped(logits[view.at].to(log_p.dtype), ctx.head.cap) / ctx.head.cap).square()
            given = (
                normalisers[rows],
                entropies[rows],
                totals[rows],
                entropy_slope[rows] if entropy_slope is not None else None,
            )
            kernels.differentiate(logits[: view.size], view.temperatures, ctx.head.cap, *given)
            logits[view.at] = own.to(logits.dtype)
            gradient = logits[: view.size]
            if to_hidden is not None:
                torch.mm(gradient, weight, out=to_hidden[rows])
            if to_weight is not None:
                to_weight.add(gradient, hidden[rows])
            if to_bias is not None:
                to_bias += gradient.sum(0, dtype=to_bias.dtype)
        if to_hidden is not None:
            ctx.head.summed(to_hidden)
        bias_gradient = to_bias.to(bias.dtype) if to_bias is not None else None
        return to_hidden, to_weight.result() if to_weight is not None else None, bias_gradient, None, None


class _View:
    """A chunk's part of the predictions; distributions are counted from the chunk's first."""

    def __init__(self, chunk: TargetChunk, predictions: TargetIndex, head: Head) -> None:
        self.rows = slice(chunk.first, chunk.last)
        self.size = chunk.last - chunk.first
        self.pairs = slice(chunk.first_pair, chunk.last_pair)
        self.local = predictions.sources[self.pairs] - chunk.first
        self.temperatures = predictions.temperatures[self.rows]
        targets = predictions.targets[self.pairs] - head.first
        self._here = None if head.group is None else (targets >= 0) & (targets < len(head.weight))
        self.at = (self.local, targets)
        """Indices of the pairs' logits; targets that other ranks have point to the dummy row after the last."""
        if self._here is not None:
            self.at = torch.where(self._here, self.local, self.size), torch.where(self._here, targets, 0)

    def own(self, values: Tensor) -> Tensor:
        """The values of pairs whose targets this rank has; zero for the others."""
        return values if self._here is None else torch.where(self._here, values, 0.0)


class _Sum:
    """Σ gradientᵀ · hidden over chunks, in at least fp32 if there are several."""

    def __init__(self, weight: Tensor, chunks: int) -> None:
        self._weight, self._chunks = weight, chunks
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        if self._chunks == 1:
            self._sum = gradient.t() @ hidden
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._weight, dtype=computed_in(self._weight.dtype))
        if self._weight.dtype == self._sum.dtype:
            self._sum.addmm_(gradient.t(), hidden)
        elif self._weight.device.type == "cuda":
            torch.addmm(self._sum, gradient.t(), hidden, out_dtype=torch.float32, out=self._sum)
        else:
            self._sum += gradient.t() @ hidden

    def result(self) -> Tensor:
        assert self._sum is not None
        return self._sum.to(self._weight.dtype)


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return torch.tanh(logits / cap) * cap if cap else logits
