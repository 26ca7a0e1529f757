"""Checkpoints: everything a run needs to resume. A checkpoint is complete or does not exist.

    checkpoints/
      .step-000030.tmp-4242/   being written, or left by a crash: never read
      step-000010/
      step-000020/
        model/ …               what trainers wrote: model and optimizer.safetensors, or shards/ with a file per rank
        state.json             the state that the pipeline saves
        manifest.json          the format, size and checksum of every other file; written last

A checkpoint gets its name `step-…` by one rename, after every byte of it is on disk, and loses it by one rename before
it is deleted. So whatever crashes, each folder named `step-…` is complete, and the newest old checkpoints are deleted
only after the new one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from roll.atomic_files import (
    DIGEST,
    atomic_write,
    file_digest,
    sync_folder,
    to_json,
)
from roll.config.errors import RunError, UserError
from roll.config.file_modes import inherit_folder_mode, inherit_folder_mode_recursively
from roll.config.hints import option
from roll.run.disk import full_disk
from roll.run.folder import RunFolder
from roll.run.format import format_entries, format_number

_MANIFEST = "manifest.json"
_CHECK = "check"
_FIRST_ENTRIES = {"step", "algorithm", "files"}
"""Entries of manifests that were written before manifests had a format and a checksum."""
_STATE = "state.json"
_MODEL, _SHARDS = "model", "shards"
"""The folders of a checkpoint that hold weights."""
_READERS = 8
"""Files that are hashed concurrently."""
SCORE = "held_out_score"
"""Key in the state: the best checkpoint is the one with the highest value. It may be missing."""
_NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.old-\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its step, its folder, and the state saved with it."""

    step: int
    path: Path
    state: dict[str, Any]

    def verify(self) -> None:
        """Compares every file with its checksum; the error names the damaged file and what to do about it."""
        _verify(self.path, self.step)


def verify_model(folder: Path) -> None:
    """Verifies the model folder of a checkpoint and the shards next to it before a model is loaded from them. A folder
    outside a checkpoint has no checksums and passes."""
    path = folder.parent
    if folder.name != _MODEL or not _NAME.fullmatch(path.name) or not (path / _MANIFEST).is_file():
        return
    try:
        _verify(path, _step(path), (_MODEL, _SHARDS))
    except _DamagedError as error:
        others = [other for _, other in _complete_checkpoints(path.parent) if other != path]
        replacement = f"checkpoint of that run, such as {others[0] / _MODEL}" if others else "model"
        raise UserError(
            f"model: {path / error.name} is damaged ({error.problem}): write another {replacement}"
        ) from error


def _verify(path: Path, step: int, folders: Sequence[str] | None = None) -> None:
    """Compares the files of a checkpoint, or those in some of its folders, with the manifest."""
    manifest = _read_json(path, _MANIFEST)
    if manifest.keys() != _FIRST_ENTRIES and manifest.get(_CHECK) != _manifest_checksum(manifest):
        raise _damaged(path, _MANIFEST, "its checksum is wrong")
    format_number(path, manifest)
    try:
        algorithm = str(manifest["algorithm"])
        files = {str(name): (int(entry["bytes"]), str(entry["digest"])) for name, entry in manifest["files"].items()}
        hashlib.new(algorithm)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise _damaged(path, _MANIFEST, "it is not a manifest") from error
    if manifest.get("step") != step or _STATE not in files:
        raise _damaged(path, _MANIFEST, f"it is not the manifest of step {step}")
    chosen = {name: each for name, each in files.items() if folders is None or name.split("/")[0] in folders}
    for name, (size, _) in chosen.items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, name, "it is missing")
        if file.stat().st_size != size:
            raise _damaged(path, name, f"it has {file.stat().st_size} bytes, not {size}")
    with ThreadPoolExecutor(_READERS) as readers:  # hashing releases the GIL
        found = readers.map(lambda name: file_digest(path / name, algorithm), chosen)
        for name, digest in zip(chosen, found, strict=True):
            if digest != chosen[name][1]:
                raise _damaged(path, name, "its checksum is wrong")
    states = {file.relative_to(path).as_posix() for file in _files(path) if _is_state(file)}
    if unknown := sorted(states - files.keys()):
        raise _damaged(path, unknown[0], f"{_MANIFEST} does not have it")


