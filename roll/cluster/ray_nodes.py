"""Which nodes of the cluster are lost, and whether Ray itself still answers.

A node is lost when Ray's list says so, or when its raylet refuses connections: Ray's own health check takes 15 seconds
and more to find a raylet that was killed, and longer where several are. What always holds: a lost node stays lost,
because one that comes back has another id; no look at Ray holds up the event loop: Ray's own calls hang for a minute once
its head is gone.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

LOOK_S = 1.0
REFUSED_S = 3.0
"""A raylet that has refused connections for that long is gone."""
_CONNECT_S = 2.0
_JOIN_S = 3.0
_HEAD = "the head of Ray's cluster"


class NodeWatch:
    """Looks once a second, in threads of its own, from `start` to `stop`."""

    def __init__(
        self, names: Mapping[str, str], own: str, head: str, silent_s: float, refused_s: float = REFUSED_S
    ) -> None:
        """`names` are the nodes by their ids, `own` is the one this process is on, `head` where Ray's head listens: it is
        lost when nothing has listened there for `silent_s`. Other nodes are lost when they have answered and then refuse
        connections for `refused_s`."""
        self.failure: str | None = None
        """Why no worker can be reached any more."""
        self._names, self._own = names, own
        self._head = head
        self._silent_s = silent_s
        self._lost: dict[str, str] = {}
        self._refused_s = refused_s
        self._answered: set[str] = set()
        self._refusing_since_s: dict[str, float] = {}
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._watch_head, self._watch_nodes)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Asks Ray for nothing from now on."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_JOIN_S if self.failure is None else 0.0)

    def lost(self, node: str) -> str | None:
        """What a lost node is called, and why Ray says that it is lost; None for one that is there."""
        return self._lost.get(node)

    async def look_now(self, most_s: float) -> None:
        """Returns once Ray's list of nodes has been taken over, or after `most_s`."""
        loop, seen = asyncio.get_running_loop(), asyncio.Event()

        def look() -> None:
            self.look()
            with suppress(RuntimeError):  # the loop has ended by now
                loop.call_soon_threadsafe(seen.set)

        # No thread of the loop's own, which waits for all of them when it ends.
        threading.Thread(target=look, daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await seen.wait()

    def look(self) -> None:
        """Takes over what Ray says of its nodes. Blocks, for a minute when Ray's head is gone."""
        if self._stopped.is_set() or not ray.is_initialized():  # to ask Ray then would start it anew
            return
        try:
            nodes = ray.nodes()
        except (RayError, OSError, RuntimeError):
            return  # whether Ray is gone is the other thread's to say
        for node in nodes:
            if not node["Alive"] and node["NodeID"] in self._names:
                why = node.get("DeathReasonMessage") or "Ray does not say why"
                self._lost.setdefault(node["NodeID"], f"{self._names[node['NodeID']]}, which Ray has lost ({why})")
            elif node["NodeID"] in self._names and node["NodeID"] not in self._lost:
                self._look_at_raylet(node)
        if self._own in self._lost and self.failure is None:
            self.failure = f"this program runs on {self._lost[self._own]}"

    def _look_at_raylet(self, node: Mapping[str, Any]) -> None:
        """A refused connection means that no process listens any more. Silence may be a slow network, and is left to
        Ray's health check, and so is a raylet that this process could never reach."""
        id, host, port = node["NodeID"], node.get("NodeManagerAddress"), node.get("NodeManagerPort")
        if not host or not port:
            return
        try:
            # waits: its second argument is the limit
            socket.create_connection((host, port), _CONNECT_S).close()
        except ConnectionRefusedError:
            since_s = self._refusing_since_s.setdefault(id, time.monotonic())
            if id in self._answered and time.monotonic() - since_s >= self._refused_s:
                self._lost[id] = f"{self._names[id]}, whose raylet is gone (it refuses connections to its port {port})"
        except OSError:
            self._refusing_since_s.pop(id, None)
        else:
            self._answered.add(id)
            self._refusing_since_s.pop(id, None)

    def _watch_nodes(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self.look()

    def _watch_head(self) -> None:
        host, _, port = self._head.rpartition(":")
        answered_s = time.monotonic()
        while not self._stopped.wait(LOOK_S / 2):
            try:
                # waits: its second argument is the limit
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            except OSError as error:
                if (silent_s := time.monotonic() - answered_s) > self._silent_s:
                    self.failure = f"{_HEAD} at {self._head} has not answered for {silent_s:.0f} s ({error})"
                    return
            else:
                answered_s = time.monotonic()
