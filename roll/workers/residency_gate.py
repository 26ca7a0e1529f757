"""The residency gate of a worker that is called at any time and shares its devices with other roles."""

from __future__ import annotations

import asyncio
from contextlib import suppress

POLL_S = 2.0
"""How long a call waits for the worker to be onloaded before it is sent back."""


class ResidencyGate:
    """Whether the worker is resident on its devices. While it is offloaded, calls are sent back, to be made again."""

    def __init__(self) -> None:
        self._here = asyncio.Event()
        self._here.set()

    @property
    def is_on(self) -> bool:
        return self._here.is_set()

    async def come(self) -> bool:
        """Waits up to `POLL_S`; returns whether the worker is resident."""
        if not self.is_on:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._here.wait(), POLL_S)
        return self.is_on

    def end(self) -> None:
        self._here.clear()

    def begin(self) -> None:
        self._here.set()
