"""The picture of a sample's life in the docs shows the table of moves, all of it and nothing else."""

from __future__ import annotations

from pathlib import Path

from roll.rollout.lifecycle import MOVES
from roll.scheduler.render_lifecycle import render_lifecycle

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "lifecycle.svg"


def test_the_picture_in_the_docs_is_the_tables() -> None:
    assert PICTURE.read_text() == render_lifecycle(), "run `make docs`"


def test_every_move_is_an_arrow() -> None:
    picture = render_lifecycle()
    arrows = {f"<title>{start} → {end}</title>" for start, ends in MOVES.items() for end in ends}
    assert all(arrow in picture for arrow in arrows)
    assert picture.count("<title>") == len(arrows)
