"""Detects lost nodes of the Ray cluster, and whether Ray itself still answers.

A node is lost when Ray lists it as dead, or when its raylet refuses connections: Ray's own health check takes 15 seconds
and more to detect a killed raylet, and longer for several. Invariants: a lost node stays lost, because a node that comes
back has a new id; no query to Ray blocks the event loop, because Ray's calls hang for a minute once its head is gone.
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

POLL_S = 1.0
REFUSED_S = 3.0
"""A node is lost once its raylet has refused connections for this long."""
_CONNECT_S = 2.0
_JOIN_S = 3.0
_HEAD = "the head of Ray's cluster"


class NodeWatch:
    """Polls once per second, in two threads, from `start` to `stop`."""

    def __init__(
        self, names: Mapping[str, str], own_node: str, head: str, silent_s: float, refused_s: float = REFUSED_S
    ) -> None:
        """`names`: names of the nodes by id. `own`: id of this process's node. `head`: address of Ray's head, which is
        lost when no connection succeeds for `silent_s`. A node is lost when its raylet has accepted a connection before
        and then refuses connections for `refused_s`."""
        self.failure: str | None = None
        """Why no worker can be reached; None while Ray is alive."""
        self._names, self._own_node = names, own_node
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
        """Stops polling Ray."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_JOIN_S if self.failure is None else 0.0)

    def lost_reason(self, node: str) -> str | None:
        """The name of a lost node and why it is lost; None for a live node."""
        return self._lost.get(node)

    async def poll_now(self, timeout_s: float) -> None:
        """Polls the nodes now; returns when that is done, or after `most_s`."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def poll() -> None:
            self.poll()
            with suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(done.set)

        # Not a thread of the event loop's executor: the loop waits for those when it ends.
        threading.Thread(target=poll, daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await done.wait()

    def poll(self) -> None:
        """Updates the lost nodes from Ray's list and the raylets. Blocks, for a minute if Ray's head is gone."""
        if self._stopped.is_set() or not ray.is_initialized():  # a query would start Ray again
            return
        try:
            nodes = ray.nodes()
        except (RayError, OSError, RuntimeError):
            return  # the other thread detects whether Ray is gone
        for node in nodes:
            if not node["Alive"] and node["NodeID"] in self._names:
                why = node.get("DeathReasonMessage") or "Ray does not say why"
                self._lost.setdefault(node["NodeID"], f"{self._names[node['NodeID']]}, which Ray has lost ({why})")
            elif node["NodeID"] in self._names and node["NodeID"] not in self._lost:
                self._check_raylet(node)
        if self._own_node in self._lost and self.failure is None:
            self.failure = f"this program runs on {self._lost[self._own_node]}"

    def _check_raylet(self, node: Mapping[str, Any]) -> None:
        """Checks whether a raylet refuses connections, which means that its process has ended. A timeout may be a slow
        network; Ray's health check decides then, and also for a raylet that this process could never reach."""
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
        while not self._stopped.wait(POLL_S):
            self.poll()

    def _watch_head(self) -> None:
        host, _, port = self._head.rpartition(":")
        answered_s = time.monotonic()
        while not self._stopped.wait(POLL_S / 2):
            try:
                # waits: its second argument is the limit
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            except OSError as error:
                if (silent_s := time.monotonic() - answered_s) > self._silent_s:
                    self.failure = f"{_HEAD} at {self._head} has not answered for {silent_s:.0f} s ({error})"
                    return
            else:
                answered_s = time.monotonic()
