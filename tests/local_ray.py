"""Ray on this machine: one for all tests of a process that need no cluster of their own, and clusters of nodes."""

from __future__ import annotations

from typing import Any

_started: list[Any] = []
"""The executor that started it."""


def start() -> None:
    """Starts Ray, unless it runs."""
    import ray

    from roll.cluster.ray_executor import RayExecutor
    from roll.config.schema import RayConfig

    if not ray.is_initialized():
        stop()
        _started.append(RayExecutor(RayConfig(object_store_gb=0.2)))
        connect(_started[-1])


def connect(executor: Any) -> None:
    """Starts the Ray of an executor. Ray gives its node 30 s, which may be too little beside other tests: three tries."""
    from roll.config import UserError

    for tries_left in (2, 1, 0):
        try:
            executor.connect()
        except UserError:
            if not tries_left:
                raise
        else:
            return


def stop() -> None:
    """Stops it, for a test that starts or joins a cluster itself."""
    while _started:
        _started.pop().disconnect()


def start_nodes(count: int, **node: Any) -> Any:
    """A cluster of `count` nodes on this machine, each with the arguments `node`. Ray gives a node 30 s to start,
    which may be too little beside other tests: there are three tries."""
    from ray.cluster_utils import Cluster

    for tries_left in (2, 1, 0):
        cluster = Cluster()
        try:
            for _ in range(count):
                cluster.add_node(**node)
        except Exception:
            cluster.shutdown()
            if not tries_left:
                raise
        else:
            return cluster
    raise AssertionError("the last try raises or returns")
