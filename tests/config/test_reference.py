"""The reference page says everything there is, and is the one in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll.config import Config, changed_keys, load_config, schema_tree
from roll.config.reference import render_reference
from roll.config.yaml_document import parse

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"


@pytest.fixture(scope="module")
def page() -> str:
    return render_reference()


def test_docs_are_current(page: str) -> None:
    assert PAGE.read_text(encoding="utf-8") == page, "python -m roll.config.reference > docs/reference/config.md"


@pytest.mark.parametrize("path", list(schema_tree.known_paths()), ids=schema_tree.dotted)
def test_every_setting_is_on_the_page_with_its_meaning(page: str, path: tuple[str, ...]) -> None:
    line = next(line for line in page.splitlines() if re.match(rf"\| \[?`{schema_tree.dotted(path)}`", line))
    assert schema_tree.doc_at(path), "every setting has a line saying what it does"
    assert schema_tree.doc_at(path) in line
    assert "any value" not in line


def test_the_examples_of_the_page_load(page: str) -> None:
    example = page.partition("```yaml\n")[2].partition("```")[0]
    config = load_config(parse(example).data)
    assert (config.model.path, config.train.lr, config.rollout.group_size) == ("smollm2-135m", 1e-5, 8)
    line = page.partition("```sh\nroll plan examples/tiny.yaml ")[2].partition("\n")[0]
    assert load_config({}, line.replace("'", "").split()).rollout.stop == ("\n",)


def test_types_read_as_plain_words(page: str) -> None:
    assert "| `train.steps` | whole number ≥ 1 | `100` | Training steps. |" in page
    assert "| `model.dtype` | `auto`, `bf16` or `fp32` | `auto` |" in page
    assert "| `rollout.top_p` | number > 0 and ≤ 1 | `1.0` |" in page
    assert "| `train.lr` | number > 0 | `1e-06` |" in page


def test_defaults_are_valid() -> None:
    assert changed_keys(load_config({}), Config()) == []
