"""Rows of tables: of JSON, CSV and Parquet files and of Hugging Face datasets, as plain objects.

Invariants: a row has its position in words that a message can use and a person can find, and its index in the table
changes only if the table does.

A name with `*` in it means all files that match, sorted by name: `bbh/*.json`, `MATH/**/*.json`.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from roll.config.errors import UserError
from roll.config.suggest import did_you_mean, either
from roll.config.user_code import find_file, format_path, working_copy, working_directory_hint
from roll.data.csv_rows import DELIMITERS, csv_rows
from roll.data.file_layout import FileLayout, read_text, text_lines

FILES = (".jsonl", ".json", *DELIMITERS, ".parquet")
HUB = "hf:"
"""The prefix of a dataset's name: `hf:openai/gsm8k`, or `hf:` and a folder that `save_to_disk` wrote."""
TABLES = (f"a {either(FILES)} file", f"`{HUB}dataset`")
"""The forms of a table's name, in words."""
LocatedRow: TypeAlias = tuple[str, str, Any]
"""A row's position, its name and its values."""
_DEFAULT_LAYOUT = FileLayout()
_BATCH_ROWS = 1024
_SURROGATE = re.compile("[\ud800-\udfff]")
_SAVED_MARKERS = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class TableRow:
    location: str
    """`tasks.jsonl:12`, `tasks.parquet, row 12`."""
    name: str
    """`line-12`, `row-12`: stable as long as the rows before it are. With several files: `algebra/7/row-1`."""
    values: dict[str, Any]


@dataclass(frozen=True)
class GivenRows:
    """Rows that a program passed instead of a table's name."""

    name: str
    """The name of the argument, for messages."""
    rows: tuple[dict[str, Any], ...]


def is_table(name: str, root: str = "") -> bool:
    """Whether a source's name is that of a table."""
    return name.endswith(FILES) or name.startswith(HUB) or is_saved(name, root)


def is_saved(name: str, root: str = "") -> bool:
    """Whether it is a folder, resolved from `root`, that the `save_to_disk` of `datasets` wrote."""
    folder = find_file(name, root)
    return any((folder / file).is_file() for file in _SAVED_MARKERS)


def read_rows(
    table: str | GivenRows,
    setting: str,
    *,
    subset: str = "",
    part: str = "",
    layout: FileLayout = _DEFAULT_LAYOUT,
    root: str = "",
) -> Iterator[TableRow]:
    """The rows of a table in order; `setting` is the option that names it, resolved from `root`. `subset` and `part`
    select a configuration and a split of a dataset. `layout` is for files."""
    if isinstance(table, GivenRows):
        for position, values in enumerate(table.rows):
            yield TableRow(f"{table.name}[{position}]", f"row-{position + 1}", values)
        return
    if table.startswith(HUB) or is_saved(table, root):
        for number, row in enumerate(_dataset(table.removeprefix(HUB), setting, subset, part, root), 1):
            yield _row(f"{table}, row {number}", f"row-{number}", row)
        return
    for option, value in (("subset", subset), ("part", part)):
        if value:
            raise UserError(f"{setting}: {table!r} is a file, which has no {option} {value!r}: leave it out")
    if not table.endswith(FILES):
        raise UserError(f"{setting}: {table!r} is no table: write {either(TABLES)}")
    for path, prefix in _files(table, setting, root):
        for location, name, row in _file(path, setting, layout):
            yield _row(location, f"{prefix}{name}", row)


def _files(table: str, setting: str, root: str) -> Iterator[tuple[Path, str]]:
    """The files that a name matches; if there are several, each with a prefix for the names of its rows."""
    path = Path(table).expanduser()
    path = path if path.is_absolute() else format_path(find_file(table, root))
    if path.is_file() or not glob.has_magic(table):
        if not path.is_file():
            what = f"{str(path)!r} is no file" if path.exists() else f"there is no file {str(path)!r}"
            raise UserError(f"{setting}: {what}{working_directory_hint(table, working_copy(root))}")
        yield path, ""
        return
    if "**" in table:
        _refuse_loops(path, setting)
    matches = sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not matches:
        raise UserError(f"{setting}: no file matches {str(path)!r}{working_directory_hint(table, working_copy(root))}")
    base = Path(*path.parts[: next(n for n, part in enumerate(path.parts) if glob.has_magic(part))])
    for name in matches:
        yield Path(name), f"{Path(name).relative_to(base).with_suffix('').as_posix()}/"


