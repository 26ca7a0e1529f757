"""The settings that the pages for users of other libraries name exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
from doc_blocks import ROOT

from roll.config import load_config, schema_tree

KNOWN = {".".join(path) for path in schema_tree.known_paths()}


def rows(page: str) -> list[list[str]]:
    text = (ROOT / "docs" / "migration" / page).read_text(encoding="utf-8")
    table = text[text.index("| ROLL | note |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("page", ["trl.md", "verl.md"])
def test_settings_beside_those_of_others_exist(page: str) -> None:
    named = [name for _, ours, _ in rows(page) for name in re.findall(r"`([^`]+)`", ours)]
    assert len(named) > 30
    for name in named:
        key, _, value = name.partition(": ")
        known: Any = key.replace(".NAME.", f".{schema_tree.ANY_NAME}.")
        assert known in KNOWN or any(each.startswith(known + ".") for each in KNOWN), name
        if value and key not in ("tasks.source", "reward.name"):
            load_config({}, [f"{key}={value}", *(["algorithm.kl_coef=0.1"] if key == "algorithm.kl_in" else [])])


def test_the_values_of_the_page_for_trl_are_ours() -> None:
    for _, ours, note in rows("trl.md"):
        if ours in ("`algorithm.aggregation`", "`algorithm.scale`", "`algorithm.ratio`"):
            values = re.findall(r": `(\w+)`", note) or re.findall(r"`(\w+)`", note)
            for value in values:
                load_config({}, [f"{ours.strip('`')}={value}"])
