"""Makes links from the documentation to other files of the repository work on the site.

Pages link to files outside docs/ by relative paths, as a code host needs them. For each linked file the site gets a page
`repository/PATH` with its text, and the link leads there. MkDocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDER = "repository"
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
PAGES = ("CONTRIBUTING.md",)
"""Files that the navigation of mkdocs.yml lists."""
ROW = re.compile(r"^\s*\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for every file outside docs/ that a page links to."""
    waiting = [ROOT / name for name in PAGES]
    for page in DOCS.rglob("*.md"):
        waiting += [file for _, file in _outside(page) if file.exists()]
    done: set[Path] = set()
    while waiting:
        if (file := waiting.pop()) not in done:
            done.add(file)
            if file.suffix == ".md":
                waiting += [target for _, target in _outside(file) if target.exists()]
            listed = file.relative_to(ROOT).as_posix() in PAGES
            level = InclusionLevel.INCLUDED if listed else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, _page_of(file), content=_content(file), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files outside docs/, and to files that the site leaves out, lead to their pages.

    In tables a code host needs `\\|` for a bar in code, and the site would show the backslash.
    """
    markdown = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    uri = page.file.src_uri
    home = DOCS / uri
    if uri.startswith(f"{FOLDER}/"):
        home = ROOT / uri.removeprefix(f"{FOLDER}/")
        if not home.is_file() or home.suffix != ".md":
            return markdown

    def moved(match: re.Match[str]) -> str:
        target = (home.parent / match[2]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        return match[1] + _relative(_uri(target), uri) + (match[3] or "") + match[4]

    return LINK.sub(moved, markdown)


def _outside(page: Path) -> list[tuple[str, Path]]:
    """The links of a page to files that are no part of the site."""
    found = [(match[2], (page.parent / match[2]).resolve()) for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    return [(link, target) for link, target in found if target.is_relative_to(ROOT) and not _on_site(target)]


def _on_site(file: Path) -> bool:
    return file.is_relative_to(DOCS) and file.suffix in (".md", ".png", ".svg")


def _uri(file: Path) -> str:
    """Where the site has a file."""
    return file.relative_to(DOCS).as_posix() if _on_site(file) else _page_of(file)


def _page_of(file: Path) -> str:
    name = file.relative_to(ROOT).as_posix()
    return f"{FOLDER}/{name}" if file.suffix == ".md" else f"{FOLDER}/{name}.md"


def _relative(target: str, page: str) -> str:
    return os.path.relpath(target, os.path.dirname(page) or ".")


def _content(file: Path) -> str:
    name = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        names = sorted(
            f"- `{each.name}{'/' if each.is_dir() else ''}`" for each in file.iterdir() if each.name[0] not in "._"
        )
        return f"# {name}/\n\n" + "\n".join(names) + "\n"
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    if file.suffix == ".ipynb":
        return _notebook(name, json.loads(text))
    return f"# {name}\n\n{_fenced(text, LANGUAGES.get(file.suffix, 'text'))}"


def _notebook(name: str, notebook: Any) -> str:
    """A notebook's text and code, without what the code printed."""
    parts = [f"`{name}`\n"]
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(_fenced(text, "python") if cell["cell_type"] == "code" else text + "\n")
    return "\n".join(parts)


def _fenced(text: str, language: str) -> str:
    return f"~~~~~~{language}\n{text.rstrip()}\n~~~~~~\n"
