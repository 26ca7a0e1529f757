"""Samples that the algorithm leaves out are on record as such, and a step of nothing else is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from small_runs import SMALL, TINY, Remains

from roll import load_config
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter
from roll.scheduler.rollout_result import LEFT_OUT

CHOOSY = ("algorithm=raft_pp", "rollout.filter=none", "train.steps=3")


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warned(self, text: str) -> None:
        self.said.append(text)


def test_the_ledger_says_which_samples_of_a_group_were_trained_on(run_small: Callable[..., Remains]) -> None:
    run = run_small(*CHOOSY, "algorithm.positive_above=0.3")
    rows = [row for step in run.samples().values() for row in step]
    ends = {row["sample"]: (row["state"], row["reason"]) for row in rows}
    assert {id: (state, reason) for id, (state, reason, _) in run.lineage().items()} == ends
    expected = {row["sample"]: ("trained", "") if row["reward"] > 0.3 else ("dropped", LEFT_OUT) for row in rows}
    assert ends == expected
    assert {state for state, _ in ends.values()} == {"trained", "dropped"}, "the test needs some of both"
    counted = sum(row.get("samples/trained", 0) for row in run.metrics())
    assert counted == sum(state == "trained" for state, _ in ends.values())


def test_a_step_that_trains_on_nothing_says_which_settings_left_all_out(tmp_path: Path) -> None:
    reporter = Warnings()
    settings = [*SMALL, f"run={tmp_path / 'run'}", *CHOOSY, "algorithm.positive_above=2", "algorithm.mask_truncated=true"]
    summary = train(load_config(TINY, settings), reporter=reporter)
    run = Remains(tmp_path / "run")
    assert reporter.said[0] == (
        "step 1: nothing was trained: the algorithm left out all of 8 samples (algorithm.mask_truncated=True, "
        "algorithm.positive_above=2.0)"
    )
    assert len(reporter.said) == 3
    assert {(state, reason) for state, reason, _ in run.lineage().values()} == {("dropped", LEFT_OUT)}
    assert summary["trained_samples"] == 0
    assert summary["curve"] is None
    assert not run.folder.curve_path.exists()
