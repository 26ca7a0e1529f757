"""Continuing a run: with which settings, and from what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from small_runs import SMALL, TINY, Remains
from thorough import but

from roll.config import Config, UserError, load_config, schema_tree
from roll.model import loading
from roll.pipeline.entrypoints import train
from roll.pipeline.report import PlainReporter, SilentReporter
from roll.pipeline.resume import IMMUTABLE, MUTABLE, changes_since, refuse_changes
from roll.run import RunFolder
from roll.run.history import History

SAVING = (*SMALL, "train.steps=3", "run.checkpoint_every=1")


class Listening(SilentReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def _print(self, text: str) -> None:
        self.said.append(text)


def resume(run: Remains, *overrides: str, base: tuple[str, ...] = SAVING) -> list[str]:
    """What the run says that continues it."""
    reporter: PlainReporter = Listening()
    config = load_config(TINY, [*base, f"run={run.path}", *overrides])
    train(config, resume=True, reporter=reporter)
    return reporter.said  # type: ignore[attr-defined,no-any-return]


def changed(run: Remains) -> list[tuple[int, str, Any, Any]]:
    events = History(run.folder).read()
    return [(e["step"], e["key"], e["before"], e["after"]) for e in events if e["event"] == "changed"]


@pytest.mark.parametrize("fast", [False, True])
def test_a_run_keeps_its_precision_on_a_machine_that_would_choose_another(
    fast: bool, run_small: Callable[..., Remains], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`model.dtype: auto` is bf16 where that is fast."""
    monkeypatch.setattr(loading, "cpu_multiplies_bf16", lambda: fast)
    run = run_small("train.steps=2", base=SAVING)
    monkeypatch.setattr(loading, "cpu_multiplies_bf16", lambda: not fast)
    resume(run, "train.steps=3")
    assert {tensor.dtype for tensor in load(run.weights()).values()} == {torch.bfloat16 if fast else torch.float32}
    assert load_config(run.folder.config_path).model.dtype == "auto"


def test_a_learning_rate_changed_on_resume_is_used_and_on_record(run_small: Callable[..., Remains]) -> None:
    run = run_small("train.lr=1e-3", "algorithm.kl_coef=0.1", base=SAVING)
    said = resume(run, "train.lr=2e-4", "train.steps=5", "algorithm.kl_coef=0.3")
    assert "warning: from step 3 on train.lr is 0.0002, was 0.001" in said
    rates = {row["step"]: (row["train/lr"], row["train/kl_coef"]) for row in run.metrics() if "train/lr" in row}
    assert rates == {1: (1e-3, 0.1), 2: (1e-3, 0.1), 3: (1e-3, 0.1), 4: (2e-4, 0.3), 5: (2e-4, 0.3)}
    assert changed(run) == [
        (3, "train.steps", 3, 5),
        (3, "train.lr", 1e-3, 2e-4),
        (3, "algorithm.kl_coef", 0.1, 0.3),
    ]
    assert load_config(run.folder.config_path).train.lr == 2e-4

    train(load_config(run.folder.config_path, ["train.steps=6"]), resume=True, reporter=SilentReporter())
    last = {row["step"]: row["train/lr"] for row in run.metrics() if "train/lr" in row}
    assert last[6] == 2e-4  # what it was changed to is what it continues with
    assert changed(run)[3:] == [(5, "train.steps", 5, 6)]


@pytest.mark.thorough
def test_another_learning_rate_gives_other_weights_and_the_same_one_does_not(run_small: Callable[..., Remains]) -> None:
    exact = (*SAVING, "deterministic=true", "train.lr=1e-3")
    first = run_small("train.steps=2", base=exact)
    copies = [first.path.with_name(name) for name in ("same", "other")]
    for copy in copies:
        shutil.copytree(first.path, copy)
    resume(Remains(copies[0]), base=exact)
    resume(Remains(copies[1]), "train.lr=1e-2", base=exact)
    whole = run_small(name="whole", base=exact)
    assert Remains(copies[0]).weights() == whole.weights()
    assert Remains(copies[1]).weights() != whole.weights()


MANY = (
    *("train.micro_batch_tokens=64", "train.share_prefixes=false", "train.activation_checkpointing=on"),
    *("train.compile=off", "train.max_skipped_in_a_row=2", "train.clip_grad_norm=0.5", "train.weight_decay=0.1"),
    *(
        "train.betas=[0.8,0.9]",
        "train.eps=1e-6",
        "train.warmup_steps=2",
        "train.schedule=cosine",
        "train.epochs_per_step=2",
    ),
    *("train.updates_per_step=2", "rollout.groups_per_step=3", "rollout.group_size=3", "rollout.max_new_tokens=5"),
    *(
        "rollout.filter=none",
        "rollout.deadline_s=60",
        "rollout.max_attempts=1",
        "rollout.max_running=2",
        "rollout.oversample=0.5",
    ),
    *("algorithm.clip_low=0.1", "algorithm.clip_high=0.3", "algorithm.entropy_coef=0.01", "algorithm.kl_coef=0.1"),
    *("env.step_deadline_s=5", "reward.workers=2", "reward.deadline_s=9", "threads=2", "eval.samples=4"),
)


