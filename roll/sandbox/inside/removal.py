"""Removes what a program left in its scratch folder: however deep, wide or closed it is, and never for long.

Every step is relative to an open folder and follows no link, so that nothing outside can be reached, whoever renames
things meanwhile. Folders far below are moved up to the top one, and emptied there: depth costs neither descriptors nor
long paths.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # loads at once, signal does not
import os
import time

TYPE_CHECKING = False  # without importing typing, which takes a while
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

FOLDER = "roll-scratch-"
"""What the names of scratch folders begin with."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ONLY_PATH = getattr(os, "O_PATH", 0)
_DEEPEST = 64
"""Folders that are open at a time, each in the one before."""
_AT_A_TIME = 4096
"""Folders that are looked up in one go: a list of all might be long."""
_DESCRIPTORS = 256
_FRESH_S = 60.0
_MOST_S = 600.0
"""Seconds after which the process that removes things later gives up."""


def remove_tree(folder: str, until_s: float) -> bool:
    """Removes a folder and all in it. False if something is still there: time (of `time.monotonic`) was up, or the system
    does not let it go."""
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
    """A descriptor of a folder that its owner can now list, enter and change. `OSError` if it is a link or no folder."""
    try:
        opened = os.open(name, _FOLDER, dir_fd=within)
    except PermissionError:
        if not _ONLY_PATH:
            os.chmod(name, 0o700, dir_fd=within, follow_symlinks=False)
            return os.open(name, _FOLDER, dir_fd=within)
        closed = os.open(name, _ONLY_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)  # the folder itself, even if its name is another's by now
            opened = os.open(".", _FOLDER, dir_fd=closed)
        finally:
            os.close(closed)
    if os.fstat(opened).st_mode & 0o700 != 0o700:
        os.fchmod(opened, 0o700)
    return opened


class _Removal:
    """The emptying of one folder."""

    def __init__(self, top: int, until_s: float) -> None:
        self._top, self._until_s = top, until_s
        self._token, self._moved = os.urandom(8).hex(), 0

    def empty(self) -> bool:
        """Whether the folder is empty now."""
        while self._clear(self._top, 0):  # what was moved up comes next
            if time.monotonic() > self._until_s:
                return False
        with os.scandir(self._top) as entries:
            return next(entries, None) is None

    def _clear(self, within: int, depth: int) -> bool:
        """Removes what is in an open folder, as far as it can. Whether any folder in it was removed or moved."""
        some, changed = False, True
        while changed and time.monotonic() < self._until_s:
            changed = False
            for name in _folders(within, self._until_s):
                try:
                    self._remove(name, within, depth)
                    some = changed = True
                except OSError:  # gone, or the system does not let it go
                    continue
        return some

    def _remove(self, name: str, within: int, depth: int) -> None:
        inner = open_folder(name, within)
        try:
            if depth == _DEEPEST:
                os.rename(name, f"{self._token}-{self._moved}", src_dir_fd=within, dst_dir_fd=self._top)
                self._moved += 1
                return
            self._clear(inner, depth + 1)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=within)


def _folders(within: int, until_s: float) -> Sequence[str]:
    """The folders in an open folder, or the first of them. All else in it is removed on the way."""
    found: list[str] = []
    with os.scandir(within) as entries:
        for count, entry in enumerate(entries):
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                try:
                    os.unlink(entry.name, dir_fd=within)
                except OSError:  # somebody else's, or gone
                    pass
            if len(found) >= _AT_A_TIME or (count & 255 == 255 and time.monotonic() > until_s):
                break
    return found


def remove_later(folders: Sequence[str]) -> None:
    """Leaves folders to a process of its own, which nobody waits for. Those that a supervisor holds are passed over."""
    if os.fork():
        return
    try:
        os.setsid()
        os.closerange(0, _DESCRIPTORS)
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
        os.nice(19)
        until_s = time.monotonic() + _MOST_S
        for folder in folders:
            try:
                held = hold(folder)
                remove_tree(folder, until_s)
                os.close(held)
            except OSError:  # in use, or somebody else's
                continue
    finally:
        os._exit(0)


def left_behind(place: str) -> list[str]:
    """Scratch folders that have lain in a place for a while. Some may be in use."""
    found = []
    for name in os.listdir(place):
        if name.startswith(FOLDER):
            folder = os.path.join(place, name)
            try:
                if time.time() - os.lstat(folder).st_ctime > _FRESH_S:  # before, it may be about to be held
                    found.append(folder)
            except OSError:
                continue
    return found


def hold(folder: str) -> int:
    """Has other processes know that a folder is in use, as long as the descriptor is open. `OSError` if it is already."""
    import fcntl

    opened = open_folder(folder)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
