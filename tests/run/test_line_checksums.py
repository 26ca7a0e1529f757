"""Checksums of lines: damage to metrics or samples is refused by name and mended, or changes nothing that is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import RunError
from roll.run import Metrics, RunFolder, read_samples, write_samples
from roll.run.line_checksums import FOLDER, checksums_path, line_checksum
from roll.run.repair import repair
from roll.run.samples import check_samples

STEPS = 6


@pytest.fixture
def run(folder: RunFolder) -> RunFolder:
    """A run that has ended, with metrics and samples of a few steps."""
    folder.ledger_path.touch()
    with Metrics(folder) as metrics:
        for step in range(1, STEPS + 1):
            metrics.log(step, {"reward/mean": step / 8, "samples": 4})
            write_samples(folder, step, [{"sample": f"{step}.{i}", "text": f"é {i}", "reward": i / 4} for i in range(4)])
    return folder


def test_a_checksum_whose_check_is_that_of_a_complete_file_is_still_a_checksum(folder: RunFolder) -> None:
    """Both checks have 16 bits: of 65,536 lines one has the same."""
    file = folder.samples_dir / "step-000001.jsonl"
    check = crc32(b"samples/step-000001.jsonl 0 --------") & 0xFFFF
    value_of = line_checksum(folder.path, file)
    same = (
        number
        for number in range(1_000_000)
        if crc32(b"samples/step-000001.jsonl 0 %08x" % value_of(b'{"reward":%d}' % number)) & 0xFFFF == check
    )
    rows = [{"reward": next(same)}, {"reward": 2}]
    write_samples(folder, 1, rows)
    assert read_samples(folder, 1) == rows


def rows(run: RunFolder) -> list[Any]:
    """All that is on record."""
    return [Metrics.read(run.metrics_path), *(read_samples(run, step) for step in range(1, STEPS + 1))]


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))

    return damage


def _digit(file: Path) -> None:
    """Another digit, which is as good JSON as before."""
    before = file.read_bytes()
    changed = before.replace(b"0.25", b"0.75", 1)
    assert changed != before
    file.write_bytes(changed)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a digit": (_digit, "is damaged on line"),
    "a line twice": (lines(lambda all: [all[0], all[1], all[1], *all[2:]]), "is damaged on line 3"),
    "the last line twice": (lines(lambda all: [*all, all[-1]]), "is damaged on line"),
    "a line less": (lines(lambda all: [all[0], *all[2:]]), "lacks a line that the run wrote"),
    "the last line less": (lines(lambda all: all[:-1]), "lacks a line that the run wrote"),
    "two lines exchanged": (lines(lambda all: [all[1], all[0], *all[2:]]), "is damaged on line 2"),
    "a line cut": (lines(lambda all: [all[0], all[1][:9] + b"\n", *all[2:]]), "is damaged on line 2"),
    "its end cut": (lambda file: os.truncate(file, file.stat().st_size - 3), "lacks a line that the run wrote"),
    "NULs at its end": (lines(lambda all: [*all[:-1], bytes(len(all[-1]) - 1) + b"\n"]), "is damaged on line"),
    "emptied": (lambda file: os.truncate(file, 0), "lacks . lines that the run wrote"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples/step-000003.jsonl"])
def test_damage_is_refused_by_name_and_mended(run: RunFolder, name: str, kind: str) -> None:
    before = rows(run)
    damage, says = DAMAGE[kind]
    damage(run.path / name)
    with pytest.raises(RunError, match=says) as caught:
        rows(run)
    assert str(run.path / name) in str(caught.value)
    assert "roll repair" in str(caught.value)
    with pytest.raises(RunError, match=says):
        Metrics(run) if name.startswith("metrics") else check_samples(run, STEPS)
    assert repair(run.path, lambda _: {}).findings
    for was, now in zip(before, rows(run), strict=True):
        assert [row for row in was if row in now] == now, "what is kept is as it was, in its order"
        assert len(now) == len(was) or was == before[0 if name.startswith("metrics") else 3]
    assert not repair(run.path, lambda _: {}).findings


def test_samples_that_have_each_others_names_get_their_own(run: RunFolder) -> None:
    before = rows(run)
    one, other = run.samples_dir / "step-000002.jsonl", run.samples_dir / "step-000005.jsonl"
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    with pytest.raises(RunError, match=r"step-000002\.jsonl is damaged on line 1"):
        read_samples(run, 2)
    assert (
        "samples/step-000002.jsonl: it is step-000005.jsonl, whose name it gets"
        in repair(run.path, lambda _: {}).findings
    )
    assert rows(run) == before


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_is_read_as_if_it_were_the_runs(run: RunFolder, data: st.DataObject) -> None:
    before = rows(run)
    metrics, samples = run.metrics_path, run.samples_dir / "step-000003.jsonl"
    file = data.draw(
        st.sampled_from([metrics, samples, checksums_path(run.path, metrics), checksums_path(run.path, samples)])
    )
    whole = file.read_bytes()
    content, at = bytearray(whole), data.draw(st.integers(0, len(whole) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "zero", "splice", "repeat"])):
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[at:]
        case "zero":
            content[at:] = bytes(len(content) - at)
        case "splice":
            del content[at : at + data.draw(st.integers(1, 40))]
        case "repeat":
            content[at:at] = content[at : at + data.draw(st.integers(1, 200))]
    file.write_bytes(bytes(content))
    try:
        if refusal := _refusal(run, before):
            assert file.name.removesuffix(".crc") in refusal
            assert repair(run.path, lambda _: {}).findings
            for was, now in zip(before, rows(run), strict=True):
                assert [row for row in was if row in now] == now
    finally:
        _restore(run, before)


def _refusal(run: RunFolder, before: list[Any]) -> str:
    """Why the records are not read; empty if they are, and are what they were."""
    try:
        assert rows(run) == before
    except RunError as error:
        return str(error)
    return ""


def _restore(run: RunFolder, before: list[Any]) -> None:
    write_samples(run, 3, before[3])
    checksums_path(run.path, run.metrics_path).unlink(missing_ok=True)
    run.metrics_path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in before[0]))
    Metrics(run).close()


def test_a_kill_between_a_checksum_and_its_line_costs_nothing(run: RunFolder) -> None:
    metrics = Metrics(run)
    metrics._sums.add(b"a line that is never written")
    before = Metrics.read(run.metrics_path)
    with Metrics(run) as resumed:
        resumed.log(STEPS + 1, {"a": 1})
    assert Metrics.read(run.metrics_path)[:-1] == before


def test_steps_that_are_written_anew_have_new_checksums(run: RunFolder) -> None:
    with Metrics(run) as metrics:
        metrics.truncate_after(3)
        metrics.log(4, {"a": 1})
    assert [row["step"] for row in Metrics.read(run.metrics_path)] == [1, 2, 3, 4]
    write_samples(run, 2, [{"sample": "2.0"}])
    assert read_samples(run, 2) == [{"sample": "2.0"}]


def test_a_run_without_checksums_is_read_and_has_them_once_it_goes_on(run: RunFolder) -> None:
    for file in sorted((run.path / FOLDER).rglob("*.crc")):
        file.unlink()
    before = rows(run)
    assert not repair(run.path, lambda _: {}).findings
    with Metrics(run) as metrics:
        metrics.log(STEPS + 1, {"a": 1})
    assert rows(run)[0][:-1] == before[0]
    _digit(run.metrics_path)
    with pytest.raises(RunError, match="is damaged on line 2"):
        Metrics.read(run.metrics_path)


def test_a_run_is_read_while_it_writes(run: RunFolder) -> None:
    with Metrics(run) as metrics:
        for step in range(STEPS + 1, STEPS + 50):
            metrics.log(step, {"a": step})
            assert Metrics.read(run.metrics_path)[-1]["step"] == step


def test_resume_compares_no_more_samples_than_it_has_time_for(run: RunFolder) -> None:
    _digit(run.samples_dir / "step-000001.jsonl")
    size = (run.samples_dir / "step-000006.jsonl").stat().st_size
    check_samples(run, STEPS, max_bytes=2 * size)
    check_samples(run, 0)
    with pytest.raises(RunError, match=r"step-000001\.jsonl is damaged"):
        check_samples(run, STEPS)


def test_who_may_read_the_run_may_read_its_checksums_and_nobody_else(run: RunFolder) -> None:
    run.path.chmod(0o750)
    write_samples(run, 9, [{"sample": "9.0"}])
    made = checksums_path(run.path, run.samples_dir / "step-000009.jsonl")
    assert made.stat().st_mode & 0o777 == made.parent.stat().st_mode & 0o666
