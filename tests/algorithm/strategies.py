"""Random steps and losses for property tests of the learning core.

Structure (groups, lengths, turns, weights, rewards) is drawn by hypothesis, so failures shrink to small steps. The
numbers of tokens come from a drawn seed and a drawn gap between the policies: they do not lie on the kinks of a loss,
where a gradient is a matter of convention, unless the gap is 0 and all four policies agree.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
from hypothesis import strategies as st
from reference.divergence import Estimator
from reference.losses import Aggregation, Name, RefLoss
from reference.samples import Level, RefSample, RefToken, Rows

REWARDS = (0.0, 1.0, 0.1, 0.7, -1.0, 2.5)
DOMAINS = ("math", "code", "")
STATES = ("start", "door", "goal")

ON_POLICY, USUAL, FAR, EXTREME = 0.0, 0.3, 3.0, 15.0
GAPS = (ON_POLICY, USUAL, FAR, EXTREME)
"""Standard deviations of the differences between a token's log-probabilities; the last passes e^20."""


def tokens(rng: np.random.Generator, lengths: list[int], gap: float) -> tuple[RefToken, ...]:
    made = []
    for turn, length in enumerate(lengths):
        for _ in range(length):
            prox = -abs(rng.normal()) - 0.1
            cur, beh, ref = (prox + gap * rng.normal() for _ in range(3))
            made.append(RefToken(cur, prox, beh, ref, value=rng.normal(), entropy=abs(rng.normal()), turn=turn))
    return tuple(made)


@st.composite
def steps(
    draw: st.DrawFn, gaps: tuple[float, ...] = GAPS, turn_rewards: bool | None = None, empty: bool = True
) -> list[RefSample]:
    """A step of one to four groups of one to four samples.

    Among them are groups of one, groups whose rewards are all equal, answers of one token, samples of weight 0 and, with
    `empty`, samples without a sampled token. `turn_rewards` says whether turns are rewarded and have states; states come
    back within a sample and between samples and groups. Every turn has at least one token.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gap = draw(st.sampled_from(gaps))
    rewarded = draw(st.booleans()) if turn_rewards is None else turn_rewards
    samples = []
    for group in range(draw(st.integers(1, 4))):
        domain = draw(st.sampled_from(DOMAINS))
        choices = REWARDS[: draw(st.integers(1, len(REWARDS)))]
        for _ in range(draw(st.integers(1, 4))):
            lengths = draw(st.lists(st.integers(1, 3), min_size=0 if empty else 1, max_size=3))
            turns = len(lengths) if rewarded else 0
            samples.append(
                RefSample(
                    group=group,
                    reward=draw(st.sampled_from(choices)),
                    response_tokens=tokens(rng, lengths, gap),
                    domain=domain,
                    baseline=draw(st.sampled_from(REWARDS)),
                    truncated=draw(st.booleans()),
                    turn_rewards=tuple(draw(st.sampled_from(REWARDS)) for _ in range(turns)),
                    turn_states=tuple(draw(st.sampled_from(STATES)) for _ in range(turns)),
                    weight=draw(st.sampled_from((1.0, 1.0, 1.0, 0.0))),
                )
            )
    return samples


def random_rows(samples: list[RefSample], seed: int) -> Rows:
    """A number for every token, of both signs and now and then 0: advantages, values or returns."""
    rng = np.random.default_rng(seed)
    return [
        [float(rng.normal() * (rng.random() > 0.1)) for _ in range(len(sample.response_tokens))] for sample in samples
    ]


@st.composite
def losses(draw: st.DrawFn, names: tuple[Name, ...] = get_args(Name)) -> RefLoss:
    """Any loss with any of its options."""
    low, cap = draw(st.sampled_from(((0.5, 2.0), (0.0, 5.0), (0.9, 1.1))))
    return RefLoss(
        name=draw(st.sampled_from(names)),
        ratio=draw(st.sampled_from(get_args(Level))),
        clip_low=draw(st.sampled_from((0.2, 3e-4, 1.0))),
        clip_high=draw(st.sampled_from((0.2, 0.28, 4e-4))),
        dual_clip=draw(st.sampled_from((None, 3.0))),
        tau_positive=draw(st.sampled_from((1.0, 2.0))),
        tau_negative=draw(st.sampled_from((1.05, 0.5))),
        correction=draw(st.sampled_from(("none", "truncated", "masked"))),
        correction_level=draw(st.sampled_from(get_args(Level))),
        correction_low=low,
        correction_cap=cap,
        kl_coef=draw(st.sampled_from((0.0, 0.1))),
        kl_estimator=draw(st.sampled_from(get_args(Estimator))),
        entropy_coef=draw(st.sampled_from((0.0, 0.01))),
        aggregation=draw(st.sampled_from(get_args(Aggregation))),
        length_normaliser=draw(st.integers(1, 16)),
    )
