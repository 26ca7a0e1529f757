"""A worker's turn on its devices, for roles that are asked at any time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

POLL_S = 2.0
"""How long a question waits for the worker's turn before it is sent back."""


class ResidencyGate:
    """Whether the worker is on its devices. Questions of a worker that is not are sent back, to be asked again."""

    def __init__(self) -> None:
        self._here = asyncio.Event()
        self._here.set()

    @property
    def is_on(self) -> bool:
        return self._here.is_set()

    async def come(self) -> bool:
        """Waits a while; whether it is the worker's turn."""
        if not self.is_on:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._here.wait(), POLL_S)
        return self.is_on

    def end(self) -> None:
        self._here.clear()

    def begin(self) -> None:
        self._here.set()
