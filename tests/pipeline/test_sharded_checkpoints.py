"""What becomes of the checkpoints that ranks write: exported, measured, trained on, damaged, and cut short."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ONE, SMALL, TINY, Remains
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.cli import main
from roll.config import UserError, load_config
from roll.config.errors import RunError
from roll.model.find import find_model
from roll.model.loading import load_model
from roll.model.shard_folder import ShardFolder
from roll.pipeline.entrypoints import train
from roll.pipeline.recorder import Recorder
from roll.pipeline.report import SilentReporter, StepReport
from roll.pipeline.signals import Stopped
from roll.run import Checkpoints
from roll.run.checkpoint import _manifest_checksum

MIB = 2**20
SHARDED = "{strategy: sharded, replicas: 2}"
RANKS = f"roles.actor_train={SHARDED}"
EXACT = (*SMALL, "deterministic=true", "model.dtype=fp32", "train.lr=1e-3", "train.steps=3", "run.checkpoint_every=2")


@pytest.fixture
def copy(over_ranks: Remains, tmp_path: Path) -> Remains:
    """To be damaged: six steps on two ranks, saved after every second one."""
    shutil.copytree(over_ranks.path, tmp_path / "copy")
    return Remains(tmp_path / "copy")


def masters(run: Remains, step: int) -> dict[str, Tensor]:
    shards = ShardFolder(run.path / "checkpoints" / f"step-{step:06d}" / "shards")
    return {name.removeprefix("master/"): shards.whole(name) for name in shards if name.startswith("master/")}


def same_bits(model: Any, weights: dict[str, Tensor]) -> bool:
    found = dict(model.named_parameters())
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


@torch.no_grad()
def log_probs(model: Any, ids: list[int]) -> Tensor:
    """Of every token but the first, by `transformers` alone."""
    logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.thorough
def test_an_exported_model_gives_the_log_probs_that_the_run_recorded(copy: Remains, tmp_path: Path) -> None:
    """The samples of step 5 were drawn by the weights after step 4, which engines have verified against the trainer."""
    shutil.rmtree(copy.path / "checkpoints" / "step-000006")
    out = tmp_path / "out"
    assert main(["export", str(copy.path), str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert same_bits(model, masters(copy, 4))
    rows = copy.samples()[5]
    assert len(rows) == 8
    for row in rows:
        drawn = [position for position, version in enumerate(row["versions"]) if version >= 0]
        assert {row["versions"][position] for position in drawn} == {4}
        computed = log_probs(model, row["ids"])[[position - 1 for position in drawn]].tolist()
        assert computed == pytest.approx([row["logprobs"][position] for position in drawn], abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "7"}], add_generation_prompt=True)
    assert tokenizer.decode(rendered["input_ids"]) == "<|user|>7<|end|><|assistant|>"
    assert model.generation_config.eos_token_id == 0


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Of this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("strategy", ["sharded", "single"])
def test_an_export_that_does_not_fit_is_one_message_and_leaves_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str], strategy: str
) -> None:
    run: Remains = request.getfixturevalue("over_ranks" if strategy == "sharded" else "undisturbed")
    capfd.readouterr()
    with files_of_at_most(MIB):
        assert main(["export", str(run.path), str(tmp_path / "out")]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"the run failed: cannot write {tmp_path / 'out'}: File too large (")
    assert said.endswith(" free): make room, or write another folder\n")
    assert list(tmp_path.iterdir()) == []


def measured(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return {key: value for key, value in found.items() if key not in ("model", "step", "seconds")}


@pytest.mark.thorough
def test_ranks_and_one_process_with_an_exported_folder_answer_alike(
    over_ranks: Remains, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", str(over_ranks.path), out]) == 0
    by_ranks = measured(capfd, str(over_ranks.path))
    assert measured(capfd, TINY, *EXACT, f"model={out}") == by_ranks


@pytest.mark.thorough
def test_a_run_begins_from_shards_over_ranks_and_in_one_process(
    over_ranks: Remains, run_small: Callable[..., Remains]
) -> None:
    """Actor and reference, of the newest checkpoint or of one that is named."""
    named = f"model={over_ranks.path / 'checkpoints' / 'step-000004' / 'model'}"
    beside = ("algorithm.kl_coef=0.1", "train.steps=1", "train.lr=1e-12")
    ranks = run_small(named, RANKS, f"roles.reference={SHARDED}", *beside, name="ranks", base=EXACT)
    alone = run_small(named, *beside, name="alone", base=EXACT)
    assert ranks.samples() == alone.samples()
    begun, four = masters(ranks, 1), masters(over_ranks, 4)
    assert all(torch.allclose(begun[name], four[name], rtol=0, atol=1e-9) for name in four)
    assert same_bits(load_model(find_model(str(over_ranks.path)), torch.float32, 0), masters(over_ranks, 6))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def unlist(file: Path) -> None:
    """The manifest no longer has it."""
    manifest = file.parent.parent / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["files"][f"shards/{file.name}"]
    manifest.write_text(json.dumps(content | {"check": _manifest_checksum(content)}))


DAMAGES = [(flip, "__1_0.distcp"), (Path.unlink, "__0_0.distcp"), (cut, ".metadata"), (unlist, "__1_0.distcp")]


@pytest.mark.parametrize(("damage", "name"), DAMAGES, ids=["flipped", "missing", "cut", "not in the manifest"])
def test_damaged_shards_are_refused_by_name_and_moved_aside(
    copy: Remains, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None], name: str
) -> None:
    file = copy.path / "checkpoints" / "step-000006" / "shards" / name
    damage(file)
    with pytest.raises(UserError) as refused:
        train(load_config(TINY, [*ONE, RANKS, f"run={copy.path}", "train.steps=7"]), resume=True)
    repair = f"`roll repair {copy.path}` moves it aside, and the run continues from step-000004"
    assert f"checkpoint file {file} is damaged (" in str(refused.value)
    assert repair in str(refused.value)
    capfd.readouterr()
    assert main(["export", str(copy.path), str(tmp_path / "out")]) == 2
    assert f"checkpoint file {file} is damaged (" in capfd.readouterr().err
    assert not list(tmp_path.glob("*out*"))
    assert main(["repair", str(copy.path)]) == 0
    assert copy.checkpoint.step == 4


@pytest.mark.parametrize(("damage", "name"), DAMAGES[:3], ids=["flipped", "missing", "cut"])
def test_a_model_whose_shards_are_damaged_is_refused_by_name(
    copy: Remains, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None], name: str
) -> None:
    saved = copy.path / "checkpoints"
    file = saved / "step-000006" / "shards" / name
    damage(file)
    capfd.readouterr()
    assert main(["eval", str(copy.path), "roles.actor_train={}"]) == 2
    said = "".join(capfd.readouterr().err.split("\n"))
    assert f"model: {file} is damaged (" in said
    assert f"write another checkpoint of that run, such as {saved / 'step-000004' / 'model'}" in said
    assert "Traceback" not in said


@pytest.mark.thorough
def test_a_rank_that_cannot_write_ends_the_run_with_one_message(tmp_path: Path) -> None:
    """A limit on files that weights on their way to engines stay under, and a rank's shards do not."""
    path, reporter = tmp_path / "run", Steps()
    rare = ("train.steps=18", "run.checkpoint_every=6", "weight_sync.bucket_mb=1")
    config = load_config(TINY, [*EXACT, RANKS, *rare, f"run={path}"])
    with files_of_at_most(5 * MIB), pytest.raises(RunError) as failed:
        train(config, reporter=reporter)
    assert str(failed.value).startswith(f"checkpoints/step-000006 could not be written to {path}: File too large (")
    assert "there is no checkpoint yet" in str(failed.value)
    assert 6 <= reporter.last < 12, "it does not go on until the next checkpoint is due"
    assert not list(path.rglob("*tmp-*"))


class Steps(SilentReporter):
    last = 0

    def stepped(self, report: StepReport) -> None:
        self.last = report.step


@pytest.mark.thorough
def test_a_run_that_is_ended_while_ranks_write_has_a_whole_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Recorder._finish

    async def struck(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        await finish(*arguments)

    monkeypatch.setattr(Recorder, "_finish", struck)
    with pytest.raises(Stopped):
        train(load_config(TINY, [*EXACT, RANKS, f"run={tmp_path / 'run'}"]), reporter=SilentReporter())
    examined = list(Checkpoints(Remains(tmp_path / "run").folder).inspect())
    assert all(problem is None for _, _, problem in examined)
