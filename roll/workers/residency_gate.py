"""The residency gate of a worker that is called at any time and shares its devices with other roles."""

from __future__ import annotations

import asyncio
from contextlib import suppress

POLL_S = 2.0
"""How long a call waits for the worker to be onloaded before it is sent back."""


class ResidencyGate:
    """Whether the worker is resident on its devices. While it is offloaded, calls are sent back, to be made again."""

    def __init__(self) -> None:
        self._resident = asyncio.Event()
        self._resident.set()

    @property
    def is_resident(self) -> bool:
        return self._resident.is_set()

    async def wait_resident(self) -> bool:
        """Waits up to `POLL_S`; returns whether the worker is resident."""
        if not self.is_resident:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._resident.wait(), POLL_S)
        return self.is_resident

    def close(self) -> None:
        self._resident.clear()

    def open(self) -> None:
        self._resident.set()
