"""One word, one meaning: public class names are unique, and the glossary and the paper's map name what exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import roll

pytestmark = pytest.mark.lint

ROOT = Path(roll.__file__).parent
DOCS = ROOT.parent / "docs"


def test_no_public_class_name_exists_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@pytest.mark.parametrize("page", ["explanation/glossary.md", "explanation/paper.md", "explanation/architecture.md"])
def test_the_pages_about_the_code_name_files_that_exist(page: str) -> None:
    named = re.findall(r"`(roll/[\w/]+(?:\.py)?/?)`", (DOCS / page).read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT.parent / name).exists()] == []


def test_the_paper_is_named_where_its_ideas_are() -> None:
    for file, word in (
        ("devices/map.py", "AutoDeviceMapping"),
        ("strategy/train/base.py", "Parallel Strategy"),
        ("scheduler/scheduler.py", "Rollout Scheduler"),
    ):
        assert word in (ROOT / file).read_text(encoding="utf-8"), f"{file} does not say {word}"
    assert "2506.06122" in (ROOT / "devices" / "map.py").read_text(encoding="utf-8")
