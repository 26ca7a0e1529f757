"""Scratch folders: what they hold is counted whatever a program does, and all of it is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.sandbox.inside import removal
from roll.sandbox.inside.removal import FOLDER, lock_folder, old_scratch_folders, remove_in_background, remove_tree
from roll.sandbox.scratch_usage import Scratch


def soon() -> float:
    return time.monotonic() + 60


def deep(folder: Path, levels: int, name: str = "d") -> None:
    """Folders in one another, far beyond the longest path."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


class TestRemoval:
    def test_whatever_lies_in_a_folder_is_removed(self, tmp_path: Path) -> None:
        folder, outside = tmp_path / "scratch", tmp_path / "outside"
        folder.mkdir()
        outside.mkdir()
        (outside / "kept").write_text("kept")
        deep(folder, 300, "d" * 200)
        (folder / "closed" / "inner").mkdir(parents=True)
        (folder / "closed" / "inner" / "file").write_text("x")
        for name in (b"\xff\xfe", b"\n", b" "):
            os.mkdir(os.path.join(os.fsencode(folder), name))
            (folder / os.fsdecode(name) / "file").write_text("x")
        os.mkfifo(folder / "pipe")
        for place in (folder, folder / "closed"):
            (place / "link").symlink_to(outside)
            (place / "file-link").symlink_to(outside / "kept")
        for mode, name in ((0, "closed/inner"), (0o300, "closed")):
            (folder / name).chmod(mode)
        folder.chmod(0)
        assert remove_tree(str(folder), soon())
        assert not folder.exists()
        assert (outside / "kept").read_text() == "kept"

    def test_it_takes_no_longer_than_it_may(self, tmp_path: Path) -> None:
        folder = tmp_path / "scratch"
        folder.mkdir()
        deep(folder, 200)
        assert not remove_tree(str(folder), time.monotonic() - 1)
        assert folder.exists()
        assert remove_tree(str(folder), soon())
        assert remove_tree(str(folder), soon())  # it is gone

    def test_no_link_is_followed_from_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "scratch").symlink_to(tmp_path / "outside")
        with pytest.raises(OSError, match="scratch"):
            remove_tree(str(tmp_path / "scratch"), soon())
        assert (tmp_path / "outside").exists()

    def test_another_process_removes_the_rest_but_nothing_in_use(self, tmp_path: Path) -> None:
        used, left = tmp_path / f"{FOLDER}used", tmp_path / f"{FOLDER}left"
        for folder in (used, left):
            folder.mkdir()
            deep(folder, 100)
        held = lock_folder(str(used))
        remove_in_background([str(used), str(left)])
        os.wait()
        assert not left.exists()
        assert used.exists()
        os.close(held)
        remove_in_background([str(used)])
        os.wait()
        assert not used.exists()

    def test_folders_that_have_just_been_made_are_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in (f"{FOLDER}one", "other"):
            (tmp_path / name).mkdir()
        assert old_scratch_folders(str(tmp_path)) == []
        monkeypatch.setattr(removal, "_MIN_AGE_S", -1)
        assert old_scratch_folders(str(tmp_path)) == [str(tmp_path / f"{FOLDER}one")]


HOLDING = """
import mmap, os, sys, time
file = os.open("x", os.O_CREAT | os.O_RDWR)
os.write(file, bytes(2_000_000))
os.unlink("x")
if sys.argv[1] == "mapped":
    import ctypes
    ctypes.CDLL(None).mmap(None, 4096, 1, 2, file, 0)
    os.close(file)
print("held", flush=True)
time.sleep(3600)
"""


class TestCounting:
    def count(self, folder: Path, limit_bytes: int) -> bool:
        return Scratch(str(folder), limit_bytes).exceeds(os.getpid())

    def test_files_count_at_any_depth_and_behind_any_permission(self, tmp_path: Path) -> None:
        folder = tmp_path / "closed" / "more"
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(100_000))
        for mode in (0, 0o100, 0o200, 0o300, 0o400):
            (tmp_path / "closed").chmod(mode)
            assert not self.count(tmp_path, 200_000)
            assert (tmp_path / "closed").stat().st_mode & 0o777 == mode
            assert self.count(tmp_path, 90_000)  # whose program is ended, so that permissions may stay changed
        (tmp_path / "closed").chmod(0o700)
        deep(tmp_path, 300, "d" * 200)
        assert self.count(tmp_path, 1_000_000)  # each folder is some bytes, and 300 more than fit
        assert not self.count(tmp_path, 4_000_000)

    def test_names_of_one_file_count_once_and_holes_do_not(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(100_000))
        for n in range(9):
            os.link(tmp_path / "file", tmp_path / f"name{n}")
        with open(tmp_path / "holes", "wb") as file:
            file.truncate(1 << 40)
        assert self.count(tmp_path, 90_000)
        assert not self.count(tmp_path, 150_000)

    def test_too_many_names_do_not_fit(self, tmp_path: Path) -> None:
        for n in range(300):
            (tmp_path / f"f{n}").touch()
        assert self.count(tmp_path, 1_000_000)
        assert not self.count(tmp_path, 2_000_000)

    @pytest.mark.parametrize(("how", "limit_bytes"), [("open", 1_000_000), ("mapped", 120_000)])
    def test_files_without_a_name_count(self, tmp_path: Path, how: str, limit_bytes: int) -> None:
        (tmp_path / "file").write_bytes(
            bytes(100_000)
        )  # of a mapped file the size is not known: it is a quarter of the limit
        process = subprocess.Popen([sys.executable, "-c", HOLDING, how], cwd=tmp_path, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            assert self.count(tmp_path, limit_bytes)
            assert not self.count(tmp_path, 3_000_000)
        finally:
            process.kill()
            process.communicate()
        assert not self.count(tmp_path, limit_bytes)

    def test_a_folder_that_is_gone_holds_nothing(self, tmp_path: Path) -> None:
        assert not self.count(tmp_path / "nowhere", 1)
