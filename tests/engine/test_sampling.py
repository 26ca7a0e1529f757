"""Drawing tokens: noise from (seed, position) alone, frequencies of the distribution, truncation as promised."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from numpy.typing import NDArray

from roll.engine.request import SamplingParams, seed_of
from roll.engine.sampling import sample_tokens, truncate, uniforms

quick = settings(max_examples=examples(80), derandomize=True, deadline=None)
SEEDS = st.integers(0, 2**64 - 1)


def draw_many(logits: torch.Tensor, count: int, **options: float) -> NDArray[np.int64]:
    """Tokens of `count` requests that share one row of logits and differ in their seeds."""
    base = SamplingParams(1, **options)  # type: ignore[arg-type]
    samplings = [replace(base, seed=seed_of(i)) for i in range(count)]
    tokens, _ = sample_tokens(logits[None], [0] * count, samplings, [5] * count)
    return np.array(tokens)


# noise


@given(seeds=st.lists(SEEDS, min_size=1, max_size=20), position=st.integers(0, 2**20))
@quick
def test_noise_depends_on_seed_and_position_alone(seeds: list[int], position: int) -> None:
    together = uniforms(seeds, [position + i for i in range(len(seeds))])
    assert ((together >= 0) & (together < 1)).all()
    for i, seed in enumerate(seeds):
        assert uniforms([seed], [position + i])[0] == together[i]


def test_noise_is_distinct_over_positions_and_seeds() -> None:
    over_positions = uniforms([7] * 100_000, range(100_000))
    over_seeds = uniforms(range(100_000), [7] * 100_000)
    assert len(np.unique(over_positions)) == len(np.unique(over_seeds)) == 100_000
    both = uniforms([s for s in range(300) for _ in range(300)], [p for _ in range(300) for p in range(300)])
    assert len(np.unique(both)) == 300 * 300


@pytest.mark.parametrize("along", ["positions", "small seeds", "seeds of names"])
def test_noise_is_uniform_and_uncorrelated(along: str) -> None:
    n = 100_000
    numbers = {
        "positions": lambda: uniforms([seed_of("a run", 0)] * n, range(n)),
        "small seeds": lambda: uniforms(range(n), [3] * n),
        "seeds of names": lambda: uniforms([seed_of(0, f"{i}.0") for i in range(n)], [40] * n),
    }[along]()
    deviation = 1 / math.sqrt(12 * n)
    assert abs(numbers.mean() - 0.5) < 4 * deviation
    assert abs(numbers.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / math.sqrt(n)
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    assert chi_square(counts, np.full(64, 1 / 64)) < chi_square_bound(63)


def test_seeds_of_different_parts_differ() -> None:
    names = [(0, "1.2"), (0, "12"), ("0", "1", "2"), (1, "0.2"), (10, ".2"), ("eval", "1.2")]
    seeds = {seed_of(*parts) for parts in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(3, "4.5") == seed_of("3", "4.5") == 14970004902464474400


# frequencies


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_bound(freedom: int) -> float:
    """What chance exceeds less than once in ten thousand times (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(("vocab", "temperature"), [(2, 1.0), (7, 0.5), (256, 2.0), (257, 1.0), (700, 0.5)])
def test_frequencies_are_the_softmax(vocab: int, temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(size=vocab).astype(np.float32))
    probabilities = torch.softmax(logits.double() / temperature, -1).numpy()
    count = 20_000
    counts = np.bincount(draw_many(logits, count, temperature=temperature), minlength=vocab)
    usual = probabilities * count >= 5  # rarer ones are counted together: chi-square needs some of each
    pooled = np.append(counts[usual], counts[~usual].sum())
    shares = np.append(probabilities[usual], probabilities[~usual].sum())
    pooled, shares = pooled[shares > 0], shares[shares > 0]
    assert chi_square(pooled, shares) < chi_square_bound(len(shares) - 1)


def test_frequencies_of_a_truncated_distribution() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))
    counts = np.bincount(draw_many(logits, 10_000, top_k=3), minlength=5)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert chi_square(counts[[1, 3, 4]], np.array([0.4, 0.3, 0.15]) / 0.85) < chi_square_bound(2)


# what is drawn, whatever the neighbours


@given(
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=8, max_size=8),
    top_p=st.sampled_from([0.4, 1.0]),
    seed=st.integers(0, 1000),
)
@quick
def test_a_draw_does_not_depend_on_the_others(
    rows: list[int], temperatures: list[float], top_p: float, seed: int
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (4, 300)).astype(np.float32))
    samplings = [SamplingParams(1, temperatures[i], top_p=top_p, seed=seed + i) for i in range(len(rows))]
    positions = [i * 3 for i in range(len(rows))]
    tokens, logprobs = sample_tokens(logits, rows, samplings, positions)
    for i, row in enumerate(rows):
        token, logprob = sample_tokens(logits[row : row + 1], [0], [samplings[i]], [positions[i]])
        assert (token[0], logprob[0]) == (tokens[i], logprobs[i])


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.05, 5), vocab=st.integers(2, 600))
@quick
def test_the_token_is_the_inverse_of_the_distribution_at_the_noise(seed: int, temperature: float, vocab: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32))
    (token,), (logprob,) = sample_tokens(logits[None], [0], [SamplingParams(1, temperature, seed=seed)], [seed])
    reference = torch.log_softmax(logits.double() / temperature, -1).numpy()
    ends = np.cumsum(np.exp(reference))
    noise = uniforms([seed], [seed])[0]
    assert ends[token] > noise - 1e-5
    assert token == 0 or ends[token - 1] < noise + 1e-5
    assert abs(logprob - reference[token]) < 1e-4


