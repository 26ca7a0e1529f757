"""What a finished run leaves in its folder, and whether it is true."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import SMALL, TINY, Remains

from roll import Batch, load_config
from roll.cli import main
from roll.engine.request import Completion, Request
from roll.model.tiny import tiny_model
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter
from roll.rollout.engine_client import EngineClient
from roll.rollout.lifecycle import MOVES
from roll.run import read_samples
from roll.run.trace import trace_files
from roll.workers.train import TrainWorker

STEPS = 3


class Watched:
    """A run, the tokens its engine drew, and the batches its trainer was given."""

    def __init__(self, path: Path) -> None:
        self.remains = Remains(path)
        self.prompts: dict[str, list[int]] = {}
        self.drawn: dict[str, Completion] = {}
        self.batches: list[Batch] = []
        self.summary: dict[str, Any] = {}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A run with everything on: TensorBoard, evaluation and checkpoints in between, groups that are dropped."""
    seen = Watched(tmp_path_factory.mktemp("remains") / "run")
    generate, update = EngineClient.generate, TrainWorker.update

    async def watch_generate(door: EngineClient, request: Request, engine: int, *watch: Any) -> Completion:
        completion = await generate(door, request, engine, *watch)
        seen.prompts[request.id] = list(request.ids)
        seen.drawn[request.id] = completion
        return completion

    @functools.wraps(update)
    def watch_update(worker: TrainWorker, batch: Batch, *rest: Any) -> Any:
        seen.batches.append(batch)
        return update(worker, batch, *rest)

    overrides = [
        *(*SMALL, f"run={seen.remains.path}", f"train.steps={STEPS}", "run.tensorboard=true", "run.curve=true"),
        *("run.checkpoint_every=1", "eval.every=1", "rollout.group_size=3", "rollout.max_new_tokens=3"),
        "model.dtype=fp32",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "generate", watch_generate)
        patch.setattr(TrainWorker, "update", watch_update)
        seen.summary = train(load_config(TINY, overrides), reporter=SilentReporter())
    return seen


def test_the_config_reads_back_equal(watched: Watched) -> None:
    config = load_config(watched.remains.folder.config_path)
    assert config.train.steps == STEPS
    assert config.run.dir == str(watched.remains.path)
    assert load_config(watched.remains.folder.config_path, [f"train.steps={STEPS}"]) == config


def test_metrics_have_a_row_for_every_step_and_every_evaluation(watched: Watched) -> None:
    rows = watched.remains.metrics()
    evaluations = [row for row in rows if "eval/reward" in row]
    steps = [row for row in rows if "reward/mean" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert {"response/tokens_mean", "groups/kept", "groups/issued", "samples/failed"} <= row.keys()
        assert {"train/loss", "train/grad_norm", "train/lr", "train/rollout_logprob_diff", "train/entropy"} <= row.keys()
        assert 0 <= row["reward/mean"] <= 1
        assert row["train/skipped"] == 0
        assert row["train/rollout_logprob_diff_max"] < 1e-3


def test_tensorboard_has_the_same_numbers(watched: Watched) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(watched.remains.folder.tensorboard_dir))
    events.Reload()
    rows = {row["step"]: row["reward/mean"] for row in watched.remains.metrics() if "reward/mean" in row}
    assert {event.step: event.value for event in events.Scalars("reward/mean")} == pytest.approx(rows)


def test_every_sample_lived_a_legal_life(watched: Watched) -> None:
    histories = watched.remains.histories()
    assert len(histories) >= STEPS * 2 * 3
    for history in histories.values():
        states = ["new", *(transition.state for transition in history)]
        assert all(after in MOVES[before] for before, after in itertools.pairwise(states)), states
        assert states[-1] in ("trained", "dropped", "failed")
        assert states[-1] == "trained" or history[-1].reason


def test_every_sample_of_the_ledger_is_in_the_samples_once(watched: Watched) -> None:
    rows = [row for step in watched.remains.samples().values() for row in step]
    last = {id: history[-1] for id, history in watched.remains.histories().items()}
    assert sorted(row["sample"] for row in rows) == sorted(last)
    for row in rows:
        assert (row["state"], row["reason"]) == (last[row["sample"]].state, last[row["sample"]].reason)


def test_sample_rows_are_consistent(watched: Watched) -> None:
    for step, rows in watched.remains.samples().items():
        for row in rows:
            ids, mask, logprobs, versions = (row[key] for key in ("ids", "loss_mask", "logprobs", "versions"))
            assert len(ids) == len(mask) == len(logprobs) == len(versions)
            assert mask == sorted(mask), "a response follows its prompt"
            assert 1 <= sum(mask) <= 3
            for masked, logprob, version in zip(mask, logprobs, versions, strict=True):
                assert (logprob < 0, version) == ((True, step - 1) if masked else (False, -1))


