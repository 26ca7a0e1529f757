"""What a process needs before numeric work: its threads, and fixed choices where bits must repeat."""

from __future__ import annotations

import os

from roll.cluster import Place


def set_up_process(place: Place, deterministic: bool) -> None:
    import torch

    torch.set_num_threads(place.threads or os.cpu_count() or 1)
    torch.use_deterministic_algorithms(deterministic, warn_only=False)


def take_peak_bytes(place: Place) -> int:
    """The most GPU memory this process has had allocated since it was asked last; 0 on a CPU."""
    if not place.device.startswith("cuda"):
        return 0
    import torch

    peak = torch.cuda.max_memory_allocated(place.device)
    torch.cuda.reset_peak_memory_stats(place.device)
    return int(peak)