class Saving:
    """A checkpoint being written. Nothing reads it until `finish` renames it to its final name, which happens once or
    never.

    Workers may still be writing into `folder` after the state was captured; the caller of `finish` makes sure that they
    are done. `finish` and `drop` may be called from different threads.
    """

    def __init__(self, checkpoints: Checkpoints, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder
        self._checkpoints = checkpoints
        self._lock = threading.Lock()
        self._ended = False

    def finish(self, digests: Mapping[str, str] = MappingProxyType({})) -> None:
        """Syncs all files to disk and makes them a checkpoint. Files whose `digests` the workers computed while writing
        are not read again."""
        with self._lock:
            assert not self._ended, f"the checkpoint of step {self.step} was finished or dropped before"
            self._ended = True
            _write_manifest(self.folder, self.step, digests)
            self._checkpoints.commit(self.step, self.folder)

    def drop(self) -> None:
        """Deletes the files, unless they are a checkpoint already. Waits for a running `finish`."""
        with self._lock:
            self._ended = True
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """If the block raises, deletes the files."""
        try:
            yield
        except BaseException as error:
            self.drop()
            if (cause := full_disk(error)) is not None:
                name = self.folder.parent / f"step-{self.step:06d}"
                raise RunError(f"cannot write to {name}: {cause}") from error
            raise


class Checkpoints:
    """The checkpoints of a run. It keeps the newest `keep`, those of every `every` steps, and the best one if `best`."""

    def __init__(self, folder: RunFolder, keep: int = 2, every: int = 0, best: bool = False) -> None:
        assert keep >= 1, "the newest checkpoint is always kept"
        self._dir = folder.checkpoints_dir
        self._keep = keep
        self._every = every
        self._best = best

    @contextmanager
    def saving(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """Saves a checkpoint: the block writes its files into the given folder; `state` is stored as JSON.

        The checkpoint is complete when the block ends; if the block raises, nothing is left of it. The state is read back
        as JSON returns it: tuples as lists, keys as strings.
        """
        saving = self.begin(step, state)
        with saving.dropped_on_error():
            yield saving.folder
            saving.finish()

    def begin(self, step: int, state: dict[str, Any]) -> Saving:
        """Begins a checkpoint with the current state. No other one may begin until this one is finished or dropped."""
        self._dir.mkdir(exist_ok=True)
        inherit_folder_mode(self._dir)
        self._tidy()
        newest = max((other for other, _ in _complete_checkpoints(self._dir)), default=step)
        assert newest <= step, (
            f"step {step} cannot be saved: the run has a checkpoint of step {newest} and continues from it"
        )
        temporary = self._dir / f".step-{step:06d}.tmp-{os.getpid()}"
        temporary.mkdir()
        saving = Saving(self, step, temporary)
        with saving.dropped_on_error():
            # Not `to_json`: what is read back must be what was saved, so NaN stays NaN.
            (temporary / _STATE).write_text(json.dumps(state, indent=2))
        return saving

    def commit(self, step: int, temporary: Path) -> None:
        """Renames a complete folder to its checkpoint's name, and deletes checkpoints that are not to be kept."""
        final = self._dir / f"step-{step:06d}"
        if final.exists():
            # Between the two renames neither folder has the final name; `latest` then reads the old one under this name.
            final.rename(self._dir / f".step-{step:06d}.old-{os.getpid()}")
        inherit_folder_mode_recursively(temporary)
        temporary.rename(final)
        sync_folder(self._dir)
        self._tidy()

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        complete = _complete_checkpoints(self._dir)
        return _load(*complete[0]) if complete else None

    def inspect(self) -> Iterator[tuple[Path, Checkpoint | None, str | None]]:
        """Every folder with a checkpoint's name, newest first: with the checkpoint, or with what is wrong with it."""
        for path in sorted(self._dir.glob("step-*"), key=_step_or_none, reverse=True):
            if not _NAME.fullmatch(path.name):
                continue
            try:
                if not (path / _MANIFEST).is_file():
                    raise _damaged(path, _MANIFEST, "it is missing")
                checkpoint = _load(_step(path), path)
                checkpoint.verify()
            except _DamagedError as error:
                yield path, None, f"{error.name}: {error.problem}"
            else:
                yield path, checkpoint, None

    def without_manifest(self) -> list[Path]:
        """Folders named like a checkpoint newer than the newest complete one, but without a manifest: it was deleted."""
        complete = _complete_checkpoints(self._dir)
        named = [path for path in sorted(self._dir.glob("step-*")) if _NAME.fullmatch(path.name)]
        return [
            path for path in named if not (path / _MANIFEST).is_file() and (not complete or _step(path) > complete[0][0])
        ]

    def _tidy(self) -> None:
        """Deletes what nothing will read again: leftovers of a crash, replaced checkpoints, and those not to be kept."""
        for leftover in self._dir.glob(".step-*.tmp-*"):
            shutil.rmtree(leftover)
        for replaced in self._dir.glob(".step-*.old-*"):
            final = self._dir / f"step-{_step(replaced):06d}"
            if not final.exists():
                replaced.rename(final)  # the crash came before the new checkpoint got the name
        outdated = [
            path for step, path in _complete_checkpoints(self._dir)[self._keep :] if not self._every or step % self._every
        ]
        if self._best and outdated:
            best = _best(self._dir)
            outdated = [path for path in outdated if path != best]
        for path in [*self._dir.glob(".step-*.old-*"), *outdated]:
            # Renamed first, so that a half-deleted checkpoint never has a checkpoint's name.
            shutil.rmtree(path.rename(self._dir / f".step-{_step(path):06d}.tmp-{os.getpid()}"))


def _complete_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint with a manifest, newest first."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*step-*"), reverse=True):  # names that start with `step-…` come first
        if _NAME.fullmatch(path.name) and (path / _MANIFEST).is_file():
            found.setdefault(_step(path), path)
    return sorted(found.items(), reverse=True)


