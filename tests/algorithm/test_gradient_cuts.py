"""A gradient does not depend on how the step is cut: every loss × aggregation × random ranks and micro-batches.

The model is a toy in float64: a token's log-prob is a smooth function of parameters that all tokens share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from numpy.typing import NDArray
from torch import Tensor

from roll.algorithm import CorrectionSpec, LossInputs, LossSpec
from roll.algorithm.loss_inputs import Aggregation, Level, token_weights
from roll.algorithm.losses import LOSSES, resolve_loss
from roll.config.errors import UserError
from roll.data import Batch

PARAMETERS = 6
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
SOFT = {"tau_positive": 1.0, "tau_negative": 1.05}
LEVELS: list[Level] = ["token", "turn", "sequence"]
VARIANTS: dict[str, list[LossSpec]] = {
    "clipped": [
        *(LossSpec("clipped", {**CLIP, "ratio": level}, correction=CorrectionSpec(level=level)) for level in LEVELS),
        LossSpec("clipped", {**CLIP, "dual_clip": 1.5}, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.2),
        LossSpec("clipped", CLIP, correction=CorrectionSpec("masked", "token", 0.8, 1.3), kl_coef=0.1, kl_estimator="k2"),
    ],
    "cispo": [LossSpec("cispo", {**CLIP, "ratio": level}, kl_coef=0.1, kl_estimator="k1") for level in LEVELS],
    "topr": [LossSpec("topr")],
    "sapo": [LossSpec("sapo", {**SOFT, "ratio": level}, kl_coef=0.1, kl_estimator="abs") for level in LEVELS],
    "reinforce": [LossSpec("reinforce", correction=CorrectionSpec("truncated", "sequence", cap=2.0))],
    "nll": [LossSpec("nll")],
}
SPECS = [spec for variants in VARIANTS.values() for spec in variants]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
LENGTH = 7

Cut = Sequence[Sequence[NDArray[np.int64]]]
"""For every rank its micro-batches, each as indices of samples."""


def make_batch(sampled: Sequence[int], others: Sequence[int], seed: int) -> Batch:
    """Samples with so many sampled tokens among so many others, and random log-probs and advantages."""
    rng = np.random.default_rng(seed)
    masks = [rng.permutation([True] * yes + [False] * no) for yes, no in zip(sampled, others, strict=True)]
    lengths = [len(mask) for mask in masks]
    tokens = sum(lengths)
    log_probs = {name: -rng.exponential(1.0, tokens) for name in ("behaviour", "proximal", "ref")}
    return Batch(
        np.cumsum([0, *lengths]),
        {
            "ids": np.arange(tokens),
            "loss_mask": np.concatenate(masks).astype(bool),
            "advantage": rng.normal(0, 1, len(lengths)),
            **log_probs,
        },
    )


@st.composite
def batches_and_cuts(draw: st.DrawFn) -> tuple[Batch, Cut]:
    samples = draw(st.integers(1, 10))
    counts = st.lists(st.integers(0, 6), min_size=samples, max_size=samples)
    batch = make_batch(draw(counts), [n + 1 for n in draw(counts)], draw(st.integers(0, 2**32 - 1)))
    ranks, pieces = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    owner = np.array(draw(st.lists(st.integers(0, ranks * pieces - 1), min_size=samples, max_size=samples)))
    return batch, [[np.flatnonzero(owner == rank * pieces + i) for i in range(pieces)] for rank in range(ranks)]


def step_gradient(
    batch: Batch, spec: LossSpec, cut: Cut, weights_of: Callable[[Batch, Any], Any] | None = None
) -> Tensor:
    """The sum over ranks of the sum over micro-batches; `weights_of` replaces weights of the whole step."""
    rng = np.random.default_rng(1)
    features = torch.from_numpy(rng.normal(0, 1, (batch.tokens, PARAMETERS)))
    theta = torch.from_numpy(rng.normal(0, 1, PARAMETERS)).requires_grad_()
    weights = token_weights(batch, spec.aggregation, LENGTH)
    total = torch.zeros(PARAMETERS, dtype=torch.float64)
    for micro_batches in cut:
        theta.grad = None
        for members in micro_batches:
            piece, spots = batch.select(members), batch.token_indices(members)
            mask = torch.from_numpy(piece.loss_mask)
            stream = lambda values, keep=mask: torch.from_numpy(np.asarray(values))[keep]  # noqa: E731
            current = torch.nn.functional.logsigmoid(features[spots] @ theta)[mask]
            inputs = LossInputs(
                current=current,
                proximal=stream(piece["proximal"]),
                behaviour=stream(piece["behaviour"]),
                advantage=stream(np.repeat(piece["advantage"], piece.lengths)),
                sample=torch.unique(stream(np.repeat(np.arange(len(piece)), piece.lengths)), return_inverse=True)[1],
                turn=torch.unique(stream(turns_of(piece)), return_inverse=True)[1],
                ref=stream(piece["ref"]),
                entropy=torch.sigmoid(features[spots] @ theta)[mask],
            )
            weight = stream(weights[spots] if weights_of is None else weights_of(piece, spec.aggregation))
            (resolve_loss(spec)(inputs).values * weight).sum().backward()
        if theta.grad is not None:
            total += theta.grad
    return total


def turns_of(batch: Batch) -> NDArray[np.int64]:
    """Numbers of made-up turns: each sample's tokens in two halves."""
    halves = [np.arange(length) >= length // 2 for length in batch.lengths]
    return np.concatenate([2 * i + half for i, half in enumerate(halves)] or [np.zeros(0, np.int64)])


def check_cut(batch: Batch, spec: LossSpec, cut: Cut, **options: Any) -> None:
    whole = step_gradient(batch, spec, [[np.arange(len(batch))]])
    np.testing.assert_allclose(step_gradient(batch, spec, cut, **options), whole, rtol=1e-9, atol=1e-12)


def test_every_loss_has_a_variant_here() -> None:
    assert set(VARIANTS) == set(LOSSES)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.params.get('ratio', '')}")
