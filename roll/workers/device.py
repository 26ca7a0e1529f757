"""Base class of workers that compute on devices: sets up torch in the process and reports GPU memory."""

from __future__ import annotations

import os

from roll.cluster import Dispatch, Worker, WorkerPlacement, dispatch


class DeviceWorker(Worker):
    def __init__(self, placement: WorkerPlacement, deterministic: bool) -> None:
        """Sets torch's thread count, and deterministic algorithms if results must be bit-identical."""
        import torch

        super().__init__(placement)
        torch.set_num_threads(placement.threads or os.cpu_count() or 1)
        torch.use_deterministic_algorithms(deterministic, warn_only=False)

    @dispatch(Dispatch.ALL)
    def take_peak_bytes(self) -> int:
        """Peak GPU memory allocated by the worker's process since the last call; 0 on a CPU."""
        if not self.placement.device.startswith("cuda"):
            return 0
        import torch

        peak = torch.cuda.max_memory_allocated(self.placement.device)
        torch.cuda.reset_peak_memory_stats(self.placement.device)
        return int(peak)
