"""A log that several processes write to and whose size never exceeds its limit.

While everything fits there is one file. Then there are three, each at most a third of the limit:

    graders.log.first    the beginning, never deleted
    graders.log.before   the part directly before graders.log
    graders.log          the newest part; its first line says how many bytes were dropped after the first part

Invariants: bytes are kept in the order in which they were written, with or without line breaks; a process that cannot
write (a full disk) continues without its log, and the log later says how many bytes are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from roll.config.file_modes import inherit_folder_mode

LIMIT_BYTES = 64 << 20
SMALLEST_BYTES = 3 << 12
CHUNK_BYTES = 1 << 20
FIRST, BEFORE = ".first", ".before"
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031  # Linux; fcntl has it from Python 3.10 on, but not everywhere
_HEADER = re.compile(rb"\[roll: (\d+) bytes of this log were dropped")


class BoundedLog:
    """One writer of a log."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._part_bytes = max(limit_bytes, SMALLEST_BYTES) // 3
        self._unwritten = 0
        """Bytes that could not be written since the last successful write."""

    def write(self, data: bytes) -> None:
        """Appends bytes. Never raises because the disk is full."""
        max_bytes = min(CHUNK_BYTES, self._part_bytes // 2)
        for begin in range(0, len(data), max_bytes):
            chunk = data[begin : begin + max_bytes]
            try:
                with self._lock():
                    self._append(chunk)
            except OSError:
                self._unwritten += len(chunk)

    def _append(self, chunk: bytes) -> None:
        if self._unwritten:
            chunk = b"\n[roll: %d bytes could not be written here]\n" % self._unwritten + chunk
        size = self._path.stat().st_size if self._path.exists() else 0
        if size and size + len(chunk) > self._part_bytes:
            self._begin_part()
        _append_to(self._path, chunk)
        self._unwritten = 0

    def _begin_part(self) -> None:
        first, before = (self._path.with_name(self._path.name + suffix) for suffix in (FIRST, BEFORE))
        if not first.exists():
            self._path.replace(first)
            dropped = 0
        else:
            dropped = _dropped_before(self._path)
            if before.exists():
                dropped += before.stat().st_size
            self._path.replace(before)
        header = f"[roll: {dropped} bytes of this log were dropped after {first.name}"
        earlier = f"; the bytes right before this line are in {before.name}" if before.exists() else ""
        _append_to(self._path, f"{header}{earlier}; run.keep.log_mb is its limit]\n".encode())

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Holds the lock of the log's folder, if the file system supports locks."""
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def is_bounded(path: Path) -> bool:
    """Whether the size of a log can be bounded: not if it is a device such as /dev/null."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def wide_pipe() -> tuple[int, int]:
    """A pipe with a larger buffer than the default, if the system allows it, so that its writers block less."""
    reading, writing = os.pipe()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, writing


def start_writer(path: Path, limit_bytes: int) -> int:
    """Starts a process that copies a pipe to the log, and returns the write end of the pipe. The process ends when all
    copies of the write end are closed."""
    import subprocess  # not at the top: subreapers do not need it and start faster without it

    reading, writing = wide_pipe()
    try:
        command = (sys.executable, "-I", "-S", "-c", _program(), str(path), str(limit_bytes))
        # waits: it forks and ends at once
        done = subprocess.run(command, stdin=reading, start_new_session=True, check=False)
        if done.returncode:
            raise OSError(done.returncode, f"the process that writes {path} did not start")
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return writing


def main() -> None:
    """Copies stdin to the log, detached from its parent, which may end before its last output is written."""
    if os.fork():
        os._exit(0)
    log = BoundedLog(Path(sys.argv[1]), int(sys.argv[2]))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    while chunk := os.read(0, CHUNK_BYTES):
        log.write(chunk)
    os._exit(0)


def _program() -> str:
    root = str(Path(__file__).parents[2])
    return f"import sys; sys.path.insert(0, {root!r}); from roll.process.bounded_log import main; main()"


def _append_to(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not os.fstat(descriptor).st_size:
            inherit_folder_mode(path)
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    finally:
        os.close(descriptor)


def _dropped_before(path: Path) -> int:
    with path.open("rb") as file:
        found = _HEADER.match(file.read(200))
    return 0 if found is None else int(found[1])