def _refuse_loops(pattern: Path, setting: str) -> None:
    """Refuses link cycles: `**` follows links, and a link to a parent folder would give endless files."""
    fixed_parts = [*takewhile(lambda part: not glob.has_magic(part), pattern.parts)]
    pending: list[tuple[Path, frozenset[str]]] = [(Path(*fixed_parts), frozenset())]
    while pending:
        folder, parents = pending.pop()
        real = os.path.realpath(folder)
        if real in parents:
            raise UserError(
                f"{setting}: {folder} is a link to a folder that it is in: remove it, or write the files' names"
            )
        try:
            inside = [entry for entry in os.scandir(folder) if entry.is_dir()]
        except OSError:
            continue
        pending += [(Path(entry.path), parents | {real}) for entry in inside]


def _file(path: Path, setting: str, layout: FileLayout) -> Iterator[LocatedRow]:
    if path.suffix == ".parquet":
        for number, row in enumerate(_parquet(path, setting, layout), 1):
            yield f"{path}, row {number}", f"row-{number}", row
    elif path.suffix == ".json":
        yield from _json(path, layout)
    else:
        lines = json_lines(path, setting, layout) if path.suffix == ".jsonl" else csv_rows(path, layout)
        for number, row in lines:
            yield f"{path}:{number}", f"line-{number}", row


def _row(location: str, name: str, values: Any) -> TableRow:
    if not isinstance(values, dict):
        raise UserError(f"{location}: not an object with columns")
    return TableRow(location, name, {column: _plain_value(value, location, column) for column, value in values.items()})


def json_lines(path: Path, setting: str, layout: FileLayout = _DEFAULT_LAYOUT) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers; `setting` is the option that names the file."""
    if not path.is_file():
        raise UserError(f"{setting}: there is no file {str(path)!r}")
    # Not `splitlines`, which also splits at separators that JSON strings may contain unescaped (U+2028, U+0085).
    for number, line in enumerate(text_lines(path, layout), 1):
        if not line.strip():
            continue
        try:
            row = _parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object")
        yield number, row


def _parse_json(text: str) -> Any:
    """Parses JSON; raises `ValueError` for duplicate keys or too deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is written twice")
    return values


def _plain_value(value: Any, location: str, column: str) -> Any:
    """Dates, times and decimal numbers of typed columns as text, as in other tables and JSON."""
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise UserError(f"{location}: {column!r} has half of a character (\\ud800 to \\udfff): write whole ones")
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, list):
        return [_plain_value(item, location, column) for item in value]
    return (
        {key: _plain_value(item, location, column) for key, item in value.items()} if isinstance(value, dict) else value
    )


def _json(path: Path, layout: FileLayout) -> Iterator[LocatedRow]:
    """The rows of a JSON file: those of its list; for an object, those of the list under the key, or the object itself if
    no key is given and it has no list of objects; or JSON lines, which some name `.json` too."""
    try:
        in_lines = _is_json_lines(path, layout)
        value = None if in_lines else _parse_json(read_text(path, layout))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if in_lines:
        for number, row in json_lines(path, "", layout):
            yield f"{path}:{number}", f"line-{number}", row
        return
    for number, row in enumerate(_row_list(path, value, layout.rows), 1):
        yield f"{path}, row {number}", f"row-{number}", row


def _is_json_lines(path: Path, layout: FileLayout) -> bool:
    """Whether the first non-empty line is an object, and there is another line."""
    lines = (line for line in text_lines(path, FileLayout(row_mb=layout.row_mb * 16)) if line.strip())
    first = next(lines, "")
    if not first.lstrip().startswith("{"):
        return False
    try:
        return isinstance(_parse_json(first), dict) and next(lines, None) is not None
    except ValueError:
        return False


