"""Trackers: copies of the metrics for other tools, which never harm the run."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from roll.config import UserError
from roll.config.schema import RunConfig
from roll.run import Metrics, RunFolder
from roll.run.trackers import TrackedRun, Trackers, find_trackers

TRACKER = """
import json

class Lines:
    def __init__(self, run):
        self.file = open(run.folder / "lines.txt", "a")
        print("from", run.first_step, run.config["seed"], file=self.file, flush=True)

    def log(self, step, metrics):
        print(step, json.dumps(metrics), file=self.file, flush=True)

    def close(self):
        print("closed", file=self.file, flush=True)
        self.file.close()

class Deaf:
    def log(self, step, metrics): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "my_trackers.py").write_text(TRACKER)
    return RunFolder.create(tmp_path / "run", "seed: 1\n", "0700")


def test_a_users_tracker_gets_what_is_on_record(folder: RunFolder, tmp_path: Path) -> None:
    found = find_trackers(RunConfig(trackers=("my_trackers.py:Lines",), tensorboard=False), str(tmp_path))
    with Metrics(folder, Trackers(folder, found, {"seed": 7}, pytest.fail)) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"reward/mean": step / 2})
        metrics.truncate_after(1)
        metrics.log(2, {"reward/mean": 20})
    lines = (folder.path / "lines.txt").read_text().splitlines()
    assert lines[0] == "from 0 7"
    assert lines[4:6] == ["closed", "from 2 7"], "a new one replaces what the run has taken back"
    assert lines[-1] == "closed"
    told = [json.loads(line.split(" ", 1)[1]) for line in lines[5:] if line[0].isdigit()]
    assert told == [{"reward/mean": 20.0}]


def test_an_installed_package_may_offer_trackers(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("lines", "my_trackers:Lines", "roll.trackers")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if group == point.group else [])
    assert [
        factory.__name__
        for factory in find_trackers(RunConfig(trackers=("lines", "tensorboard"), tensorboard=False)).values()
    ] == ["Lines", "TensorBoard"]
    with pytest.raises(UserError, match=r"run.trackers 'line' is not known: write tensorboard, lines, .*did you mean"):
        find_trackers(RunConfig(trackers=("line",), tensorboard=False))


def test_a_class_that_is_no_tracker_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the class Deaf has no method close"):
        find_trackers(RunConfig(trackers=("my_trackers.py:Deaf",), tensorboard=False), str(tmp_path))


class Failing:
    """Fails from the second step on."""

    error: Exception = RuntimeError("no network")

    def __init__(self, run: TrackedRun) -> None:
        self.logged: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > 1:
            raise self.error
        self.logged.append(step)

    def close(self) -> None:
        raise RuntimeError("no network either")


class OnAFullDisk(Failing):
    error = OSError(errno.ENOSPC, "No space left on device")


def test_one_that_fails_is_dropped_with_a_warning(folder: RunFolder) -> None:
    warnings: list[str] = []
    kept: list[Mapping[str, float]] = []

    class Keeping(Failing):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            kept.append(metrics)

        def close(self) -> None: ...

    with Metrics(folder, Trackers(folder, {"first": Failing, "other": Keeping}, {}, warnings.append)) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"reward/mean": step})
    assert warnings == [
        "the tracker first failed and gets no more metrics (RuntimeError: no network); metrics.jsonl has them all"
    ]
    assert [each["reward/mean"] for each in kept] == [1, 2, 3]
    assert len(Metrics.read(folder.metrics_path)) == 3


def test_a_full_disk_is_still_the_runs_error(folder: RunFolder) -> None:
    metrics = Metrics(folder, Trackers(folder, {"first": OnAFullDisk}, {}, pytest.fail))
    metrics.log(1, {"reward/mean": 1})
    with pytest.raises(OSError, match="No space left"):
        metrics.log(2, {"reward/mean": 1})


def test_one_that_cannot_start_is_the_users_to_mend(folder: RunFolder) -> None:
    def factory(run: TrackedRun) -> Failing:
        raise ImportError("no module named wonder")

    metrics = Metrics(folder, Trackers(folder, {"wonder": factory}, {}, pytest.fail))
    with pytest.raises(UserError, match="'wonder' could not start: ImportError: no module named wonder"):
        metrics.log(1, {"reward/mean": 1})


def test_what_it_is_given_is_its_own(folder: RunFolder) -> None:
    """A tracker that changes what it gets changes nothing for the next one."""
    config = {"train": {"lr": 1.0}}
    seen: list[Mapping[str, object]] = []

    class Changing(Failing):
        def __init__(self, run: TrackedRun) -> None:
            seen.append(json.loads(json.dumps(run.config)))
            run.config["train"]["lr"] = 0.0

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            assert dict(metrics) == {"reward/mean": 1.0}
            metrics.clear()  # type: ignore[attr-defined]

        def close(self) -> None: ...

    with Metrics(folder, Trackers(folder, {"a": Changing, "b": Changing}, config, pytest.fail)) as metrics:
        metrics.log(1, {"reward/mean": 1.0})
    assert seen == [{"train": {"lr": 1.0}}] * 2