def _best(directory: Path) -> Path | None:
    """The checkpoint with the highest score, the newest among equals; one that was not evaluated has no score."""
    scores = []
    for step, path in _complete_checkpoints(directory):
        try:
            score = json.loads((path / _STATE).read_bytes()).get(SCORE)
        except (OSError, RecursionError, ValueError, AttributeError):  # damaged: loading it reports that
            continue
        if isinstance(score, int | float) and score == score:
            scores.append((score, step, path))
    return max(scores)[2] if scores else None


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} does not have the name of a checkpoint"
    return int(match[1] or match[2])


def _step_or_none(path: Path) -> int:
    return _step(path) if _NAME.fullmatch(path.name) else -1


def _load(step: int, path: Path) -> Checkpoint:
    return Checkpoint(step, path, _read_json(path, _STATE))


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((path / name).read_bytes())
    except FileNotFoundError as error:
        raise _damaged(path, name, "it is missing") from error
    except (RecursionError, ValueError) as error:
        raise _damaged(path, name, "it is not JSON") from error
    if not isinstance(content, dict):
        raise _damaged(path, name, "it is not a JSON object")
    return content


class _DamagedError(UserError):
    """A file of a checkpoint differs from what was written."""

    def __init__(self, message: str, name: str, problem: str) -> None:
        super().__init__(message)
        self.name = name
        self.problem = problem


def _damaged(path: Path, name: str, problem: str) -> UserError:
    older = [other for step, other in _complete_checkpoints(path.parent) if step < _step(path)]
    run = path.parent.parent
    fall_back = f"`roll repair {run}` moves it aside, and the run continues from {older[0].name}; or " if older else ""
    message = f"checkpoint file {path / name} is damaged ({problem}): {fall_back}start over with {option('restart')}"
    return _DamagedError(message, name, problem)


def _write_manifest(directory: Path, step: int, digests: Mapping[str, str]) -> None:
    """Syncs every file to disk, then writes the manifest that makes them a checkpoint. Files with a known digest were
    synced by the workers that wrote them."""
    files: dict[str, Any] = {}
    for file in _files(directory):
        name = file.relative_to(directory).as_posix()
        if name not in digests:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        files[name] = {"bytes": file.stat().st_size, "digest": digests.get(name) or file_digest(file)}
    if missing := sorted(digests.keys() - files.keys()):
        raise RunError(
            f"{missing[0]} of the checkpoint of step {step} was written, but is not in {directory}: all workers must see "
            "the run's folder under the same path"
        )
    for folder in [path for path in directory.rglob("*") if path.is_dir()]:
        sync_folder(folder)
    manifest = {**format_entries(), "step": step, "algorithm": DIGEST, "files": files}
    manifest[_CHECK] = _manifest_checksum(manifest)
    atomic_write(directory / _MANIFEST, to_json(manifest, indent=True))


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's own entries."""
    entries = {name: value for name, value in manifest.items() if name != _CHECK}
    return hashlib.new(DIGEST, json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _is_state(file: Path) -> bool:
    """Whether a trainer reads the file. Other files, such as a user's notes, are not checked."""
    return file.suffix in (".safetensors", ".distcp") or file.name == ".metadata"


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())
