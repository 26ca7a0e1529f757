"""How the rows of a text file are laid out, as far as its name does not say, and its text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.config.errors import UserError


@dataclass(frozen=True)
class Layout:
    """What a reader of a CSV or JSON file has to be told. The defaults fit a file with a header, or with one list."""

    columns: tuple[str, ...] = ()
    """Names of the columns of a CSV file that has no header."""
    rows: str = ""
    """The key in a JSON file that the list of rows is under; `data.train` for a key inside of another."""
    delimiter: str = ""
    """The character between the fields of a CSV file; empty: a comma, in a TSV file a tab."""
    quotes: bool = True
    """Whether a field of a CSV file may be in double quotes, in which case it may hold delimiters and line ends."""
    headerless: tuple[str, ...] = ()
    """Names of the columns if the file turns out to have no header, which is so if ..."""
    headers: tuple[frozenset[str], ...] = ()
    """... none of these sets of names is in its first line."""

    def is_headerless(self, first: Sequence[str]) -> bool:
        """Whether the first record of a CSV file is a row."""
        names = {field.strip() for field in first}
        fits = len(first) == len(self.headerless)
        return fits and not any(header <= names for header in self.headers)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 if it begins with the mark of that; without the mark."""
    data = path.read_bytes()
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not {encoding.removesuffix('-sig').upper()} text ({error.reason}): save the file as UTF-8"
        ) from error
