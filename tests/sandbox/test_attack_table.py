"""Every attack of the table, tried on every level that this machine has: it is contained, or the level names the gap."""

from __future__ import annotations

import pytest
from attack import Attack, probe_all, set_off
from attack_table import BOMBS, PROBES, UNSEEN
from boxes import NAMES, box
from thorough import but

from roll.sandbox import Sandbox


@pytest.fixture(params=but({"plain", "namespaces"}, NAMES))
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return box(request.param)


def test_the_table_has_no_name_twice_and_more_than_sixty_attacks() -> None:
    attacks = [*PROBES, *BOMBS, *UNSEEN]
    assert len({attack.name for attack in attacks}) == len(attacks) > 60
    assert {attack.kind for attack in attacks} == {
        "processes",
        "kernel",
        "limits",
        "files",
        "network",
        "scratch",
        "time and output",
        "memory",
    }


def test_no_probe_gets_away_with_anything(sandbox: Sandbox) -> None:
    probes = [probe for probe in PROBES if probe.here and not probe.gap(sandbox)]
    assert len(probes) >= (10 if not sandbox.guards else 25)
    escapes = {name: escapes for name, escapes in probe_all(sandbox, probes).items() if escapes}
    assert escapes == {}


@pytest.mark.parametrize(
    "bomb", [pytest.param(bomb, marks=pytest.mark.slow if bomb.slow else (), id=bomb.name) for bomb in BOMBS]
)
def test_a_bomb_is_ended(sandbox: Sandbox, bomb: Attack) -> None:
    if bomb.gap(sandbox):
        pytest.skip(f"{sandbox.isolated_by}: nothing guards {' or '.join(sorted(bomb.held_by))}")
    _, wrong = set_off(sandbox, bomb)
    assert wrong == ""


def test_probes_notice_what_works() -> None:
    """A probe that could not fail would prove nothing: without the guards, several find a way."""
    bare = box(NAMES[-1])
    able = [probe for probe in PROBES if probe.here and probe.gap(bare) and probe.kind in ("network", "kernel")]
    escapes = probe_all(bare, able)
    assert sum(bool(found) for found in escapes.values()) >= 5
