"""Trackers: copies of a run's metrics for other tools, such as TensorBoard.

Invariants: metrics.jsonl is the record, and a tracker gets the metrics of a step after they are in it. A tracker that
fails during the run is dropped with a warning; one that cannot start ends the run with a message. Secrets are redacted
from what trackers get.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.config.errors import UserError
from roll.config.registry import Registry
from roll.config.settings import RunConfig
from roll.run.disk import full_disk
from roll.run.folder import RunFolder

TENSORBOARD = "tensorboard"
TRACKERS = Registry("tracker", "roll.trackers", {TENSORBOARD: "roll.run.trackers:TensorBoard"})


@dataclass(frozen=True)
class TrackedRun:
    """The run, as its trackers know it."""

    folder: Path
    config: Mapping[str, Any]
    """All settings, as config.yaml has them."""
    first_step: int = 0
    """The first step it gets. A run that returned to a checkpoint replaces what it logged of this step and later ones
    before."""


class Tracker(Protocol):
    """Copies metrics elsewhere. It is made with the run (`TrackedRun`), when the first metrics are there."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step. Steps come in order; one step may come in several parts."""
        ...

    def close(self) -> None:
        """Ends the copy. The run has ended, or continues from an earlier checkpoint with a new tracker."""
        ...


class TensorBoard:
    """TensorBoard events in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides the events at and after purge_step that files before this one have. It orders files by their
        # names, which begin with the second they were created in: two files of one second may be read in any order.
        folder = run.folder / TENSORBOARD
        while any(folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
            time.sleep(0.02)
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.first_step, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, number in metrics.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


Factory = Callable[[TrackedRun], Tracker]


def find_trackers(run: RunConfig, root: str | None = None) -> dict[str, Factory]:
    """The trackers that the settings name; `UserError` for one that is not there or has no method `log` or `close`."""
    found: dict[str, Factory] = {}
    for name in dict.fromkeys([*([TENSORBOARD] if run.tensorboard else []), *run.trackers]):
        found[name] = factory = TRACKERS.find(name, "run.trackers", root)
        missing = [method for method in ("log", "close") if isinstance(factory, type) and not hasattr(factory, method)]
        if missing:
            raise UserError(
                f"run.trackers {name!r}: the class {factory.__name__} has no method {missing[0]}: write "
                "log(step, metrics) and close()"
            )
    return found


class Trackers:
    """All trackers of a run, each made when there is something to track."""

    def __init__(
        self,
        folder: RunFolder,
        factories: Mapping[str, Factory],
        config: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._folder, self._config, self._warn = folder, config, warn
        self._factories = dict(factories)
        self._made: dict[str, Tracker] = {}
        self._first_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, factory in list(self._factories.items()):
            if name not in self._made:
                self._make(name, factory)
            self._attempt(name, functools.partial(self._made[name].log, step, dict(metrics)))

    def resume_from(self, step: int) -> None:
        """Closes all trackers; the next metrics are of this step, and replace those of it and of later ones."""
        self.close()
        self._first_step = step

    def close(self) -> None:
        made, self._made = self._made, {}
        for name, tracker in made.items():
            self._attempt(name, tracker.close)

    def _make(self, name: str, factory: Factory) -> None:
        run = TrackedRun(self._folder.path, copy.deepcopy(dict(self._config)), self._first_step)
        try:
            self._made[name] = factory(run)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"run.trackers {name!r} could not start: {type(error).__name__}: {error}") from error

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if full_disk(error) is not None:
                raise
            self._factories.pop(name, None)
            with suppress(Exception):
                self._made.pop(name).close()
            self._warn(
                f"the tracker {name} failed and gets no more metrics ({type(error).__name__}: {error}); "
                "metrics.jsonl has them all"
            )
