"""Puzzles of reasoning-gym: made from a few words, anywhere the same, judged by their own verifiers."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from typing import Any

import pytest

from roll.config.errors import UserError
from roll.config.schema import DataConfig, TasksConfig
from roll.data.chat_sources import load_chats
from roll.data.sources import TaskSet, load_tasks
from roll.data.task import Response, Task
from roll.reward import RewardSpec, make
from roll.reward.pool import GraderPool

rg = pytest.importorskip("reasoning_gym")


def load(source: str, **options: Any) -> TaskSet:
    return load_tasks(TasksConfig(source=source, options=options))


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        load(source, **options)
    return str(refused.value)


def judge(task: Task, text: str, **options: Any) -> Any:
    return make("reasoning_gym", options)(task, Response(text, 1, "stop"))


def test_a_family_by_name_with_its_parameters() -> None:
    tasks = load("reasoning_gym:letter_counting", count=20, held_out=5, max_words=6, system="Count.")
    assert (len(tasks.train), len(tasks.held_out)) == (20, 5)
    assert tasks == load("reasoning_gym:letter_counting", count=20, held_out=5, max_words=6, system="Count.")
    task = tasks.train[0]
    assert (task.id, task.domain, task.messages[0]["content"]) == ("letter_counting#5", "letter_counting", "Count.")
    entry = rg.create_dataset("letter_counting", seed=0, size=25, max_words=6)[5]
    assert (task.question, task.answer) == (entry["question"], entry["answer"])


def test_several_families_by_weight() -> None:
    families = {"letter_counting": 2, "spell_backward": {"weight": 1, "max_word_len": 4}}
    tasks = load("reasoning_gym", families=families, count=30, held_out=9)
    kinds = [task.domain for task in tasks.held_out]
    assert (kinds.count("letter_counting"), kinds.count("spell_backward")) == (6, 3)
    spelled = [task for task in tasks.train if task.domain == "spell_backward"]
    assert spelled
    assert all(len(task.answer) <= 4 for task in spelled)


def test_what_is_held_out_is_never_trained_on() -> None:
    """Also where there are fewer questions than tasks."""
    tasks = load("reasoning_gym:leg_counting", count=300, held_out=60, max_animals=1, min_animals=1, max_instances=2)
    asked = {task.question for task in tasks.train}
    assert asked
    assert not asked & {task.question for task in tasks.held_out}
    assert len(tasks.train) < 300


def test_a_task_is_small_and_its_puzzle_is_made_again_elsewhere() -> None:
    """The grader process has nothing but the task."""
    (task, *_) = load("reasoning_gym:sudoku", count=2, held_out=0).train
    assert len(pickle.dumps(task.info)) < 200
    json.dumps(dict(task.info))

    async def verdicts() -> list[float]:
        async with GraderPool(RewardSpec.of("reasoning_gym"), deadline_s=60) as pool:
            answers = [task.answer, "nothing of the kind"]
            return [(await pool.score(task, Response(text, 1, "stop"))).reward for text in answers]

    assert asyncio.run(verdicts()) == [1.0, 0.0]


def test_the_last_tagged_answer_counts_else_the_text() -> None:
    (task, *_) = load("reasoning_gym:chain_sum", count=1, held_out=0).train
    right, wrong = task.answer, str(int(task.answer) + 1)
    assert judge(task, f" {right}\n") == 1.0
    assert judge(task, f"First <answer>{wrong}</answer>, no: <answer> {right} </answer> it is.") == 1.0
    assert judge(task, f"<answer>{right}</answer> or <answer>{wrong}</answer>") == 0.0
    assert judge(task, wrong) == judge(task, "") == judge(task, "<answer></answer>") == 0.0


def test_a_wrong_answer_is_worth_nothing_whatever_its_family_says() -> None:
    (cube, *_) = load("reasoning_gym:rubiks_cube", count=1, held_out=0).train
    puzzles = rg.create_dataset("rubiks_cube", seed=0, size=1)
    assert puzzles.score_answer("no idea", puzzles[0]) == 0.01
    assert judge(cube, "no idea") == 0.0


def test_puzzles_with_many_solutions_have_no_answer_but_a_verifier() -> None:
    (task, *_) = load("reasoning_gym:graph_color", count=1, held_out=0).train
    assert task.answer is None
    coloring = rg.create_dataset("graph_color", seed=0, size=1)[0]["metadata"]["possible_answer"]
    assert judge(task, json.dumps(coloring)) == 1.0
    assert judge(task, json.dumps(dict.fromkeys(coloring, 1))) == 0.0


def test_what_a_verifier_cannot_read_is_wrong() -> None:
    (task, *_) = load("reasoning_gym:prime_factorization", count=1, held_out=0).train
    puzzles = rg.create_dataset("prime_factorization", seed=0, size=1)
    with pytest.raises(ValueError):
        puzzles.score_answer("garbage", puzzles[0])
    assert judge(task, "garbage") == 0.0


def test_partial_credit_stays() -> None:
    (task, *_) = load("reasoning_gym:spell_backward", count=1, held_out=0, min_word_len=4).train
    score = judge(task, task.answer[:-1])
    assert 0 < score < 1
    assert judge(task, task.answer[:-1], partial=False) == judge(task, task.answer[:-1], wrong=score) == 0
    assert judge(task, task.answer, partial=False) == 1


def test_only_tasks_of_that_source_can_be_judged() -> None:
    with pytest.raises(ValueError, match="does not say how its puzzle is made"):
        judge(Task.ask("t", "?", 1), "1")


def test_puzzles_may_be_imitated() -> None:
    chats = load_chats(DataConfig(source="reasoning_gym:chain_sum", options={"count": 3, "held_out": 1}))
    assert (len(chats.train), len(chats.held_out)) == (3, 1)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("reasoning_gym:leter_counting", {}, "has no family 'leter_counting'; did you mean 'letter_counting'"),
        ("reasoning_gym:letter_counting", {"max_word": 3}, "reasoning-gym refused 'letter_counting': TypeError"),
        ("reasoning_gym:letter_counting", {"min_words": 9, "max_words": 3}, "reasoning-gym refused 'letter_counting'"),
        ("reasoning_gym:letter_counting", {"size": 3}, "write seed and count instead"),
        ("reasoning_gym:letter_counting", {"count": 0}, "count=0, held_out=100"),
        ("reasoning_gym", {}, "missing a required argument: 'families'"),
        ("reasoning_gym", {"families": {}}, "families is {}: write a family's name, or names and weights"),
        ("reasoning_gym", {"families": {"chain_sum": 0}}, "the weight of family 'chain_sum' is 0"),
        ("reasoning_gym", {"families": {"chain_sum": {"weight": "x"}}}, "the weight of family 'chain_sum' is 'x'"),
    ],
)
def test_what_cannot_work_is_reported(source: str, options: dict[str, Any], says: str) -> None:
    assert says in refusal(source, **options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll.data import reasoning_gym as source

    source._package.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "puzzles need the package reasoning-gym" in refusal("reasoning_gym:chain_sum")
