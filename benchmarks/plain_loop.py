"""The loop ROLL's trainer is compared with: what a careful person writes with `transformers` and torch alone.

Sequences sorted by length and padded on the right, micro-batches of as many padded tokens as fit, the model's own SDPA
attention, logits only from the first position an answer begins at, log-softmax in fp32, gradients clipped, fused AdamW.
Weights, gradients and moments are in the model's precision, which is faster than fp32 masters and less exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.data.batch import Batch

CLIP = 0.2
Piece = tuple[Tensor, Tensor, Tensor, Tensor, int]


class PlainLoop:
    def __init__(self, model: PreTrainedModel, lr: float, padded_tokens: int, mask: bool = True) -> None:
        self.model = model
        self.padded_tokens = padded_tokens
        self._mask = mask
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> list[Tensor]:
        return [self._log_probs(piece) for piece in self._pieces(batch)]

    def update(self, batch: Batch) -> None:
        self.backward(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, batch: Batch) -> None:
        sampled = int(batch.loss_mask.sum())
        for piece in self._pieces(batch):
            log_probs = self._log_probs(piece)
            _, _, mask, advantages, first = piece
            ratio = torch.exp(log_probs - log_probs.detach())
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
            loss = -(gain * mask[:, first + 1 :]).sum() / sampled
            loss.backward()

    def _log_probs(self, piece: Piece) -> Tensor:
        """Of the tokens after position `first`. [sequences, positions]"""
        ids, attended, _, _, first = piece
        kept = ids.shape[1] - first
        seen = {"attention_mask": attended} if self._mask else {}
        logits = self.model(input_ids=ids, **seen, use_cache=False, logits_to_keep=kept).logits[:, :-1]
        return torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, first + 1 :, None])[:, :, 0]

    def _pieces(self, batch: Batch) -> Iterator[Piece]:
        """ids, attention mask, mask of sampled tokens [sequences, positions], advantages, where answers begin."""
        device = self.model.device
        sequences, masks = batch.rows("ids"), batch.rows("loss_mask")
        waiting: list[int] = []
        order = np.argsort(batch.lengths, kind="stable").tolist()
        for place, index in enumerate(order):
            waiting.append(index)
            following = order[place + 1] if place + 1 < len(order) else None
            if following is not None and (len(waiting) + 1) * batch.lengths[following] <= self.padded_tokens:
                continue
            longest = int(batch.lengths[waiting].max())
            ids = np.zeros((len(waiting), longest), np.int64)
            attended, mask = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
            for row, i in enumerate(waiting):
                ids[row, : len(sequences[i])] = sequences[i]
                attended[row, : len(sequences[i])] = 1
                mask[row, : len(masks[i])] = masks[i]
            first = int(min(np.flatnonzero(masks[i])[0] for i in waiting)) - 1
            advantages = batch["advantage"][waiting].astype(np.float32)
            tensors = [torch.from_numpy(array).to(device) for array in (ids, attended, mask, advantages)]
            yield tensors[0], tensors[1], tensors[2], tensors[3], first
            waiting = []
