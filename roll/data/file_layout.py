"""The layout of a text file's rows, as far as its name does not determine it, and reading its text."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.config.errors import UserError

ROW_MB = 16
_MAX_ROWS_PER_FILE = 16


@dataclass(frozen=True)
class FileLayout:
    """What a reader of a CSV or JSON file needs to know. The defaults fit a file with a header, or with one list."""

    columns: tuple[str, ...] = ()
    """Column names of a CSV file without a header."""
    rows: str = ""
    """The key of the list of rows in a JSON file; `data.train` for a nested key."""
    delimiter: str = ""
    """The delimiter of a CSV file; empty: a comma, in a TSV file a tab."""
    quotes: bool = True
    """Whether a field of a CSV file may be in double quotes; it may then contain delimiters and newlines."""
    headerless: tuple[str, ...] = ()
    """Column names to use if the file has no header, which is the case if ..."""
    headers: tuple[frozenset[str], ...] = ()
    """... its first line contains none of these sets of names."""
    row_mb: int = ROW_MB
    """Maximum MiB of a line or a record; a file that is read as a whole may have 16 times as many."""

    def __post_init__(self) -> None:
        if self.row_mb < 1:
            raise UserError(f"the option row_mb is {self.row_mb}, but takes a whole number ≥ 1: MiB that a row may have")

    def is_headerless(self, first: Sequence[str]) -> bool:
        """Whether the first record of a CSV file is a row."""
        names = {field.strip() for field in first}
        fits = len(first) == len(self.headerless)
        return fits and not any(header <= names for header in self.headers)


def read_text(path: Path, layout: FileLayout) -> str:
    """The text of a file that is read as a whole, in UTF-8, or in UTF-16 if it has that byte order mark; without the
    mark."""
    max_mib, size = layout.row_mb * _MAX_ROWS_PER_FILE, path.stat().st_size >> 20
    if size >= max_mib:
        raise UserError(
            f"{path}: it has {size} MiB, of at most {max_mib} in a file that is read whole: write JSON lines (.jsonl), "
            f"one row each, or the option row_mb: {size // _MAX_ROWS_PER_FILE + 1}"
        )
    return "".join(text_lines(path, FileLayout(row_mb=max_mib)))


def text_lines(path: Path, layout: FileLayout) -> Iterator[str]:
    """The lines of a text file with their newlines, without the byte order mark. No line longer than a row may be is
    read."""
    max_bytes = layout.row_mb << 20
    try:
        with path.open("rb") as file:
            mark = file.read(2)
            if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                file.seek(0)
                yield from _wide_lines(path, io.TextIOWrapper(file, "utf-16", newline="\n"), max_bytes)
                return
            file.seek(len(codecs.BOM_UTF8) if mark + file.read(1) == codecs.BOM_UTF8 else 0)
            number = 0
            while line := file.readline(max_bytes + 1):
                number += 1
                if len(line) > max_bytes:
                    raise _too_long(path, number, layout.row_mb)
                yield _decode_line(path, number, line)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _decode_line(path: Path, number: int, line: bytes) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8 text ({error.reason}): save the file as UTF-8") from error
    if "\0" in text:
        raise UserError(f"{path}:{number}: a byte of it is 0, which no text has: save the file as UTF-8")
    return text


def _wide_lines(path: Path, file: io.TextIOWrapper, max_chars: int) -> Iterator[str]:
    number = 0
    try:
        while line := file.readline(max_chars + 1):
            number += 1
            if len(line) > max_chars:
                raise _too_long(path, number, max_chars >> 20)
            yield line
    except UnicodeError as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{path}:{number + 1}: not UTF-16 text ({reason}): save the file as UTF-8") from error


def _too_long(path: Path, number: int, row_mb: int) -> UserError:
    return UserError(
        f"{path}:{number}: the line is longer than {row_mb} MiB: cut it, or write the option row_mb, the MiB that a row "
        "may have"
    )
