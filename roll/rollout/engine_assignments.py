"""The engines of a rollout worker's samples, as the controller gives and takes them."""

from __future__ import annotations

import asyncio

from roll.rollout.messages import EngineAssignment


class EngineAssignments:
    """What always holds: a sample generates only on the seat it was given last; one that lost it waits for another."""

    def __init__(self) -> None:
        self._given: dict[str, EngineAssignment] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        self._taken_away: set[str] = set()

    def give(self, seat: EngineAssignment) -> None:
        self._taken_away.discard(seat.sample)
        self._given[seat.sample] = seat
        awaited = self._awaited.get(seat.sample)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def engine(self, sample: str) -> int | None:
        """The engine a sample has a seat on."""
        seat = self._given.get(sample)
        return None if seat is None else seat.engine

    def lose(self, sample: str) -> None:
        self._given.pop(sample, None)
        self._taken_away.discard(sample)

    def take_away(self, sample: str) -> None:
        """The sample loses its seat while it does not need one; when it does, it has to ask for another."""
        if self._given.pop(sample, None) is not None:
            self._taken_away.add(sample)

    def must_ask(self, sample: str) -> bool:
        """Whether the sample's seat was taken away without its knowing; told once."""
        if sample not in self._taken_away:
            return False
        self._taken_away.discard(sample)
        return True

    async def of(self, sample: str, deadline_s: float) -> EngineAssignment:
        """The sample's seat; waits for one at most so long, then raises `TimeoutError`."""
        if (seat := self._given.get(sample)) is not None:  # as in every turn but the first
            return seat
        async with asyncio.timeout(deadline_s):
            while sample not in self._given:
                self._awaited[sample] = asyncio.get_running_loop().create_future()
                try:
                    await self._awaited[sample]
                finally:
                    del self._awaited[sample]
        return self._given[sample]
