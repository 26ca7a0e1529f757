"""Runs on Ray that generate while they train: what is ready outlives a stop, and a response may span two versions."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from long_runs import long_run
from small_runs import SMALL, TINY, Remains

from roll import load_config
from roll.ledger.index import LedgerIndex
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter, StepReport

pytestmark = pytest.mark.ray

AHEAD = (
    *SMALL,
    *("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=600", "ray.call_deadline_s=600"),
    *("rollout.max_staleness=1", "rollout.filter=none", "fault_tolerance.spare_trainer=false"),
)


class Stopper(SilentReporter):
    """Asks the run to stop after a step, as a cluster's scheduler does."""

    def __init__(self, after: int) -> None:
        self._after = after

    def stepped(self, report: StepReport) -> None:
        if report.step == self._after:
            os.kill(os.getpid(), signal.SIGTERM)


def run_ahead(path: Path, *overrides: str, reporter: SilentReporter | None = None, resume: bool = False) -> Remains:
    config = load_config(TINY, [*AHEAD, f"run={path}", *overrides])
    train(config, reporter=reporter or SilentReporter(), resume=resume)
    return balanced(Remains(path))


def balanced(run: Remains) -> Remains:
    with LedgerIndex.open(run.folder.ledger_path) as index:
        balance = index.balance()
    assert not balance.problems
    assert balance.groups.open == 0
    return run


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("stopped", [True, False])
def test_what_is_ready_when_a_run_ends_is_trained_on_when_it_goes_on(tmp_path: Path, stopped: bool) -> None:
    """Whether it was stopped or had made all its steps; with fewer rollout workers than before."""
    steps = 100 if stopped else 3
    for attempt in range(5):  # on a busy machine it may be that nothing is ready just then
        path, reporter = tmp_path / f"run {attempt}", Stopper(3) if stopped else None
        run = run_ahead(path, f"train.steps={steps}", "roles.rollout.replicas=2", reporter=reporter)
        assert run.checkpoint.step == 3
        ready = [sample for group in run.checkpoint.state["scheduler"]["ready"] for sample in group["samples"]]
        if ready:
            break
    assert ready
    assert {run.lineage()[sample["id"]][:2] for sample in ready} == {
        ("dropped", "ended: the run stopped before it was trained on")
    }
    saved = saved_samples(run.checkpoint.path / "buffer")
    assert set(saved) == {sample["id"] for sample in ready}

    run_ahead(path, "train.steps=5", resume=True)
    assert run.checkpoint.step == 5
    rows = {row["sample"]: row for step in run.samples().values() for row in step}
    for id, sample in saved.items():
        assert run.lives()[id][-2:] == ["kept", "trained"]
        assert run.lives()[id].count("queued") == 1  # not made again
        assert rows[id]["response"] == sample["response"]["text"]
        assert len(rows[id]["ids"]) == sample["logged"]
        assert rows[id]["reward"] == sample["reward"]
        assert drawn_by(rows[id]) == {*range(sample["oldest"], sample["newest"] + 1)}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Remains]:
    """A run on a Ray of its own that aborts responses for new weights and is interrupted after some steps: its exit
    status, what it said, and what is left of it, which is none of its processes."""
    settings = (*AHEAD, "rollout.on_weight_update=abort", "rollout.max_new_tokens=96")
    with long_run(tmp_path_factory.mktemp("interrupted"), *settings, steps=5) as run:
        os.kill(run.child.pid, signal.SIGINT)
        return *run.end(), run.remains


@pytest.mark.thorough
def test_an_interrupted_run_saves_and_leaves_no_process_behind(interrupted: tuple[int, str, Remains]) -> None:
    status, said, run = interrupted
    assert status == 128 + signal.SIGINT, said
    assert "continue with" in said
    assert run.checkpoint.step >= 5


@pytest.mark.thorough
def test_responses_that_are_aborted_for_new_weights_go_on_from_their_prefix_with_them(
    interrupted: tuple[int, str, Remains],
) -> None:
    run = balanced(interrupted[2])
    spanned = {row["sample"]: row for step in run.samples().values() for row in step if len(drawn_by(row)) > 1}
    assert spanned
    histories = run.histories()
    for id, row in spanned.items():
        again = [t for t in histories[id] if t.state == "queued" and t.reason.startswith("new weights")]
        assert again
        versions = [version for version in row["versions"] if version >= 0]
        assert versions == sorted(versions)
        changes = [number for number, (a, b) in enumerate(pairwise(versions), 1) if a != b]
        assert set(changes) <= {t.info["tokens"] for t in again}  # what it had then stays as it was
    trained = {row["sample"]: (step, drawn_by(row)) for step, rows in run.samples().items() for row in rows}
    for id, (step, versions) in trained.items():
        if run.lives()[id][-1] == "trained":
            assert step - 1 - min(versions) <= 1, id


def saved_samples(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for part in folder.glob("*.jsonl") for line in part.read_bytes().splitlines()]
    return {line["id"]: line for line in lines}


def drawn_by(row: dict[str, Any]) -> set[int]:
    """The versions of the weights that drew a sample's tokens."""
    return {version for version in row["versions"] if version >= 0}
