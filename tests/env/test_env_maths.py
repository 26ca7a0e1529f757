"""Maths with retries: which number is the answer, what a try costs, and problems from a file."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import UserError
from roll.config.schema import TasksConfig
from roll.data.sources import load_tasks
from roll.data.task import Task
from roll.env.base import parse_reset, parse_step
from roll.env.demonstrations import demonstrations
from roll.env.math_retry import MathRetry, format_number, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("It is 7, no, 12.", "12"),
        ("= -5", "-5"),
        ("3-5", "5"),
        ("so −5.", "-5"),
        ("$1,234.50", "1234.5"),
        ("about 3.25!", "3.25"),
        ("1/2", "1/2"),
        ("x=2/4 of it", "1/2"),
        ("1/0", None),
        ("1,2", "2"),
        ("10 eggs\n#### 18", "18"),
        ("none", None),
        ("", None),
        ("9" * 10_000, None),
        ("x" * 100_000, None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Fraction(number))


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.fractions(max_denominator=999).filter(lambda number: abs(number) < 10**15))
def test_a_number_is_read_as_it_is_shown(number: Fraction) -> None:
    assert last_number(f"It is {format_number(number)}.") == number


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*"0123456789-−.,/$ x()"]), max_size=40).map("".join))
def test_anything_may_be_said(text: str) -> None:
    last_number(text)
    world = MathRetry()
    parse_reset(world.reset(0))
    parse_step(world.step(text))


def test_a_right_answer_is_worth_less_with_every_try() -> None:
    for wrong in range(3):
        world = MathRetry(tries=3, decay=0.5)
        world.reset(1)
        right = world.expert()
        for number in range(wrong):
            step = world.step(f"I say {int(right) + 1}.")
            assert (step.reward, step.done) == (0.0, False)
            assert step.observation == f"{int(right) + 1} is wrong. Think again. Tries left: {2 - number}."
        step = world.step(f"So {right}")
        assert (step.observation, step.reward, step.terminated) == ("Right.", 0.5**wrong, True)
        assert step.info == {"invalid": 0, "tries": wrong + 1, "success": 1}


def test_the_last_wrong_answer_ends_it_and_says_what_was_right() -> None:
    world = MathRetry(tries=1)
    text, _ = world.reset(1)
    assert "You have one try." in text
    right = world.expert()
    assert world.step("-999").observation == f"-999 is wrong: it was {right}."
    world = MathRetry(tries=2, invalid_penalty=0.1)
    world.reset(1)
    assert world.step("hm").reward == -0.1
    last = world.step("hm")
    assert (last.truncated, last.info["invalid"]) == (True, 2)


def test_sums_come_from_the_seed_and_are_right() -> None:
    questions = []
    for seed in range(200):
        world = MathRetry(low=-5, high=9, terms=4, operations="+-*")
        text, _ = world.reset(seed)
        question = text.split("\n")[0]
        questions.append(question)
        assert Fraction(eval(question.removeprefix("What is ").removesuffix("?"))) == Fraction(world.expert())
        assert MathRetry(low=-5, high=9, terms=4, operations="+-*").reset(seed)[0] == text
    assert len(set(questions)) > 190


def test_wrong_answers_name_the_state() -> None:
    def after(*said: str) -> object:
        world = MathRetry(tries=5)
        world.reset(2)
        return [world.step(text) for text in said][-1].info["state"]

    assert after("-1", "-2") == after("-2", "-1")
    assert after("-1") != after("-2")


def test_problems_of_a_file(tmp_path: Path) -> None:
    rows = [{"q": "How many?", "a": "It is 3*6=18\n#### 18"}, {"q": "Half of one?", "a": 0.5}]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    options = {"problems": str(path), "question": "q", "answer": "a", "format": "answer"}
    for seed in range(2):
        world = MathRetry(**options)  # type: ignore[arg-type]
        text, _ = world.reset(seed)
        assert text.startswith(rows[seed]["q"])  # type: ignore[arg-type]
        assert world.expert() == ("<answer>18</answer>" if seed == 0 else "<answer>0.5</answer>")
        assert world.step("18 0.5").info["invalid"] == 1
        assert world.step(world.expert()).reward == 0.5


def problems(folder: Path, count: int) -> str:
    """A file of so many problems, the first of which is there twice."""
    rows = [{"question": f"What is {number}?", "answer": number} for number in range(count)]
    path = folder / f"{count}.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, rows[0]])), encoding="utf-8-sig")
    return str(path)


def test_a_seed_without_a_problem_is_refused(tmp_path: Path) -> None:
    world = MathRetry(problems=problems(tmp_path, 3))
    assert world.episodes == 3
    for seed in (3, -1):
        with pytest.raises(ValueError, match=f"the seed is {seed}, but the problems of this file are 0 to 2"):
            world.reset(seed)


@pytest.mark.parametrize(
    ("lines", "options", "sizes"),
    [
        (2, {}, (1, 1)),
        (50, {}, (45, 5)),
        (1050, {}, (950, 100)),
        (3000, {}, (1000, 100)),
        (50, {"held_out": 20}, (30, 20)),
        (50, {"count": 20}, (20, 30)),
        (50, {"count": 50, "held_out": 0}, (50, 0)),
        (50, {"count": 40, "held_out": 5, "first_seed": 5}, (40, 5)),
    ],
)
def test_no_held_out_problem_is_trained_on(
    tmp_path: Path, lines: int, options: dict[str, int], sizes: tuple[int, int]
) -> None:
    file = problems(tmp_path, lines)
    config = TasksConfig(source="environment", options={"name": "maths_retries", "problems": file, **options})
    found = load_tasks(config)
    asked = [[_question(task) for task in part] for part in (found.train, found.held_out)]
    assert (len(asked[0]), len(asked[1])) == sizes
    assert len({*asked[0], *asked[1]}) == sum(sizes)


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        (1, {}, "'maths_retries' has 1 episodes with its options, too few to train on some and hold others out: write"),
        (50, {"count": 50}, "too few .* with count=50: write a smaller count"),
        (50, {"count": 1000, "held_out": 100}, "has 50 episodes .* with count=1000, held_out=100"),
        (50, {"count": 40, "held_out": 10, "first_seed": 5}, "with count=40, held_out=10, first_seed=5"),
        (50, {"first_seed": -1}, "first_seed is -1: the seeds of 'maths_retries' begin with 0"),
        (50, {"count": "40"}, "count is '40': write a whole number"),
        (50, {"count": 0}, "write a count above 0"),
    ],
)
def test_a_file_that_is_too_small_to_split_is_refused(
    tmp_path: Path, lines: int, options: dict[str, int], says: str
) -> None:
    of = {"name": "maths_retries", "problems": problems(tmp_path, lines), **options}
    with pytest.raises(UserError, match=rf"^tasks\.options: .*{says}"):
        load_tasks(TasksConfig(source="environment", options=of))
    with pytest.raises(UserError, match=rf"^data\.options: .*{says}|the seed is -1"):
        list(demonstrations("train", **of))  # type: ignore[arg-type]


def _question(task: Task) -> str:
    assert task.environment is not None
    return MathRetry(**task.environment.options).reset(task.environment.seed)[0].splitlines()[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tries": 0}, "write 1 or more tries"),
        ({"decay": 2}, "a decay from 0 to 1"),
        ({"operations": "/"}, r"operations from \+-\*"),
        ({"low": 3, "high": 2}, "low below high"),
        ({"problems": "/nowhere.jsonl"}, "there is no file"),
        ({"problems": "{}", "answer": "b"}, "problems.jsonl:1: there is no column 'b'"),
        ({"problems": "{}"}, "problems.jsonl:1: there is no number in 'answer'"),
        ({"problems": "{}", "question": "why"}, "problems.jsonl:1: there is no column 'why'"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, options: dict[str, object], says: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "Who?", "answer": "Nobody"}\n')
    if options.get("problems") == "{}":
        options = {**options, "problems": str(path)}
    with pytest.raises((UserError, ValueError), match=says):
        MathRetry(**options)  # type: ignore[arg-type]
