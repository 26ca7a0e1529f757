"""What becomes of the checkpoints that ranks write: exported, measured, trained on, damaged, and cut short."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, TINY, WAIT_S, Remains
from test_full_disk import MIB, assert_one_message
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.cli import main
from roll.config import UserError, load_config
from roll.model.find import find_model
from roll.model.loading import load_model
from roll.model.shard_folder import ShardFolder
from roll.pipeline.launch import train
from roll.pipeline.report import SilentReporter
from roll.run import Checkpoints

SHARDED = "{strategy: sharded, replicas: 2}"
RANKS = f"roles.actor_train={SHARDED}"
EXACT = (*SMALL, "deterministic=true", "model.dtype=fp32", "train.lr=1e-3", "train.steps=3", "run.checkpoint_every=2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    """Three steps on two ranks, saved after the second and the third."""
    path = tmp_path_factory.mktemp("sharded") / "run"
    train(load_config(TINY, [*EXACT, RANKS, f"run={path}"]), reporter=SilentReporter())
    return Remains(path)


@pytest.fixture
def copy(recorded: Remains, tmp_path: Path) -> Remains:
    """To be damaged."""
    shutil.copytree(recorded.path, tmp_path / "copy")
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


def test_an_exported_model_gives_the_log_probs_that_the_run_recorded(copy: Remains, tmp_path: Path) -> None:
    """The samples of step 3 were drawn by the weights after step 2, which engines have verified against the trainer."""
    shutil.rmtree(copy.path / "checkpoints" / "step-000003")
    out = tmp_path / "out"
    assert main(["export", str(copy.path), str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert same_bits(model, masters(copy, 2))
    rows = copy.samples()[3]
    assert len(rows) == 8
    for row in rows:
        drawn = [position for position, version in enumerate(row["versions"]) if version >= 0]
        assert {row["versions"][position] for position in drawn} == {2}
        computed = log_probs(model, row["ids"])[[position - 1 for position in drawn]].tolist()
        assert computed == pytest.approx([row["logprobs"][position] for position in drawn], abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "7"}], add_generation_prompt=True)
    assert tokenizer.decode(rendered["input_ids"]) == "<|user|>7<|end|><|assistant|>"
    assert model.generation_config.eos_token_id == 0


def measured(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return {key: value for key, value in found.items() if key not in ("model", "step", "seconds")}


def test_ranks_and_one_process_with_an_exported_folder_answer_alike(
    recorded: Remains, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", str(recorded.path), out]) == 0
    by_ranks = measured(capfd, str(recorded.path))
    assert measured(capfd, TINY, *EXACT, f"model={out}") == by_ranks


def test_a_run_begins_from_shards_over_ranks_and_in_one_process(
    recorded: Remains, run_small: Callable[..., Remains]
) -> None:
    """Actor and reference, of the newest checkpoint or of one that is named."""
    named = f"model={recorded.path / 'checkpoints' / 'step-000002' / 'model'}"
    beside = ("algorithm.kl_coef=0.1", "train.steps=1", "train.lr=1e-12")
    ranks = run_small(named, RANKS, f"roles.reference={SHARDED}", *beside, name="ranks", base=EXACT)
    alone = run_small(named, *beside, name="alone", base=EXACT)
    assert ranks.samples() == alone.samples()
    begun, two = masters(ranks, 1), masters(recorded, 2)
    assert all(torch.allclose(begun[name], two[name], rtol=0, atol=1e-9) for name in two)
    assert same_bits(load_model(find_model(str(recorded.path)), torch.float32, 0), masters(recorded, 3))


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
    manifest.write_text(json.dumps(content))


DAMAGES = [(flip, "__1_0.distcp"), (Path.unlink, "__0_0.distcp"), (cut, ".metadata"), (unlist, "__1_0.distcp")]


@pytest.mark.parametrize(("damage", "name"), DAMAGES, ids=["flipped", "missing", "cut", "not in the manifest"])
def test_damaged_shards_are_refused_by_name_and_moved_aside(
    copy: Remains, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None], name: str
) -> None:
    file = copy.path / "checkpoints" / "step-000003" / "shards" / name
    damage(file)
    with pytest.raises(UserError) as refused:
        train(load_config(TINY, [*EXACT, RANKS, f"run={copy.path}", "train.steps=4"]), resume=True)
    repair = f"`roll repair {copy.path}` moves it aside, and the run continues from step-000002"
    assert f"checkpoint file {file} is damaged (" in str(refused.value)
    assert repair in str(refused.value)
    capfd.readouterr()
    assert main(["export", str(copy.path), str(tmp_path / "out")]) == 2
    assert f"checkpoint file {file} is damaged (" in capfd.readouterr().err
    assert not list(tmp_path.glob("*out*"))
    assert main(["repair", str(copy.path)]) == 0
    assert copy.checkpoint.step == 2


@pytest.mark.parametrize(("damage", "name"), DAMAGES[1:3], ids=["missing", "cut"])
def test_a_model_whose_shards_cannot_be_read_is_refused_by_name(
    copy: Remains, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None], name: str
) -> None:
    damage(copy.path / "checkpoints" / "step-000003" / "shards" / name)
    capfd.readouterr()
    assert main(["eval", str(copy.path), "roles.actor_train={}"]) == 2
    said = capfd.readouterr().err
    assert f"model: '{copy.path}' could not be loaded: " in said
    assert f"step-000003/shards/{name}" in said
    assert "Traceback" not in said


def run_roll(script: str, *arguments: str, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    command = [sys.executable, "-c", script, "train", TINY, *EXACT, RANKS, *arguments, "--plain"]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, preexec_fn=limit)


ROLL = "import sys; from roll.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_rank_that_cannot_write_ends_the_run_with_one_message(tmp_path: Path) -> None:
    """A limit on files that weights on their way to engines stay under, and a rank's shards do not."""
    path = tmp_path / "run"
    done = run_roll(ROLL, "weights.bucket_mb=1", "train.steps=50", f"run={path}", limit_bytes=5 * MIB)
    assert_one_message(done, "File too large", "checkpoints/step-000002", "there is no checkpoint yet")
    assert "step 5/" not in done.stdout, "it does not go on until the next checkpoint is due"
    assert not list(path.rglob("*tmp-*"))


STRUCK = """
import os, signal, sys
import roll.pipeline.recorder as recorder
from roll.cli import main

async def struck(self, saving, written):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    await finish(self, saving, written)

finish, recorder.Recorder._finish = recorder.Recorder._finish, struck
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_that_is_ended_while_ranks_write_has_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = run_roll(STRUCK, f"run={path}")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "Traceback" not in done.stderr
    saved = [(checkpoint, problem) for _, checkpoint, problem in Checkpoints(Remains(path).folder).examined()]
    assert all(problem is None for _, problem in saved)
