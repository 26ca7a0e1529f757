"""Gradients do not depend on ranks or micro-batches: updates over ranks against those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis_examples import ALL, examples

from roll.algorithm import CorrectionSpec, LossSpec
from roll.algorithm.loss_inputs import Aggregation, CreditSpec, Estimator, Level
from roll.algorithm.losses import LOSSES
from roll.config.errors import UserError
from roll.data import Batch
from roll.strategy.train.sharded.process_group import RankGroup
from tests.ranks import Ranks
from tests.strategy.train.sharded.trainers import (
    KINDS,
    MIXTURES,
    Found,
    Gradients,
    Groups,
    Job,
    errors,
    largest_of_a_sample,
    make_batch,
    sharded_critic_update,
    sharded_steps,
    sharded_update,
    single_critic,
    single_critic_update,
    single_steps,
    single_update,
)
from tests.strategy.train.test_single_strategy import make_batch as unrelated_batch
from tests.thorough import but

EXACT = 1e-12
"""Of losses and gradients in fp64."""
TOLERANCE = 2e-6
"""Of each parameter's gradient in fp32, or of what one sample adds to it where samples cancel each other. A model that
fp32 computes badly has `test_what_fp32_loses…`."""
ROUTED = 2e-7
"""Of a mixture of experts in fp64, because `transformers` computes the router's softmax in fp32."""
PARAMS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_low": 0.2, "clip_high": 0.3},
    "cispo": {"clip_low": 0.2, "clip_high": 0.3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
}
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
LEVELS: tuple[Level, ...] = get_args(Level)
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

several = settings(
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


BOTH = (torch.float64, torch.float32)
MOST = BOTH if ALL else BOTH[:1]
"""Precisions of most tests: in fp64 the comparison is the closer one."""


def check(ranks: Ranks, job: Job, dtypes: Sequence[torch.dtype] = MOST) -> None:
    """In each precision: all ranks have the loss, the gradients and the stats of one process that cuts nothing."""
    for dtype in dtypes:
        own = replace(job, dtype=dtype)
        expected = single_update(replace(own, extra_rows=4096, defect=""))
        for found in ranks.run(sharded_update, own):
            compare(own, found, expected, cancels)


def check_critic(ranks: Ranks, job: Job) -> None:
    for dtype in MOST:
        own = replace(job, dtype=dtype)
        expected = single_critic_update(replace(own, extra_rows=4096))
        for found in ranks.run(sharded_critic_update, own):
            compare(own, found, expected)


def never(job: Job, gradients: Gradients, name: str, error: float) -> bool:
    return False


def compare(
    job: Job, found: Found, expected: Found, allowed: Callable[[Job, Gradients, str, float], bool] = never
) -> None:
    """`allowed` says whether a parameter's gradient may have an error above the tolerance."""
    dtype, exact = job.dtype, job.dtype == torch.float64
    limit = TOLERANCE if not exact else ROUTED if job.kind in MIXTURES else EXACT
    loss = pytest.approx(expected.loss, rel=limit if exact else 1e-5, abs=0 if exact else 1e-6)
    assert found.loss == loss, f"the loss in {dtype}"
    for update, (one, other) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        for name, error in errors(one, other).items():
            assert error < limit or allowed(job, other, name, error), f"the gradient {update} of {name} in {dtype}"
    norm = pytest.approx(expected.stats.grad_norm, rel=limit if exact else 1e-5)
    assert found.stats.grad_norm == norm, f"the norm of the gradient in {dtype}"
    assert found.counted() == expected.counted()
    assert found.metrics.keys() == expected.metrics.keys() | {"imbalance"}
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), f"the metric {name} in {dtype}"


def cancels(job: Job, gradients: Gradients, name: str, error: float) -> bool:
    """Whether samples cancel each other in a parameter's gradient so far that an error in fp32, as a share of what one
    sample adds to it, is within the tolerance: equal answers of which one is good and one is bad on two ranks, say. The
    router of a mixture computes in fp32 in a model in fp64 too."""
    if job.config.several_updates or (job.dtype == torch.float64 and job.kind not in MIXTURES):
        return False
    scale = largest_of_a_sample(replace(job, extra_rows=4096, defect=""), name) / float(gradients[name].norm())
    return error < (TOLERANCE if job.dtype == torch.float32 else ROUTED) * scale


