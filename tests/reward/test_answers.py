"""Golds that no response satisfies are refused before a run starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from roll.cli import main
from roll.config import UserError
from roll.data import Response, Task
from roll.data.task import EnvSpec
from roll.reward import RewardSpec
from roll.reward.answers import MAX_JUDGED, AnswersChecked, check_answers
from roll.reward.compose import ComposedRule, WeightedPart


def tasks(*answers: Any, **info: Any) -> list[Task]:
    return [Task.ask(f"q{number}", "?", answer, **info) for number, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("reward", "good", "bad", "info"),
    [
        ("number", ["1/2", "5", "1,234.5", 7, "#### 72"], ["[0,1)", "3:30", "x^2+2x+1", "1/2/3", None, "many"], {}),
        (
            "math",
            ["5", "x^2", r"\frac{1}{2}", "[0,1)", r"\text{Monday}"],
            ["9 (apples)", "", None, "x^{{", "two of 3"],
            {},
        ),
        ("choice", ["B", "(c)"], ["Z", "", None, "maybe"], {}),
        ("choice", ["B", 0, "Paris"], ["C", 2, "Berlin"], {"choices": ["Rome", "Paris"]}),
        ("exact", ["Rome", 5, ["a", "b"]], [None, [], [None], "", " ", ["a", ""]], {}),
        ("fuzzy", ["Rome"], [None, "!!", ""], {}),
        ("code", [None], [], {"tests": [{"stdin": "", "stdout": "1"}]}),
        ("code", [], [None], {}),
        ("instructions", [], [None], {}),
        ("reasoning_gym", [], ["5"], {}),
        ("length", ["9 (apples)", None], [], {}),
    ],
)
def test_each_reward_names_the_golds_that_it_cannot_use(
    reward: str, good: list[Any], bad: list[Any], info: dict[str, Any]
) -> None:
    source = RewardSpec("it", ".", ComposedRule(reward, {"target": 5} if reward == "length" else {}))
    checked = check_answers(source, tasks(*good, **info))
    assert checked is None if reward == "length" or not good else checked == AnswersChecked(len(good), len(good))
    for answer in bad:
        with pytest.raises(UserError, match=r"^reward: .*task 'q1'") as caught:
            check_answers(
                source, [*tasks(good[0], **info), Task.ask("q1", "?", answer, **info)] if good else _one(answer, info)
            )
        if isinstance(answer, str) and reward != "reasoning_gym":
            assert repr(answer) in str(caught.value)


def _one(answer: Any, info: dict[str, Any]) -> list[Task]:
    return [Task.ask("q1", "?", answer, **info)]


def test_of_several_faults_the_first_is_described_and_the_others_named() -> None:
    with pytest.raises(UserError, match=r"task 'q1', 'a', is not.*\(the same holds for 4 more: 'q2', 'q3', 'q4' …\)$"):
        check_answers(RewardSpec.of("number"), tasks(1, "a", "b", "c", "d", "e"))


def test_parts_and_domains_name_their_setting() -> None:
    parts = {"right": WeightedPart("number"), "form": WeightedPart("format", {"json": True}, 0.1)}
    with pytest.raises(UserError, match=r"^reward\.parts\.right: the answer of task 'q0'"):
        check_answers(RewardSpec("it", ".", ComposedRule(parts=parts)), tasks("x"))
    domains = {"sums": ComposedRule("number"), "quiz": ComposedRule("choice")}
    source = RewardSpec("it", ".", domains=domains)
    good = [Task.ask("a", "?", "5", domain="sums"), Task.ask("b", "?", "B", domain="quiz")]
    assert check_answers(source, good) == AnswersChecked(2, 2)
    with pytest.raises(UserError, match=r"^domains\.quiz\.reward: the answer of task 'c', '5'"):
        check_answers(source, [*good, Task.ask("c", "?", "5", domain="quiz")])


def test_tasks_of_environments_have_no_golds_to_check() -> None:
    played = Task("a", (), environment=EnvSpec("frozen_lake"))
    assert check_answers(RewardSpec.of("number"), [played]) is None


def test_what_only_a_verdict_tells_is_tried_with_some_tasks_spread_evenly() -> None:
    several = tasks(*(f"x^{number}+1" for number in range(2, MAX_JUDGED + 50)), *range(10))
    assert check_answers(RewardSpec.of("math"), several) == AnswersChecked(MAX_JUDGED + 10, len(several))
    assert str(AnswersChecked(256, 7473)) == "checked the answers of 256 of 7473 tasks"
    assert str(AnswersChecked(20, 20)) == "checked the answers of all 20 tasks"


def test_the_check_works_where_an_event_loop_is_running() -> None:
    async def inside() -> AnswersChecked | None:
        return check_answers(RewardSpec.of("math"), tasks("x^2"))

    assert asyncio.run(inside()) == AnswersChecked(1, 1)


class OfOnes:
    """A reward of a user's own that takes the answer 1 alone."""

    def check_answer(self, task: Task) -> bool:
        if task.answer != 1:
            raise ValueError(f"the answer of task {task.id!r} is not 1")
        return True

    def __call__(self, task: Task, response: Response) -> float:
        return 1.0


def test_a_users_own_reward_may_check_golds() -> None:
    assert check_answers(RewardSpec.of(OfOnes()), tasks(1)) == AnswersChecked(1, 1)
    with pytest.raises(UserError, match="the answer of task 'q0' is not 1"):
        check_answers(RewardSpec.of(OfOnes()), tasks(2))


def test_roll_plan_says_how_many_golds_it_checked_and_refuses_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = "model: tiny\nrun: runs/a\ntasks: {{source: {}.jsonl, options: {{held_out: 1}}}}\nreward: math\n"
    rows = {"good": ["5", "x+1", "7"], "bad": ["5", "9 (apples)", "7"]}
    for name, answers in rows.items():
        lines = [f'{{"question": "?", "answer": "{answer}"}}\n' for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        (tmp_path / f"{name}.yaml").write_text(config.format(name))
    assert main(["plan", "good.yaml"]) == 0
    assert "checked the answers of all 3 tasks" in capsys.readouterr().out
    assert main(["plan", "bad.yaml"]) == 2
    assert "the answer of task 'line-2', '9 (apples)', has words beside the mathematics" in capsys.readouterr().err
