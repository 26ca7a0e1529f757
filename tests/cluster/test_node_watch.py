"""Lost nodes and a lost head, as a watch over Ray's own list of nodes tells them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from roll.cluster import WorkerPlacement
from roll.cluster.errors import ClusterLost, NodeLost
from roll.cluster.ray_executor import RayExecutor
from roll.cluster.ray_nodes import NodeWatch
from roll.config.schema import RayConfig

NAMES = {"a": "node0 (first, 10.0.0.1)", "b": "node1 (second, 10.0.0.2)"}
LOST = "node1 (second, 10.0.0.2), which Ray has lost (no heartbeats)"


class Nodes:
    """What Ray says of its nodes."""

    def __init__(self) -> None:
        self.dead: dict[str, str] = {}
        self.error: Exception | None = None
        self.ports: dict[str, int] = {}

    def __call__(self) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        return [
            {
                "NodeID": id,
                "Alive": id not in self.dead,
                "DeathReasonMessage": self.dead.get(id, ""),
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": self.ports.get(id, 0),
            }
            for id in (*NAMES, "another run's")
        ]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    said = Nodes()
    monkeypatch.setattr(ray, "nodes", said)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return said


@pytest.fixture
def head() -> Iterator[socket.socket]:
    """Somebody who listens, as the head of a cluster does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def watch_of(head: socket.socket, silent_s: float = 60.0) -> NodeWatch:
    return NodeWatch(NAMES, "a", "127.0.0.1:{1}".format(*head.getsockname()), silent_s)


def test_a_node_that_ray_calls_dead_is_lost_and_stays_so(nodes: Nodes, head: socket.socket) -> None:
    watch = watch_of(head)
    watch.poll()
    assert watch.lost_reason("a") is watch.lost_reason("b") is watch.failure is None
    nodes.dead = {"b": "no heartbeats", "another run's": "received SIGTERM"}
    watch.poll()
    assert watch.lost_reason("b") == LOST
    assert watch.lost_reason("another run's") is None
    nodes.error = ConnectionError("Ray is gone")
    watch.poll()
    assert (watch.lost_reason("b"), watch.failure) == (LOST, None)


def test_a_node_whose_raylet_refuses_connections_is_lost_before_ray_says_so(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        nodes.ports = {"b": raylet.getsockname()[1]}
        watch, patient = (NodeWatch(NAMES, "a", "127.0.0.1:1", 60.0, refused_s) for refused_s in (0.0, 3600.0))
        for each in (watch, patient):
            each.poll()
            assert each.lost_reason("b") is None
    for each in (watch, patient):
        each.poll()
    assert f"node1 (second, 10.0.0.2), whose raylet is gone (it refuses connections to its port {nodes.ports['b']})" == (
        watch.lost_reason("b")
    )
    assert patient.lost_reason("b") is None  # it has not refused for an hour
    with socket.create_server(("127.0.0.1", nodes.ports["b"])):
        patient.poll()
    assert patient._refusing_since_s == {}


def test_a_raylet_that_could_never_be_reached_is_left_to_ray(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nodes.ports = {"b": port}
    watch = NodeWatch(NAMES, "a", "127.0.0.1:1", 60.0, refused_s=0.0)
    watch.poll()
    watch.poll()
    assert watch.lost_reason("b") is None


def test_the_node_of_this_program_is_the_end(nodes: Nodes, head: socket.socket) -> None:
    watch = watch_of(head)
    nodes.dead = {"a": "no heartbeats"}
    watch.poll()
    assert watch.failure == "this program runs on node0 (first, 10.0.0.1), which Ray has lost (no heartbeats)"


def test_a_head_that_nobody_hears_of_for_long_enough_is_the_end(nodes: Nodes, head: socket.socket) -> None:
    watch = watch_of(head, silent_s=0.1)
    address = head.getsockname()
    watch.start()
    try:
        head.accept()[0].close()
        assert watch.failure is None
        head.close()
        watch._threads[0].join(60)
    finally:
        watch.stop()
    assert watch.failure is not None
    assert f"the head of Ray's cluster at 127.0.0.1:{address[1]} has not answered for" in watch.failure


def test_a_watch_that_was_stopped_asks_ray_for_nothing(nodes: Nodes, head: socket.socket) -> None:
    watch = watch_of(head)
    watch.start()
    watch.stop()
    assert not any(thread.is_alive() for thread in watch._threads)
    nodes.dead = {"b": "received SIGTERM"}  # as nodes do when a cluster ends
    watch.poll()
    assert watch.lost_reason("b") is None


def test_work_on_a_placement_ends_with_its_node(nodes: Nodes, head: socket.socket) -> None:
    """Ray itself waits for a node that never comes back."""

    async def main() -> None:
        executor = RayExecutor(RayConfig(address="10.0.0.1:6379"))
        watch = executor._watch = watch_of(head)
        here, there = WorkerPlacement("engine", 0, 2, node="a"), WorkerPlacement("engine", 1, 2, node="b")
        assert await executor._until_node_lost(there, asyncio.sleep(0, "done")) == "done"
        assert await executor.lost_node(there) is None
        hanging = asyncio.ensure_future(executor._until_node_lost(there, asyncio.Event().wait()))
        nodes.dead = {"b": "no heartbeats"}
        assert await executor.lost_node(there) == LOST
        assert await executor.lost_node(here) is None
        with pytest.raises(NodeLost, match=r"engine\[1\] was on node1 \(second, 10\.0\.0\.2\), which Ray has lost"):
            await hanging
        watch.failure = "the head of Ray's cluster at 10.0.0.1:6379 has not answered for 12 s"
        for place in (here, there):
            with pytest.raises(ClusterLost, match="has not answered for 12 s: no worker can be reached any more"):
                await executor.lost_node(place)

    asyncio.run(main())
