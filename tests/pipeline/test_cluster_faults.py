"""Workers and nodes of a cluster that are killed while a run is generating, training, publishing and saving: it goes on
and ends in the bits of a run to which nothing happened, or it says what it lost and resumes to those bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_faults import (
    HEAD,
    ON_HEAD,
    PHASES,
    PLANS,
    SPREAD,
    TRAINER_NODE,
    VICTIMS,
    Cell,
    Outcome,
    Plan,
    assert_same_ending,
    endure,
    undisturbed,
)
from small_runs import Remains

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("own_cluster")]

SHORT = Plan(
    [
        (
            SPREAD,
            [
                Cell("reward worker", "generating"),
                Cell("rollout worker", "training"),
                Cell("engine", "publishing"),
                Cell("environment worker", "saving"),
                Cell("trainer", "training"),
                Cell("node of an engine", "generating"),
                Cell(TRAINER_NODE, "saving"),
            ],
        ),
        (ON_HEAD, [Cell(HEAD, "publishing")]),
    ]
)


def check(plan: Plan, folder: Path) -> None:
    outcomes: list[Outcome] = []
    endure(plan, folder, outcomes)
    assert [outcome.cell for outcome in outcomes] == plan.cells
    assert_same_ending(Remains(folder / "run"), undisturbed(plan.steps, folder))


@pytest.mark.thorough
def test_a_run_goes_on_without_what_is_killed_or_says_so_and_resumes(tmp_path: Path) -> None:
    """Every victim and every phase once; of the nodes one that holds a worker of every role but the trainer."""
    check(SHORT, tmp_path)


def test_the_plans_have_every_victim_in_every_phase_once() -> None:
    cells = [cell for plan in PLANS.values() for cell in plan.cells]
    assert sorted((cell.victim, cell.phase) for cell in cells) == sorted((v, p) for v in VICTIMS for p in PHASES)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_goes_on_or_resumes_whatever_is_killed_in_whatever_phase(tmp_path: Path, plan: str) -> None:
    check(PLANS[plan], tmp_path)
