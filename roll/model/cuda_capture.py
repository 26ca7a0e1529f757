"""Capturing CUDA graphs in a process that trains in the same memory.

`torch.cuda.graph` gives all cached memory back to the device before each capture, and the training step after it has to
allocate that memory again. It also lets the garbage collector run during a capture: if that destroys another graph, the
driver ends the capture with an error.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FREE_SHARE = 1 / 16
"""Share of the device's memory that is free before a capture; with less, cached memory is given back first."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Captures in `graph` what the block launches; it runs on `stream`. Graphs with the same `pool` share memory. The
    garbage collector does not run before the capture has ended."""
    free, total = torch.cuda.mem_get_info(stream.device)
    if free < total * _FREE_SHARE:
        torch.cuda.empty_cache()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