def test_everything_that_may_change_can_be_continued_with(run_small: Callable[..., Remains]) -> None:
    run = run_small(base=SAVING)
    resume(run, *MANY, "train.steps=5")
    assert run.checkpoint.step == 5
    assert {key for _, key, _, _ in changed(run)} == {text.partition("=")[0] for text in (*MANY, "train.steps=5")}


KEPT = {
    "seed=4": "noise of sampling",
    "deterministic=true": "bits of the run",
    "model=/other": "weights of this model",
    "model.lora=4": "weights of this model",
    "model.dtype=bf16": "weights of this model",
    "train.optimizer=adamw_8bit": "moments of the other optimizer",
    "rollout.temperature=0.7": "were drawn with it",
    "rollout.task_order=longest_first": "the other order",
    "tasks.source=echo": "which of these tasks",
    "tasks.options={count: 3}": "which of these tasks",
    "reward=exact": "could not be compared",
    "algorithm.credit=returns": "weights of a critic",
    "algorithm.baseline=batch": "statistics of the other baseline",
    "pipeline=sft": "pipeline",
}


@pytest.mark.parametrize("override", KEPT)
def test_what_must_stay_is_refused_with_why_and_what_to_write(tmp_path: Path, override: str) -> None:
    before, after = load_config({}), load_config({}, [override])
    with pytest.raises(UserError) as error:
        refuse_changes(RunFolder(tmp_path), after, changes_since(before, after))
    for part in (override.partition("=")[0], KEPT[override], "resume", f"run.dir=OTHER model={tmp_path}"):
        assert part in str(error.value)


def test_a_weight_that_is_steered_is_not_set(tmp_path: Path) -> None:
    before, after = (load_config({}, ["algorithm.kl_target=0.1", f"algorithm.kl_coef={c}"]) for c in (0.1, 0.2))
    with pytest.raises(UserError, match=r"algorithm\.kl_target steers it"):
        refuse_changes(RunFolder(tmp_path), after, changes_since(before, after))


def test_rounds_of_groups_keep_their_size(tmp_path: Path) -> None:
    before, after = (
        load_config({}, ["rollout.task_order=tail_batching", f"rollout.groups_per_step={n}"]) for n in (8, 9)
    )
    with pytest.raises(UserError, match="rounds of groups"):
        refuse_changes(RunFolder(tmp_path), after, changes_since(before, after))


def _keys(section: Any, above: tuple[str, ...] = ()) -> Iterator[str]:
    for name in section.model_fields:
        kind = schema_tree.section_in(schema_tree.type_at((*above, name)))
        yield from _keys(kind, (*above, name)) if kind else [schema_tree.dotted((*above, name))]


def test_the_table_names_settings_that_there_are() -> None:
    known = list(_keys(Config))
    for name in (*IMMUTABLE, *MUTABLE):
        assert any(key == name or key.startswith(name if name.endswith(".") else f"{name}.") for key in known), name


@pytest.mark.parametrize("evidence", but({"history"}, ["history", "summary", "metrics"]))
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(run_small: Callable[..., Remains], evidence: str) -> None:
    """Whatever else is left of it."""
    run = run_small(base=SAVING)
    shutil.rmtree(run.folder.checkpoints_dir)
    if evidence != "history":
        run.folder.history_path.unlink()
    if evidence == "metrics":
        run.folder.summary_path.unlink()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}
    newest = 2 if evidence == "metrics" else 3
    with pytest.raises(UserError, match=rf"newest of step {newest}, but .*checkpoints holds none: .*restart"):
        resume(run, "train.steps=4")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.name in {p.name for p in before}} == before


def test_a_run_that_never_saved_starts_from_the_beginning_and_says_so(run_small: Callable[..., Remains]) -> None:
    run = run_small(base=SAVING)
    shutil.rmtree(run.folder.checkpoints_dir)
    run.folder.history_path.write_text(json.dumps({"time_s": 1.0, "event": "began", "step": 0}) + "\n")
    run.folder.summary_path.unlink()
    lines = run.folder.metrics_path.read_bytes().splitlines(keepends=True)
    run.folder.metrics_path.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] <= 1))
    shutil.rmtree(run.folder.path / "sums")
    said = resume(run)
    assert "warning: the run ended before its first checkpoint: it starts from the beginning" in said
    assert run.checkpoint.step == 3


def test_a_checkpoint_without_its_manifest_is_not_passed_over(run_small: Callable[..., Remains]) -> None:
    run = run_small(base=SAVING)
    (run.checkpoint.path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"step-000003 is damaged \(it has no manifest\): `roll repair"):
        resume(run, "train.steps=4")


def test_a_checkpoint_that_is_gone_is_said(run_small: Callable[..., Remains]) -> None:
    run = run_small(base=SAVING)
    shutil.rmtree(run.checkpoint.path)
    assert "warning: the checkpoint of step 3 is gone: the run continues from step 2" in resume(run)
    assert run.checkpoint.step == 3