def _row_list(path: Path, value: Any, key: str) -> list[Any]:
    """The list of rows in a JSON value."""
    if key:
        try:
            rows = lookup(value, key) if isinstance(value, dict) else None
        except KeyError:
            rows = None
        if not isinstance(rows, list):
            held_keys = (
                f"the keys {shortlist(value)}" if isinstance(value, dict) else f"a {type(value).__name__} at its top"
            )
            raise UserError(
                f"{path}: the option rows is {key!r}, but there is no list of that name; the file has {held_keys}"
            )
        return rows
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or not value:
        raise UserError(f"{path}: it holds one {type(value).__name__}, but takes a list of objects, one per row")
    keys = [name for name, item in value.items() if _is_rows(item)]
    if len(keys) > 1:
        raise UserError(
            f"{path}: it has several lists of rows, {shortlist(keys)}: name one with the option rows: {keys[0]}"
        )
    return value[keys[0]] if keys else [value]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def shortlist(names: Iterable[str], limit: int = 20) -> str:
    """Names for a message, shortened: a file may have thousands of them."""
    all_names = list(names)
    return ", ".join(all_names[:limit]) + (f" and {len(all_names) - limit} more" if len(all_names) > limit else "")


def lookup(values: Mapping[str, Any], column: str) -> Any:
    """The value of a column; `question.stem` may also be the key `stem` of the object in `question`. Raises `KeyError` if
    there is no such column."""
    if column in values:
        return values[column]
    outer, dot, inner = column.partition(".")
    if dot and isinstance(values.get(outer), dict):
        return lookup(values[outer], inner)
    raise KeyError(column)


def _parquet(path: Path, setting: str, layout: FileLayout) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise _missing_package("pyarrow", path, setting) from error
    try:
        file = ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are of these classes
        raise UserError(f"{path}: not a Parquet file: {error}") from error
    max_bytes = layout.row_mb << 28
    for number in range(file.metadata.num_row_groups):
        if (size := file.metadata.row_group(number).total_byte_size) > max_bytes:
            raise UserError(
                f"{path}: its row group {number} has {size >> 20} MiB, of at most {max_bytes >> 20}: write smaller ones, "
                f"or the option row_mb: {size // (1 << 28) + 1}"
            )
    try:
        for group in file.iter_batches(batch_size=_BATCH_ROWS):
            yield from group.to_pylist()
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: it is damaged: {error}") from error


def _dataset(name: str, setting: str, subset: str, part: str, root: str) -> Iterator[Any]:
    """The rows of a dataset: a folder, or one on the hub."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise _missing_package("datasets", name, setting) from error
    folder = find_file(name, root)
    try:
        if is_saved(name, root):
            if subset:
                raise UserError(f"{setting}: {name!r} is a folder of one dataset, without the subset {subset!r}")
            dataset: Any = datasets.load_from_disk(str(folder))
        else:
            dataset = datasets.load_dataset(name, subset or None)
    except UserError:
        raise
    except Exception as error:
        kind = "folder" if folder.is_dir() else "name on the hub"
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(f"{setting}: the dataset {name!r} (a {kind}) could not be loaded: {reason}") from error
    return iter(_split(dataset, name, setting, part))


def _split(dataset: Any, name: str, setting: str, part: str) -> Any:
    """One split of a dataset; by default the only one, or `train`."""
    if not isinstance(dataset, dict):
        if part:
            raise UserError(f"{setting}: the dataset {name!r} has no splits, so none called {part!r}: leave it out")
        return dataset
    split = part or ("train" if "train" in dataset else next(iter(dataset)) if len(dataset) == 1 else "")
    if split not in dataset:
        have = ", ".join(map(repr, dataset))
        if not split:
            raise UserError(f"{setting}: the dataset {name!r} has the splits {have}: write part=… to name one")
        raise UserError(
            f"{setting}: the dataset {name!r} has no split {split!r}, but {have}{did_you_mean(split, dataset)}"
        )
    return dataset[split]


def _missing_package(package: str, table: object, setting: str) -> UserError:
    remedy = f"run `pip install {package}`, or `pip install -e '.[tasks]'` in ROLL's folder"
    return UserError(f"{setting}: reading {str(table)!r} needs the package {package}: {remedy}")
