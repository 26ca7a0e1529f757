"""A wrong call on a role is a type error before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

pytestmark = pytest.mark.lint

SNIPPET = """
from roll.cluster import Cluster, Dispatch, Worker, dispatch

class Adder(Worker):
    @dispatch(Dispatch.ONE)
    def add(self, a: int, b: int = 0) -> int:
        return a + b

    @dispatch(Dispatch.ALL)
    async def say(self, text: str) -> str:
        return text


class Other(Worker):
    @dispatch(Dispatch.ONE)
    def other(self) -> None: ...


async def use(adders: Cluster[Adder]) -> None:
    total: int = await adders.call(Adder.add, 1, 2)
    total = await adders.call(Adder.add, 1, b=2)
    text: str = await adders.call(Adder.say, "x")
    total = await adders.call_rank(1, Adder.add, 1)
    text = await adders.call_rank(0, Adder.say, "x")
    totals: list[int] = await adders.call_each(Adder.add, 1)
    await adders.call(Adder.add, "1")  # wrong
    await adders.call(Adder.add)  # wrong
    await adders.call(Adder.add, 1, c=2)  # wrong
    await adders.call(Adder.say, 1)  # wrong
    await adders.call(Other.other)  # wrong
    await adders.call_rank(0, Adder.say, 1)  # wrong
    await adders.call_each(Adder.add, None)  # wrong
    text = await adders.call(Adder.add, 1)  # wrong
    total = await adders.call(Adder.say, "x")  # wrong
"""

# Only the cluster's own types matter here; what the rest of the library imports would take half a minute to read.
SETTINGS = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,transformers.*,numpy.*,pydantic.*,roll.config.*,roll.algorithm.*,roll.pipeline.*,roll.rollout.*,roll.workers.*]
follow_imports = skip
"""


def test_wrong_calls_are_type_errors_and_right_ones_are_not(tmp_path: Path) -> None:
    snippet, config = tmp_path / "snippet.py", tmp_path / "mypy.ini"
    snippet.write_text(SNIPPET)
    config.write_text(SETTINGS)
    report, problems, _ = api.run(["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(snippet)])
    assert not problems
    reported = {int(line) for line in re.findall(r"snippet\.py:(\d+): error", report)}
    wrong = {number for number, line in enumerate(SNIPPET.split("\n"), 1) if "# wrong" in line}
    assert reported == wrong, report
