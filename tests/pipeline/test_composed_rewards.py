"""A run whose reward is made of parts: each is a metric, and so is the time it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_runs import REWARDS, Remains

from roll.run import Metrics

PARTS = f"""{{
  letters: "{REWARDS}:letters",
  right: number,
  brief: {{name: length, weight: 0.5, options: {{overlong: 3, ramp: 2}}}},
}}"""


def test_parts_and_their_latencies_are_metrics(run_small: Callable[..., Remains]) -> None:
    run = run_small('reward.name=""', f"reward.parts={PARTS}", "reward.memory_mb=500", "train.steps=2")
    rows = [row for row in Metrics.read(run.folder.metrics_path) if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        worth = row["reward/letters"] + row["reward/right"] + 0.5 * row["reward/brief"]
        assert row["reward/mean"] == pytest.approx(worth)
        parts = ("part/letters", "part/right", "part/brief")
        assert all(row[f"graders/echo/{what}_s"] >= 0 for what in ("verdict", "wait", *parts))
        assert (row["graders/failed"], row["graders/cache_hits"]) == (0, 0), (
            "letters promises nothing, so nothing is kept"
        )
    samples = [sample for step in run.samples().values() for sample in step]
    assert {tuple(sample["parts"]) for sample in samples} == {("letters", "right", "brief")}


def test_the_same_answer_to_the_same_task_is_judged_once_in_a_run(run_small: Callable[..., Remains]) -> None:
    run = run_small(
        "reward=fuzzy", "rollout.max_new_tokens=1", "rollout.group_size=16", "train.steps=2", "rollout.filter=none"
    )
    hits = [row["graders/cache_hits"] for row in Metrics.read(run.folder.metrics_path) if "graders/cache_hits" in row]
    assert any(share > 0 for share in hits)