@settings(max_examples=6, deadline=None, derandomize=True)
@given(case=batches_and_cuts())
def test_every_cut_gives_the_gradient_of_one_batch(
    spec: LossSpec, aggregation: Aggregation, case: tuple[Batch, Cut]
) -> None:
    check_cut(case[0], replace(spec, aggregation=aggregation), case[1])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_balanced_ranks_are_such_a_cut(aggregation: Aggregation) -> None:
    batch = make_batch([5, 1, 0, 3, 2, 7], [1, 2, 3, 1, 5, 1], 0)
    cut = [[part[:1], part[1:]] for part in batch.split(3)]
    check_cut(batch, replace(SPECS[1], aggregation=aggregation), cut)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.params.get('ratio', '')}")
def test_normalising_within_a_micro_batch_is_caught(spec: LossSpec, aggregation: Aggregation) -> None:
    batch = make_batch([5, 1, 2], [1, 1, 1], 0)
    cut = [[np.array([0])], [np.array([1, 2])]]

    def mean_of_means(piece: Batch, how: Aggregation) -> NDArray[np.float64]:
        return token_weights(piece, how, LENGTH) / len(cut)

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_cut(batch, replace(spec, aggregation=aggregation), cut, weights_of=mean_of_means)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_each_sample_has_its_share(counts: list[tuple[int, int]], aggregation: Aggregation) -> None:
    batch = make_batch([yes for yes, _ in counts], [no for _, no in counts], 0)
    weights = token_weights(batch, aggregation, LENGTH)
    assert weights.shape == (batch.tokens,)
    assert not weights[~batch.loss_mask].any()
    if not batch.loss_mask.any():
        assert not weights.any()
        return
    sampled = batch.sum_tokens(batch.loss_mask)
    share, counted = batch.sum_tokens(weights), (sampled > 0).sum()
    expected = {
        "token_mean": sampled / sampled.sum(),
        "sequence_mean": (sampled > 0) / counted,
        "sequence_sum": sampled / counted,
        "fixed_length": sampled / (counted * LENGTH),
    }[aggregation]
    np.testing.assert_allclose(share, expected, atol=1e-12)
    for mask, row in zip(batch.rows("loss_mask"), np.split(weights, batch.offsets[1:-1]), strict=True):
        assert len(set(row[mask])) <= 1


def inputs_of(count: int) -> LossInputs:
    zeros = torch.zeros(count)
    return LossInputs(zeros, zeros, zeros, zeros, zeros.long(), zeros.long())


def test_a_loss_may_be_user_code_and_a_wrong_one_is_named() -> None:
    found = resolve_loss(LossSpec("roll.algorithm.losses:clipped", CLIP))
    assert found(inputs_of(2)).values.tolist() == [0.0, 0.0]
    for wrong in ("cliped", "roll.algorithm.losses:nothing", "no.such.module:loss", ""):
        with pytest.raises(UserError, match=f"algorithm.loss '{wrong}'"):
            resolve_loss(LossSpec(wrong))


def test_a_kl_penalty_without_a_reference_is_refused() -> None:
    loss = resolve_loss(LossSpec("clipped", CLIP, kl_coef=0.1))
    with pytest.raises(ValueError, match="no column 'ref'"):
        loss(inputs_of(2))
