"""Rewards against real data sets, where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.data import Response, Task
from roll.reward import make
from roll.reward.instructions import CONSTRAINTS, Instructions
from roll.reward.instructions.constraints import follows

DATA = Path(__file__).parents[3] / "shared" / "data"


def rows(name: str) -> list[dict[str, Any]]:
    file = DATA / name
    if not file.exists():
        pytest.skip(f"there is no {file}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_reference_answers_of_gsm8k_are_right_and_their_neighbours_wrong() -> None:
    number = make("number")
    data = rows("gsm8k_train.jsonl") + rows("gsm8k_test.jsonl")
    for row in data:
        task = Task.ask("t", row["question"], row["answer"].rpartition("####")[2].strip())
        assert number.check_answer(task)  # type: ignore[attr-defined]
        assert number(task, Response(row["answer"], 1, "stop")) == 1.0
        assert number(task, Response(row["answer"] + "1", 1, "stop")) == 0.0
    assert len(data) == 8792


def test_the_reference_answers_of_gsm8k_are_right_as_mathematics() -> None:
    math = make("math")
    for row in rows("gsm8k_train.jsonl") + rows("gsm8k_test.jsonl"):
        answer = row["answer"].rpartition("####")[2].strip()
        task = Task.ask("t", row["question"], answer)
        assert math.check_answer(task)  # type: ignore[attr-defined]
        assert math(task, Response(row["answer"], 1, "stop")) == 1.0
        assert math(task, Response(rf"… \boxed{{{answer}}}", 1, "stop")) == 1.0
        assert math(task, Response(rf"… \boxed{{{answer}1}}", 1, "stop")) == 0.0


def test_every_instruction_of_ifeval_is_known_and_takes_its_arguments() -> None:
    refused = set()
    for row in rows("ifeval.jsonl"):
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            assert name in CONSTRAINTS
            try:
                follows("Some text.", name, {key: value for key, value in arguments.items() if value is not None})
            except ValueError as error:
                refused.add(str(error).partition(";")[0])
    assert refused == {
        f"language {language!r} cannot be recognised by its script" for language in ("de", "fi", "it", "pt", "sw", "vi")
    }


def test_an_instruction_to_repeat_the_prompt_is_followed_by_what_repeats_it() -> None:
    asked = [row for row in rows("ifeval.jsonl") if row["instruction_id_list"] == ["combination:repeat_prompt"]]
    assert asked
    for row in asked:
        task = Task.ask("t", row["prompt"], instruction_id_list=row["instruction_id_list"], kwargs=row["kwargs"])
        text = row["kwargs"][0]["prompt_to_repeat"] + "\nHere it is."
        assert Instructions()(task, Response(text, 1, "stop"))["reward"] == 1.0
        assert Instructions()(task, Response("Here it is.", 1, "stop"))["reward"] == 0.0
