"""Ray starts in a thread while the process imports libraries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import ray

from roll.cluster import ray_executor
from roll.cluster.ray_executor import RayExecutor
from roll.config.errors import UserError
from roll.config.schema import RayConfig

DEADLINE_S = 20.0


@dataclass
class ToyRay:
    """Stands in for Ray: it has started once `go` is set, unless `error` says that it cannot."""

    go: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    starts: list[threading.Thread] = field(default_factory=list)
    is_running: bool = False

    def connect(self, config: RayConfig, root: str = "") -> None:
        self.starts.append(threading.current_thread())
        assert self.go.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.is_running = True

    def shutdown(self) -> None:
        assert self.starts[-1].is_alive(), "Ray's processes end with the thread that started them"
        self.is_running = False


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyRay]:
    toy = ToyRay()
    monkeypatch.setattr(ray_executor, "connect", toy.connect)
    monkeypatch.setattr(ray, "is_initialized", lambda: toy.is_running)
    monkeypatch.setattr(ray, "shutdown", toy.shutdown)
    yield toy
    toy.go.set()


def test_ray_starts_once_while_the_caller_goes_on(toy: ToyRay) -> None:
    executor = RayExecutor(RayConfig())
    executor.start_connecting()
    assert not toy.is_running
    toy.go.set()
    executor.connect()
    executor.connect()
    assert toy.is_running
    assert len(toy.starts) == 1
    assert toy.starts != [threading.current_thread()]
    executor.disconnect()
    assert not toy.is_running
    toy.starts[0].join(DEADLINE_S)
    assert not toy.starts[0].is_alive()


def test_without_an_early_start_ray_starts_where_it_is_needed(toy: ToyRay) -> None:
    toy.go.set()
    executor = RayExecutor(RayConfig())
    executor.connect()
    assert toy.starts == [threading.current_thread()]
    executor.disconnect()
    assert not toy.is_running


def test_an_error_of_the_start_is_raised_where_the_connection_is_needed(toy: ToyRay) -> None:
    toy.error = UserError("no port is free")
    toy.go.set()
    executor = RayExecutor(RayConfig())
    executor.start_connecting()
    with pytest.raises(UserError, match="no port is free"):
        executor.connect()
    executor.disconnect()


@pytest.mark.parametrize("error", [None, UserError("no port is free")])
def test_a_run_that_is_refused_meanwhile_leaves_no_ray(toy: ToyRay, error: Exception | None) -> None:
    toy.error = error
    executor = RayExecutor(RayConfig())
    executor.start_connecting()
    threading.Timer(0.05, toy.go.set).start()
    executor.disconnect()
    assert not toy.is_running
    assert toy.starts, "it was starting"
    executor.disconnect()


def test_a_process_that_is_connected_already_stays_connected(toy: ToyRay) -> None:
    toy.is_running = True
    executor = RayExecutor(RayConfig())
    executor.start_connecting()
    executor.connect()
    executor.disconnect()
    assert toy.is_running
    assert not toy.starts
