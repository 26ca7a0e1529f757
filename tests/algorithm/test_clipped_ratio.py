"""The clipped-ratio loss and its gradient against NumPy in float64, written from the formulas.

Shao et al., 2024, arXiv 2402.03300, equations 3 and 4, with PPO's clip range in two halves: a token's objective is

    min(r A, clip(r, 1 - low, 1 + high) A) - β (ref / current - log(ref / current) - 1),   r = current / proximal.

A truncated importance weight min(proximal / behaviour, cap), a constant, multiplies the first term.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from roll.algorithm import LossSpec, Streams, make_algorithm
from roll.algorithm.losses import resolve_loss
from roll.config.schema import AlgorithmConfig

Floats = NDArray[np.float64]
NAMES = ("current", "proximal", "behaviour", "advantage", "ref")


def reference_loss(
    current: Floats,
    proximal: Floats,
    behaviour: Floats,
    advantage: Floats,
    ref: Floats,
    *,
    clip_low: float,
    clip_high: float,
    correction_cap: float | None,
    kl_coef: float,
) -> tuple[Floats, Floats]:
    """The loss of every token, and its derivative by that token's current log-prob."""
    ratio = np.exp(current - proximal)
    weight = np.ones_like(ratio) if correction_cap is None else np.minimum(np.exp(proximal - behaviour), correction_cap)
    plain, clipped = ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage
    surrogate = np.minimum(plain, clipped)
    slope = np.where(plain <= clipped, ratio * advantage, 0.0)
    k3 = np.exp(ref - current) - (ref - current) - 1
    k3_slope = 1 - np.exp(ref - current)
    return -weight * surrogate + kl_coef * k3, -weight * slope + kl_coef * k3_slope


def run_loss(columns: dict[str, Floats], params: dict[str, Any]) -> tuple[Floats, Floats, dict[str, torch.Tensor]]:
    tensors = {name: torch.from_numpy(values.copy()) for name, values in columns.items()}
    tensors["current"].requires_grad_()
    if not params["kl_coef"]:
        del tensors["ref"]
    loss = resolve_loss(LossSpec("clipped_ratio", params))(Streams(**tensors))
    loss.values.sum().backward()
    gradient = tensors["current"].grad
    assert gradient is not None
    return loss.values.detach().numpy(), gradient.numpy(), loss.metrics


def random_columns(seed: int, tokens: int, spread: float) -> dict[str, Floats]:
    rng = np.random.default_rng(seed)
    proximal = -rng.exponential(1.5, tokens)
    near = lambda: np.minimum(proximal + rng.normal(0, spread, tokens), 0.0)  # noqa: E731
    return {
        "current": near(),
        "proximal": proximal,
        "behaviour": near(),
        "advantage": rng.normal(0, 1, tokens) * rng.integers(0, 2, tokens),
        "ref": near(),
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 40),
    spread=st.sampled_from([0.0, 0.05, 0.5, 2.0]),
    clip_low=st.floats(0.01, 1.0),
    clip_high=st.floats(0.01, 3.0),
    correction_cap=st.none() | st.floats(0.5, 5.0),
    kl_coef=st.sampled_from([0.0, 0.001, 0.3]),
)
def test_values_and_gradient_are_the_formulas(seed: int, tokens: int, spread: float, **params: Any) -> None:
    columns = random_columns(seed, tokens, spread)
    values, gradient, metrics = run_loss(columns, params)
    expected_values, expected_gradient = reference_loss(*(columns[name] for name in NAMES), **params)
    np.testing.assert_allclose(values, expected_values, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    for name, watched in metrics.items():
        assert watched.shape == (tokens,), name
        assert not watched.requires_grad, name


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.5, 1.0, 0.0),  # already likelier than allowed: no push up
        (1.5, -1.0, 1.5),  # but may be pushed down
        (0.5, -1.0, 0.0),  # already less likely than allowed: no push down
        (0.5, 1.0, -0.5),  # but may be pushed up
        (1.0, 1.0, -1.0),
        (1.0, -1.0, 1.0),
    ],
)
def test_the_clip_stops_only_the_push_away(ratio: float, advantage: float, slope: float) -> None:
    columns = {name: np.zeros(1) for name in NAMES} | {"current": np.log([ratio]), "advantage": np.array([advantage])}
    params = {"clip_low": 0.2, "clip_high": 0.2, "correction_cap": None, "kl_coef": 0.0}
    _, gradient, _ = run_loss(columns, params)
    np.testing.assert_allclose(gradient, [slope], rtol=1e-12)


def test_the_correction_is_truncated_from_above_and_has_no_gradient() -> None:
    columns = random_columns(3, 4, 0.0) | {"advantage": np.ones(4), "current": np.full(4, -1.0)}
    columns["proximal"] = np.full(4, -1.0)
    columns["behaviour"] = np.array([-1.0, -5.0, -0.5, -1.0 - np.log(2)])
    params = {"clip_low": 0.2, "clip_high": 0.2, "correction_cap": 2.0, "kl_coef": 0.0}
    values, gradient, _ = run_loss(columns, params)
    np.testing.assert_allclose(-values, [1.0, 2.0, np.exp(-0.5), 2.0], rtol=1e-12)
    np.testing.assert_allclose(gradient, values, rtol=1e-12)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("correction", ["truncated", "none"])
def test_the_config_reaches_the_loss(correction: str, kl_coef: float) -> None:
    config = AlgorithmConfig(
        clip_low=0.1,
        clip_high=0.3,
        correction=correction,
        correction_cap=1.5,
        kl_coef=kl_coef,
        aggregation="sequence_mean",
    )
    algorithm = make_algorithm(config)
    assert algorithm.needs_reference == (kl_coef > 0)
    assert algorithm.loss.aggregation == "sequence_mean"
    columns = random_columns(7, 50, 0.7)
    values, gradient, _ = run_loss(columns, algorithm.loss.params)
    expected = reference_loss(
        *(columns[name] for name in NAMES),
        clip_low=0.1,
        clip_high=0.3,
        correction_cap=1.5 if correction == "truncated" else None,
        kl_coef=kl_coef,
    )
    np.testing.assert_allclose(values, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-12, atol=1e-12)
