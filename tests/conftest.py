from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none, those marked `vllm` where it is not installed."""
    _skip(items, "vllm", "needs vLLM (make test-vllm)", importlib.util.find_spec("vllm") is not None)
    if any(item.get_closest_marker("gpu") is not None for item in items):
        import torch

        _skip(items, "gpu", "needs a CUDA device", torch.cuda.is_available())


def _skip(items: list[pytest.Item], mark: str, reason: str, there: bool) -> None:
    for item in items:
        if not there and item.get_closest_marker(mark) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
