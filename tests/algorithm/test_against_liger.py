"""The reference losses against Liger's fused GRPO loss, written by others: value and gradient by the hidden states.

Liger takes hidden states, the head's weight, one advantage a sample and padded rows. What maps onto what:

| here | Liger |
| --- | --- |
| clipped, token_mean | `loss_type="dapo"` (one process; `"bnpo"` is the same) |
| clipped, sequence_mean | `loss_type="grpo"` |
| clipped, fixed_length | `loss_type="dr_grpo"`, `max_completion_length` = `length_normaliser` |
| ratio: sequence | `importance_sampling_level="sequence"` (clipped only) |
| dual_clip | `delta` (it holds the ratio for both signs, which shows only above 1 + clip_high) |
| cispo, clip_low 1, token_mean | `loss_type="cispo"`, `epsilon_high` = 1 + `clip_high`: a bound, not a distance |
| sapo, sequence_mean | `loss_type="sapo"` |
| KL k3 in the loss | `beta`, `ref_per_token_logps` |
| correction | `vllm_is_ratio`, the weights themselves, [samples, tokens] |

It counts every row, so samples that are not trained are left out; its arithmetic is in float32.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference.logits import log_prob_slope, log_softmax
from reference.losses import RefLoss, corrected, step_gradient, step_loss
from reference.samples import RefSample, RefToken
from torch import Tensor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")

HIDDEN, VOCABULARY, LONGEST, TEMPERATURE = 6, 11, 7, 0.8
LENGTHS = (1, 3, 7, 2, 5)

LIGER_NAMES = {
    ("clipped", "token_mean"): "dapo",
    ("clipped", "sequence_mean"): "grpo",
    ("clipped", "fixed_length"): "dr_grpo",
    ("cispo", "token_mean"): "cispo",
    ("sapo", "sequence_mean"): "sapo",
}

CLIPPED = RefLoss("clipped", length_normaliser=LONGEST)
LOSSES = {
    "token mean": CLIPPED,
    "sequence mean": replace(CLIPPED, aggregation="sequence_mean"),
    "fixed length": replace(CLIPPED, aggregation="fixed_length"),
    "asymmetric clip": replace(CLIPPED, clip_high=0.28),
    "dual clip": replace(CLIPPED, dual_clip=1.5),
    "ratio of the sequence": replace(CLIPPED, ratio="sequence", aggregation="sequence_mean"),
    "ratio of the sequence, token mean": replace(CLIPPED, ratio="sequence"),
    "cispo": RefLoss("cispo", clip_low=1.0, clip_high=0.28),
    "sapo": RefLoss("sapo", aggregation="sequence_mean"),
}
OPTIONS = {
    "alone": {},
    "KL": {"kl_coef": 0.3},
    "truncated": {"correction": "truncated", "correction_cap": 1.2},
    "masked, by sequence, KL": {
        "correction": "masked",
        "correction_level": "sequence",
        "correction_low": 0.3,
        "kl_coef": 0.3,
    },
}


class Step:
    """Random hidden states under a random head, the tokens drawn from them, and the same as `RefSample`s."""

    def __init__(self, seed: int, gap: float) -> None:
        rng = np.random.default_rng(seed)
        self.hidden = rng.normal(size=(len(LENGTHS), LONGEST, HIDDEN))
        self.head = rng.normal(size=(VOCABULARY, HIDDEN))
        self.ids = rng.integers(VOCABULARY, size=(len(LENGTHS), LONGEST))
        self.advantages = rng.normal(size=len(LENGTHS))
        self.samples = []
        for i, length in enumerate(LENGTHS):
            tokens = []
            for t in range(length):
                cur = float(log_softmax(self.head @ self.hidden[i, t], TEMPERATURE)[self.ids[i, t]])
                tokens.append(RefToken(cur, *(cur + gap * rng.normal(size=3))))
            self.samples.append(RefSample(group=0, reward=0.0, response_tokens=tuple(tokens)))

    @property
    def token_advantages(self) -> list[list[float]]:
        return [[float(a)] * length for a, length in zip(self.advantages, LENGTHS, strict=True)]

    def padded(self, rows: list[list[float]]) -> Tensor:
        """[samples, tokens], 0 beyond each row's end."""
        made = torch.zeros(len(LENGTHS), LONGEST)
        for i, row in enumerate(rows):
            made[i, : len(row)] = torch.tensor(row)
        return made

    def column(self, name: str) -> Tensor:
        return self.padded([[getattr(token, name) for token in sample.response_tokens] for sample in self.samples])

    def liger(self, loss: RefLoss) -> tuple[float, Tensor]:
        """(loss, gradient by the hidden states) as Liger has them."""
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss  # takes seconds

        theirs = LigerFusedLinearGRPOLoss(
            compiled=False,
            beta=loss.kl_coef,
            use_ref_model=loss.kl_coef != 0,
            epsilon_low=loss.clip_low,
            epsilon_high=loss.clip_high + (1 if loss.name == "cispo" else 0),
            loss_type=LIGER_NAMES[loss.name, loss.aggregation],
            max_completion_length=loss.length_normaliser,
            importance_sampling_level=loss.ratio,
            sapo_temperature_pos=loss.tau_positive,
            sapo_temperature_neg=loss.tau_negative,
            temperature=TEMPERATURE,
            delta=loss.dual_clip,
        )
        hidden = torch.tensor(self.hidden, dtype=torch.float32, requires_grad=True)
        ratios = [[corrected(sample, t, loss) for t in range(n)] for sample, n in zip(self.samples, LENGTHS, strict=True)]
        value, _ = theirs(
            hidden,
            torch.tensor(self.head, dtype=torch.float32),
            torch.tensor(self.ids),
            self.padded([[1.0] * length for length in LENGTHS]),
            torch.tensor(self.advantages, dtype=torch.float32),
            ref_per_token_logps=self.column("ref"),
            old_per_token_logps=self.column("prox"),
            vllm_is_ratio=None if loss.correction == "none" else self.padded(ratios),
        )
        value.backward()
        assert hidden.grad is not None
        return value.item(), hidden.grad

    def reference(self, loss: RefLoss) -> tuple[float, Tensor]:
        """The same by the reference: each log-probability's derivative carried through softmax and head."""
        gradient = torch.zeros(len(LENGTHS), LONGEST, HIDDEN, dtype=torch.float64)
        for i, row in enumerate(step_gradient(self.samples, self.token_advantages, loss)):
            for t, slope in enumerate(row):
                by_logits = log_prob_slope(self.head @ self.hidden[i, t], int(self.ids[i, t]), TEMPERATURE)
                gradient[i, t] = torch.from_numpy(slope * (by_logits @ self.head))
        return step_loss(self.samples, self.token_advantages, loss), gradient


@pytest.mark.parametrize("gap", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_value_and_gradient_agree(loss: RefLoss, options: dict[str, object], gap: float) -> None:
    chosen = replace(loss, **options)  # type: ignore[arg-type]
    for seed in range(5):
        step = Step(seed, gap)
        value, gradient = step.reference(chosen)
        their_value, their_gradient = step.liger(chosen)
        assert their_value == pytest.approx(value, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(their_gradient.double(), gradient, rtol=1e-4, atol=1e-5)


def test_reinforce_is_the_clipped_gradient_on_the_policy() -> None:
    """Without old log-probs Liger's ratio is 1 with the gradient of the log-probability, which is -A."""
    step = Step(0, 0.0)
    torch.testing.assert_close(
        step.liger(CLIPPED)[1].double(), step.reference(RefLoss("reinforce"))[1], rtol=1e-4, atol=1e-5
    )
