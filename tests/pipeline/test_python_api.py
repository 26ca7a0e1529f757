"""ROLL as a library: rewards and tasks of one's own, as objects and as files, and a pipeline written by hand."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_runs import EXAMPLES, SMALL, TINY, Remains

import roll
from roll import Response, Task
from roll.config import dump_config
from roll.pipeline.report import SilentReporter, StepReport

pytestmark = pytest.mark.usefixtures("elsewhere")

SOURCE = """
from roll import Task

def vowels(split, how_many=5):
    for letter in "aeiou"[:how_many]:
        yield Task.ask(f"{split}-{letter}", letter, letter)
"""


def vowels(split: str, how_many: int = 5) -> Iterator[Task]:
    for letter in "aeiou"[:how_many]:
        yield Task.ask(f"{split}-{letter}", letter, letter)


def test_a_reward_function_of_ones_own_with_parts(run_small: Callable[..., Remains]) -> None:
    weight = 0.5

    def parts(task: Task, response: Response) -> dict[str, float]:
        return {"lower": weight * any(c.islower() for c in response.text), "full": float(response.finish == "length")}

    run = run_small(reward=parts)
    rows = [row for step in run.samples().values() for row in step]
    for row in rows:
        assert row["parts"]["lower"] == weight * any(c.islower() for c in row["response"])
        assert row["reward"] == sum(row["parts"].values())
    assert all({"reward/lower", "reward/full"} <= row.keys() for row in run.metrics() if "reward/mean" in row)


def test_a_task_source_of_ones_own_as_a_function(run_small: Callable[..., Remains]) -> None:
    run = run_small("tasks.options={how_many: 3}", tasks=vowels)
    questions = {row["question"] for step in run.samples().values() for row in step}
    assert questions <= set("aei")
    assert len(questions) > 1


@pytest.mark.thorough
def test_a_task_source_of_ones_own_in_a_file(tmp_path: Path, run_small: Callable[..., Remains]) -> None:
    (tmp_path / "sources.py").write_text(SOURCE)
    source = f"tasks={tmp_path / 'sources.py'}:vowels"
    run = run_small(source, "tasks.options={how_many: 2}")
    assert {row["task"] for step in run.samples().values() for row in step} == {"train-a", "train-e"}


def test_tasks_in_a_jsonl_file(tmp_path: Path, run_small: Callable[..., Remains]) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{n}", "answer": {n}}}\n' for n in range(4)))
    run = run_small(f"tasks={tmp_path / 'tasks.jsonl'}", "tasks.options={held_out: 0.25}")
    assert {row["answer"] for step in run.samples().values() for row in step} <= {0, 1, 2}


@pytest.mark.thorough
def test_a_run_without_held_out_tasks_is_not_evaluated(run_small: Callable[..., Remains]) -> None:
    run = run_small("run.curve=true", tasks=lambda split: vowels(split) if split == "train" else ())
    summary = run.folder.read_summary()
    assert summary is not None
    assert summary["reward_before"] is None
    assert summary["reward_after"] is None
    assert summary["curve"] == str(run.folder.curve_path)
    assert run.folder.curve_path.is_file()


def test_a_reporter_hears_of_every_step(run_small: Callable[..., Remains], tmp_path: Path) -> None:
    class Ears(SilentReporter):
        heard: list[StepReport]

        def stepped(self, report: StepReport) -> None:
            self.heard.append(report)

    ears = Ears()
    ears.heard = []
    config = roll.load_config(TINY, [*SMALL, f"run={tmp_path / 'run'}"])
    summary = roll.train(config, reporter=ears)
    assert [report.step for report in ears.heard] == [1, 2]
    assert summary["steps"] == 2


def test_bad_configs_raise_user_errors() -> None:
    with pytest.raises(roll.UserError, match=r"did you mean train\.lr"):
        roll.load_config(TINY, ["train.lrr=1"])
    with pytest.raises(roll.UserError, match="held-out tasks"):
        roll.evaluate(roll.load_config(TINY, SMALL), tasks=lambda split: vowels(split) if split == "train" else ())


def test_evaluate_gives_answers(tmp_path: Path) -> None:
    evaluation = roll.evaluate(roll.load_config(TINY, [*SMALL, "eval.show=2"]))
    assert 0 <= evaluation.reward <= 1
    assert len(evaluation.answers) == 2
    assert evaluation.failed == 0


def test_the_pipeline_written_by_hand_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "tiny.yaml").write_text(dump_config(roll.load_config(TINY, SMALL)))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "by_hand.py"), run_name="__main__")
    assert "step 10: reward" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_the_public_names_exist() -> None:
    for name in roll.__all__:
        assert getattr(roll, name) is not None
    assert dir(roll) == sorted(roll.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = roll.trian
