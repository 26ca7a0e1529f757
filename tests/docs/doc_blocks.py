"""The code blocks of the documentation, with the words that mark them. CONTRIBUTING.md says what the words mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
CODE = {"bash", "sh", "python", "yaml", "toml"}
OUTPUT = {"", "text", "json", "csv", "diff"}
PLACES = {"cpu", "slow", "gpu"}

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}) *(\S*) *$")
_MARK = re.compile(r"^ {0,3}<!-- ((?:cpu|slow|gpu)\b[^>]*?) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `words` are those of the mark before it, none if it has no mark."""

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def place(self) -> str | None:
        return self.words[0] if self.words else None

    def has(self, word: str) -> bool:
        return word in self.words

    def value(self, name: str) -> str | None:
        """What follows `name=` among the words."""
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), None)


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page in order."""
    return parse_blocks((ROOT / page).read_text(encoding="utf-8"), page)


def parse_blocks(text: str, page: str) -> list[Block]:
    found, lines = [], text.splitlines()
    start: int | None = None
    fence, language = "", ""
    for number, line in enumerate(lines):
        match = _FENCE.match(line)
        if start is None and match:
            start, fence, language = number, match[1], match[2]
        elif start is not None and line.strip() == fence:
            mark = _MARK.match(lines[start - 1]) if start else None
            words = tuple(mark[1].split()) if mark else ()
            found.append(Block(page, start + 1, language, words, "\n".join(lines[start + 1 : number]) + "\n"))
            start = None
    assert start is None, f"{page}:{(start or 0) + 1}: the block has no end"
    return found
