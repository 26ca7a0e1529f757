from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

import local_ray
import pytest
from hypothesis_examples import ALL, examples

from roll.config.secrets import KNOWN

# `nohup`, or a shell's background job, starts programs deaf to these signals; what tests start shall hear them.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Until all tests are collected nothing is garbage: see `pytest_collection_finish`.
gc.disable()

# Models are tiny here and tests run side by side: threads that wait for each other's cores would be most of the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray starts its workers with niceness 15: beside busy processes of other tests they get next to no time.
os.environ.setdefault("RAY_worker_niceness", "0")

# Ray starts a worker for every core before anything needs one.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


if importlib.util.find_spec("hypothesis") is not None:  # a machine for GPU tests may lack it
    from hypothesis import settings

    # Without a deadline: a busy machine is no reason for a test to fail.
    settings.register_profile("roll", max_examples=examples(100), deadline=None)
    settings.load_profile("roll")


@pytest.fixture(scope="session")
def _ray_of_the_session() -> Iterator[None]:
    yield
    local_ray.stop()


@pytest.fixture(scope="module")
def shared_ray(_ray_of_the_session: None) -> None:
    """Ray, started for the first module that needs it, and again after one of `own_cluster`."""
    local_ray.start()


@pytest.fixture(scope="module")
def own_cluster(_ray_of_the_session: None) -> None:
    """The module starts or joins clusters of its own: the shared Ray is stopped."""
    local_ray.stop()


@pytest.fixture(autouse=True)
def threads_stay_as_they_were() -> Iterator[None]:
    """A worker sets the threads of its process, which in tests is the tests'."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def secrets_of_one_test_are_not_the_next_ones() -> Iterator[None]:
    known = dict(vars(KNOWN))
    yield
    vars(KNOWN).update(known)


@pytest.hookimpl(tryfirst=True)  # before the hook of xdist, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none, those marked `vllm` where it is not installed; those marked
    `thorough` are left out unless all tests run.

    Side by side run files. One after the other run those that start Ray, and those of ranks: each of them has several
    processes that wait for each other. What takes longest starts first: tests on Ray, those that share one before the
    others; tests of ranks; and of whole runs.
    """
    if not ALL and (thorough := [item for item in items if item.get_closest_marker("thorough") is not None]):
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]
    items.sort(key=_order)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_row(item)))
    _skip(items, "vllm", "needs vLLM (make test-vllm)", importlib.util.find_spec("vllm") is not None)
    if any(item.get_closest_marker("gpu") is not None for item in items):
        import torch

        _skip(items, "gpu", "needs a CUDA device", torch.cuda.is_available())


def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector passes over what stays to the end: all modules and tests, some millions of objects that it
    would visit in every test that asks for a collection.

    pytest-xdist groups tests by a suffix of their ids, which some versions of pytest do not let it set."""
    gc.enable()
    gc.freeze()
    if session.config.getoption("loadgroup", False) and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError(f"pytest-xdist cannot group tests with pytest {pytest.__version__}: see constraints.txt")


def _row(item: pytest.Item) -> str:
    """What runs one after the other: what shares Ray, a run over ranks, or the server that runs are forked off."""
    file = item.nodeid.partition("::")[0]
    if item.get_closest_marker("ray"):
        return "ray"
    if "sharded" in file:
        return "ranks"
    return "runs" if hasattr(getattr(item, "module", None), "start_roll") else file


def _order(item: pytest.Item) -> tuple[bool, ...]:
    ray, own = item.get_closest_marker("ray") is not None, "own_cluster" in getattr(item, "fixturenames", ())
    return not ray, own, "sharded" not in item.path.parts, "pipeline" not in item.path.parts


def _skip(items: list[pytest.Item], mark: str, reason: str, there: bool) -> None:
    for item in items:
        if not there and item.get_closest_marker(mark) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
