"""Commands from rank 0 of a mesh to the other ranks, for a role that many clients call at any time.

The controller calls all ranks of a trainer in the same order. A reward model is called by every reward worker: they call
rank 0 only, and it sends commands to the other ranks through the rendezvous store.

Invariant: every rank executes the same commands in the same order.
"""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roll.strategy.train.sharded.process_group import RankRendezvous

_POLL = timedelta(seconds=5)


class RankCommands:
    def __init__(self, rendezvous: RankRendezvous, followers: int) -> None:
        """Opens a separate connection to the store: a connection that waits for a command blocks its other users."""
        deadline = timedelta(seconds=rendezvous.deadline_s)
        self._store = TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=deadline)
        self.followers = followers
        self._number = 0

    def send(self, command: Any) -> None:
        """Sends a command to the other ranks; the caller executes it too."""
        if self.followers:
            self._store.set(f"order/{self._number}", pickle.dumps(command))  # type: ignore[arg-type]
            self._number += 1

    async def next(self) -> Any:
        """Waits for the next command and returns it."""
        key = f"order/{self._number}"
        while not await asyncio.to_thread(self._is_set, key):
            pass
        command = pickle.loads(await asyncio.to_thread(self._store.get, key))
        self._number += 1
        if self._store.add(f"{key}/read", 1) == self.followers:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/read")
        return command

    def _is_set(self, key: str) -> bool:
        try:
            self._store.wait([key], _POLL)
        except (RuntimeError, ValueError):  # torch has no specific error for a timeout
            return bool(self._store.check([key]))  # raises if the store has ended
        return True
