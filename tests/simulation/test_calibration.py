"""A spec from timings: exact where the engine is as the model says, without negative costs where it is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.simulation.calibration import Timing, batches_to_time, error_of, fitted
from roll.simulation.spec import EngineSpec
from roll.simulation.workload import RLVR

BATCHES = batches_to_time(RLVR)

Cost = st.floats(1e-6, 1e-1)


def timings_of(spec: EngineSpec) -> list[Timing]:
    return [Timing(len(batch), sum(batch), spec.step_s(len(batch), sum(batch))) for batch in BATCHES]


@given(Cost, Cost, Cost)
def test_an_engine_as_the_model_says_is_found_again(base_s: float, per_sequence_s: float, per_token_s: float) -> None:
    true = replace(RLVR.engine, base_s=base_s, per_sequence_s=per_sequence_s, per_cached_token_s=per_token_s / 1000)
    found = fitted(replace(true, base_s=1.0, per_sequence_s=1.0), timings_of(true), true.prefill_tokens_per_s)
    assert error_of(found, timings_of(true)) < 1e-6
    # alone and in a full batch, also where one cost drowns in the others
    for batch, cached in ((1, 100), (RLVR.engine.max_running, 100_000)):
        assert found.step_s(batch, cached) == pytest.approx(true.step_s(batch, cached), rel=1e-4)


@given(st.lists(st.floats(1e-4, 1.0), min_size=len(BATCHES), max_size=len(BATCHES)))
def test_no_cost_is_negative_whatever_was_timed(seconds: list[float]) -> None:
    timings = [Timing(len(batch), sum(batch), s) for batch, s in zip(BATCHES, seconds, strict=True)]
    found = fitted(RLVR.engine, timings, 1000.0)
    assert min(found.base_s, found.per_sequence_s, found.per_cached_token_s) >= 0
    assert found.step_s(1, 100) > 0


def test_a_batch_that_costs_less_the_larger_it_is_has_only_a_base() -> None:
    timings = [Timing(len(batch), sum(batch), 1.0 / len(batch)) for batch in BATCHES]
    found = fitted(RLVR.engine, timings, 1000.0)
    assert found.per_sequence_s == 0
    assert found.base_s > 0


def test_batches_are_of_all_sizes_and_of_the_contexts_that_the_workload_has() -> None:
    sizes = [len(batch) for batch in BATCHES]
    assert {1, RLVR.engine.max_running} < set(sizes)
    assert all(larger <= 2 * size for size, larger in pairwise(sorted(sizes)))
    contexts = [context for batch in BATCHES for context in batch]
    assert min(contexts) >= RLVR.prompts.min_tokens
    assert max(contexts) < RLVR.prompts.max_tokens + RLVR.responses.max_tokens
    assert batches_to_time(RLVR) == BATCHES != batches_to_time(replace(RLVR, seed=2))
