"""Repairs a run's folder: finds damage and makes the run resumable.

Invariants: nothing is deleted. The original of every changed or removed file is kept in `damaged-DATE-TIME/` of the run's
folder. After a repair every file can be read, and the run resumes from its newest complete checkpoint, if one is left.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from roll.atomic_files import atomic_open, atomic_write
from roll.config import load_config
from roll.config.errors import UserError
from roll.config.hints import option, resume_command
from roll.ledger.index_tables import index_path
from roll.ledger.log_repair import CheckpointMark, RepairedLog, repair_log
from roll.run.checkpoint import Checkpoint, Checkpoints
from roll.run.folder import RunFolder
from roll.run.format import FORMAT_FILE, check_format
from roll.run.history import History, parse_event
from roll.run.line_checksums import (
    audit,
    checksums_path,
    compare_with_checksums,
    drop_checksums,
    line_checksum,
    read_checksums,
    write_checksums,
)
from roll.run.metrics import parse_row
from roll.run.samples import parse_sample

InFlight = Callable[[Mapping[str, Any]], Mapping[str, str]]
"""Given a checkpoint's state, returns the samples that were in flight, with their tasks."""


@dataclass
class Repair:
    """What was found, and repaired unless it was a dry run."""

    folder: RunFolder
    checkpoint: Checkpoint | None
    findings: list[str] = field(default_factory=list)
    """One sentence per damaged file."""
    backup_folder: Path | None = None
    """The folder that now has the damaged originals."""
    settings_lost: bool = False

    @property
    def next_step(self) -> str:
        """What the user can do with the run now."""
        if self.settings_lost:
            return "put config.yaml back: the run cannot continue without it"
        if self.checkpoint is not None:
            return f"`{resume_command('CONFIG')}` continues from step {self.checkpoint.step}"
        if History(self.folder).newest_saved() is not None:
            return f"no whole checkpoint is left: put one back, or start over with {option('restart')}"
        return f"the run has no checkpoint yet: `{resume_command('CONFIG')}` starts from the beginning"

    @property
    def can_continue(self) -> bool:
        if self.settings_lost:
            return False
        return self.checkpoint is not None or History(self.folder).newest_saved() is None


def repair(run: Path, in_flight: InFlight, *, dry_run: bool = False) -> Repair:
    """Finds the damage of a run and repairs it; with `dry_run` it is only found."""
    folder = RunFolder.open(run, any_format=True)
    with folder.lock():
        repairing = _Repairing(folder, dry_run)
        repairing.format()
        repairing.config()
        checkpoint = repairing.checkpoints()
        repairing.ledger(_checkpoint_mark(checkpoint, in_flight))
        repairing.swapped_samples()
        repairing.lines(folder.metrics_path, lambda line: parse_row(line) is not None, _steps_of)
        repairing.lines(folder.history_path, lambda line: parse_event(line) is not None, _count_of)
        for file in sorted(folder.samples_dir.glob("step-*.jsonl")):
            repairing.lines(file, lambda line: parse_sample(line) is not None, _count_of)
        for file in sorted(folder.path.glob("trace*.json")):
            repairing.trace(file)
        repairing.summary()
        report = Repair(folder, checkpoint, repairing.findings, repairing.backup_folder, repairing.settings_lost)
        if report.findings and not dry_run:
            step = 0 if checkpoint is None else checkpoint.step
            History(folder).add("repaired", step, found=report.findings)
        return report


def _checkpoint_mark(checkpoint: Checkpoint | None, in_flight: InFlight) -> CheckpointMark:
    if checkpoint is None:
        return CheckpointMark()
    state = checkpoint.state
    return CheckpointMark(
        state.get("ledger_position", 0), state.get("ledger_mark"), in_flight(state.get("scheduler") or {})
    )


