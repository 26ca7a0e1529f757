"""Handles a device that has run out of memory: recognises the error, restores state for a retry, and words the message.

Invariant: such an error comes from a refused allocation. The device and all earlier results are intact, so the pass can
be retried with smaller micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Error texts of libraries that allocate by themselves, and of a compiler that wraps errors. A host that runs out of
memory reports `can't allocate memory`, which smaller micro-batches would not solve."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def error_sentence(error: BaseException) -> str:
    """The error's first sentence: how much was requested, without the advice that follows."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ". ".join(line.split(". ")[:2]).rstrip(".")


def save_rng_state(device: torch.device) -> Callable[[], None]:
    """Returns a function that restores the current random states of host and device, so that a repeated pass applies the
    same dropout."""
    host_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(host_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)

    return restore


def free_memory(device: torch.device) -> None:
    """Releases unreferenced memory. To be called after the error, whose frames hold tensors, is out of scope."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def retry_warning(setting: str, tokens: int) -> str:
    """The warning about a repeated pass."""
    return (
        f"the GPU ran out of memory: the pass was repeated with at most {tokens} tokens in a micro-batch, and all "
        f"later passes keep that limit, which changes no gradient; write {setting}={tokens} to start with it"
    )
