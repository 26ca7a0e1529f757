"""Rows of tables: the lines of a JSON file, the rows of a Parquet file or of a Hugging Face dataset, as plain objects.

What always holds: a row comes with its place, in words that a message can name and a person can find, and its position
in the table never changes while the table does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from roll.config.errors import UserError
from roll.config.names import did_you_mean, either
from roll.config.user_code import elsewhere, find_file, shown, working_copy

FILES = (".jsonl", ".json", ".parquet")
HUB = "hf:"
"""What a dataset's name begins with: `hf:openai/gsm8k`, or `hf:` and a folder that `save_to_disk` wrote."""
TABLES = (f"a {', '.join(FILES)} file", f"`{HUB}dataset`")
"""The forms of a table's name, in words."""
_SAVED = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Row:
    place: str
    """`tasks.jsonl:12`, `tasks.parquet, row 12`."""
    name: str
    """`line-12`, `row-12`: the same as long as the rows before it are."""
    values: dict[str, Any]


def is_table(name: str, root: str = "") -> bool:
    """Whether a source's name is one of a table."""
    return name.endswith(FILES) or name.startswith(HUB) or is_saved(name, root)


def is_saved(name: str, root: str = "") -> bool:
    """Whether it is a folder, found from `root`, that the `save_to_disk` of `datasets` wrote."""
    folder = find_file(name, root)
    return any((folder / file).is_file() for file in _SAVED)


def read_rows(table: str, setting: str, *, subset: str = "", part: str = "", root: str = "") -> Iterator[Row]:
    """The rows of a table in their order; `setting` is what names it, from `root`. `subset` and `part` are of a
    dataset: one of its configurations, and one of its splits."""
    path = Path(table).expanduser()
    path = path if path.is_absolute() else shown(find_file(table, root))
    if table.startswith(HUB) or is_saved(table, root):
        yield from _numbered(table, _dataset(table.removeprefix(HUB), setting, subset, part, root))
        return
    for option, given in (("subset", subset), ("part", part)):
        if given:
            raise UserError(f"{setting}: {table!r} is a file, which has no {option} {given!r}: leave it out")
    if path.suffix not in FILES:
        raise UserError(f"{setting}: {table!r} is no table: write {either(TABLES)}")
    if not path.is_file():
        raise UserError(f"{setting}: there is no file {str(path)!r}{elsewhere(table, working_copy(root))}")
    if path.suffix == ".jsonl":
        for number, row in json_lines(path, setting):
            yield Row(f"{path}:{number}", f"line-{number}", row)
    else:
        yield from _numbered(path, _parquet(path, setting) if path.suffix == ".parquet" else iter(_json(path)))


def json_lines(path: Path, setting: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines with the numbers of their lines; `setting` is what names the file."""
    if not path.is_file():
        raise UserError(f"{setting}: there is no file {str(path)!r}")
    # Not `splitlines`, which also cuts at separators that JSON strings may hold as they are (U+2028, U+0085).
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object")
        yield number, row


def _numbered(table: object, rows: Iterator[Any]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{table}, row {number}: not an object with columns")
        yield Row(f"{table}, row {number}", f"row-{number}", {name: _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """Days, times and decimal numbers of columns that have such types as text: as other tables, and JSON, have them."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _json(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: it holds one {type(rows).__name__}, but takes a list of objects, one a row")
    return rows


def _parquet(path: Path, setting: str) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise _missing("pyarrow", path, setting) from error
    try:
        file = ParquetFile(path)
    except ValueError as error:  # pyarrow's own errors are of this class
        raise UserError(f"{path}: not a Parquet file: {error}") from error
    for group in file.iter_batches():
        yield from group.to_pylist()


def _dataset(name: str, setting: str, subset: str, part: str, root: str) -> Iterator[Any]:
    """The rows of a dataset: a folder, or one of the hub's."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise _missing("datasets", name, setting) from error
    folder = find_file(name, root)
    try:
        if is_saved(name, root):
            if subset:
                raise UserError(f"{setting}: {name!r} is a folder of one dataset, without the subset {subset!r}")
            found: Any = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(name, subset or None)
    except UserError:
        raise
    except Exception as error:
        kind = "folder" if folder.is_dir() else "name on the hub"
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(f"{setting}: the dataset {name!r} (a {kind}) could not be loaded: {reason}") from error
    return iter(_split(found, name, setting, part))


def _split(found: Any, name: str, setting: str, part: str) -> Any:
    """One split of a dataset; the only one, or `train`, where none is asked for."""
    if not isinstance(found, dict):
        if part:
            raise UserError(f"{setting}: the dataset {name!r} has no splits, so none called {part!r}: leave it out")
        return found
    wanted = part or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else "")
    if wanted not in found:
        have = ", ".join(map(repr, found))
        if not wanted:
            raise UserError(f"{setting}: the dataset {name!r} has the splits {have}: write part=… to name one")
        raise UserError(
            f"{setting}: the dataset {name!r} has no split {wanted!r}, but {have}{did_you_mean(wanted, found)}"
        )
    return found[wanted]


def _missing(package: str, table: object, setting: str) -> UserError:
    remedy = f"run `pip install {package}`, or install roll[tasks]"
    return UserError(f"{setting}: reading {str(table)!r} needs the package {package}: {remedy}")