def worst(found: Found, expected: Found) -> float:
    assert len(found.gradients) == len(expected.gradients) > 0
    return max(max(errors(one, other).values()) for one, other in zip(found.gradients, expected.gradients, strict=True))


def spec_of(name: str, aggregation: Aggregation, **more: Any) -> LossSpec:
    return LossSpec(name, PARAMS.get(name, {}), aggregation=aggregation, length=16, **more)


@st.composite
def losses(draw: st.DrawFn) -> LossSpec:
    spec = spec_of(
        draw(st.sampled_from(sorted(LOSSES))),
        draw(st.sampled_from(AGGREGATIONS)),
        correction=draw(
            st.none()
            | st.builds(CorrectionSpec, st.sampled_from(["truncated", "masked"]), st.sampled_from(LEVELS), st.just(0.5))
        ),
        credit=draw(st.sampled_from([CreditSpec(), CreditSpec("returns", discount=0.9, kl_coef=0.1, whiten=True)])),
        kl_coef=draw(st.sampled_from([0.0, 0.1])),
        kl_estimator=draw(st.sampled_from(ESTIMATORS)),
        entropy_coef=draw(st.sampled_from([0.0, 0.01])),
    )
    if "clip_low" in spec.params or "tau_positive" in spec.params:
        spec = replace(spec, params={**spec.params, "ratio": draw(st.sampled_from(LEVELS))})
    return spec


GROUPS = st.builds(
    Groups,
    seed=st.integers(0, 10_000),
    groups=st.integers(1, 6),
    most_samples=st.integers(1, 4),
    turns=st.integers(1, 3),
    untrained=st.sampled_from([0.0, 0.3, 0.9]),
    equal=st.sampled_from([0.0, 0.3, 0.9]),
    proximal=st.booleans(),
)
MOSTLY_TRAINED = st.builds(
    replace, GROUPS, groups=st.integers(3, 6), untrained=st.sampled_from([0.0, 0.2]), proximal=st.just(True)
)
"""For few draws: several ranks have work."""
EXTRA_ROWS = st.sampled_from([0, 3, 20, 60, 4096])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", but(["clipped"], LOSSES))
def test_every_loss_and_aggregation(launched: Any, name: str, aggregation: Aggregation) -> None:
    """On two ranks and on four in turn; `test_…_on_every_layout` has them all."""
    number = list(LOSSES).index(name) * len(AGGREGATIONS) + AGGREGATIONS.index(aggregation)
    spec = spec_of(name, aggregation, kl_coef=0.1, entropy_coef=0.01)
    layout = ("two shards", "four shards", "two replicas of two")[number % 3]
    check(launched(layout), Job(make_batch(Groups(seed=number, groups=3)), spec, extra_rows=5))


@settings(several, max_examples=8 if ALL else 4)
@given(spec=losses(), shape=GROUPS, extra_rows=EXTRA_ROWS)
def test_random_groups_limits_and_idle_ranks(ranks: Ranks, spec: LossSpec, shape: Groups, extra_rows: int) -> None:
    check(ranks, Job(make_batch(shape), spec, extra_rows=extra_rows))


def test_samples_that_cancel_each_other(four: Ranks) -> None:
    """Equal answers whose advantages sum to 0 but for the KL: what is left is a small part of what each rank adds."""
    spec = spec_of("cispo", "sequence_mean", credit=CreditSpec("returns", 0.9, kl_coef=0.1, whiten=True), kl_coef=0.1)
    for seed in range(3 if ALL else 1):
        shape = Groups(seed=seed, groups=4, most_samples=2, turns=1, untrained=0.0, equal=1.0)
        check(four, Job(make_batch(shape), spec, extra_rows=60))


