"""The kernels of experts against plain torch. They need a GPU, or Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from roll.engine.paged import expert_kernels, layer_kernels  # noqa: E402
from roll.engine.paged.expert_kernels import SortedPairs, Tile  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
KINDS = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
kinds = pytest.mark.parametrize("dtype", KINDS)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-2
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def zeros(experts: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.int32, device=DEVICE)


def pairs_of(lines: SortedPairs) -> list[list[int]]:
    """Each expert's pairs."""
    return [sorted(line[:count].tolist()) for line, count in zip(lines.order, lines.counts.tolist(), strict=True)]


def routed(rows: int, experts: int, chosen: int, how: str) -> Tensor:
    """Experts of rows, each once a row: as they come, none for the first expert, or all for the last ones."""
    likely = random(rows, experts, seed=rows)
    if how == "one idle":
        likely[:, 0] = -100
    if how == "all to the same":
        likely += 100 * torch.arange(experts, device=DEVICE)
    return likely.topk(chosen, dim=-1).indices.int()


@kinds
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 4, 1), (7, 5, 3), (40, 32, 4), (33, 128, 8)])
def test_rows_go_to_the_likeliest_experts(
    dtype: torch.dtype, normalised: bool, rows: int, experts: int, chosen: int
) -> None:
    order = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(row)) for row in range(rows)])
    logits = (order.to(DEVICE) / experts * 4).to(dtype)  # no two alike
    shares = torch.softmax(logits.float(), dim=-1)
    expected, likeliest = shares.topk(chosen, dim=-1)
    if normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    routes = torch.full((rows + 2, 3, chosen), -1, dtype=torch.int32, device=DEVICE)
    lines, weights = expert_kernels.route(logits, chosen, normalised, dtype, zeros(experts), routes[:, 1])
    close(weights, expected.to(dtype))
    assert torch.equal(routes[:rows, 1].long(), likeliest)
    assert (routes[:rows, [0, 2]] == -1).all(), "other layers' routes are left alone"
    assert (routes[rows:] == -1).all()
    flat = likeliest.flatten().tolist()
    assert pairs_of(lines) == [[pair for pair, e in enumerate(flat) if e == expert] for expert in range(experts)]


