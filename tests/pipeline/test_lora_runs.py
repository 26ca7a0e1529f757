"""Runs that train adapters: their checkpoints, what goes on from them, and the same rewards on Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_runs import EXACT, SMALL, TINY, Remains, start_roll
from transformers import AutoModelForCausalLM

from roll import load_config
from roll.cli import main
from roll.model.tiny import tiny_model
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter

pytestmark = pytest.mark.usefixtures("elsewhere")

LORA = ("model.lora.rank=4", "model.dtype=fp32", "train.lr=1e-2")
KL = ("algorithm.kl_coef=0.05", "algorithm.kl_in=reward")
RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=600", "ray.call_deadline_s=600")


def adapters(run: Remains) -> Path:
    return run.checkpoint.path / "model"


def weights(run: Remains) -> bytes:
    return (adapters(run) / "adapter_model.safetensors").read_bytes()


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Of tokens that have embeddings: that of padding is zero, where norms make much of the last bit."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(4, 24)[None]).logits
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    """A deterministic run with a penalty, that nothing happened to."""
    path = tmp_path_factory.mktemp("lora") / "run"
    train(load_config(TINY, [*EXACT, *LORA, *KL, f"run={path}"]), reporter=SilentReporter())
    return Remains(path)


def test_a_checkpoint_holds_adapters_alone(trained: Remains) -> None:
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in adapters(trained).iterdir()}
    assert not (adapters(trained) / "model.safetensors").exists()
    assert all(".lora_" in name for name in load_file(adapters(trained) / "adapter_model.safetensors"))
    assert all(".lora_" in name for name in load_file(trained.checkpoint.path / "optimizer.safetensors"))


def test_the_penalty_is_against_the_base(trained: Remains) -> None:
    """0 at first, because fresh adapters change nothing; then it is not."""
    kl = [row["train/kl"] for row in trained.metrics() if "train/kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-4


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_same_bits(tmp_path: Path, trained: Remains) -> None:
    path = tmp_path / "run"
    arguments = ["train", TINY, *EXACT, *LORA, *KL, f"run.dir={path}"]
    child = start_roll(arguments, tmp_path / "out")
    child.wait_for(lambda: list(path.glob("checkpoints/step-000002/manifest.json")))
    child.kill()
    assert main([*arguments, "--resume"]) == 0
    again = Remains(path)
    assert weights(again) == weights(trained)
    assert again.optimizer() == trained.optimizer()
    assert again.samples() == trained.samples()


def test_export_eval_and_a_run_from_there(
    tmp_path: Path, trained: Remains, run_small: Callable[..., Remains], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained.path), str(tmp_path / "merged")]) == 0
    assert main(["export", str(trained.path), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert "PeftModel.from_pretrained(base, " in capfd.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    by_peft = PeftModel.from_pretrained(tiny_model(0), tmp_path / "adapter")
    torch.testing.assert_close(logits(merged), logits(by_peft), atol=1e-4, rtol=0)
    assert (logits(merged) - logits(tiny_model(0))).abs().max() > 0.01
    assert main(["eval", str(trained.path)]) == 0
    further = run_small(f"model={trained.path}", *LORA, "train.steps=1", name="further")
    assert str(trained.checkpoint.path) in (adapters(further) / "roll_base.json").read_text()
    whole = run_small(f"model={further.path}", "train.steps=1", "train.lr=1e-12", "model.dtype=fp32", name="whole")
    assert main(["export", str(further.path), str(tmp_path / "exported")]) == 0
    same = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "exported", adapters(whole))]
    torch.testing.assert_close(logits(same[0]), logits(same[1]), atol=1e-5, rtol=0)
    assert main(["export", str(whole.path), str(tmp_path / "none"), "--adapter"]) == 2
    assert "trained all weights and has no adapters" in capfd.readouterr().err


def test_a_plan_has_no_reference(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, *SMALL, *LORA, *KL]) == 0
    said = capfd.readouterr().out
    assert "reference" not in said
    assert "adapters of rank 4" in said
    assert "997,248 parameters, of adapters 48,640" in said
    assert main(["plan", TINY, *LORA, *KL, "roles.reference=cpu"]) == 2
    assert "the actor without its adapters is the reference" in capfd.readouterr().err


@pytest.mark.thorough
def test_supervised_fine_tuning(tmp_path: Path) -> None:
    sft = {"pipeline": "sft", "model": {"path": "tiny", "lora": 8}, "data": "echo", "train": {"steps": 12, "lr": 2e-2}}
    train(load_config({**sft, "run": str(tmp_path / "run"), "threads": 1}), reporter=SilentReporter())
    losses = [row["eval/loss"] for row in Remains(tmp_path / "run").metrics() if "eval/loss" in row]
    assert losses[-1] < losses[0] - 0.2
    assert all(".lora_" in name for name in load_file(adapters(Remains(tmp_path / "run")) / "adapter_model.safetensors"))


@pytest.mark.thorough
def test_two_ranks_train_the_same_adapters(
    tmp_path: Path, run_small: Callable[..., Remains], trained: Remains, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process goes on with them, and they are exported."""
    run = run_small("roles.actor_train={strategy: sharded, replicas: 2}", *LORA, *KL, base=EXACT)
    for here, there in zip(trained.metrics(), run.metrics(), strict=True):
        for name in {"reward/mean", "train/kl", "train/grad_norm"} & here.keys():
            assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5)
    one, two = (load_file(adapters(each) / "adapter_model.safetensors") for each in (trained, run))
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-3
    config = load_config(TINY, [*EXACT, *LORA, *KL, "train.steps=7", f"run={run.path}"])
    train(config, resume=True, reporter=SilentReporter())
    assert (run.checkpoint.path / "optimizer.safetensors").is_file()
    assert main(["export", str(run.path), str(tmp_path / "merged")]) == 0
    assert "step 7" in capfd.readouterr().out
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["shared_memory", "broadcast"])
def test_the_same_rewards_on_ray(run_small: Callable[..., Remains], trained: Remains, path: str) -> None:
    """There the engine has merged weights, whose roundings are not those of adapters beside them."""
    run = run_small(*RAY, *LORA, *KL, f"weight_sync={path}", "fault_tolerance.spare_trainer=false", base=EXACT)
    for here, there in zip(trained.metrics(), run.metrics(), strict=True):
        assert here.get("reward/mean") == pytest.approx(there.get("reward/mean"), abs=0.1)
    mismatch = [row["train/rollout_logprob_diff_max"] for row in run.metrics() if "train/rollout_logprob_diff_max" in row]
    assert 0 < max(mismatch) < 1e-3
