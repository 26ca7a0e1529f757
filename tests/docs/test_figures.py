"""In the figures of the documentation no text leaves its box or the figure, and text stays readable at half size."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from doc_blocks import ROOT

IMAGES = ROOT / "docs" / "images"
FIGURES = sorted(path.name for path in IMAGES.glob("*.svg"))
DRAWN = ["architecture", "weight_sync", "phases"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", IMAGES / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


def extent(text: Any, size: float, figures: ModuleType) -> tuple[float, float, float]:
    """The left end, the right end and the baseline of a text."""
    bold = text.get("font-weight") == "bold"
    width = figures.width_of("".join(text.itertext()), round(size), bold)
    x, y = float(text.get("x")), float(text.get("y"))
    left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor", "start"), 0.0)
    return left, left + width, y


@pytest.mark.parametrize("name", [f"{name}.svg" for name in (*DRAWN, "lifecycle")])
def test_no_text_leaves_its_box(name: str, figures: ModuleType) -> None:
    root = ElementTree.parse(IMAGES / name).getroot()
    boxes = [
        tuple(float(rect.get(key, "0")) for key in ("x", "y", "width", "height")) for rect in root.iter(f"{SVG}rect")
    ]
    texts = list(root.iter(f"{SVG}text"))
    assert texts
    for text in texts:
        size = float(text.get("font-size") or root.get("font-size", "0"))
        left, right, y = extent(text, size, figures)
        middle = (left + right) / 2
        around = [box for box in boxes if box[0] <= middle <= box[0] + box[2] and box[1] <= y <= box[1] + box[3]]
        x, top, width, height = min(around, key=lambda box: box[2] * box[3])
        assert x <= left, f"{''.join(text.itertext())!r} leaves its box"
        assert right <= x + width, f"{''.join(text.itertext())!r} leaves its box"
        assert top <= y - 0.75 * size, f"{''.join(text.itertext())!r} leaves its box"
        assert y + 0.2 * size <= top + height, f"{''.join(text.itertext())!r} leaves its box"
        assert size * 760 / float(root.get("viewBox", "").split()[2]) / 2 >= 6.5, "too small at half the width of a page"


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_those_that_the_program_draws(name: str, figures: ModuleType) -> None:
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == getattr(figures, name)().svg(), "run `make docs`"


def test_a_text_that_does_not_fit_is_an_error(figures: ModuleType) -> None:
    figure = figures.Figure(100, 100, "a figure")
    with pytest.raises(AssertionError, match="does not fit its box"):
        figure.box(0, 0, 60, 40, "white", "", "more than fits")


@pytest.mark.parametrize("name", FIGURES)
def test_figures_load_nothing(name: str) -> None:
    text = (IMAGES / name).read_text(encoding="utf-8")
    assert not re.search(r"href=\"http|@import|url\(http|<script", text)


def test_every_figure_is_on_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *Path(ROOT / "docs").rglob("*.md")])
    assert [name for name in FIGURES if f"images/{name}" not in pages] == []
