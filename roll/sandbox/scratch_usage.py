"""How much of the disk a program holds, where the kernel does not limit it: on the plain level, unless the scratch folder
is a file system of its own.

Counted are the blocks of all that lies in the folder, at any depth and behind any permission, and of files that have no
name any more but are still open or mapped.
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
from roll.sandbox.usage import children, ended

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ONLY_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_ENTRY_BYTES = 4096
"""What a name takes at least: more files than pages do not fit, and the time to count them stays short."""
_FEWEST = 256
_CHANCES = 10
_CAP_SYS_PTRACE = 19
_NOT_ITS_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class _Full(Exception):
    """More than fits has been found, or something that cannot be looked into."""


@dataclass
class Scratch:
    """A scratch folder that is watched."""

    folder: str
    limit_bytes: int
    _hidden: frozenset[int] = frozenset()
    """Processes that could not be looked into the last time."""
    _unfinished: int = 0
    """How often in a row folders vanished while they were counted."""

    def exceeds(self, pid: int) -> bool:
        """Whether the folder, and all that come from a process, hold more than fits."""
        count = _Count(self.limit_bytes)
        try:
            finished = _count_tree(self.folder, count)
            hidden = _count_nameless(list(children(pid)), self.folder, count) if finished else frozenset()
        except _Full:
            return True
        except OSError:  # the folder has just been removed: the program has ended
            return False
        self._unfinished = 0 if finished else self._unfinished + 1
        known, self._hidden = self._hidden, hidden
        # once may be a process's last moment, and a few times chance: who goes on hides what it holds
        return bool(known & hidden) or self._unfinished > _CHANCES


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
        if self.bytes > self.limit_bytes or self.entries > max(_FEWEST, self.limit_bytes // _ENTRY_BYTES):
            raise _Full


def _count_tree(folder: str, count: _Count) -> bool:
    """Counts what has a name. Few descriptors are open at a time, and no path is longer than a name. False if a folder
    vanished under it: then the rest is not counted."""
    try:
        visit = _Visit(folder)
    except OSError:
        return False
    try:
        left = [_count_entries(visit.at, count)]  # of each folder above, the folders in it that are not counted yet
        while left:
            if not left[-1]:
                left.pop()
                visit.leave()
            elif visit.enter(left[-1].pop()):
                left.append(_count_entries(visit.at, count))
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in _NOT_ITS_FAULT:
            return True
        raise _Full from error  # closed again at once, or a link by now: no honest program does that
    finally:
        visit.close()
    return True


def _count_entries(folder: int, count: _Count) -> list[str]:
    """Counts what lies in an open folder; the names of the folders in it."""
    folders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                count.add(entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    return folders


class _Visit:
    """One folder at a time, entered from above and left upwards. Closed ones are opened for as long as it takes."""

    def __init__(self, folder: str) -> None:
        self.at, mode = _listable(folder, None)
        self._modes = [mode]

    def enter(self, name: str) -> bool:
        """Whether there is still such a folder, which is then the current one."""
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
    """A folder, opened, and what its permissions were if they had to be changed for that."""
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
    """Counts files without a name that processes hold. Those that do not let themselves be looked into are returned."""
    if not pids or os.geteuid() != 0 or _may_look():
        return _count_open(pids, folder, count)
    # Root in a container looks into processes of other users only as that user. A thread of its own does so, because what
    # changes its user loses the signal that tells of its parent's end.
    owner, dumpable = os.stat(f"/proc/{pids[-1]}"), kernel.is_dumpable()
    found: list[frozenset[int] | BaseException] = []

    def look() -> None:
        try:
            kernel.become_for_files(owner.st_uid, owner.st_gid)
            found.append(_count_open(pids, folder, count))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=look, name="sandbox-scratch")
    thread.start()
    thread.join()  # waits: it reads some files of the kernel's
    kernel.set_dumpable(dumpable)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@functools.cache
def _may_look() -> bool:
    """Whether root may look into processes of other users."""
    with open("/proc/self/status") as status:
        effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return bool(effective >> _CAP_SYS_PTRACE & 1)


def _count_open(pids: list[int], folder: str, count: _Count) -> frozenset[int]:
    hidden = set()
    device = os.stat(folder).st_dev
    for pid in pids:
        for thread in _listed(f"/proc/{pid}/task"):
            place = f"/proc/{pid}/task/{thread}"
            try:
                for found in _opened(place):
                    if found.st_nlink == 0 and found.st_dev == device and stat.S_ISREG(found.st_mode):
                        count.add(found)
                _count_mapped(place, folder, count)
            except (FileNotFoundError, ProcessLookupError):
                continue
            except PermissionError:
                if not ended(place):
                    hidden.add(pid)
    return frozenset(hidden)


def _opened(place: str) -> Iterator[os.stat_result]:
    for number in os.listdir(f"{place}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.stat(f"{place}/fd/{number}")


def _count_mapped(place: str, folder: str, count: _Count) -> None:
    """A mapped file that has neither a name nor a descriptor: nobody says how large it is, so few of them fit."""
    with open(f"{place}/maps", errors="surrogateescape") as maps:
        for line in maps:
            if line.endswith(" (deleted)\n") and f" {folder}/" in line:
                inode = int(line.split(None, 5)[4])
                if all(inode != known for _, known in count.seen):
                    count.seen.add((-1, inode))
                    count.add_bytes(count.limit_bytes // 4)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
