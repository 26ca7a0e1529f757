from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from roll.run import Panel, plot_curve
from roll.run.plot import series, smooth

PANELS = (
    Panel("learning", "reward/mean", "training reward", {"eval/reward": "held-out accuracy"}),
    Panel("length", "response/tokens_mean"),
)
FULL = [
    {"step": step, "reward/mean": step / 20, "response/tokens_mean": 50 - step}
    | ({"eval/reward": step / 20} if step % 5 == 0 else {})
    for step in range(20)
]


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 1}],
        [{"step": 1, "reward/mean": None}],
        [{"step": 1, "eval/reward": 0.5}, {"step": 2, "reward/mean": -1.0}],
        FULL,
    ],
    ids=["none", "other", "null", "few", "full"],
)
def test_a_picture_of_the_right_size_is_drawn_of_whatever_there_is(
    metrics: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plot_curve(metrics, tmp_path / "curve.png", "title", PANELS)
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1350, 540)
    assert capfd.readouterr() == ("", "")


def test_series_skip_what_has_no_value() -> None:
    assert series([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}], "a") == ([1], [2.0])


def test_smoothing_keeps_constants_and_averages_neighbours() -> None:
    assert smooth([2.0] * 5, 3) == [2.0] * 5
    assert smooth([0.0, 3.0, 6.0, 0.0], 3) == [1.5, 3.0, 3.0, 3.0]
