"""The executor that a config names. Imports neither torch nor transformers, so that Ray can start while they are
imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from roll.cluster.executor import Executor, LocalExecutor
from roll.config.errors import UserError
from roll.config.root import root_of
from roll.config.schema import Config

MIN_HANG_S = 20.0
"""Importing libraries and loading a model may keep a starting worker from answering for some seconds."""
_RAY_SAYS = r"Raylet is terminated|has been marked dead|A worker died or was killed"


def make_executor(config: Config) -> Executor:
    """The executor that the config names; it has started or joined nothing yet."""
    silent_s = max(config.fault_tolerance.hang_s, MIN_HANG_S)
    if config.executor == "local":
        return LocalExecutor(config.ray.call_deadline_s, config.ray.start_deadline_s, silent_s)
    # Ray reads this when it is imported. It hides pages about dead processes, which the run reports in one sentence.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _RAY_SAYS)
    try:
        from roll.cluster.ray_executor import RayExecutor
    except ModuleNotFoundError as error:
        raise UserError(
            f"executor is ray, but the package {error.name} is not installed: run "
            "`pip install -e '.[ray]'` in ROLL's folder, "
            "or write executor=local"
        ) from error
    return RayExecutor(config.ray, silent_s=silent_s, root=root_of(config))


@contextmanager
def executor_of(config: Config) -> Iterator[Executor]:
    """The executor that the config names; everything it started is stopped at the end, also after an error."""
    executor = make_executor(config)
    try:
        yield executor
    finally:
        executor.disconnect()


@contextmanager
def connecting_executor_of(config: Config) -> Iterator[Executor]:
    """As `executor_of`, but the executor connects in a thread while the block runs, for example while it imports
    libraries."""
    with executor_of(config) as executor:
        executor.start_connecting()
        yield executor
