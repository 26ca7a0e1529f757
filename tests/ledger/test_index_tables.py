"""The tables of a ledger's index are what the record says, whatever was damaged, locked, killed or written meanwhile."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ledger_model import Model, asked, lives, write

from roll.config.errors import RunError, UserError
from roll.ledger import index_tables
from roll.ledger.index_tables import index_path
from roll.run import Ledger, LedgerIndex


def test_a_half_written_tail_is_left_for_later(path: Path) -> None:
    whole = path.read_bytes()
    for cut in (1, 30, 100):
        path.write_bytes(whole[:-cut])
        with LedgerIndex.open(path) as index:
            assert sum(index.states().values()) == 60
            assert index.states()["trained"] < 60
    path.write_bytes(whole)
    assert asked(path)


def test_nothing_new_is_not_read_again(path: Path) -> None:
    asked(path)
    with patch.object(index_tables, "RecordBlock", side_effect=AssertionError):
        asked(path)


def test_only_what_is_new_is_read(path: Path) -> None:
    asked(path)
    size = path.stat().st_size
    write(path, lives(10, start=500))
    taken = []
    real = index_tables.RecordBlock.apply

    def apply(block: Any, start: int, lines: list[bytes]) -> None:
        taken.append((start, len(lines)))
        real(block, start, lines)

    with patch.object(index_tables.RecordBlock, "apply", apply):
        asked(path)
    assert taken == [(size, 40)]


@pytest.mark.parametrize("damage", ["deleted", "garbage", "empty", "cut", "other program's", "older", "journal"])
def test_a_damaged_index_is_made_anew(path: Path, damage: str) -> None:
    asked(path)
    file = index_path(path)
    if damage == "deleted":
        file.unlink()
    elif damage in ("garbage", "empty"):
        file.write_bytes(b"no database" * 500 if damage == "garbage" else b"")
    elif damage == "cut":
        os.truncate(file, 5000)
    elif damage == "journal":
        Path(f"{file}-journal").write_bytes(b"torn")
    else:
        with closing(sqlite3.connect(file, isolation_level=None)) as database:
            database.execute("DROP TABLE samples" if damage == "older" else "DROP TABLE stages")
            database.execute("PRAGMA user_version = 0")
    asked(path)


def test_another_record_makes_it_anew(path: Path) -> None:
    asked(path)
    path.unlink()
    write(path, lives(3))
    asked(path)
    path.unlink()
    write(path, lives(90, start=1000))
    asked(path)


def test_a_record_that_lost_its_end_and_grew_again_makes_it_anew(path: Path) -> None:
    """As after a power cut: the beginning is the same, and far longer than what is compared of it."""
    asked(path)
    assert path.stat().st_size > 3 * index_tables._CHECKED_BYTES
    os.truncate(path, path.stat().st_size - 500)
    write(path, lives(20, start=700))
    asked(path)


def test_a_folder_that_cannot_be_written_has_a_temporary_one(path: Path) -> None:
    def connect(name: str, **options: Any) -> sqlite3.Connection:
        if name:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return real(name, **options)

    real = sqlite3.connect
    with patch.object(index_tables.sqlite3, "connect", connect):
        asked(path)
    assert not index_path(path).exists()


def test_one_that_is_locked_for_too_long_is_the_users_to_wait_for(path: Path) -> None:
    asked(path)
    with closing(sqlite3.connect(index_path(path), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with (
            patch.object(index_tables, "_WAIT_S", 0.05),
            pytest.raises(UserError, match="by another process: ask again later"),
        ):
            LedgerIndex.open(path)
    asked(path)


def test_a_disk_that_takes_no_index_at_all_is_an_error(path: Path) -> None:
    with (
        patch.object(index_tables.sqlite3, "connect", side_effect=sqlite3.OperationalError("disk is full")),
        pytest.raises(RunError, match=r"cannot make an index of .*: disk is full"),
    ):
        LedgerIndex.open(path)


def test_a_corrupt_record_is_refused_and_leaves_the_index_as_it_was(path: Path) -> None:
    asked(path)
    size = path.stat().st_size
    write(path, lives(10, start=500))
    content = bytearray(path.read_bytes())
    content[size + 250] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="corrupt"):
        LedgerIndex.open(path)
    os.truncate(path, size)
    asked(path)


def test_progress_is_told_up_to_the_end(path: Path) -> None:
    told: list[tuple[int, int]] = []
    with patch.object(index_tables, "BLOCK_BYTES", 6_000):
        LedgerIndex.open(path, lambda done, size: told.append((done, size))).close()
    size = path.stat().st_size
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == (size, size)


ASK = """
import sys, pathlib
from roll.ledger import index_tables
from roll.run import LedgerIndex
index_tables.BLOCK_BYTES = 10_000
with LedgerIndex.open(pathlib.Path(sys.argv[1])) as index:
    print(index.states(), index.balance(), index.reasons(), index.state_latencies(), index.solve_rates())
"""


def test_processes_that_ask_at_once_get_the_same_answers_though_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(path, lives(2000))
    with ExitStack() as stack:
        asking = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", ASK, str(path)], stdout=subprocess.PIPE))
            for _ in range(3)
        ]
        deadline = time.monotonic() + 30
        while not index_path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        asking[0].kill()
        said = [process.communicate(timeout=60)[0].decode() for process in asking]
    assert [process.returncode for process in asking[1:]] == [0, 0]
    assert said[1] == said[2]
    assert said[1].startswith("{'trained': 2000}")
    with LedgerIndex.open(path) as index:
        assert index.states() == {"trained": 2000}
        assert index.balance() == Model.of(path).balance()


def test_asking_while_the_run_writes(path: Path) -> None:
    ledger = Ledger.open(path)
    done = threading.Event()

    def run() -> None:
        for start in range(1000, 3000, 10):
            ledger.append_many(lives(10, start))
            ledger.flush()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    samples = 0
    while not done.is_set():
        with LedgerIndex.open(path) as index:
            now = sum(index.states().values())
            assert now >= samples
            samples = now
    thread.join(30)
    ledger.close()
    with LedgerIndex.open(path) as index:
        assert index.states() == {"trained": 2060}
