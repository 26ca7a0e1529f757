"""What the first rank of a mesh has the other ranks do, for a role that is asked at any time and by many.

A trainer's calls come from the controller, to all ranks in one order. A reward model's come from every grader: so only
its first rank is asked, and it gives the others their orders, through the store at which all of them met.

What always holds: every rank carries out the same orders in the same order.
"""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roll.strategy.train.sharded.process_group import RankRendezvous

_LOOK = timedelta(seconds=5)


class RankCommands:
    def __init__(self, rendezvous: RankRendezvous, followers: int) -> None:
        """A connection of its own: one that waits for an order keeps others from using it."""
        deadline = timedelta(seconds=rendezvous.deadline_s)
        self._store = TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=deadline)
        self.followers = followers
        self._number = 0

    def give(self, order: Any) -> None:
        """Tells the other ranks what to do next: this one does it too."""
        if self.followers:
            self._store.set(f"order/{self._number}", pickle.dumps(order))  # type: ignore[arg-type]
            self._number += 1

    async def next(self) -> Any:
        """The next order, as soon as there is one."""
        key = f"order/{self._number}"
        while not await asyncio.to_thread(self._there, key):
            pass
        order = pickle.loads(await asyncio.to_thread(self._store.get, key))
        self._number += 1
        if self._store.add(f"{key}/read", 1) == self.followers:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/read")
        return order

    def _there(self, key: str) -> bool:
        try:
            self._store.wait([key], _LOOK)
        except (RuntimeError, ValueError):  # torch has no error of its own for a wait that was too long
            return bool(self._store.check([key]))  # raises when the store is gone
        return True
