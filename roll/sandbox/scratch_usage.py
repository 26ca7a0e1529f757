"""Measures a program's disk usage where the kernel does not limit it: on the plain level, unless the scratch folder is a
file system of its own.

It counts the blocks of everything in the folder, at any depth and behind any permission, and of deleted files that are
still open or mapped.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from roll.sandbox.inside import kernel
from roll.sandbox.usage import descendant_pids, has_ended

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ONLY_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_ENTRY_BYTES = 4096
"""Minimum size charged per name: this bounds the number of files, and so the time to count them."""
_MIN_ENTRIES = 256
_MAX_UNFINISHED = 10
_CAP_SYS_PTRACE = 19
_SYSTEM_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class _Full(Exception):
    """The limit is exceeded, or something cannot be inspected."""


@dataclass
class Scratch:
    """A watched scratch folder."""

    folder: str
    limit_bytes: int
    _hidden: frozenset[int] = frozenset()
    """Processes that could not be inspected in the last check."""
    _unfinished: int = 0
    """Consecutive counts during which folders vanished."""

    def exceeds(self, pid: int) -> bool:
        """Whether the folder, and deleted files that descendants of a process hold, exceed the limit."""
        count = _Count(self.limit_bytes)
        try:
            finished = _count_tree(self.folder, count)
            hidden = _count_nameless(list(descendant_pids(pid)), self.folder, count) if finished else frozenset()
        except _Full:
            return True
        except OSError:  # the folder has just been removed: the program has ended
            return False
        self._unfinished = 0 if finished else self._unfinished + 1
        known, self._hidden = self._hidden, hidden
        # one failure may be a process's last moment, a few may be chance; after that the program hides its usage
        return bool(known & hidden) or self._unfinished > _MAX_UNFINISHED


@dataclass
class _Count:
    limit_bytes: int
    bytes: int = 0
    entries: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Files with several names, or none."""

    def add(self, found: os.stat_result) -> None:
        self.entries += 1
        if found.st_nlink != 1 and not stat.S_ISDIR(found.st_mode):
            if (found.st_dev, found.st_ino) in self.seen:
                return
            self.seen.add((found.st_dev, found.st_ino))
        self.add_bytes(found.st_blocks * 512)

    def add_bytes(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.limit_bytes or self.entries > max(_MIN_ENTRIES, self.limit_bytes // _ENTRY_BYTES):
            raise _Full


def _count_tree(folder: str, count: _Count) -> bool:
    """Counts files that have a name. Few descriptors are open at a time, and no path is longer than a name. False if a
    folder vanished meanwhile: then the rest is not counted."""
    try:
        visit = _Visit(folder)
    except OSError:
        return False
    try:
        pending = [_count_entries(visit.at, count)]  # for each open folder, its subfolders that are not counted yet
        while pending:
            if not pending[-1]:
                pending.pop()
                visit.leave()
            elif visit.enter(pending[-1].pop()):
                pending.append(_count_entries(visit.at, count))
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in _SYSTEM_ERRNOS:
            return True
        # its permissions were revoked again at once, or it became a link: no honest program does that
        raise _Full from error
    finally:
        visit.close()
    return True


def _count_entries(folder: int, count: _Count) -> list[str]:
    """Counts the entries of an open folder; returns the names of its subfolders."""
    folders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                count.add(entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    return folders


class _Visit:
    """Visits one folder at a time, downwards and upwards. Folders without permissions get them for the visit."""

    def __init__(self, folder: str) -> None:
        self.at, mode = _listable(folder, None)
        self._modes = [mode]

    def enter(self, name: str) -> bool:
        """Enters a subfolder; False if it no longer exists."""
        try:
            at, mode = _listable(name, self.at)
        except (FileNotFoundError, NotADirectoryError):
            return False
        os.close(self.at)
        self.at = at
        self._modes.append(mode)
        return True

    def leave(self) -> None:
        if len(self._modes) > 1:
            above = os.open("..", _ONLY_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.at)
            self._close_as(self._modes.pop())
            self.at = above

    def close(self) -> None:
        self._close_as(self._modes[-1])

    def _close_as(self, mode: int | None) -> None:
        if mode is not None:
            with contextlib.suppress(OSError):
                os.chmod(f"/proc/self/fd/{self.at}", mode)
        os.close(self.at)


def _listable(name: str, within: int | None) -> tuple[int, int | None]:
    """An opened folder, and its former permissions if they had to be changed."""
    closed = os.open(name, _ONLY_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        mode = stat.S_IMODE(os.fstat(closed).st_mode)
        changed = mode & 0o500 != 0o500 and os.geteuid() != 0
        if changed:
            os.chmod(f"/proc/self/fd/{closed}", mode | 0o500)
        return os.open(".", _FOLDER, dir_fd=closed), mode if changed else None
    finally:
        os.close(closed)


def _count_nameless(pids: list[int], folder: str, count: _Count) -> frozenset[int]:
    """Counts deleted files that processes hold. Returns the processes that cannot be inspected."""
    if not pids or os.geteuid() != 0 or _may_inspect():
        return _count_open(pids, folder, count)
    # Root in a container can inspect processes of another user only as that user. A separate thread does so, because a
    # thread that changes its user loses the signal that reports its parent's end.
    owner, dumpable = os.stat(f"/proc/{pids[-1]}"), kernel.is_dumpable()
    found: list[frozenset[int] | BaseException] = []

    def count_as_owner() -> None:
        try:
            kernel.become_for_files(owner.st_uid, owner.st_gid)
            found.append(_count_open(pids, folder, count))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=count_as_owner, name="sandbox-scratch")
    thread.start()
    thread.join()  # waits: it reads some files of the kernel's
    kernel.set_dumpable(dumpable)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@functools.cache
def _may_inspect() -> bool:
    """Whether root may inspect processes of other users."""
    with open("/proc/self/status") as status:
        effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return bool(effective >> _CAP_SYS_PTRACE & 1)


def _count_open(pids: list[int], folder: str, count: _Count) -> frozenset[int]:
    hidden = set()
    device = os.stat(folder).st_dev
    for pid in pids:
        for thread in _list_folder(f"/proc/{pid}/task"):
            proc_path = f"/proc/{pid}/task/{thread}"
            try:
                for found in _open_files(proc_path):
                    if found.st_nlink == 0 and found.st_dev == device and stat.S_ISREG(found.st_mode):
                        count.add(found)
                _count_mapped(proc_path, folder, count)
            except (FileNotFoundError, ProcessLookupError):
                continue
            except PermissionError:
                if not has_ended(proc_path):
                    hidden.add(pid)
    return frozenset(hidden)


def _open_files(proc_path: str) -> Iterator[os.stat_result]:
    for number in os.listdir(f"{proc_path}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.stat(f"{proc_path}/fd/{number}")


def _count_mapped(proc_path: str, folder: str, count: _Count) -> None:
    """Counts mapped files that have neither a name nor a descriptor. Their size is unknown, so only a few are allowed."""
    with open(f"{proc_path}/maps", errors="surrogateescape") as maps:
        for line in maps:
            if line.endswith(" (deleted)\n") and f" {folder}/" in line:
                inode = int(line.split(None, 5)[4])
                if all(inode != known for _, known in count.seen):
                    count.seen.add((-1, inode))
                    count.add_bytes(count.limit_bytes // 4)


def _list_folder(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
