"""Engine assignments: on which engine each sample of a rollout worker generates, as decided by the controller."""

from __future__ import annotations

import asyncio

from roll.rollout.messages import EngineAssignment


class EngineAssignments:
    """Invariant: a sample generates only on its latest assignment; a sample without one waits for the next."""

    def __init__(self) -> None:
        self._given: dict[str, EngineAssignment] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        self._revoked: set[str] = set()

    def give(self, seat: EngineAssignment) -> None:
        self._revoked.discard(seat.sample)
        self._given[seat.sample] = seat
        awaited = self._awaited.get(seat.sample)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def engine(self, sample: str) -> int | None:
        """The engine that a sample is assigned to, or None."""
        seat = self._given.get(sample)
        return None if seat is None else seat.engine

    def mark_dead(self, sample: str) -> None:
        self._given.pop(sample, None)
        self._revoked.discard(sample)

    def revoke(self, sample: str) -> None:
        """Removes the assignment of a sample that is not generating; it must request a new one before its next turn."""
        if self._given.pop(sample, None) is not None:
            self._revoked.add(sample)

    def needs_assignment(self, sample: str) -> bool:
        """Whether `revoke` removed the sample's assignment. Resets the flag."""
        if sample not in self._revoked:
            return False
        self._revoked.discard(sample)
        return True

    async def of(self, sample: str, deadline_s: float) -> EngineAssignment:
        """The sample's assignment. Waits for one for up to `deadline_s`, then raises `TimeoutError`."""
        if (seat := self._given.get(sample)) is not None:  # the common case
            return seat
        async with asyncio.timeout(deadline_s):
            while sample not in self._given:
                self._awaited[sample] = asyncio.get_running_loop().create_future()
                try:
                    await self._awaited[sample]
                finally:
                    del self._awaited[sample]
        return self._given[sample]
