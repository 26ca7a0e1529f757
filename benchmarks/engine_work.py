"""The requests of the engine's benchmark, how an engine did on them, and the least time they can take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIGMA = 0.8
"""Of the logarithm of the numbers of new tokens; their median is a fifth of the longest."""
SIBLINGS = 8


def read_clock(clock: str, descendants: bool = False) -> float:
    """Seconds of wall time, or CPU seconds of this process, with those of the living ones it started if asked for."""
    if clock == "wall" or not descendants:
        return time.perf_counter() if clock == "wall" else time.process_time()
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            pid = int(status.parent.name)
            parents[pid], spent[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(spent[pid] for pid in ours)


@dataclass(frozen=True)
class Workload:
    """Prompts of equal length and how many new tokens each asks for."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    clock: str = "wall"

    @property
    def tokens(self) -> int:
        return sum(self.new_tokens)

    @property
    def longest(self) -> int:
        return max(self.new_tokens)

    @property
    def distinct_prompt_tokens(self) -> int:
        return sum(map(len, {tuple(prompt): prompt for prompt in self.prompts}.values()))


@dataclass(frozen=True)
class Sizes:
    sequences: int
    prompt: int
    longest: int


def make_workload(name: str, sizes: Sizes, vocab: int, seed: int, clock: str = "wall") -> Workload:
    """The same lengths for every seed and other prompts: nothing cached by an earlier run is of use to a later one."""
    rng = np.random.default_rng(0)
    drawn = np.exp(rng.normal(np.log(sizes.longest / 5), SIGMA, sizes.sequences)).round()
    new_tokens = np.clip(drawn, 1, sizes.longest).astype(int)
    new_tokens[new_tokens.argmax()] = sizes.longest
    groups = sizes.sequences if name == "distinct" else max(sizes.sequences // SIBLINGS, 1)
    prompts = np.random.default_rng([seed, groups]).integers(0, vocab, (groups, sizes.prompt)).tolist()
    of_each = [prompts[i * groups // sizes.sequences] for i in range(sizes.sequences)]
    return Workload(name, of_each, new_tokens.tolist(), clock)


@dataclass(frozen=True)
class Outcome:
    """One engine on one workload."""

    seconds: float
    steps_s: list[float]
    first_token_s: list[float]
    peak_cached: float | None
    """Most tokens whose keys and values were held at once; None where the engine does not tell."""

    def row(self, work: Workload, floor_s: float, bytes_per_token: int) -> dict[str, float]:
        p95 = quantiles(self.steps_s, n=20)[-1] if len(self.steps_s) > 1 else self.steps_s[0]
        cached = float("nan") if self.peak_cached is None else self.peak_cached
        return {
            "tokens_per_s": work.tokens / self.seconds,
            "step_median_ms": 1e3 * median(self.steps_s),
            "step_p95_ms": 1e3 * p95,
            "first_token_mean_s": mean(self.first_token_s) if self.first_token_s else float("nan"),
            "peak_cached_tokens": cached,
            "peak_cached_mb": cached * bytes_per_token / 1e6,
            "of_floor": floor_s / self.seconds,
        }


class Floor:
    """The least time of a workload, from the shapes of the model and what this machine does in this run.

    All requests start at once. A step reads every weight and the keys and values of what runs (bytes over the bandwidth
    of a copy) and multiplies every weight with a row for each of them (the model's own matrices, timed one after the
    other with nothing between): the longer of both. On CUDA only the bytes count for a step. Prompts are the products of
    their rows, once for equal prompts; attention's arithmetic counts as nothing.

    Of a mixture, a step reads as many experts as its rows are sent to if routers choose evenly, and a row is multiplied
    with as many experts as it goes to.
    """

    def __init__(self, model: Any, clock: str = "wall") -> None:
        self._clock = clock
        self._head = model.get_output_embeddings()
        linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not self._head]
        self._experts = [parameter.detach() for parameter in model.parameters() if parameter.ndim == 3]
        """[experts, out, in]"""
        self._chosen: int = model.config.num_experts_per_tok if self._experts else 0
        # The experts of a row as one matrix of theirs, one below the other.
        self._matrices = [*linears, *(p[: self._chosen].flatten(0, 1) for p in self._experts)]
        weight = self._head.weight
        self._device, self._dtype = weight.device, weight.dtype
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * weight.itemsize
        self._dense_bytes = sum(matrix.nbytes for matrix in [*linears, weight])
        self.copy_bandwidth = self._copy_bandwidth()
        self._seconds: dict[int, float] = {}

    def seconds(self, work: Workload) -> float:
        prompt = len(work.prompts[0])
        total = work.distinct_prompt_tokens * self._products(512) / 512 + self._products(len(work.prompts), head=True)
        for step in range(1, work.longest):
            running = sum(new > step for new in work.new_tokens)
            read = self._weight_bytes(running) + running * (prompt + step) * self.bytes_per_token
            products = 0.0 if self._device.type == "cuda" else self._step_products(running)
            total += max(read / self.copy_bandwidth, products)
        return total

    def _weight_bytes(self, rows: int) -> float:
        """Bytes of the weights that one forward pass over so many rows reads."""
        used = (p.nbytes * (1 - (1 - self._chosen / len(p)) ** rows) for p in self._experts)
        return self._dense_bytes + sum(used)

    def _step_products(self, rows: int) -> float:
        """Measured at powers of two and half-way between them, in between interpolated."""
        grid = [1, *(b << e for e in range(10) for b in (2, 3))]
        near = next(r for r, after in pairwise(grid) if after > rows)
        known = [near, grid[grid.index(near) + 1]] if near != rows else [rows]
        return float(np.interp(rows, known, [self._products(r) + self._products(r, head=True) for r in known]))

    def _products(self, rows: int, head: bool = False) -> float:
        """Seconds of so many tokens through the layers' matrices, or through the output layer's: the best of some, with
        tokens as rows or, on a CPU, as columns."""
        key = -rows if head else rows
        if key not in self._seconds:
            matrices = [self._head.weight] if head else self._matrices
            sizes = {matrix.shape[1] for matrix in matrices}
            inputs = {size: torch.randn(rows, size, device=self._device).to(self._dtype) for size in sizes}
            columns = {size: tokens.t().contiguous() for size, tokens in inputs.items()}
            ways = [(nn.functional.linear, inputs)]
            if self._device.type == "cpu":
                ways.append((lambda tokens, weight: weight @ tokens, columns))
            self._seconds[key] = min(self._timed(matrices, *way) for _ in range(5) for way in ways)
        return self._seconds[key]

    @torch.inference_mode()
    def _timed(
        self, matrices: list[Tensor], product: Callable[[Tensor, Tensor], Tensor], inputs: dict[int, Tensor]
    ) -> float:
        self._wait()
        started = read_clock(self._clock)
        for matrix in matrices:
            product(inputs[matrix.shape[1]], matrix)
        self._wait()
        return read_clock(self._clock) - started

    def _copy_bandwidth(self) -> float:
        """Bytes read and written a second."""
        size = (2 << 30 if self._device.type == "cuda" else 256 << 20) // 4
        source, target = (torch.ones(size, device=self._device) for _ in range(2))
        best = float("inf")
        for _ in range(10):
            self._wait()
            started = read_clock(self._clock)
            target.copy_(source)
            self._wait()
            best = min(best, read_clock(self._clock) - started)
        return 8 * size / best

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
