"""Rewards that raise, hang or die: the sample fails with the reason on record, and the run goes on while it can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_rewards.odd_rewards import letters, raises, raises_for_some
from small_runs import REWARDS, SMALL, TINY, Remains

from roll import Response, RunError, Task
from roll.cli import main

TWO_TASKS = ("tasks.options={symbols: '12'}", "rollout.max_replacements=0", "train.steps=1", "eval.samples=2")


def test_a_reward_that_raises_for_some_tasks(run_small: Callable[..., Remains]) -> None:
    run = run_small("train.steps=3", "rollout.groups_per_step=4", reward=raises_for_some)
    assert run.checkpoint.step == 3
    failed = [row for step in run.samples().values() for row in step if row["state"] == "failed"]
    assert failed
    for row in failed:
        assert row["reason"].startswith(f"reward raised: LookupError: no page for {row['answer']} (odd_rewards.py:")
    states = {row["task"]: row["state"] for step in run.samples().values() for row in step}
    assert {state for task, state in states.items() if int(task) % 2} == {"failed"}
    assert {state for task, state in states.items() if not int(task) % 2} <= {"trained", "dropped"}
    assert sum(row.get("samples/failed", 0) for row in run.metrics()) == len(failed)


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("hangs_for_some", "reward deadline: no verdict after 0.3 s"),
        pytest.param(
            *("dies_for_some", "reward crashed: the grader process was killed by SIGKILL"), marks=pytest.mark.thorough
        ),
    ],
)
def test_a_reward_that_takes_its_process_with_it(run_small: Callable[..., Remains], reward: str, reason: str) -> None:
    run = run_small(*TWO_TASKS, f"reward={REWARDS}:{reward}", "reward.deadline_s=0.3", "reward.max_attempts=1")
    assert run.checkpoint.step == 1
    states = {id: (state, why) for id, (state, why, _) in run.lineage().items()}
    failed = [why for state, why in states.values() if state == "failed"]
    assert len(failed) == 4
    assert all(why.startswith(reason) for why in failed)
    assert sum(state == "trained" for state, _ in states.values()) == 4


def test_a_reward_that_always_raises_ends_the_run_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", TINY, *SMALL, f"run={tmp_path / 'run'}", f"reward={REWARDS}:raises"]
    assert main(arguments) == 1
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("the run failed: ")
    assert "LookupError: the grader's book is missing (odd_rewards.py:" in message
    logged = (tmp_path / "run" / "graders.log").read_text()
    assert 1 <= logged.count("Traceback (most recent call last)") <= 4, "once in each process"
    assert "in raises" in logged


def test_a_reward_that_always_raises_ends_a_run_without_held_out_tasks_too(run_small: Callable[..., Remains]) -> None:
    def source(split: str) -> list[Task]:
        return [Task.ask("1", "1", "1")] if split == "train" else []

    with pytest.raises(RunError, match=r"all 16 samples of the step failed.*the grader's book is missing"):
        run_small(reward=raises, tasks=source)


def test_a_sample_that_fails_leaves_its_group_to_train_without_it(run_small: Callable[..., Remains]) -> None:
    def picky(task: Task, response: Response) -> float:
        if response.text[:1].isupper():
            raise ValueError("no shouting")
        return letters(task, response)

    run = run_small(reward=picky)
    groups: dict[int, list[str]] = {}
    for row in (row for step in run.samples().values() for row in step):
        groups.setdefault(row["group"], []).append(row["state"])
    mixed = [states for states in groups.values() if "failed" in states and "trained" in states]
    assert mixed
    assert all(set(states) == {"failed", "trained"} for states in mixed)


def test_a_reward_that_says_nothing_is_named(run_small: Callable[..., Remains]) -> None:
    def forgetful(task: Task, response: Response) -> None:
        letters(task, response)

    with pytest.raises(RunError, match="returned None, not a number: is a `return` missing"):
        run_small(reward=forgetful)
