"""The tables of a ledger's index: a SQLite file next to the ledger. The tables cover the ledger up to a stored position.

Invariants:

- The ledger is the truth. The tables have read it up to a byte that they store, and only complete records. If the ledger
  is shorter or different before that byte, or the file is missing, damaged or older, they are built again. In a
  read-only folder they are built in a temporary file for one query.
- Many processes may update them, also while the run is writing: each block of records is one transaction, which begins
  at the byte that the last one reached.
"""

from __future__ import annotations

import gc
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

from roll.config.errors import UserError
from roll.ledger.index_rows import RecordBlock
from roll.ledger.log import record_blocks

VERSION = 1
BLOCK_BYTES = 8 * 2**20
_WAIT_S = 600.0
_CHECKED_BYTES = 4096
_CACHE_KIB = 64 * 1024

_TABLES = ("progress", "samples", "attempts", "reasons", "stages")
_SCHEMA = """
CREATE TABLE progress (position INTEGER, fingerprint INTEGER);
INSERT INTO progress VALUES (0, 0);
CREATE TABLE samples (
    grp TEXT, sample TEXT, task TEXT, state TEXT, reason TEXT, reward REAL, scored_s REAL, ends INTEGER, first_s REAL,
    last_s REAL, offsets BLOB, PRIMARY KEY (grp, sample)
) WITHOUT ROWID;
CREATE TABLE attempts (task TEXT, grp TEXT, PRIMARY KEY (task, grp)) WITHOUT ROWID;
CREATE TABLE reasons (state TEXT, class TEXT, times INTEGER, PRIMARY KEY (state, class)) WITHOUT ROWID;
CREATE TABLE stages (
    state TEXT, bucket INTEGER, times INTEGER, total_s REAL, longest_s REAL, PRIMARY KEY (state, bucket)
) WITHOUT ROWID;
"""

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


def index_path(record: Path) -> Path:
    """The path of a ledger's index."""
    return record.with_suffix(".sqlite")


def open_updated(record: Path, progress: Progress | None = None) -> sqlite3.Connection:
    """The tables, updated, in a transaction that sees them as they are now.

    They are in the file next to the ledger, which is built again if it is damaged; if it cannot be written, in a
    temporary file.
    """
    path = index_path(record)
    try:
        return _updated(record, path, progress)
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise UserError(f"{path} is being brought up to date by another process: ask again later") from error
        return _updated(record, None, progress)
    except sqlite3.DatabaseError:
        for name in (path.name, f"{path.name}-journal"):
            path.with_name(name).unlink(missing_ok=True)
        return _updated(record, path, progress)


def _updated(record: Path, path: Path | None, progress: Progress | None) -> sqlite3.Connection:
    # With an empty name SQLite uses a temporary file, deleted when it is closed.
    database = sqlite3.connect(str(path) if path else "", timeout=_WAIT_S, isolation_level=None)
    try:
        database.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        _update(database, record, progress)
        database.execute("BEGIN")
    except BaseException:
        database.close()
        raise
    return database


def _update(database: sqlite3.Connection, record: Path, progress: Progress | None) -> None:
    end = record.stat().st_size
    last = 0
    while (position := _apply_block(database, record, end)) != last:
        if progress is not None:
            progress(position, end)
        last = position


def _apply_block(database: sqlite3.Connection, record: Path, end: int) -> int:
    """Reads the next records of the ledger, if any, in one transaction; returns the position that the tables have
    reached."""
    with _transaction(database), _gc_disabled():
        position = _trusted_position(database, record)
        for start, lines in record_blocks(record, position, end, BLOCK_BYTES):
            position = start + sum(map(len, lines)) + len(lines)
            RecordBlock(database, record).apply(start, lines)
            fingerprint = _fingerprint(record, position)
            database.execute("UPDATE progress SET position = ?, fingerprint = ?", (position, fingerprint))
            break
        return position


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if database.in_transaction:  # some errors have already ended it
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _trusted_position(database: sqlite3.Connection, record: Path) -> int:
    """The position to continue from; 0, with empty tables, if the tables do not match the beginning of this ledger."""
    if database.execute("PRAGMA user_version").fetchone() == (VERSION,):
        position, fingerprint = database.execute("SELECT position, fingerprint FROM progress").fetchone()
        if fingerprint == _fingerprint(record, position):
            return int(position)
    for table in _TABLES:
        database.execute(f"DROP TABLE IF EXISTS {table}")
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {VERSION}")
    return 0


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disables the cycle collector, which would scan every match of a block repeatedly; the matches form no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fingerprint(record: Path, position: int) -> int:
    """A checksum of the beginning and the end of the ledger's first `position` bytes; -1 if it is shorter."""
    with record.open("rb") as file:
        if os.fstat(file.fileno()).st_size < position:
            return -1
        head = file.read(min(_CHECKED_BYTES, position))
        file.seek(max(0, position - _CHECKED_BYTES))
        return crc32(file.read(min(_CHECKED_BYTES, position)), crc32(head))
