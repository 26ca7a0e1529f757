"""The kernels of a paged step against plain torch. They need a GPU, or Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from roll.engine.attention_params import AttentionParams
from roll.engine.paged.kv_cache import BLOCK, _attend, _positions
from roll.engine.paged.step_inputs import (
    CACHE_POSITION,
    HEADER,
    POSITION,
    SAMPLES,
    SEED_HIGH,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    TOKEN,
    StepInputs,
)
from roll.engine.request import SamplingParams
from roll.engine.sampling import sample_tokens

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from roll.engine.paged import attention_kernels, layer_kernels, sampling_kernels  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
KINDS = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
kinds = pytest.mark.parametrize("dtype", KINDS)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rows_at(positions: list[int], seed: int = 0) -> tuple[StepInputs, int]:
    """One row a sequence, at these positions, in blocks that lie anywhere; and how many blocks there are."""
    rng = np.random.default_rng(seed)
    lines = max(positions) // BLOCK + 1
    count = len(positions)
    table = np.zeros((HEADER + lines, count), np.int32)
    table[HEADER:] = rng.permutation(lines * count).reshape(lines, count) + 1
    table[SLOT] = np.arange(count)
    table[POSITION] = positions
    table[TOKEN] = rng.integers(0, 50, count)
    table[CACHE_POSITION] = table[HEADER + table[POSITION] // BLOCK, np.arange(count)] * BLOCK + table[POSITION] % BLOCK
    table[SAMPLES] = 1
    table[SEED_LOW], table[SEED_HIGH] = rng.integers(-(2**31), 2**31, (2, count))
    table[TEMPERATURE] = np.ones(count, np.float32).view(np.int32)
    return StepInputs(torch.from_numpy(table).to(DEVICE)), lines * count + 1


@kinds
@pytest.mark.parametrize("hidden", [48, 576])
def test_embeddings_are_those_of_the_given_or_the_last_token(dtype: torch.dtype, hidden: int) -> None:
    rows, _ = rows_at([0, 5, 2])
    rows.tokens[1] = -1
    last = torch.tensor([7, 9, 11, 0], dtype=torch.int32, device=DEVICE)
    weight = random(50, hidden, dtype=dtype)
    ids, found = layer_kernels.embed(rows, last, weight)
    assert ids.tolist() == [int(rows.tokens[0]), 9, int(rows.tokens[2])] == rows.ids(last).tolist()
    assert torch.equal(found, weight[ids])


@kinds
@pytest.mark.parametrize("hidden", [48, 576, 1536])
def test_a_norm_adds_first(dtype: torch.dtype, hidden: int) -> None:
    stream, delta, weight = (
        random(5, hidden, dtype=dtype),
        random(5, hidden, dtype=dtype, seed=1),
        random(hidden, dtype=dtype),
    )
    expected = stream + delta
    found = layer_kernels.add_norm(stream, delta, weight, 1e-5)
    assert torch.equal(stream, expected)
    close(found, rms_norm(expected.float(), (hidden,), None, 1e-5).to(dtype) * weight)
    before = stream.clone()
    close(layer_kernels.add_norm(stream, None, weight, 1e-5), found)
    assert torch.equal(stream, before)


@kinds
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (6, 2, 96)])
def test_queries_and_keys_are_rotated_and_keys_and_values_kept(
    dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int
) -> None:
    rows, blocks = rows_at([0, 17, 40])
    mixed = random(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cosines, sines = random(64, dim, dtype=dtype, seed=2), random(64, dim, dtype=dtype, seed=3)
    norms = (random(dim, dtype=dtype, seed=4), random(dim, dtype=dtype, seed=5)) if normed else None
    keys, values = torch.zeros(2, blocks, kv_heads, BLOCK, dim, dtype=dtype, device=DEVICE)
    query, key, value = mixed.view(3, -1, dim).clone().split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        query, key = (
            rms_norm(part.float(), (dim,), None, 1e-6).to(dtype) * weight
            for part, weight in zip((query, key), norms, strict=True)
        )

    def rotated(part: Tensor) -> Tensor:
        cosine, sine = (table[rows.positions.long()][:, None] for table in (cosines, sines))
        turned = torch.cat([-part[..., dim // 2 :], part[..., : dim // 2]], dim=-1)
        return part * cosine + turned * sine

    layer_kernels.rotate_and_store(mixed, norms, 1e-6, cosines, sines, rows, keys, values, heads)
    close(mixed.view(3, -1, dim)[:, :heads], rotated(query))
    cache_positions = rows.cache_positions.long()
    close(keys[cache_positions // BLOCK, :, cache_positions % BLOCK], rotated(key))
    assert torch.equal(values[cache_positions // BLOCK, :, cache_positions % BLOCK], value)
    assert int((values != 0).any(dim=-1).sum()) == 3 * kv_heads, "nothing else was written"


@kinds
def test_keys_and_values_are_kept(dtype: torch.dtype) -> None:
    rows, blocks = rows_at([3, 16])
    key, value = random(2, 3, 24, dtype=dtype), random(2, 3, 24, dtype=dtype, seed=1)
    keys, values = torch.zeros(2, blocks, 3, BLOCK, 24, dtype=dtype, device=DEVICE)
    layer_kernels.store_kv(key, value, rows, keys, values)
    cache_positions = rows.cache_positions.long()
    assert torch.equal(keys[cache_positions // BLOCK, :, cache_positions % BLOCK], key)
    assert torch.equal(values[cache_positions // BLOCK, :, cache_positions % BLOCK], value)


@kinds
@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, None), (None, 3.0), (70, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (12, 2, 128), (6, 2, 80)])
def test_attention_reads_all_positions_and_no_others(
    dtype: torch.dtype, splits: int, window: int | None, cap: float | None, heads: int, kv_heads: int, dim: int
) -> None:
    positions = [0, 1, 15, 16, 63, 64, 130, 255]
    rows, blocks = rows_at(positions)
    keys, values = (random(blocks, kv_heads, BLOCK, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    query = random(len(positions), (heads + 2) * dim, dtype=dtype, seed=3)  # the queries are the first of a line
    reading = AttentionParams(dim**-0.5, window, cap)
    found = query.new_empty(len(positions), heads * dim)
    how = {"heads": heads, "window": window, "cap": cap}
    attention_kernels.attend(found, query, rows, keys, values, reading.scale, splits=splits, **how)
    for row, position in enumerate(positions):
        own = rows.block_table[: position // BLOCK + 1, row].long()
        key, value = (_positions(cache[own])[: position + 1] for cache in (keys, values))
        expected = _attend(query[row : row + 1, : heads * dim].view(1, heads, dim), key, value, reading)
        close(found[row], expected.reshape(-1))


@kinds
@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, None), (None, 3.0), (70, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (12, 2, 128), (6, 2, 80), (96, 1, 16)])
def test_tiles_of_rows_read_what_each_row_would(
    dtype: torch.dtype, window: int | None, cap: float | None, heads: int, kv_heads: int, dim: int
) -> None:
    tile = attention_kernels.tile_rows(heads, kv_heads)
    parts = [(0, 1), (15, tile), (60, tile + 3), (130, 2 * tile - 1)]  # from where on, how many
    beginnings = [start + offset for start, count in parts for offset in range(0, count, tile)]
    tiles, blocks = rows_at([place + tile - 1 for place in beginnings])
    table = tiles.data.repeat_interleave(tile, dim=1)
    counts = [min(tile, count - offset) for _, count in parts for offset in range(0, count, tile)]
    for number, (place, count) in enumerate(zip(beginnings, counts, strict=True)):
        here = slice(number * tile, (number + 1) * tile)
        table[POSITION, here] = 0
        table[POSITION, here][:count] = torch.arange(place, place + count, dtype=torch.int32)
        table[HEADER:, here][:, count:] = 0  # nobody's
    rows = StepInputs(torch.cat([table[:, :3], table], dim=1)).part(
        3, 3 + table.shape[1]
    )  # after some that are not in tiles
    keys, values = (random(blocks, kv_heads, BLOCK, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    query = random(rows.count, (heads + 2) * dim, dtype=dtype, seed=3)
    reading, found = AttentionParams(dim**-0.5, window, cap), query.new_empty(rows.count, heads * dim)
    attention_kernels.attend_tiles(found, query, rows, keys, values, reading.scale, heads=heads, window=window, cap=cap)
    assert torch.isfinite(found).all()
    for number, (place, count) in enumerate(zip(beginnings, counts, strict=True)):
        own = rows.block_table[:, number * tile].long()[: (place + count - 1) // BLOCK + 1]
        key, value = (_positions(cache[own])[: place + count] for cache in (keys, values))
        mine = slice(number * tile, number * tile + count)
        expected = _attend(query[mine, : heads * dim].view(count, heads, dim), key, value, reading)
        close(found[mine], expected.reshape(count, -1))


@kinds
@pytest.mark.parametrize("inner", [40, 1536])
def test_the_gate(dtype: torch.dtype, inner: int) -> None:
    both = random(3, 2 * inner, dtype=dtype)
    close(layer_kernels.gate(both), silu(both[:, :inner]) * both[:, inner:])


@kinds
@pytest.mark.parametrize("vocab", [50, 4096, 9000])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_draws_are_those_of_the_plain_sampler(dtype: torch.dtype, vocab: int, cap: float | None) -> None:
    count = 24
    rows, _ = rows_at(list(range(count + 8)))  # the last of them are of prompts, and have no logits
    temperatures = np.tile(np.array([0.0, 0.5, 1.0, 2.0], np.float32), count // 4)
    rows.data[TEMPERATURE, :count] = torch.from_numpy(temperatures.view(np.int32)).to(DEVICE)
    rows.samples[3] = 0
    logits = random(count, vocab, dtype=dtype) * 3
    last = torch.full((count,), 7, dtype=torch.int32, device=DEVICE)
    out = torch.empty(2, count, dtype=torch.int32, device=DEVICE)
    sampling_kernels.sample(logits, rows, last, out, cap)
    low, high = (line[:count].cpu().numpy().view(np.uint32).astype(int) for line in (rows.seeds_low, rows.seeds_high))
    samplings = [
        SamplingParams(1, temperature=float(t), seed=int(h) << 32 | int(lo))
        for t, h, lo in zip(temperatures, high, low, strict=True)
    ]
    wide = logits.float() if cap is None else torch.tanh(logits.float() / cap) * cap
    tokens, log_probs = sample_tokens(wide, list(range(count)), samplings, [p + 1 for p in range(count)])
    assert out[0].tolist() == tokens
    torch.testing.assert_close(out[1].view(torch.float32).cpu(), torch.tensor(log_probs), rtol=1e-4, atol=1e-4)
    assert last.tolist() == [7 if row == 3 else token for row, token in enumerate(tokens)]


def test_logits_that_are_no_numbers_draw_nothing() -> None:
    rows, _ = rows_at([0, 1])
    logits = random(2, 60, dtype=torch.float32)
    logits[1, 30] = torch.nan
    last, out = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.empty(2, 2, dtype=torch.int32, device=DEVICE)
    sampling_kernels.sample(logits, rows, last, out, None)
    assert out[0, 0] >= 0
    assert out[0, 1] == -1
