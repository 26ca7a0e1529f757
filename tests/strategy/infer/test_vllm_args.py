"""Arguments of vLLM in a config: checked by its own list before anything starts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from roll.cli import main
from roll.cluster import WorkerPlacement
from roll.config import Config
from roll.config.errors import UserError
from roll.config.schema import RoleConfig, RolesConfig
from roll.config.workers import JudgeRole
from roll.engine.request import Request, SamplingParams
from roll.engine.routes import ExpertLayers
from roll.strategy.infer.engine_role import EngineRole
from roll.strategy.infer.vllm import _Running
from roll.strategy.infer.vllm_args import (
    SET_BY_ROLL,
    argument_names,
    bytes_per_token,
    check_vllm,
    environment,
    length_args,
    memory_args,
    route_args,
)

INSTALLED = importlib.util.find_spec("vllm") is not None
SOURCE = """
class EngineArgs:
    model: str = ""
    quantization: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    limit = 3

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

class Other:
    nothing: int = 0
"""


def config(args: dict[str, Any] | None = None, **settings: Any) -> Config:
    role = {"strategy": "vllm", "engine_args": args or {}}
    return Config.model_validate({"model": "tiny", "roles": {"actor_infer": role}, **settings})


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package vllm with these arguments, found in place of any other."""
    folder = tmp_path / "vllm" / "engine"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('it is looked at, not imported')")
    (folder / "arg_utils.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_without_vllm_the_user_is_told_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("model: tiny\ntasks: echo\nroles: {actor_infer: {strategy: vllm}}\n")
    assert main(["train", "x.yaml"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "vLLM is not installed" in said
    assert "pip install vllm" in said
    assert "roles.actor_infer.strategy=native" in said
    assert not (tmp_path / "runs").exists()


def test_names_are_read_and_nothing_is_imported(pretended: None) -> None:
    names = {"model", "quantization", "max_model_len", "gpu_memory_utilization", "enable_log_requests"}
    assert argument_names() == names
    assert "vllm" not in sys.modules or INSTALLED


def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest(pretended: None) -> None:
    check_vllm(config({"quantization": "fp8", "max_model_len": 100}))
    with pytest.raises(UserError, match=r"no argument 'quantisation'; did you mean 'quantization'\?"):
        check_vllm(config({"quantisation": "fp8"}))


@pytest.mark.parametrize("name", SET_BY_ROLL)
def test_an_argument_that_is_rolls_to_set_is_refused_with_what_to_write(pretended: None, name: str) -> None:
    with pytest.raises(UserError, match=rf"engine_args\.{name} is set by ROLL: .+"):
        check_vllm(config({name: 1}))


def test_what_a_judges_engine_is_set_by_is_the_judges(pretended: None) -> None:
    roles = RolesConfig(judge=JudgeRole(strategy="vllm", engine_args={"max_num_seqs": 3}))
    with pytest.raises(UserError, match=r"roles\.judge\.engine_args\.max_num_seqs .* write roles\.judge\.max_running"):
        check_vllm(config().model_copy(update={"roles": roles}), "judge")


@pytest.mark.parametrize("section", ["rollout", "eval"])
def test_temperatures_that_vllm_does_not_draw_at_are_refused_at_load(pretended: None, section: str) -> None:
    with pytest.raises(UserError, match=rf"{section}\.temperature=0\.005 .* write 0\.01 or more"):
        check_vllm(config(**{section: {"temperature": 0.005}}))


def test_the_same_bits_every_time_are_not_vllms_to_give(pretended: None) -> None:
    with pytest.raises(UserError, match=r"write roles\.actor_infer\.strategy=native, or deterministic=false"):
        check_vllm(config(deterministic=True))


def test_the_cache_holds_what_may_run_unless_the_user_says_how_much() -> None:
    shape = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    shape.max_position_embeddings = 4096
    place = WorkerPlacement("actor_infer")
    few = memory_args(shape, 2, EngineRole.of(config(rollout={"max_running": 1, "max_new_tokens": 10})), place)
    many = memory_args(shape, 2, EngineRole.of(config(rollout={"max_running": 64, "max_new_tokens": 88})), place)
    token = 2 * 2 * 2 * 16 * 2
    assert few == {"kv_cache_memory_bytes": int(1.25 * 4096 * token)}  # the longest sequence must fit
    assert many == {"kv_cache_memory_bytes": int(1.25 * 64 * 344 * token)}
    shorter = memory_args(shape, 2, EngineRole.of(config({"max_model_len": 2048}, rollout={"max_running": 1})), place)
    assert shorter == {"kv_cache_memory_bytes": int(1.25 * 2048 * token)}
    least = memory_args(shape, 2, EngineRole.of(config({"max_model_len": 32}, rollout={"max_running": 1})), place)
    assert least == {"kv_cache_memory_bytes": int(1.25 * 1024 * token)}  # some blocks
    assert memory_args(shape, 2, EngineRole.of(config({"kv_cache_memory_bytes": 1})), place) == {}
    assert memory_args(shape, 2, EngineRole.of(config({"gpu_memory_utilization": 0.5})), place) == {}
    assert "gpu_memory_utilization" in memory_args(
        shape, 2, EngineRole.of(config()), WorkerPlacement("actor_infer", device="cuda:0")
    )


def test_the_cache_of_an_engine_on_several_devices_is_that_of_one() -> None:
    shape = LlamaConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    sizes = {together: bytes_per_token(shape, 2, together) for together in (1, 2, 4, 8)}
    assert sizes == {1: 4 * 64, 2: 2 * 64, 4: 64, 8: 64}


LONG = {"original_max_position_embeddings": 512, "short_factor": [1.0] * 64, "long_factor": [4.0] * 64}


def stretched(kind: str, **settings: Any) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **settings}
    return LlamaConfig(max_position_embeddings=2048, rope_parameters=rope)


@pytest.mark.parametrize(
    ("shape", "longest"),
    [
        (LlamaConfig(max_position_embeddings=2048), None),
        (stretched("linear", factor=4.0), 2048),
        (stretched("dynamic", factor=4.0), 2048),
        (stretched("longrope", factor=4.0, **LONG), 512),
    ],
)
def test_an_engine_takes_sequences_as_long_as_the_trainer_does(shape: LlamaConfig, longest: int | None) -> None:
    assert length_args(shape, RoleConfig(), "actor_infer") == ({"max_model_len": longest} if longest else {})
    assert length_args(shape, RoleConfig(engine_args={"max_model_len": 256}), "actor_infer") == {}
    with pytest.raises(UserError, match=r"max_model_len is 4096, but .* up to .* tokens: write"):
        length_args(shape, RoleConfig(engine_args={"max_model_len": 4096}), "actor_infer")
    with pytest.raises(UserError, match="verified by a sequence of 12 tokens: write more"):
        length_args(shape, RoleConfig(engine_args={"max_model_len": 12}), "actor_infer")


@pytest.mark.parametrize("value", ["1024", -1, 0, True, None, 8.5])
def test_lengths_and_sizes_are_whole_numbers(pretended: None, value: Any) -> None:
    with pytest.raises(UserError, match=r"max_model_len is .*: write a whole number above 0"):
        check_vllm(config({"max_model_len": value}))


def test_an_engine_started_from_the_controllers_process_sees_its_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    place = WorkerPlacement("actor_infer", device="cuda:1", gpus=(1, 2), threads=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(place, config()) == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert environment(place, config())["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert environment(place, config(executor="ray")) == {"OMP_NUM_THREADS": "3"}


@pytest.mark.vllm
def test_the_arguments_that_roll_sets_are_vllms() -> None:
    known = argument_names()
    assert {"quantization", "max_model_len", "enforce_eager", "kv_cache_memory_bytes"} <= known
    assert SET_BY_ROLL.keys() <= known


MIXTURE = Qwen3MoeConfig(
    vocab_size=90,
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    mlp_only_layers=[1, 2],
)


def test_vllm_reports_experts_if_the_model_has_some_and_its_version_can(pretended: None, tmp_path: Path) -> None:
    layers = ExpertLayers.of(MIXTURE)
    assert layers is not None
    assert layers.numbers == (0, 3)
    assert ExpertLayers.of(LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=90)) is None
    assert route_args(None, "cpu", "actor_infer") == {}
    with pytest.raises(UserError, match=r"only on GPUs: write rollout\.router_replay=false, or .*strategy=native"):
        route_args(layers, "cpu", "actor_infer")
    with pytest.raises(UserError, match=r"the installed vLLM does not report .*write rollout\.router_replay=false"):
        route_args(layers, "cuda:0", "actor_infer")
    arguments = tmp_path / "vllm" / "engine" / "arg_utils.py"
    arguments.write_text(SOURCE.replace("quantization:", "enable_return_routed_experts: bool = False\n    quantization:"))
    assert route_args(layers, "cuda:0", "actor_infer") == {"enable_return_routed_experts": True}


@pytest.mark.parametrize("start", [0, 3, 4, 5])
def test_routes_of_all_layers_are_cut_to_layers_with_experts_and_to_the_requested_tokens(start: int) -> None:
    """A prompt of 5 tokens and 3 sampled ones: vLLM reports all but the last, from a token of the prompt on."""
    layers = ExpertLayers.of(MIXTURE)
    assert layers is not None
    running = _Running(Request("a", np.arange(5, dtype=np.int32), SamplingParams(3), routes_from=start))
    running.ids, running.logprobs, running.versions, running.verified = [1, 2, 3], [0.0] * 3, [0] * 3, 3
    assert running.completion("stop", layers).routes is None, "it was not reported"
    whole = np.arange(8 * 4 * 2, dtype=np.uint8).reshape(8, 4, 2)
    assert running.reported_from == min(start, 4)
    running.experts = whole[running.reported_from : 7]
    done = running.completion("stop", layers)
    assert done.routes is not None
    assert done.routes.tolist() == whole[start:7, [0, 3]].reshape(7 - start, 4).tolist()
    running.experts = whole[running.reported_from :]  # asked for as those of a prompt, they are one more
    again = running.completion("stop", layers)
    assert again.routes is not None
    assert again.routes.tolist() == done.routes.tolist()
    assert running.completion("stop", None).routes is None
