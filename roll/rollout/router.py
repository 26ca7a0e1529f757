"""The router: which engine a group goes to, with a view of all of them.

A group goes to the engine with the fewest tokens still to come; all its samples go there together, because they share
their prompt. Engines leave while their device is needed for something else, and join again.

What always holds: an engine that has left has nothing to do when `leave` returns, and gets nothing before it joins; a
group waits only while no engine is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from roll.config.errors import RunError


class Router:
    def __init__(self, engines: int, deadline_s: float = 1800.0) -> None:
        self._loads = [0] * engines
        """Tokens that may be needed on each engine for what is there."""
        self._inside = set(range(engines))
        self._deadline_s = deadline_s
        self._changed = asyncio.Event()

    @property
    def inside(self) -> frozenset[int]:
        """Engines that take groups."""
        return frozenset(self._inside)

    @asynccontextmanager
    async def seat(self, tokens: int) -> AsyncIterator[int]:
        """An engine for a group that may need so many tokens, until the block ends."""
        await self._until(lambda: bool(self._inside), "no engine has joined")
        engine = min(sorted(self._inside), key=lambda e: self._loads[e])
        self._loads[engine] += tokens
        try:
            yield engine
        finally:
            self._loads[engine] -= tokens
            self._notify()

    async def leave(self, engine: int) -> None:
        """Returns once the engine has nothing to do; it gets nothing new from now on."""
        self._inside.discard(engine)
        await self._until(lambda: self._loads[engine] == 0, f"engine {engine} has not finished its samples")

    def join(self, engine: int) -> None:
        self._inside.add(engine)
        self._notify()

    async def _until(self, holds: Callable[[], bool], otherwise: str) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            raise RunError(f"{otherwise} for {self._deadline_s:g} s") from None

    def _notify(self) -> None:
        """Wakes everyone who waits, once."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