@pytest.mark.slow
@settings(several, max_examples=examples(200))
@given(spec=losses(), shape=GROUPS, extra_rows=EXTRA_ROWS, kind=st.sampled_from(KINDS), share=st.booleans())
def test_many_random_groups_limits_and_idle_ranks(
    ranks: Ranks, spec: LossSpec, shape: Groups, extra_rows: int, kind: str, share: bool
) -> None:
    job = Job(make_batch(shape, kind), spec, kind, extra_rows=extra_rows, settings={"share_prefixes": share})
    check(ranks, job, BOTH)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@settings(several, max_examples=4)
@given(shape=GROUPS, extra_rows=EXTRA_ROWS)
def test_every_loss_and_aggregation_on_every_layout(
    ranks: Ranks, name: str, aggregation: Aggregation, shape: Groups, extra_rows: int
) -> None:
    spec = spec_of(name, aggregation, kl_coef=0.1, entropy_coef=0.01)
    check(ranks, Job(make_batch(shape), spec, extra_rows=extra_rows), BOTH)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(ranks: Ranks, kind: str) -> None:
    spec = spec_of("clipped", "token_mean", entropy_coef=0.01)
    check(ranks, Job(make_batch(Groups(seed=1), kind), spec, kind, extra_rows=5), BOTH)


