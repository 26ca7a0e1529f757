"""A run whose model computes nothing: what is left of a turn is the host's work. Started by `turns.py`.

    python turn_host.py ENGINE RESULT CONFIG

Runs a configuration in this process with the slot engine or the paged engine (the one of GPUs). The engine does all of
its work except the computation: hidden states are zeros, and every response is one of four words and the stop token,
drawn by a fixed generator. Nothing is trained. RESULT gets the CPU milliseconds per turn of this process and, apart, of
its environment processes, of the rollouts after the first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

WORDS = (" up", " down", " left", " right")


class Words:
    """Draws a word and then the stop token, whatever the position."""

    def __init__(self, words: Sequence[int], stop: int) -> None:
        self._words = np.array(words)
        self._stop = stop
        self._rng = np.random.default_rng(0)

    def tokens(self, first: Sequence[bool]) -> list[int]:
        drawn = self._words[self._rng.integers(len(self._words), size=len(first))].tolist()
        return [word if is_first else self._stop for word, is_first in zip(drawn, first, strict=True)]


def main() -> None:
    engine, result, config = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    settings = json.loads(Path(config).read_text())
    words = words_of(settings["model"])
    (compute_nothing_in_slots if engine == "slot" else compute_nothing_in_pages)(words)
    train_nothing()
    costs: list[tuple[float, float, int]] = []
    meter_rollouts(costs)
    from roll.cli import main as roll

    sys.argv = ["roll", "train", config, "--restart"]
    try:
        roll()
    finally:
        own, others, turns = (sum(column) for column in zip(*costs[1:], strict=True))
        result.write_text(json.dumps({"host_ms_per_turn": 1e3 * own / turns, "env_ms_per_turn": 1e3 * others / turns}))


def words_of(model: str) -> Words:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return Words([tokenizer(word)["input_ids"][0] for word in WORDS], tokenizer.eos_token_id)


def compute_nothing_in_slots(words: Words) -> None:
    from roll.engine import slot_engine
    from roll.engine.cache import SlotCache
    from roll.strategy.infer import native

    begun: dict[int, int] = {}

    def forward(model: Any, rows: torch.Tensor, where: torch.Tensor, plan: Any) -> torch.Tensor:
        return torch.zeros(len(rows), model.config.hidden_size)

    def sample(logits: Any, rows: Any, samplings: Any, positions: Sequence[int]) -> tuple[list[int], list[float]]:
        first = []
        for sampling, position in zip(samplings, positions, strict=True):
            first.append(begun.get(sampling.seed) != position - 1)
            begun[sampling.seed] = position
        return words.tokens(first), [-1.0] * len(first)

    native.check_probe = lambda weights, log_probs: None
    slot_engine.SlotEngine.log_probs_of = lambda self, ids: torch.zeros(len(ids) - 1)  # type: ignore[method-assign]
    slot_engine.forward_columns = forward  # type: ignore[assignment]
    slot_engine.column_logits = lambda model, hidden: hidden  # type: ignore[assignment]
    slot_engine.sample_tokens = sample
    SlotCache.copy = SlotCache.swap = lambda self, *spans: None  # type: ignore[assignment,method-assign]


def compute_nothing_in_pages(words: Words) -> None:
    from roll.engine import factory
    from roll.engine.paged.engine import PagedEngine
    from roll.engine.paged.model_runner import AsyncOutput, ModelRunner
    from roll.engine.paged.step_inputs import TOKEN

    def make(model: Any, tokenizer: Any, *, exact: bool = False, **options: Any) -> PagedEngine:
        return PagedEngine(model, tokenizer, **options)

    def sample(self: ModelRunner, decode: Any, prompts: Any, truncated: Any) -> AsyncOutput:
        drawn = words.tokens((decode[TOKEN] >= 0).tolist())
        results = torch.empty(2, len(drawn), dtype=torch.int32)
        results[0] = torch.tensor(drawn)
        results[1] = torch.full((len(drawn),), -1.0).view(torch.int32)
        return AsyncOutput(results, len(drawn), None)

    factory.SlotEngine = make  # type: ignore[assignment,misc]
    ModelRunner.sample = sample  # type: ignore[method-assign]
    ModelRunner.prefill = lambda self, table, spans, key_at: None  # type: ignore[method-assign]


def train_nothing() -> None:
    from roll.pipeline.rlvr import RLVR

    async def nothing(self: RLVR, rollout: Any) -> tuple[None, dict[str, str]]:
        return None, {}

    RLVR._train = nothing  # type: ignore[method-assign,assignment]


def meter_rollouts(costs: list[tuple[float, float, int]]) -> None:
    """Adds, for every rollout, the CPU seconds of this process and of its children, and the turns."""
    from roll.scheduler.scheduler import RolloutScheduler

    real = RolloutScheduler.next_rollout

    async def metered(self: RolloutScheduler) -> Any:
        own, others = time.process_time(), children_cpu_s()
        rollout = await real(self)
        turns = sum(sample.turns for sample in rollout.samples)
        costs.append((time.process_time() - own, children_cpu_s() - others, turns))
        return rollout

    RolloutScheduler.next_rollout = metered  # type: ignore[method-assign]


def children_cpu_s() -> float:
    """CPU seconds of this process's children that are alive."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
