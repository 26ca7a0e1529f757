from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.config.errors import RunError, UserError
from roll.config.version import __version__
from roll.run import Checkpoints, RunFolder
from roll.run.checkpoint import _manifest_checksum
from roll.run.format import FORMAT, FORMAT_FILE, check_format
from roll.run.repair import repair


def _run(path: Path) -> RunFolder:
    return RunFolder.create(path / "run", "seed: 1\n")


def test_a_run_and_its_checkpoints_have_the_number_and_the_version(tmp_path: Path) -> None:
    run = _run(tmp_path)
    with Checkpoints(run).saving(3, {}):
        pass
    manifest = json.loads((run.checkpoints_dir / "step-000003" / "manifest.json").read_bytes())
    for entries in (manifest, json.loads((run.path / FORMAT_FILE).read_bytes())):
        assert (entries["format"], entries["roll"]) == (FORMAT, __version__)
    assert check_format(RunFolder.open(run.path).path) == FORMAT


def test_a_run_without_a_number_has_format_1(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (run.path / FORMAT_FILE).unlink()
    assert check_format(RunFolder.open(run.path).path) == 1


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (run.path / FORMAT_FILE).write_text(json.dumps({"format": FORMAT + 1, "roll": "7.2.0"}))
    with pytest.raises(UserError, match=rf"format {FORMAT + 1}, written by ROLL 7.2.0; this is ROLL {__version__}"):
        RunFolder.open(run.path)


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path)
    with Checkpoints(run).saving(3, {}):
        pass
    manifest = run.checkpoints_dir / "step-000003" / "manifest.json"
    entries = json.loads(manifest.read_bytes()) | {"format": FORMAT + 1, "roll": "7.2.0"}
    manifest.write_text(json.dumps(entries | {"check": _manifest_checksum(entries)}))
    checkpoint = Checkpoints(run).latest()
    assert checkpoint is not None
    with pytest.raises(UserError, match=r"step-000003 has format .* written by ROLL 7.2.0"):
        checkpoint.verify()


@pytest.mark.parametrize("number", [0, -1, True, "2", None, 1.5])
def test_what_is_no_format_is_refused(tmp_path: Path, number: object) -> None:
    run = _run(tmp_path)
    (run.path / FORMAT_FILE).write_text(json.dumps({"format": number}))
    with pytest.raises(UserError, match="no format of ROLL"):
        RunFolder.open(run.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_damaged_format_file_is_refused_and_repaired(tmp_path: Path, content: bytes) -> None:
    run = _run(tmp_path)
    (run.path / FORMAT_FILE).write_bytes(content)
    with pytest.raises(RunError, match=r"format.json is damaged .*`roll repair"):
        RunFolder.open(run.path)
    found = repair(run.path, lambda state: {})
    assert any("format.json" in finding for finding in found.findings)
    RunFolder.open(run.path)
