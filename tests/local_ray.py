"""Ray on this machine, started once for all tests of a process that need no cluster of their own."""

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
        _started[-1].connect()


def stop() -> None:
    """Stops it, for a test that starts or joins a cluster itself."""
    while _started:
        _started.pop().disconnect()