def test_of_experts_that_are_equally_likely_a_row_has_each_once() -> None:
    lines, weights = expert_kernels.route(torch.zeros(6, 8, device=DEVICE), 3, True, torch.float32, zeros(8))
    assert int(lines.counts.sum()) == 18
    assert all(len({pair // 3 for pair in pairs}) == len(pairs) for pairs in pairs_of(lines))
    close(weights, torch.full((6, 3), 1 / 3, device=DEVICE))


def test_rows_of_logits_that_are_no_numbers_have_experts_and_no_weights() -> None:
    logits = random(4, 6)
    logits[1] = torch.nan
    logits[2, 3] = torch.nan
    logits[3] = torch.inf
    lines, weights = expert_kernels.route(logits, 2, True, torch.float32, zeros(6))
    assert all(len({pair // 2 for pair in pairs}) == len(pairs) for pairs in pairs_of(lines))
    assert sorted(pair for pairs in pairs_of(lines) for pair in pairs) == list(range(8))
    assert torch.isfinite(weights[0]).all()
    assert torch.isnan(weights[1:]).all()


def test_rows_go_to_the_experts_they_are_given() -> None:
    logits = random(5, 6)
    given = torch.tensor([[5, 0], [1, 2], [3, 4], [0, 5], [2, 2 + 1]], dtype=torch.int32, device=DEVICE)
    lines, weights = expert_kernels.route(logits, 2, True, torch.float32, zeros(6), given=given)
    expected = torch.softmax(logits, dim=-1).gather(1, given.long())
    close(weights, expected / expected.sum(-1, keepdim=True))
    assert pairs_of(lines) == pairs_of(expert_kernels.sort_by_expert(given, 6))


@pytest.mark.parametrize("how", ["as they come", "one idle", "all to the same"])
@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 4, 2), (9, 5, 3), (150, 8, 2)])
def test_pairs_stand_in_their_experts_lines(rows: int, experts: int, chosen: int, how: str) -> None:
    choices = routed(rows, experts, chosen, how)
    flat = choices.flatten().tolist()
    for given in (choices, choices.long()):
        lines = expert_kernels.sort_by_expert(given, experts)
        assert pairs_of(lines) == [[pair for pair, e in enumerate(flat) if e == expert] for expert in range(experts)]


def plain_experts(states: Tensor, choices: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[rows · chosen, hidden]"""
    parts: list[Tensor] = []
    for row, experts in enumerate(choices.tolist()):
        for expert in experts:
            gate, up = linear(states[row : row + 1], gate_up[expert]).chunk(2, dim=-1)
            parts.append(linear(silu(gate) * up, down[expert]))
    return torch.cat(parts)


@kinds
@pytest.mark.parametrize("how", ["as they come", "one idle", "all to the same"])
@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "hidden", "inner"),
    [(1, 4, 2, 32, 16), (9, 5, 3, 48, 24), (70, 6, 2, 40, 72), (130, 3, 1, 64, 32)],
)
def test_experts_make_of_rows_what_they_do_one_by_one(
    dtype: torch.dtype, how: str, rows: int, experts: int, chosen: int, hidden: int, inner: int
) -> None:
    states = random(rows, hidden, dtype=dtype)
    gate_up = random(experts, 2 * inner, hidden, dtype=dtype, seed=1) * hidden**-0.5
    down = random(experts, hidden, inner, dtype=dtype, seed=2) * inner**-0.5
    choices = routed(rows, experts, chosen, how)
    found = expert_kernels.experts(states, expert_kernels.sort_by_expert(choices, experts), gate_up, down)
    close(found, plain_experts(states, choices, gate_up, down))


@kinds
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tile", [Tile(16, 16, 16, 4, 2), Tile(32, 64, 32, 4, 3), Tile(64, 64, 64, 4, 3), Tile(128, 32, 64, 8, 2)]
)
def test_a_product_is_the_same_by_any_tile(dtype: torch.dtype, gated: bool, tile: Tile) -> None:
    if dtype == torch.float32 and tile.lines > 32 and not INTERPRETED:
        pytest.skip("fp32 uses small tiles")
    choices = routed(90, 4, 2, "as they come")
    lines = expert_kernels.sort_by_expert(choices, 4)
    states, weight = random(90, 80, dtype=dtype), random(4, 96, 80, dtype=dtype, seed=1) * 80**-0.5
    found = expert_kernels._multiply(states, lines, weight, shared=2, gated=gated, tile=tile)
    each = torch.cat([linear(states[pair // 2][None], weight[e]) for pair, e in enumerate(choices.flatten().tolist())])
    close(found, silu(each[:, :48]) * each[:, 48:] if gated else each)


def test_there_are_as_many_programs_as_any_routes_need() -> None:
    for pairs, experts, lines in [(1, 4, 16), (64, 4, 16), (65, 4, 16), (1024, 32, 64), (3, 8, 128)]:
        spread = [pairs // experts + (expert < pairs % experts) for expert in range(experts)]
        one = [pairs, *[0] * (experts - 1)]
        lopsided = [pairs - min(experts - 1, pairs), *[1] * min(experts - 1, pairs)]
        for counts in (spread, one, lopsided):
            assert sum(-(-count // lines) for count in counts) <= expert_kernels._blocks(pairs, experts, lines)


@kinds
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("hidden", "parts"), [(48, 1), (576, 3), (1024, 4)])
def test_a_norm_adds_the_weighed_sum_of_a_rows_experts(dtype: torch.dtype, wide: bool, hidden: int, parts: int) -> None:
    stream, weight = random(5, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    lines = random(5 * parts, hidden, dtype=dtype, seed=2)
    shares = random(5, parts, dtype=torch.float32 if wide else dtype, seed=3)
    expected = stream + (lines.view(5, parts, hidden) * shares[..., None]).sum(1).to(dtype)
    found = layer_kernels.add_norm(stream, lines, weight, 1e-5, shares)
    close(stream, expected)
    close(found, layer_kernels.add_norm(expected, None, weight, 1e-5))
