"""Who may read what a run writes: whoever may read the folder that it is in."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def inherit_folder_mode(path: Path) -> None:
    """Makes a file or a folder as readable as the folder that it is in; a link, and what is somebody else's, stays."""
    with suppress(PermissionError, FileNotFoundError):
        now, allowed = path.lstat().st_mode, path.parent.stat().st_mode & 0o777
        if stat.S_ISLNK(now):
            return
        if not stat.S_ISDIR(now) and not now & 0o100:
            allowed &= 0o666
        if now & 0o777 != allowed:
            path.chmod(allowed)


def inherit_folder_mode_recursively(path: Path) -> None:
    """The same for a folder and all that is in it."""
    inherit_folder_mode(path)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            inherit_folder_mode(Path(folder, name))