SHAPES = {
    "one sample": Groups(groups=1, most_samples=1, turns=1),
    "groups of one": Groups(groups=5, most_samples=1),
    "one group": Groups(groups=1, most_samples=6, untrained=0.0),
    "one sample that is trained on": Groups(groups=4, untrained=1.0),
    "equal prompts and answers": Groups(groups=4, equal=1.0, untrained=0.0),
    "turns and branches": Groups(groups=3, turns=5, untrained=0.0, seed=3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_batch_on_more_ranks_than_some_have_samples(four: Ranks, name: str) -> None:
    spec = LossSpec("clipped", {**PARAMS["clipped"], "ratio": "turn"}, aggregation="sequence_mean", kl_coef=0.1)
    check(four, Job(make_batch(SHAPES[name]), spec, extra_rows=0))


def test_activation_checkpointing_and_unshared_prefixes_change_no_gradient(two: Ranks) -> None:
    batch, spec = make_batch(Groups(seed=2)), spec_of("clipped", "token_mean")
    for setting in ({"activation_checkpointing": "on"}, {"share_prefixes": False}):
        check(two, Job(batch, spec, extra_rows=5, settings=setting))


@pytest.mark.thorough
@settings(several, max_examples=3)
@given(
    spec=losses(),
    shape=st.builds(replace, MOSTLY_TRAINED, proximal=st.just(False)),
    extra_rows=st.sampled_from([0, 20]),
    updates=st.integers(2, 3),
    epochs=st.integers(1, 2),
)
def test_several_updates_of_a_step(
    ranks: Ranks, spec: LossSpec, shape: Groups, extra_rows: int, updates: int, epochs: int
) -> None:
    """Whose proximal log-probs the ranks compute together, before the first one."""
    settings = {"updates_per_step": updates, "epochs_per_step": epochs}
    check(ranks, Job(make_batch(shape), spec, extra_rows=extra_rows, settings=settings))


@settings(several, max_examples=4 if ALL else 2)
@given(
    shape=MOSTLY_TRAINED,
    credit=st.builds(
        CreditSpec, st.just("gae"), discount=st.sampled_from([1.0, 0.9]), kl_coef=st.sampled_from([0.0, 0.1])
    ),
    clip=st.sampled_from([None, 0.2]),
    updates=st.integers(1, 2),
    extra_rows=st.sampled_from([0, 20]),
    kind=st.sampled_from(["qwen3", "tied"]),
)
def test_a_critics_value_loss(
    ranks: Ranks, shape: Groups, credit: CreditSpec, clip: float | None, updates: int, extra_rows: int, kind: str
) -> None:
    """Some of its predictions have moved further than the clip since the step began."""
    batch, rng = make_batch(shape, kind), np.random.default_rng(shape.seed)
    job = Job(batch, LossSpec("nll", credit=credit), kind, extra_rows=extra_rows, value_clip=clip)
    job = replace(job, settings={"updates_per_step": updates})
    before = single_critic(replace(job, dtype=torch.float64)).values(batch) + rng.normal(0, 0.2, batch.tokens)
    check_critic(ranks, replace(job, batch=batch.with_columns(values=before.astype(np.float32))))


def test_steps_of_the_optimizer(ranks: Ranks) -> None:
    """Of gradients that are clipped, in four updates per step: the weights that one process has after three steps, and
    the stats of each step."""
    settings = {"lr": 1e-2, "clip_grad_norm": 0.1, "updates_per_step": 2, "epochs_per_step": 2, "weight_decay": 0.1}
    batch = make_batch(Groups(seed=6, untrained=0.0))
    job = Job(batch, spec_of("clipped", "token_mean", kl_coef=0.1), dtype=torch.float64, settings=settings)
    expected = single_steps(job, 3)
    assert min(stats.grad_norm for stats in expected.stats) > 0.1
    for found in ranks.run(sharded_steps, job, 3):
        for one, other in zip(found.stats, expected.stats, strict=True):
            assert (one.loss, one.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-7)
            assert one.metrics == pytest.approx({**other.metrics, "imbalance": one.metrics["imbalance"]}, abs=1e-6)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-8, msg=name)


def cancelling() -> Batch:
    """The gradient of `k_norm` nearly cancels."""
    return make_batch(Groups(seed=12, groups=3), "sharp")


def far() -> Batch:
    """The reference is up to 15 away from the trainer's log-probs, which are down to -20."""
    batch, rng = unrelated_batch(4, 4, longest=12), np.random.default_rng(4)
    return batch.with_columns(ref=batch["behaviour"] + rng.normal(0, 0.2, batch.tokens))


@pytest.mark.parametrize("made", [cancelling, far])
def test_what_fp32_loses_in_one_process_the_ranks_lose_and_no_more(two: Ranks, made: Callable[[], Batch]) -> None:
    """Ranks have other micro-batches than one process, which round differently. Where a parameter's gradient nearly
    cancels, or grows with e^x (the KL of a token whose reference is x away: the error of its log-prob, which is 1e-6 at
    -16, becomes the relative error of its gradient), one process in fp32 may be 2e-6 or more from the exact gradient.
    Ranks differ from it by no more than that: by how much, at each parameter, it differs from the exact gradient with
    the one or the other micro-batches.
    """
    job = Job(made(), spec_of("sapo", "token_mean", kl_coef=0.1, entropy_coef=0.01), "sharp")
    exact = single_update(replace(job, dtype=torch.float64))
    one, cut = single_update(job), replace(job, extra_rows=5)
    for found in two.run(sharded_update, replace(cut, dtype=torch.float64)):
        assert worst(found, exact) < EXACT
    lost = [errors(found.gradients[0], exact.gradients[0]) for found in (one, single_update(cut))]
    assert max(max(some.values()) for some in lost) > TOLERANCE / 2
    for found in two.run(sharded_update, cut):
        for name, error in errors(found.gradients[0], one.gradients[0]).items():
            assert error < max(TOLERANCE, sum(some[name] for some in lost)), name


def too_long(group: RankGroup, job: Job) -> str:
    try:
        sharded_update(group, job)
    except UserError as error:
        return str(error)
    return ""


def test_a_sample_that_is_too_long_for_one_rank_is_refused_by_all(two: Ranks) -> None:
    batch = make_batch(Groups())
    limit = int(batch.lengths.max()) - 1
    said = two.run(too_long, Job(batch, LossSpec("reinforce"), settings={"micro_batch_tokens": limit}))
    assert said[0] == said[1]
    assert f"but train.micro_batch_tokens is {limit}" in said[0]


def test_the_metrics_of_an_update_have_the_imbalance(two: Ranks) -> None:
    one, many = make_batch(Groups(groups=1, most_samples=1)), make_batch(Groups(groups=6, untrained=0.0))
    for batch, least, most in ((one, 1.0, 1.0), (many, 0.0, 0.5)):
        for found in two.run(sharded_update, Job(batch, spec_of("nll", "token_mean"))):
            assert np.nextafter(least, -1) <= found.metrics["imbalance"] <= most
