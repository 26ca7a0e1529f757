"""Starts a vLLM engine and builds its sampling parameters. The only file that imports vLLM, and only when it is used.

It uses interfaces that are public and equal in vLLM 0.24 and 0.32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from roll.config.errors import RunError, UserError
from roll.engine.request import SamplingParams, seed_of
from roll.engine.routes import ExpertLayers


@dataclass(frozen=True)
class VllmSettings:
    """The settings of an engine."""

    model: str | None
    """Folder or hub id of the model's config; None to write `shape` to a folder."""
    shape: PretrainedConfig
    dtype: torch.dtype
    max_running: int
    device: str = "cpu"
    tensor_parallel: int = 1
    sleeps: bool = False
    """Whether it can be offloaded; only engines on GPUs can."""
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    """Additional engine arguments, by vLLM's names."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the engine's processes."""
    role: str = "actor_infer"
    """The role these settings belong to, for messages."""
    layers: ExpertLayers | None = None
    """The layers whose experts are recorded, if `args` requests that."""

    @property
    def untied(self) -> bool:
        """Whether the engine's output layer is a separate tensor. On a CPU vLLM packs a copy of it at the start, and with
        tied weights would continue to use the old copy."""
        return self.device == "cpu" and bool(self.shape.tie_word_embeddings)


def vllm_sampling_params(sampling: SamplingParams, prompt_tokens: int, routes_from: int | None = None) -> Any:
    """Sampling parameters for vLLM. It reports routed experts from token `routes_from` on, if given."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # the request itself says what ends a response
        seed=seed_of(sampling.seed, prompt_tokens) >> 1,  # a resumed request gets new noise; vLLM's seeds are signed
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **_route_args(routes_from),
    )


def probe_params() -> Any:
    """Sampling parameters that return a prompt's own log-probs."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, ignore_eos=True, detokenize=False)


def route_params(routes_from: int) -> Any:
    """Sampling parameters that return the routed experts of a prompt, from this token on."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, **_route_args(routes_from))


def _route_args(routes_from: int | None) -> dict[str, Any]:
    return {} if routes_from is None else {"routed_experts_prompt_start": routes_from}


def start(settings: VllmSettings, folder: str) -> Any:
    """Starts an engine with random weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if settings.model is None:
        shape = settings.shape
        shape.architectures = shape.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.model_type]]
        shape.save_pretrained(folder)
    args = {
        "model": settings.model or folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "max_num_seqs": settings.max_running,
        "tensor_parallel_size": settings.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "roll.strategy.infer.vllm_worker.RollWorker",
        "enable_sleep_mode": settings.sleeps,
        "disable_log_stats": True,
    }
    try:
        config = AsyncEngineArgs(**args, **_arguments(settings)).create_engine_config()
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"roles.{settings.role}: vLLM refuses its arguments {dict(settings.args)}: {reason}") from error
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except RuntimeError as error:
        raise RunError(
            f"vLLM's engine did not start with {dict(settings.args)} ({error}): the messages of its processes are "
            "above, with executor=ray in logs/ of the run; VLLM_LOGGING_LEVEL=INFO in the environment gives more of them"
        ) from error


def _arguments(settings: VllmSettings) -> dict[str, Any]:
    """The user's arguments, and those an engine on a CPU needs: an untied output layer, and no chunked prefill, because a
    request with its own seed whose prompt is computed in chunks crashes vLLM's worker (0.32)."""
    given = dict(settings.args)
    if settings.device == "cpu":
        given.setdefault("enable_chunked_prefill", False)
    if settings.untied:
        given["hf_overrides"] = {**given.get("hf_overrides", {}), "tie_word_embeddings": False}
    return given


@contextmanager
def environment_of(settings: VllmSettings, more: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process while the engine's processes are started, which inherit them."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with roles that are offloaded in turn
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled on first use
    }
    if settings.dtype == torch.float32:
        defaults["TRITON_F32_DEFAULT"] = "ieee"  # fp32 is chosen to match the trainer's log-probs: no TF32
    # A forked process would miss the threads of its parent's libraries.
    forced = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **settings.environment, **more}
    before = dict(os.environ)
    os.environ.update({name: value for name, value in defaults.items() if name not in os.environ} | forced)
    try:
        yield
    finally:
        for name in (*defaults, *forced):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
