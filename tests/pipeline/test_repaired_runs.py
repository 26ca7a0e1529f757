"""Runs that were damaged, repaired and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import EXACT, TINY, Remains, start_roll
from test_killed_runs import assert_same_run
from thorough import but

from roll.cli import main
from roll.run import LedgerIndex
from roll.run.samples import steps_with_samples


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run killed after its fifth step; its newest checkpoint is of the fourth."""
    path = tmp_path_factory.mktemp("killed") / "run"
    child = start_roll(["train", TINY, *EXACT, f"run={path}"], path.with_suffix(".out"))
    metrics = path / "metrics.jsonl"
    child.wait_for(lambda: metrics.exists() and b'{"step":5,' in metrics.read_bytes())
    child.kill()
    return path


def resume(path: Path) -> int:
    return int(main(["train", TINY, *EXACT, f"run={path}", "--resume"]))


def after_the_checkpoint(run: Remains) -> None:
    """The ledger's tail, of records that the checkpoint does not know of."""
    content = bytearray(run.folder.ledger_path.read_bytes())
    position = run.checkpoint.state["ledger_position"]
    middle = (position + len(content)) // 2
    content[middle : middle + 300] = bytes(300)
    run.folder.ledger_path.write_bytes(content)


def before_the_checkpoint(run: Remains) -> None:
    content = bytearray(run.folder.ledger_path.read_bytes())
    content[len(content) // 5] ^= 4
    del content[len(content) // 3 : len(content) // 3 + 50]
    run.folder.ledger_path.write_bytes(content)


def metrics(run: Remains) -> None:
    lines = run.folder.metrics_path.read_bytes().splitlines(keepends=True)
    run.folder.metrics_path.write_bytes(b"".join([*lines[:2], b"\x00\x00\x00\n", *lines[2:]]))


def newest_checkpoint(run: Remains) -> None:
    weights = run.checkpoint.path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])


DAMAGES = [after_the_checkpoint, before_the_checkpoint, metrics, newest_checkpoint]


@pytest.mark.parametrize("damage", but({after_the_checkpoint}, DAMAGES))
def test_a_damaged_run_is_repaired_and_ends_as_it_would_have(
    killed: Path,
    undisturbed: Remains,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Remains], None],
) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path)
    run = Remains(path)
    damage(run)
    assert resume(path) != 0
    assert f"roll repair {path}" in capfd.readouterr().err
    assert main(["repair", str(path)]) == 0
    said = capfd.readouterr().out
    step = 2 if damage is newest_checkpoint else 4
    assert f"next: `roll train CONFIG --resume` continues from step {step}" in said
    assert list(path.glob("damaged-*"))
    assert resume(path) == 0
    assert run.weights() == undisturbed.weights()
    assert run.optimizer() == undisturbed.optimizer()
    assert steps_with_samples(run.folder) == steps_with_samples(undisturbed.folder)
    if damage is not before_the_checkpoint:
        assert_same_run(run, undisturbed)
    with LedgerIndex.open(run.folder.ledger_path) as index:
        balance = index.balance()
    assert balance.problems == ()
    assert balance.groups.open == 0
    assert main(["repair", str(path)]) == 0
    assert "is damaged\n" in capfd.readouterr().out


def test_repair_says_when_there_is_nothing_to_do(killed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path)
    assert main(["repair", str(path), "--dry-run"]) == 0
    assert capfd.readouterr().out == f"nothing in {path} is damaged\n"
    assert main(["repair", str(tmp_path)]) == 2
    assert "is not a run's folder" in capfd.readouterr().err
