"""Removes everything that a program left in its scratch folder, however deep, wide or protected, in bounded time.

Every operation is relative to an open folder and follows no link, so that nothing outside can be reached, even if
something is renamed meanwhile. Deeply nested folders are moved to the top folder and emptied there: depth costs neither
descriptors nor long paths.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # loads at once, signal does not
import os
import time

TYPE_CHECKING = False  # without importing typing, which is slow
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

FOLDER = "roll-scratch-"
"""The prefix of scratch folder names."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ONLY_PATH = getattr(os, "O_PATH", 0)
_MAX_OPEN_FOLDERS = 64
"""Maximum number of nested folders open at a time."""
_MAX_LISTED = 4096
"""Folders that are listed at once: a list of all might be long."""
_DESCRIPTORS = 256
_MIN_AGE_S = 60.0
_GIVE_UP_S = 600.0
"""Time after which the background process gives up."""


def remove_tree(folder: str, until_s: float) -> bool:
    """Removes a folder and everything in it. False if something is left: the time (of `time.monotonic`) was up, or the
    system refused."""
    try:
        top = open_folder(folder)
    except FileNotFoundError:
        return True
    try:
        done = _Removal(top, until_s).empty()
    finally:
        os.close(top)
    if done:
        os.rmdir(folder)
    return done


def open_folder(name: Any, within: Any = None) -> int:
    """A descriptor of a folder that its owner can now list, enter and change. Raises `OSError` for a link or a file."""
    try:
        opened = os.open(name, _FOLDER, dir_fd=within)
    except PermissionError:
        if not _ONLY_PATH:
            os.chmod(name, 0o700, dir_fd=within, follow_symlinks=False)
            return os.open(name, _FOLDER, dir_fd=within)
        closed = os.open(name, _ONLY_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)  # the folder itself, even if its name now belongs to another
            opened = os.open(".", _FOLDER, dir_fd=closed)
        finally:
            os.close(closed)
    if os.fstat(opened).st_mode & 0o700 != 0o700:
        os.fchmod(opened, 0o700)
    return opened


class _Removal:
    """Empties one folder."""

    def __init__(self, top: int, until_s: float) -> None:
        self._top, self._until_s = top, until_s
        self._token, self._moved = os.urandom(8).hex(), 0

    def empty(self) -> bool:
        """Empties the folder; returns whether it is empty now."""
        while self._clear(self._top, 0):  # folders that were moved up come next
            if time.monotonic() > self._until_s:
                return False
        with os.scandir(self._top) as entries:
            return next(entries, None) is None

    def _clear(self, within: int, depth: int) -> bool:
        """Removes the content of an open folder as far as possible. Returns whether a folder in it was removed or
        moved."""
        removed_any, changed = False, True
        while changed and time.monotonic() < self._until_s:
            changed = False
            for name in _folders(within, self._until_s):
                try:
                    self._remove(name, within, depth)
                    removed_any = changed = True
                except OSError:  # already removed, or the system refuses
                    continue
        return removed_any

    def _remove(self, name: str, within: int, depth: int) -> None:
        inner = open_folder(name, within)
        try:
            if depth == _MAX_OPEN_FOLDERS:
                os.rename(name, f"{self._token}-{self._moved}", src_dir_fd=within, dst_dir_fd=self._top)
                self._moved += 1
                return
            self._clear(inner, depth + 1)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=within)


def _folders(within: int, until_s: float) -> Sequence[str]:
    """The folders in an open folder, or the first of them. Everything else in it is removed."""
    found: list[str] = []
    with os.scandir(within) as entries:
        for count, entry in enumerate(entries):
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                try:
                    os.unlink(entry.name, dir_fd=within)
                except OSError:  # another user's, or already removed
                    pass
            if len(found) >= _MAX_LISTED or (count & 255 == 255 and time.monotonic() > until_s):
                break
    return found


def remove_in_background(folders: Sequence[str]) -> None:
    """Removes folders in a background process, without waiting for it. Folders that a supervisor has locked are
    skipped."""
    if os.fork():
        return
    try:
        os.setsid()
        os.closerange(0, _DESCRIPTORS)
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
        os.nice(19)
        until_s = time.monotonic() + _GIVE_UP_S
        for folder in folders:
            try:
                lock = lock_folder(folder)
                remove_tree(folder, until_s)
                os.close(lock)
            except OSError:  # in use, or another user's
                continue
    finally:
        os._exit(0)


def old_scratch_folders(parent: str) -> list[str]:
    """Scratch folders that have been in a folder for a while. Some may be in use."""
    found = []
    for name in os.listdir(parent):
        if name.startswith(FOLDER):
            folder = os.path.join(parent, name)
            try:
                if time.time() - os.lstat(folder).st_ctime > _MIN_AGE_S:  # a newer folder may be about to be locked
                    found.append(folder)
            except OSError:
                continue
    return found


def lock_folder(folder: str) -> int:
    """Marks a folder as in use by a lock that lasts while the descriptor is open. Raises `OSError` if it is locked
    already."""
    import fcntl

    opened = open_folder(folder)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
