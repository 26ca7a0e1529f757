"""Bytes of a finished run's ledger and checkpoint, flipped, cut and spliced at random: whoever resumes it refuses them by
name, or continues from what was saved, and nothing else happens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import Remains

from roll.cli import main
from roll.config.errors import RunError, UserError
from roll.pipeline.resume import newest_checkpoint
from roll.run import Ledger, RunFolder

FEW, MANY = 60, 2000


@pytest.fixture(scope="module")
def run(undisturbed: Remains, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run, for this module to damage."""
    path = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(undisturbed.folder.path, path)
    return path


def continued(run: Path, scratch: Path) -> tuple[Any, Any]:
    """What a resumed run begins with: the state that was saved, and the ledger gone back to it."""
    checkpoint = newest_checkpoint(RunFolder.open(run))
    assert checkpoint is not None
    checkpoint.verify()
    shutil.copy(run / "ledger.log", scratch)
    with Ledger.open(scratch) as ledger:
        ledger.roll_back(checkpoint.state["ledger_position"], checkpoint.step, checkpoint.state["ledger_mark"])
    return checkpoint.state, {name: (each.state, each.info) for name, each in Ledger.lineage(scratch).items()}


def files(run: Path) -> list[Path]:
    """The ledger, and every file of the newest checkpoint, the small ones first: most bytes are weights."""
    newest = max((run / "checkpoints").glob("step-*"))
    return [run / "ledger.log", *sorted((each for each in newest.rglob("*") if each.is_file()), key=_size)]


def _size(file: Path) -> int:
    return file.stat().st_size


def damaged(data: st.DataObject, whole: bytes) -> bytes:
    content, at = bytearray(whole), data.draw(st.integers(0, max(len(whole) - 1, 0)))
    length = data.draw(st.integers(1, 400))
    match data.draw(st.sampled_from(["flip", "cut", "zero", "take out", "repeat", "overwrite"])):
        case "flip" if content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[at:]
        case "zero":
            content[at : at + length] = bytes(len(content[at : at + length]))
        case "take out":
            del content[at : at + length]
        case "repeat":
            content[at:at] = content[at : at + length]
        case "overwrite":
            other = data.draw(st.integers(0, max(len(whole) - 1, 0)))
            content[at : at + length] = content[other : other + len(content[at : at + length])]
    return bytes(content)


def try_damage(run: Path, scratch: Path, data: st.DataObject) -> None:
    before = continued(run, scratch)
    file = data.draw(st.sampled_from(files(run)))
    whole = file.read_bytes()
    file.write_bytes(damaged(data, whole))
    try:
        refusal = _refusal(run, scratch, before)
    finally:
        file.write_bytes(whole)
    if refusal:
        assert file.name in refusal or file.parent.name in refusal
        assert "roll repair" in refusal or "restart" in refusal


def _refusal(run: Path, scratch: Path, before: tuple[Any, Any]) -> str:
    """Why the run is not continued; empty if it is, from what was saved."""
    try:
        assert continued(run, scratch) == before
    except (UserError, RunError) as error:
        return str(error)
    return ""


@settings(max_examples=FEW, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_are_refused_by_name_or_change_nothing(run: Path, tmp_path: Path, data: st.DataObject) -> None:
    try_damage(run, tmp_path / "ledger.log", data)


@pytest.mark.slow
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_so_are_many_more(run: Path, tmp_path: Path, data: st.DataObject) -> None:
    try_damage(run, tmp_path / "ledger.log", data)


@pytest.mark.parametrize("number", range(3))
def test_the_program_says_so_in_a_message(run: Path, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    file = files(run)[number]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 3] + b"\xff\x00{[" + whole[len(whole) // 2 :])
    try:
        assert main(["train", str(run / "config.yaml"), f"run={run}", "train.steps=7", "--resume"]) in (1, 2)
    finally:
        file.write_bytes(whole)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert file.name in said
