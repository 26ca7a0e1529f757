"""Captures of CUDA graphs beside a trainer's memory and the garbage of other graphs."""

from __future__ import annotations

import gc

import pytest
import torch

from roll.model.cuda_capture import capturing

pytestmark = pytest.mark.gpu


def captured(numbers: torch.Tensor, garbage: int = 0) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that doubles the numbers, captured while `garbage` reference cycles are made."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with capturing(graph, stream):
        result = numbers * 2
        for _ in range(garbage):
            cycle: list[object] = []
            cycle.append(cycle)
    return graph, result


def test_a_graph_that_is_garbage_is_destroyed_after_the_capture() -> None:
    numbers = torch.arange(4.0, device="cuda")
    cycle: list[object] = [*captured(numbers)]
    cycle.append(cycle)
    del cycle
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # the collector would run within the capture
    try:
        graph, result = captured(numbers, garbage=1000)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    graph.replay()
    assert result.tolist() == [0, 2, 4, 6]


def test_a_capture_leaves_cached_memory_to_the_next_training_step() -> None:
    del [torch.empty(256 << 20, dtype=torch.uint8, device="cuda")][:]
    before = torch.cuda.memory_reserved()
    captured(torch.arange(4.0, device="cuda"))
    assert torch.cuda.memory_reserved() >= before >= 256 << 20


def test_a_capture_that_fails_ends_and_lets_the_collector_run_again() -> None:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with pytest.raises(RuntimeError), capturing(graph, stream):
        torch.zeros(4, device="cuda").sum().item()  # a copy to the host is not permitted
    assert gc.isenabled()
    torch.cuda.synchronize()
    again, result = captured(torch.ones(2, device="cuda"))
    again.replay()
    assert result.tolist() == [2, 2]
