"""A device that has run out of memory: how that is recognised, what is kept to try again, and what is said.

What always holds: an error of this kind comes from an allocation that was refused. The device and what was computed
before are as they were, so a pass may be tried again with less at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""How libraries that allocate by themselves, and a compiler that wraps errors, say it. A host without memory says
`can't allocate memory`: halving a micro-batch would not help it."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def said_first(error: BaseException) -> str:
    """The error's first sentence: how much was asked for, without the advice that follows."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ". ".join(line.split(". ")[:2]).rstrip(".")


def kept_noise(device: torch.device) -> Callable[[], None]:
    """Gives what brings the random numbers of host and device back to where they are now: what is dropped in a pass that
    is tried again is what would have been dropped."""
    host = torch.get_rng_state()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(host)
        if own is not None:
            torch.cuda.set_rng_state(own, device)

    return restore


def free_memory(device: torch.device) -> None:
    """Gives back what nobody refers to: to be called when the error, whose frames hold tensors, is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def shrunk(setting: str, tokens: int) -> str:
    """What is said of a pass that was done again."""
    return (
        f"the GPU ran out of memory: the pass was done again with at most {tokens} tokens in a micro-batch, and all "
        f"later ones keep to that, which changes no gradient; write {setting}={tokens} to start with it"
    )
