"""Tasks from a table: the columns of question and answer, and the prompt.

Example: with `prompt: "{question} Answer with a number."` and `answer_pattern: "#### (.*)"`, the row `{"question": "2 and
2?", "answer": "2 + 2 = 4\\n#### 4"}` is the task that asks `2 and 2? Answer with a number.`, whose answer is `4`.
"""

from __future__ import annotations

import glob
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from roll.config.errors import UserError
from roll.config.option_types import check_types
from roll.config.suggest import did_you_mean, either
from roll.data.file_layout import FileLayout
from roll.data.formats import DatasetFormat, find_format
from roll.data.row_task import RowReader, TableOptions, get, pattern, search_text
from roll.data.rows import HUB, TABLES, GivenRows, TableRow, is_saved, is_table, read_rows, shortlist
from roll.data.task import Task


class TableRows(list[Task]):
    """The tasks of a table, and the positions of skipped rows."""

    def __init__(self, tasks: Iterable[Task], skipped: Sequence[str]) -> None:
        super().__init__(tasks)
        self.skipped = tuple(skipped)


def table(split: Literal["train", "held_out"], path: str | GivenRows, root: str = "", **options: Any) -> TableRows:
    """One task per row; `path` is resolved from `root`, and `options` are those of `TableOptions`."""
    check_table_options(options)
    format = find_format(options["format"]) if options.get("format") else DatasetFormat((), ({},))
    variants = [TableOptions(**{**format.options, **variant, **options}) for variant in format.variants]
    common = variants[0]
    if common.limit < 0:
        raise UserError(f"tasks.options: limit is {common.limit}: write how many rows, or 0 for all")
    layout = _layout(common, format, variants)
    readers = [RowReader(variant) for variant in variants]
    held_out_table = common.held_out if isinstance(common.held_out, str) else ""
    if split == "held_out" and held_out_table:
        source, part = _other_table(path, held_out_table, root)
        subset = common.subset if source == path else ""
        found = read_rows(source, "tasks.options.held_out", subset=subset, part=part, layout=layout, root=root)
        unskipped = _UnskippedRows(found, common.skip)
        return TableRows((_task(row, readers, f"{part or _name(source)}/") for row in unskipped), unskipped.skipped)
    found = read_rows(path, "tasks.source", subset=common.subset, part=common.part, layout=layout, root=root)
    unskipped = _UnskippedRows(found, common.skip)
    rows = list(islice(unskipped, common.limit or None))
    if not held_out_table:
        assert not isinstance(common.held_out, str)
        chosen = held_out_rows(len(rows), common.held_out)
        rows = [row for position, row in enumerate(rows) if (position in chosen) == (split == "held_out")]
    return TableRows((_task(row, readers) for row in rows), unskipped.skipped)


def check_table_options(options: Mapping[str, Any]) -> None:
    """Raises `UserError` for an unknown table option or a value of the wrong type."""
    known = list(inspect.signature(TableOptions).parameters)
    for option in options:
        if option not in known:
            takes = f"; it takes: {', '.join(known)}"
            raise UserError(f"tasks.options.{option} is not an option of a table{did_you_mean(option, known) or takes}")
    check_types(TableOptions, options, "tasks.options.")


def _layout(common: TableOptions, format: DatasetFormat, variants: Sequence[TableOptions]) -> FileLayout:
    if len(common.delimiter) > 1:
        raise UserError(f"tasks.options.delimiter is {common.delimiter!r}, but takes one character")
    headers = tuple(frozenset(RowReader(variant).required_columns) for variant in variants)
    return FileLayout(
        tuple(common.columns), common.rows, common.delimiter, common.quotes, format.headerless, headers, common.row_mb
    )


class _UnskippedRows:
    """The rows that are not skipped, and, after iteration, the positions of those that are."""

    def __init__(self, rows: Iterator[TableRow], skip: Mapping[str, str]) -> None:
        self._rows = rows
        self._skip = {column: pattern(text, f"skip.{column}") for column, text in skip.items()}
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[TableRow]:
        for row in self._rows:
            if any(found and found.search(search_text(get(row, column))) for column, found in self._skip.items()):
                self.skipped.append(row.location)
            else:
                yield row


def _task(row: TableRow, readers: Sequence[RowReader], prefix: str = "") -> Task:
    """The row's task, by the first reader that fits."""
    fitting = next((reader for reader in readers if reader.fits(row)), None)
    if fitting is None and len(readers) > 1:
        columns = either([", ".join(reader.required_columns) for reader in readers])
        raise UserError(
            f"{row.location}: format {readers[0].options.format!r} has the columns {columns}, but the row has "
            f"{shortlist(row.values)}: name the row's in tasks.options"
        )
    return (fitting or readers[0]).task(row, prefix)


def _other_table(path: str | GivenRows, held_out: str, root: str) -> tuple[str, str]:
    """The table that is held out and, in a dataset, its split."""
    if is_table(held_out, root):
        return held_out, ""
    if isinstance(path, str) and (path.startswith(HUB) or is_saved(path, root)):
        return path, held_out
    raise UserError(
        f"tasks.options: held_out is {held_out!r}: write a share below 1, a number of rows, or another table: "
        f"{either(TABLES)}"
    )


def _name(table: str) -> str:
    """The prefix of the ids of a table's tasks: a file's name, or for many files the last folder that they share."""
    parts = [Path(part).stem for part in Path(table.removeprefix(HUB)).parts]
    return next((part for part in reversed(parts) if not glob.has_magic(part)), "held_out")


def held_out_rows(count: int, held_out: float | int) -> set[int]:
    """Evenly spaced positions: of 10 rows, 2 are the fifth and the last."""
    if isinstance(held_out, bool) or held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise UserError(f"tasks.options: held_out is {held_out}: write a share below 1, or a whole number of rows")
    size = held_out if isinstance(held_out, int) else round(count * held_out)
    if size > count:
        raise UserError(f"tasks.options: held_out is {held_out}, but there are {count} rows")
    return {position for position in range(count) if (position + 1) * size // count > position * size // count}