def test_the_trained_tokens_are_the_sampled_ones(watched: Watched) -> None:
    assert len(watched.batches) == STEPS
    for step, batch in enumerate(watched.batches, 1):
        kept = [row for row in read_samples(watched.remains.folder, step) if row["state"] == "trained"]
        assert len(batch) == len(kept)
        columns = (batch.rows(name) for name in ("ids", "loss_mask", "behaviour"))
        for row, ids, mask, behaviour in zip(kept, *columns, strict=True):
            drawn = watched.drawn[row["sample"]]
            assert ids.tolist() == row["ids"] == watched.prompts[row["sample"]] + drawn.ids.tolist()
            assert mask.tolist() == row["loss_mask"]
            assert ids[mask].tolist() == drawn.ids.tolist()
            assert np.array_equal(behaviour[mask], drawn.logprobs)
            assert row["logprobs"] == pytest.approx(behaviour.tolist(), abs=1e-6)


@torch.no_grad()
def test_the_logprobs_of_the_first_step_are_those_of_the_fresh_model(watched: Watched) -> None:
    model = tiny_model(load_config(watched.remains.folder.config_path).seed).eval()
    for row in read_samples(watched.remains.folder, 1):
        ids = torch.tensor([row["ids"]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(row["loss_mask"][1:], dtype=torch.bool)
        assert torch.allclose(logprobs[mask], torch.tensor(row["logprobs"][1:])[mask], atol=1e-4)


def test_the_checkpoint_is_whole_and_of_the_last_step(watched: Watched) -> None:
    checkpoint = watched.remains.checkpoint
    assert checkpoint.step == STEPS
    kept = sorted(path.name for path in watched.remains.folder.checkpoints_dir.iterdir())
    assert kept == ["step-000002", "step-000003"]


def test_the_summary_says_what_came_of_it(watched: Watched) -> None:
    summary = json.loads(watched.remains.folder.summary_path.read_text())
    assert summary == json.loads(json.dumps(watched.summary))
    assert (summary["steps"], summary["steps_planned"], summary["seed"]) == (STEPS, STEPS, 0)
    assert summary["stopped"] is False
    assert summary["seconds"] > 0
    rows = [row for row in watched.remains.metrics() if "eval/reward" in row]
    assert summary["reward_before"] == rows[0]["eval/reward"]
    assert summary["reward_after"] == rows[-1]["eval/reward"]
    trained = sum(history[-1].state == "trained" for history in watched.remains.histories().values())
    assert summary["trained_samples"] == trained
    assert [answer["question"] for answer in summary["answers_before"]] == [
        answer["question"] for answer in summary["answers_after"]
    ]


def test_the_curve_is_a_picture(watched: Watched) -> None:
    assert watched.remains.folder.curve_path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_finished_run_goes_on_with_more_steps(run_small: Callable[..., Remains]) -> None:
    first = run_small("train.steps=1")
    before = first.weights()
    again = run_small("train.steps=2", resume=True)
    assert again.checkpoint.step == 2
    assert again.weights() != before
    assert [row["step"] for row in again.metrics() if "reward/mean" in row] == [1, 2]


def test_resuming_a_finished_run_changes_nothing(run_small: Callable[..., Remains]) -> None:
    run = run_small()
    before = (run.weights(), run.metrics(), run.lineage(), run.samples())
    run_small(resume=True)
    assert (run.weights(), run.metrics(), run.lineage(), run.samples()) == before


@pytest.mark.thorough
def test_a_run_with_nothing_left_to_learn_ends_early_and_resumes_to_the_same_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rewards = tmp_path / "content.py"
    rewards.write_text("def always(task, response):\n    return 1.0\n")
    arguments = [
        *SMALL,
        "train.steps=12",
        f"reward={rewards}:always",
        f"run={tmp_path / 'run'}",
        "rollout.max_new_tokens=1",
    ]
    assert main(["train", TINY, *arguments]) == 0
    assert "nothing left to learn" in capfd.readouterr().out
    assert main(["train", TINY, *arguments, "--resume"]) == 0
    assert Remains(tmp_path / "run").checkpoint.step == 10


def test_a_run_deletes_what_it_is_told_not_to_keep(run_small: Callable[..., Remains]) -> None:
    """Checkpoints, samples and traces; what is left can be read and continued."""
    keep = ("run.keep.checkpoints=1", "run.keep.checkpoints_every=2", "run.keep.samples=2", "run.checkpoint_every=1")
    run = run_small("train.steps=5", *keep)
    assert sorted(path.name for path in run.folder.checkpoints_dir.iterdir()) == [
        f"step-{step:06d}" for step in (2, 4, 5)
    ]
    assert sorted(run.samples()) == [4, 5]
    run_small("train.steps=6", *keep, "run.keep.best=true", "eval.every=1", resume=True)
    assert sorted(run.samples()) == [5, 6]
    assert run.checkpoint.step == 6


@pytest.mark.thorough
def test_a_trace_goes_on_in_the_next_file(run_small: Callable[..., Remains], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.pipeline.recorder._trace_bytes", lambda config: 8192)
    run = run_small("train.steps=4", "run.keep.trace_mb=1")
    files = trace_files(run.folder)
    assert len(files) >= 3
    for file in files:
        events = json.loads(file.read_bytes())
        assert not any("the trace ends here" in event["name"] for event in events[:-1])
