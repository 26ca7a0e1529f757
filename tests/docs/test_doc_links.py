"""Links of the documentation lead to files, and to headings, that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]*)\)")
FENCED = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+).+?\1")


def slug(heading: str) -> str:
    """The anchor of a heading, the same on a code host and on the site."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*?)(?: *\{#([\w-]+)\})?$", text, re.MULTILINE)
    return frozenset(given or slug(heading) for heading, given in headings)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = CODE.sub("", FENCED.sub("", (ROOT / page).read_text(encoding="utf-8")))
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link} is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.resolve()), f"{page}: {link}: the page has no such heading"


def test_pages_that_the_code_names_exist() -> None:
    """Messages and comments name pages by their path in the repository."""
    files = [path for folder in ("roll", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.*")]
    missing = []
    for file in [*files, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        if file.suffix not in (".py", ".yaml", ".yml", ".toml", "") or file == Path(__file__):
            continue
        for name in re.findall(r"\bdocs/[\w/]+\.(?:md|svg|png|py)\b", file.read_text(encoding="utf-8")):
            if not (ROOT / name).exists():
                missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert missing == []
