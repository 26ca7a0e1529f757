"""Rows of CSV and TSV files.

Invariants: every row has the file's columns, or is refused with its line number; a field may contain quotes, newlines and
any amount of text; an empty field is null.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from roll.config.errors import UserError
from roll.data.file_layout import FileLayout, text_lines

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""The default delimiter, by file suffix."""


def csv_rows(path: Path, layout: FileLayout) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows, with the numbers of the lines on which they begin."""
    records = _records(path, layout)
    if not records:
        return
    line, first = records[0]
    if layout.columns:
        names = list(layout.columns)
    elif layout.is_headerless(first):
        names = list(layout.headerless)
    else:
        names, records = _header(path, line, first), records[1:]
    for line, fields in records:
        if len(fields) != len(names):
            columns = f"{len(names)} columns ({', '.join(names)})"
            raise UserError(f"{path}:{line}: the row has {len(fields)} fields, but there are {columns}")
        yield line, {name: field if field.strip() else None for name, field in zip(names, fields, strict=True)}


def _records(path: Path, layout: FileLayout) -> list[tuple[int, list[str]]]:
    """The fields of every record except empty lines, with the line on which it begins."""
    delimiter = layout.delimiter or DELIMITERS[path.suffix]
    records: list[tuple[int, list[str]]] = []
    start = 1
    allowed = csv.field_size_limit(min(layout.row_mb << 20, 2**31 - 1))
    try:
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if layout.quotes else csv.QUOTE_NONE
        reader = csv.reader(_lines(path, layout), delimiter=delimiter, quoting=quoting, strict=True)
        for fields in reader:
            if fields:
                records.append((start, fields))
            start = reader.line_num + 1
    except csv.Error as error:
        if "field larger than field limit" in str(error):
            raise UserError(
                f"{path}:{start}: a field of this row is longer than {layout.row_mb} MiB: close its quote, or write the "
                "option row_mb, the MiB that a row may have"
            ) from error
        raise UserError(
            f"{path}:{start}: this row cannot be read: {error}: inside of a quoted field write a quote twice; if quotes "
            "mean nothing in this file, write the option quotes: false"
        ) from error
    finally:
        csv.field_size_limit(allowed)
    return records


def _lines(path: Path, layout: FileLayout) -> Iterator[str]:
    """The lines of a file. Newlines inside fields are kept; carriage returns of old systems end lines too."""
    for line in text_lines(path, layout):
        if "\r" in line:
            yield from io.StringIO(line, newline="")
        else:
            yield line


def _header(path: Path, line: int, fields: Sequence[str]) -> list[str]:
    names = [field.strip() or f"column {number}" for number, field in enumerate(fields, 1)]
    duplicate = next((name for position, name in enumerate(names) if name in names[:position]), None)
    if duplicate is not None:
        raise UserError(
            f"{path}:{line}: the header names the column {duplicate!r} twice: rename one; for a file without a header "
            "write the option columns: [question, …, answer]"
        )
    return names
