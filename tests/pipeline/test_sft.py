"""Supervised fine-tuning as a run: what it leaves, that it goes on after a stop, and that others go on from it."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import SMALL as SMALL_RLVR
from small_runs import TINY, Remains, start_roll

import roll
from roll.algorithm import LossSpec
from roll.cli import main
from roll.config import UserError, load_config
from roll.data import Batch, Chat
from roll.pipeline.entrypoints import evaluate, train
from roll.pipeline.report import SilentReporter
from roll.run import LedgerIndex
from roll.scheduler.rollout_result import NOT_FINITE
from roll.workers.train import TrainWorker

pytestmark = pytest.mark.usefixtures("elsewhere")

BASE: dict[str, Any] = {
    "pipeline": "sft",
    "model": "tiny",
    "threads": 1,
    "data": {"source": "echo", "samples_per_step": 4},
    "train": {"lr": 2e-3, "steps": 4},
    "eval": {"every": 2},
    "run": {"checkpoint_every": 0, "tensorboard": False, "curve": False},
}
WEIGHTED = LossSpec("reinforce")
"""Imitation, if all advantages are 1."""
EXACT = ("deterministic=true", "train.steps=6", "eval.every=3", "run.checkpoint_every=2")


def run(path: Path, *overrides: str, **options: Any) -> Remains:
    train(load_config(BASE, [f"run.dir={path}", *overrides]), reporter=SilentReporter(), **options)
    return Remains(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    return run(tmp_path_factory.mktemp("sft") / "run", *EXACT, "run.curve=true")


def losses(remains: Remains) -> list[float]:
    return [row["eval/loss"] for row in remains.metrics() if "eval/loss" in row]


def test_a_run_leaves_what_it_did(undisturbed: Remains) -> None:
    rows = undisturbed.metrics()
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3, 6]
    assert losses(undisturbed)[-1] < losses(undisturbed)[0]
    for row in steps:
        assert row["train/learned_tokens"] == 8, "four answers of a digit and its end"
        assert not [name for name in row if "rollout_logprob_diff" in name], "nobody sampled these tokens"
    assert [row["train/epoch"] for row in steps] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.4])
    summary = json.loads(undisturbed.folder.summary_path.read_text())
    assert (summary["pipeline"], summary["steps"], summary["steps_planned"]) == ("sft", 6, 6)
    assert (summary["trained_samples"], summary["trained_tokens"]) == (24, 48)
    assert (summary["loss_before"], summary["loss_after"]) == (losses(undisturbed)[0], losses(undisturbed)[-1])
    assert undisturbed.folder.curve_path.read_bytes().startswith(b"\x89PNG")


def test_every_sample_is_on_the_ledger(undisturbed: Remains) -> None:
    lives = undisturbed.histories()
    assert [[move.state for move in life] for life in lives.values()] == [["queued", "trained"]] * 24
    tasks = [life[0].info["task"] for life in lives.values()]
    for epoch in (tasks[:10], tasks[10:20]):
        assert sorted(epoch) == list("0123456789")
    with LedgerIndex.open(undisturbed.folder.ledger_path) as index:
        assert index.balance().problems == ()


def test_what_is_too_long_is_on_the_ledger_as_dropped(tmp_path: Path) -> None:
    def chats(split: str) -> Iterator[Chat]:
        yield Chat.of("short", "q", "a")
        if split == "train":
            yield Chat.of("long", "q", "a" * 99)

    remains = run(tmp_path / "run", "data.max_tokens=50", "data.too_long=drop", "train.steps=1", chats=chats)
    (dropped,) = [life for life in remains.histories().values() if life[-1].state == "dropped"]
    assert dropped[0].info["task"] == "long"
    assert dropped[-1].reason == "too long: 104 tokens"


def test_samples_of_a_skipped_update_are_dropped_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = TrainWorker.update

    @functools.wraps(update)
    def poison(worker: TrainWorker, batch: Batch, loss: LossSpec, step: int) -> Any:
        sick = (np.arange(len(batch)) == 1) & (step == 1)
        return update(worker, batch.with_columns(advantage=np.where(sick, np.nan, 1.0)), WEIGHTED, step)

    monkeypatch.setattr(TrainWorker, "update", poison)
    remains = run(tmp_path / "run", "train.steps=3", "eval.every=0")
    ends = {sample: (life[-1].state, life[-1].reason) for sample, life in remains.histories().items()}
    assert list(ends) == [f"{position}.0" for position in range(12)]
    assert list(ends.values()) == [*[("trained", "")] * 4, *[("dropped", NOT_FINITE)] * 4, *[("trained", "")] * 4]
    steps = [row for row in remains.metrics() if "train/loss" in row]
    assert [row["train/learned_tokens"] for row in steps] == [8, 0, 8]
    assert [row["train/epoch"] for row in steps] == pytest.approx([0.4, 0.8, 1.2])
    summary = json.loads(remains.folder.summary_path.read_text())
    assert (summary["trained_samples"], summary["trained_tokens"]) == (8, 16)
    with LedgerIndex.open(remains.folder.ledger_path) as index:
        assert index.balance().problems == ()


def test_the_steps_of_epochs(tmp_path: Path) -> None:
    remains = run(tmp_path / "run", "data.epochs=1.2", "train.steps=100", "train.schedule=linear", "eval.every=0")
    steps = [row for row in remains.metrics() if "train/loss" in row]
    assert [row["train/tokens"] for row in steps] == [24, 24, 24], "12 samples of 6 tokens"
    assert [row["train/lr"] for row in steps] == pytest.approx([2e-3, 2e-3 * 2 / 3, 2e-3 / 3]), "the schedule ends there"


def test_what_the_trainer_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Batch] = []
    update = TrainWorker.update

    @functools.wraps(update)
    def watch(worker: TrainWorker, batch: Batch, *rest: Any) -> Any:
        batches.append(batch)
        return update(worker, batch, *rest)

    monkeypatch.setattr(TrainWorker, "update", watch)
    run(tmp_path / "run", "train.steps=1", "eval.every=0")
    (batch,) = batches
    assert not batch.behaviour.any()
    assert np.all(batch["advantage"] == 1)
    assert np.all(batch["temperature"] == 1)
    assert [mask.tolist() for mask in batch.rows("loss_mask")] == [[False] * 4 + [True] * 2] * 4


@pytest.mark.thorough
def test_a_killed_run_goes_on_in_the_same_bits(tmp_path: Path, undisturbed: Remains) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(json.dumps(BASE))
    path = tmp_path / "run"
    arguments = ["train", str(config), *EXACT, f"run.dir={path}"]
    child = start_roll(arguments, tmp_path / "out")
    child.wait_for(lambda: list(path.glob("checkpoints/step-000002/manifest.json")))
    child.kill()
    assert main([*arguments, "--resume"]) == 0
    again = Remains(path)
    assert again.weights() == undisturbed.weights()
    assert again.optimizer() == undisturbed.optimizer()
    assert again.metrics() == undisturbed.metrics()
    assert again.lineage() == undisturbed.lineage()


def test_an_interrupt_ends_the_step_and_saves(tmp_path: Path, undisturbed: Remains) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(json.dumps(BASE))
    path = tmp_path / "run"
    arguments = ["train", str(config), *EXACT, f"run.dir={path}"]
    child = start_roll(arguments, tmp_path / "out")
    child.wait_for(lambda: "step 1/6" in child.said)
    os.kill(child.pid, signal.SIGINT)
    assert child.end() == 128 + signal.SIGINT, child.said
    assert "stopping after this step and saving" in child.said
    assert main([*arguments, "--resume"]) == 0
    assert Remains(path).weights() == undisturbed.weights()


def test_a_run_is_not_resumed_on_other_conversations(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "q", "response": "a"}\n' * 8)
    run(tmp_path / "run", f"data.source={file}", "train.steps=1")
    file.write_text('{"prompt": "q", "response": "b"}\n' * 8)
    with pytest.raises(UserError, match=r"a\.jsonl \(data\.source\) has changed"):
        run(tmp_path / "run", f"data.source={file}", "train.steps=2", resume=True)
    with pytest.raises(UserError, match="are not those that the run in"):
        run(tmp_path / "run", f"data.source={file}", "train.steps=2", resume=True, code="current")


def test_runs_go_on_from_each_other_without_an_export(tmp_path: Path) -> None:
    """SFT, then RL from it, then SFT from that: each begins with the weights that the one before ended with."""
    first = run(tmp_path / "a")
    rl = load_config(TINY, [*SMALL_RLVR, f"run={tmp_path / 'b'}", f"model={first.path}", "train.lr=1e-12"])
    train(rl, reporter=SilentReporter())
    again = run(tmp_path / "c", f"model={tmp_path / 'b'}", "train.steps=1")
    assert losses(again)[0] == pytest.approx(losses(first)[-1], rel=1e-4)
    assert losses(first)[-1] < losses(first)[0] - 0.5


def test_the_samples_of_a_run_can_be_imitated(tmp_path: Path) -> None:
    """Token logs as runs write them are trained on as they are."""
    train(load_config(TINY, [*SMALL_RLVR, f"run={tmp_path / 'rl'}"]), reporter=SilentReporter())
    (file, *_) = sorted((tmp_path / "rl" / "samples").glob("*.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    remains = run(tmp_path / "sft", f"data.source={file}", "data.options={held_out: 0, id: sample}", "data.epochs=1",
                  "train.steps=100")  # fmt: skip
    learned = sum(row["train/learned_tokens"] for row in remains.metrics() if "train/loss" in row)
    assert learned == sum(sum(row["loss_mask"]) for row in rows)
    assert losses(remains) == [], "nothing was held out"


def test_evaluate_and_its_refusals(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "a")
    assert main(["eval", str(first.path)]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert f"held-out loss {losses(first)[-1]:.4f}" in said
    assert "over 20 tokens of answers" in said
    with pytest.raises(UserError, match="no held-out conversations"):
        evaluate(load_config(BASE), chats=lambda split: [Chat.of("a", "q", "a")] if split == "train" else [])


def test_a_plan_has_the_trainer_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(json.dumps(BASE))
    assert main(["plan", str(config), "devices=cpu"]) == 0
    said = capfd.readouterr().out
    assert "actor_train" in said
    assert not [word for word in ("actor_infer", "rollout", "generate", "publish", "colocated") if word in said]
    assert "10 to train on, 10 held out" in said
    assert "4, 1.6 epochs, 16 samples in all" in said
    assert main(["plan", str(config), "roles.actor_infer=cpu"]) == 2
    assert "roles.actor_infer: pipeline sft has no actor_infer" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.group_size=4"], "override rollout.group_size=4: rollout.group_size is set, but nothing reads rollout"),
        (
            ["reward=math"],
            "reward.name is set, but nothing reads reward in pipeline sft: remove it, or write pipeline=rlvr",
        ),
        (["algorithm=dapo"], "algorithm.name is set, but nothing reads algorithm"),
        (["algorithm.kl_coef=0.1"], "algorithm.kl_coef is set, but nothing reads algorithm"),
        (["tasks=echo"], "tasks.source is set, but nothing reads tasks"),
        (["eval.show=0"], "eval.show is set, but nothing reads eval.show"),
        (["pipeline=rlvr"], "data.source is set, but nothing reads data in pipeline rlvr"),
        (["train.updates_per_step=2"], "an sft step is one update: write a smaller data.samples_per_step"),
        (["train.epochs_per_step=2"], "an sft step is one update: write data.epochs instead"),
        (["data.epochs=2"], "each is the length of the run: write one of them"),
    ],
)
def test_settings_that_nothing_reads_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(BASE, overrides)
    assert message in str(refused.value)


def test_what_would_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 6 tokens, but train.micro_batch_tokens is 5: write"):
        run(tmp_path / "run", "train.micro_batch_tokens=5")
    with pytest.raises(UserError, match="chats were given, but nothing reads them in pipeline rlvr"):
        roll.train(load_config(TINY), chats=lambda split: [])
    assert not (tmp_path / "run").exists()


RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=600", "ray.call_deadline_s=600")


@pytest.mark.slow
def test_the_same_bits_on_ray(tmp_path: Path, undisturbed: Remains) -> None:
    there = run(tmp_path / "run", *EXACT, *RAY, "fault_tolerance.spare_trainer=false")
    assert there.weights() == undisturbed.weights()
    assert losses(there) == losses(undisturbed)


@pytest.mark.slow
def test_a_trainer_that_dies_sends_the_run_back_to_its_checkpoint(tmp_path: Path) -> None:
    longer = (*EXACT, "train.steps=60", "eval.every=0")
    calm = run(tmp_path / "calm", *longer)
    config, path = tmp_path / "sft.yaml", tmp_path / "run"
    config.write_text(json.dumps(BASE))
    child = start_roll(["train", str(config), *longer, *RAY, f"run.dir={path}"], tmp_path / "out")
    child.wait_for(lambda: "step 5/60" in child.said)
    log = (path / "logs" / "actor_train-0.log").read_text()
    os.kill(int(re.findall(r" is process (\d+) on ", log)[-1]), signal.SIGKILL)
    assert child.end() == 0, child.said
    assert "rolling back to the last checkpoint" in child.said
    hurt = Remains(path)
    assert hurt.weights() == calm.weights()
    assert hurt.lineage() == calm.lineage()
    with LedgerIndex.open(hurt.folder.ledger_path) as index:
        assert index.balance().problems == ()