@given(seed=st.integers(0, 10_000), vocab=st.integers(1, 600))
@quick
def test_temperature_zero_takes_the_likeliest_with_its_log_prob_at_one(seed: int, vocab: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32))
    (token,), (logprob,) = sample_tokens(logits[None], [0], [SamplingParams(1, 0.0, seed=seed)], [seed])
    assert token == int(logits.argmax())
    assert abs(logprob - float(torch.log_softmax(logits.double(), -1)[token])) < 1e-5


# extremes


EXTREME = st.sampled_from([-math.inf, -1e30, -200.0, -20.0, 0.0, 3.0, 80.0])


@given(logits=st.lists(EXTREME, min_size=1, max_size=40), offset=st.integers(0, 600), seed=SEEDS)
@quick
def test_a_token_without_probability_is_never_drawn(logits: list[float], offset: int, seed: int) -> None:
    row = torch.full((offset + 40,), -math.inf)
    row[offset : offset + len(logits)] = torch.tensor(logits)
    if not row.isfinite().any():
        row[offset] = 0.0
    for temperature in (0.0, 0.3, 1.0):
        count = 16
        samplings = [SamplingParams(1, temperature, seed=seed)] * count
        tokens, logprobs = sample_tokens(row[None], [0] * count, samplings, range(count))
        probabilities = torch.softmax(row / (temperature or 1.0), -1)
        assert all(0 <= token < len(row) and probabilities[token] > 0 for token in tokens)
        assert all(math.isfinite(logprob) for logprob in logprobs)


@pytest.mark.parametrize("at", [0, 255, 256, 511, 699])
def test_a_certain_token_is_always_drawn(at: int) -> None:
    logits = torch.full((700,), -math.inf)
    logits[at] = -3.0
    assert (draw_many(logits, 2000) == at).all()


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab", [5, 256, 300, 49_152])
def test_noise_at_its_ends_draws_a_token_of_positive_mass(
    noise: float, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.engine.sampling.uniforms", lambda seeds, positions: np.full(len(seeds), noise))
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(0, 4, (3, vocab)).astype(np.float32))
    logits[1, [0, -1]] = -math.inf
    logits[2, 2:] = -math.inf
    tokens, logprobs = sample_tokens(logits, [0, 1, 2], [SamplingParams(1)] * 3, [0] * 3)
    assert all(math.isfinite(logprob) for logprob in logprobs)
    assert tokens[2] == (0 if noise == 0 else 1)
    assert tokens[1] == 1 if noise == 0 else tokens[1] < vocab - 1


@pytest.mark.parametrize("last", [200, 400])
def test_sums_that_round_differently_draw_no_token_without_probability(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.engine.sampling.uniforms", lambda seeds, positions: np.full(len(seeds), 1 - 2.0**-53))
    rows = 500
    logits = torch.from_numpy(np.random.default_rng(last).normal(0, 12, (rows, 600)).astype(np.float32))
    logits[:, last + 1 :] = -math.inf
    tokens, _ = sample_tokens(logits, range(rows), [SamplingParams(1)] * rows, [0] * rows)
    assert max(tokens) <= last


# truncation


def truncated_by_hand(logits: NDArray[np.float32], top_k: int, top_p: float) -> set[int]:
    """The k likeliest (the first of equals), then the fewest of them whose share is at least p."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or len(order)]
    mass = np.exp(logits[order].astype(np.float64) - logits[order].max())
    mass /= mass.sum()
    kept, total = set(), 0.0
    for token, share in zip(order, mass, strict=True):
        kept.add(token)
        total += share
        if top_p < 1 and total >= top_p:
            break
    return kept


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=30),
    top_k=st.integers(0, 35),
    top_p=st.sampled_from([0.013, 0.31, 0.52, 0.77, 0.973, 1.0]),
    seed=SEEDS,
)
@quick
def test_truncation_keeps_what_a_simple_reference_keeps(logits: list[float], top_k: int, top_p: float, seed: int) -> None:
    row = np.array(logits, np.float32)
    kept = truncated_by_hand(row, top_k, top_p)
    result = truncate(torch.from_numpy(row), top_k, top_p)
    assert set(torch.nonzero(result.isfinite())[:, 0].tolist()) == kept
    assert all(result[token] == row[token] for token in kept)
    samplings = [SamplingParams(1, 1.0, top_p=top_p, top_k=top_k, seed=seed)] * 8
    tokens, logprobs = sample_tokens(torch.from_numpy(row)[None], [0] * 8, samplings, range(8))
    total = sum(math.exp(row[token]) for token in kept)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert token in kept
        assert logprob == pytest.approx(math.log(math.exp(row[token]) / total), abs=1e-5)


def test_truncation_comes_after_the_temperature() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    hot = set(draw_many(logits, 300, temperature=5.0, top_p=0.7).tolist())
    cold = set(draw_many(logits, 300, temperature=0.2, top_p=0.7).tolist())
    assert (cold, hot) == ({0}, {0, 1, 2})


def test_drawing_leaves_the_logits_and_the_global_generator_alone() -> None:
    logits = torch.randn(2, 50)
    before, state = logits.clone(), torch.get_rng_state()
    sample_tokens(logits, [0, 1], [SamplingParams(1, 0.5, top_k=3), SamplingParams(1, 1.0, top_p=0.4)], [0, 1])
    assert torch.equal(logits, before)
    assert torch.equal(torch.get_rng_state(), state)
