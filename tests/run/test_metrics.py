from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.config.errors import RunError, UserError
from roll.config.schema import RunConfig
from roll.run import Metrics, RunFolder
from roll.run.trackers import Trackers, find_trackers


def steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in Metrics.read(folder.metrics_path)]


def test_what_is_logged_is_read_at_once(folder: RunFolder) -> None:
    with Metrics(folder) as metrics:
        metrics.log(1, {"reward/mean": 0.5, "count": 3})
        (row,) = Metrics.read(folder.metrics_path)
    assert (row["step"], row["reward/mean"], row["count"]) == (1, 0.5, 3)
    assert row["time_s"] > 1.7e9
    assert not folder.tensorboard_dir.exists()


def test_numbers_that_are_not_finite_are_null(folder: RunFolder) -> None:
    with Metrics(folder) as metrics:
        metrics.log(1, {"a": float("nan"), "b": float("-inf"), "c": 1.0})
    row = json.loads(folder.metrics_path.read_text(), parse_constant=pytest.fail)
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)


def test_a_resumed_run_forgets_the_steps_it_will_write_anew(folder: RunFolder) -> None:
    with Metrics(folder) as metrics:
        for step in range(5):
            metrics.log(step, {"a": step})
    with Metrics(folder) as metrics:
        metrics.truncate_after(2)
        assert steps(folder) == [0, 1, 2]
        metrics.log(3, {"a": 30})
    assert [row["a"] for row in Metrics.read(folder.metrics_path)] == [0, 1, 2, 30]


def test_a_line_half_written_by_a_kill_is_cut_off(folder: RunFolder) -> None:
    killed = Metrics(folder)
    killed.log(1, {"a": 1})
    killed.log(2, {"a": 2})
    folder.metrics_path.write_bytes(folder.metrics_path.read_bytes()[:-5])
    assert steps(folder) == [1]
    with Metrics(folder) as metrics:
        metrics.log(3, {"a": 3})
    assert steps(folder) == [1, 3]


def test_damage_elsewhere_is_named(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step":1}\n{"step\n{"step":3}\n')
    with pytest.raises(RunError, match="line 2"):
        Metrics.read(folder.metrics_path)


def test_no_metrics_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Metrics.read(tmp_path / "metrics.jsonl")


def test_tensorboard_shows_a_resumed_run_once(folder: RunFolder) -> None:
    trackers = Trackers(folder, find_trackers(RunConfig()), {}, pytest.fail)
    with Metrics(folder, trackers) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"reward/mean": step})
        metrics.truncate_after(1)
        metrics.log(2, {"reward/mean": 20})

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.tensorboard_dir))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 1), (2, 20)]
