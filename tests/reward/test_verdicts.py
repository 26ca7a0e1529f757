"""The table of verdicts: every row holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from verdict_table import GROUPS, Group

from roll.data import Response, Task
from roll.reward import make
from roll.reward.base import normalise
from roll.reward.builtin import BUILTINS

ASK_OTHERS = {"http", "judge", "reward_model"}


@functools.cache
def sum_of_puzzle() -> str:
    """The answer of the one puzzle of the table, which its rows call SUM."""
    from roll.data.reasoning_gym import make_puzzles

    return str(make_puzzles("chain_sum", {}, 0, 1)[0]["answer"])


def verdict(group: Group, gold: Any, text: str) -> float:
    if group.reward == "reasoning_gym":
        text = text.replace("SUM", sum_of_puzzle())
    task = Task.ask("row", "?", gold, **group.info)
    return normalise(make(group.reward, group.options)(task, Response(text, len(text.split()), "stop"))).reward


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.reward}: {group.why}")
def test_every_row_of_the_table_holds(group: Group) -> None:
    wrong = [
        f"gold {gold!r}, response {text!r}: expected {expected:g}, got {got:g}"
        for gold, text, expected in group.rows
        if (got := verdict(group, gold, text)) != pytest.approx(expected)
    ]
    assert not wrong, f"{group.reward}{dict(group.options) or ''}: {group.why}\n" + "\n".join(wrong)


def test_the_table_has_many_rows_and_every_reward_that_judges_a_text() -> None:
    assert sum(len(group.rows) for group in GROUPS) >= 300
    assert {group.reward for group in GROUPS} == BUILTINS.keys() - ASK_OTHERS
    rows = [
        (group.reward, repr(group.options), repr(group.info), repr(row[:2])) for group in GROUPS for row in group.rows
    ]
    assert len(set(rows)) == len(rows), "a row stands twice in the table"