class _Repairing:
    def __init__(self, folder: RunFolder, dry_run: bool) -> None:
        self._folder = folder
        self._dry_run = dry_run
        self.findings: list[str] = []
        self.settings_lost = False
        self.backup_folder: Path | None = None

    def checkpoints(self) -> Checkpoint | None:
        """The newest complete checkpoint; damaged ones are moved aside."""
        newest: Checkpoint | None = None
        for path, checkpoint, problem in Checkpoints(self._folder).inspect():
            if problem is None:
                newest = checkpoint if newest is None else newest
            else:
                self._report(path, f"damaged checkpoint ({problem})")
                self._move(path)
        return newest

    def config(self) -> None:
        """Reports a damaged config.yaml. No other file has its content, so only the user can restore it."""
        try:
            load_config(self._folder.config_path)
        except UserError as error:
            self.settings_lost = True
            remedy = f"put it back, or start over with {option('restart')}"
            self._report(self._folder.config_path, f"cannot be read: {remedy} ({error})")

    def ledger(self, checkpoint: CheckpointMark) -> None:
        path = self._folder.ledger_path
        repaired = repair_log(path, checkpoint)
        if repaired.is_empty:
            return
        self._report(path, _describe_ledger_repair(repaired))
        if not self._dry_run:
            self._back_up(path)
            repaired.write(path)
            if index_path(path).exists():
                self._move(index_path(path))  # it is built again when queried

    def lines(
        self, path: Path, is_valid: Callable[[bytes], bool], describe_removed: Callable[[list[bytes], list[bytes]], str]
    ) -> None:
        """Removes damaged lines from a file, including lines that the run did not write there, and a half-written line at
        its end."""
        if not path.is_file():
            return
        run = self._folder.path
        found = audit(run, path)
        foreign = set(found.bad)
        kept = [line for number, line in enumerate(found.lines) if number not in foreign and is_valid(line)]
        bad = [line for number, line in enumerate(found.lines) if number in foreign or not is_valid(line)]
        removed = [describe_removed(bad, kept)] if bad else []
        removed += [f"a half-written end of {len(found.torn)} bytes"] if found.torn else []
        problems = [", ".join(removed) + " taken out"] if removed else []
        problems += [f"{_missing(found.missing)} not there any more"] if found.missing else []
        problems += ["checksums of it are damaged and made again"] if found.sums_damaged else []
        if not problems:
            return
        self._report(path, "; ".join(problems))
        if not self._dry_run:
            self._back_up(path)
            self._back_up(checksums_path(run, path))
            drop_checksums(run, path)
            atomic_write(path, b"".join(line + b"\n" for line in kept))
            if found.has_sums:
                write_checksums(run, path, map(line_checksum(run, path), kept))

    def swapped_samples(self) -> None:
        """Renames samples files whose names were swapped."""
        run, owners = self._folder.path, {}
        for path in sorted(self._folder.samples_dir.glob("step-*.jsonl")):
            found = audit(run, path)
            if found.has_sums and found.lines and len(found.bad) == len(found.lines):
                owners[path] = self._owner(path, found.lines)
        if not owners or None in owners.values() or set(owners.values()) != set(owners):
            return
        for path, owner in owners.items():
            assert owner is not None
            self._report(path, f"it is {owner.name}, whose name it gets")
        if not self._dry_run:
            contents = {path: path.read_bytes() for path in owners}
            for path, owner in owners.items():
                assert owner is not None
                self._back_up(path)
                atomic_write(owner, contents[path])

    def _owner(self, path: Path, lines: list[bytes]) -> Path | None:
        """The samples file whose checksums match these lines."""
        run = self._folder.path
        for other in sorted(self._folder.samples_dir.glob("step-*.jsonl")):
            sums = read_checksums(run, other)
            if other != path and sums is not None:
                found = compare_with_checksums(other.relative_to(run).as_posix(), lines, b"", sums, sums.settled)
                if not (found.bad or found.missing or found.sums_damaged):
                    return other
        return None

    def trace(self, path: Path) -> None:
        """Removes damaged events from a trace and closes an array that a kill left open."""
        bad = number = 0
        with path.open("rb") as file:
            lines = file.read().split(b"\n")
        events = []
        for line in lines:
            event = line.strip().removesuffix(b",")
            if event in (b"", b"[", b"]"):
                continue
            number += 1
            if _is_object(event):
                events.append(event)
            else:
                bad += 1
        torn = bool(lines[-1]) and bad == 1 and not _is_object(lines[-1].strip().removesuffix(b","))
        if not bad or torn:  # viewers accept a trace without its end
            return
        self._report(path, f"{bad} of {number} events are damaged, taken out")
        if not self._dry_run:
            self._back_up(path)
            with atomic_open(path) as new:
                new.write(b"[\n" + b",\n".join(events) + b"\n]\n")

    def summary(self) -> None:
        path = self._folder.summary_path
        if path.is_file() and not _is_object(path.read_bytes()):
            self._report(path, "damaged, taken away; the run writes it again when it ends")
            self._move(path)

    def format(self) -> None:
        path = self._folder.path / FORMAT_FILE
        if path.is_file() and not _is_object(path.read_bytes()):
            self._report(path, "damaged, taken away; a resumed run writes it again")
            self._move(path)
        else:
            check_format(self._folder.path)

    def _report(self, path: Path, what: str) -> None:
        self.findings.append(f"{path.relative_to(self._folder.path)}: {what}")

    def _back_up(self, path: Path) -> None:
        """Keeps a copy of a file before it is changed."""
        if not path.exists():
            return
        target = self._target(path)
        try:
            os.link(path, target)
        except OSError:  # the file system has no hard links
            shutil.copy2(path, target)

    def _move(self, path: Path) -> None:
        if not self._dry_run:
            path.rename(self._target(path))

    def _target(self, path: Path) -> Path:
        if self.backup_folder is None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            names = (f"damaged-{stamp}" + (f".{number}" if number else "") for number in count())
            self.backup_folder = next(place for name in names if not (place := self._folder.path / name).exists())
            try:
                self.backup_folder.mkdir()
            except OSError as error:
                raise UserError(f"cannot write to {self._folder.path} ({error.strerror})") from error
        target = self.backup_folder / path.relative_to(self._folder.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def _describe_ledger_repair(repaired: RepairedLog) -> str:
    problems = []
    if repaired.gaps:
        lost = sum(size for _, size in repaired.gaps)
        places = f"byte {repaired.gaps[0][0]}" + (
            f" and {len(repaired.gaps) - 1} more places" if repaired.gaps[1:] else ""
        )
        problems.append(f"{lost} bytes of records are lost at {places}")
    if repaired.samples:
        more = " …" if len(repaired.samples) > 3 else ""
        who = f"{len(repaired.samples)} samples" if repaired.samples[1:] else "1 sample"
        verb = "are" if repaired.samples[1:] else "is"
        problems.append(f"{who} with lost records {verb} removed ({', '.join(repaired.samples[:3])}{more})")
    if repaired.cut_bytes:
        problems.append(f"the last {repaired.cut_bytes} bytes are cut off")
    return "; ".join(problems)


def _missing(lines: int) -> str:
    return f"{lines} lines that the run wrote are" if lines > 1 else "1 line that the run wrote is"


def _count_of(bad: list[bytes], kept: list[bytes]) -> str:
    return f"{len(bad)} of {len(bad) + len(kept)} lines are damaged,"


def _steps_of(bad: list[bytes], kept: list[bytes]) -> str:
    """The number of damaged lines, and the steps that have no line left."""
    steps = {row["step"] for line in kept if (row := parse_row(line)) is not None}
    gone = [step for step in range(1, max(steps, default=0)) if step not in steps]
    of = f" (step{'s' if gone[1:] else ''} {', '.join(map(str, gone[:5]))}{' …' if gone[5:] else ''})" if gone else ""
    return f"{_count_of(bad, kept).removesuffix(',')}{of},"


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (RecursionError, ValueError):
        return False
