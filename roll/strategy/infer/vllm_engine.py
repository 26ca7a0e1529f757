"""An engine of vLLM: how it is started, and how it is asked for tokens. The one file that imports vLLM, when it is used.

Interfaces that are public in vLLM 0.24 and 0.32, and the same in both.
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
    """What an engine is started with."""

    model: str | None
    """Folder or hub id of the model's shape; None to write `shape` to a folder."""
    shape: PretrainedConfig
    dtype: torch.dtype
    max_running: int
    device: str = "cpu"
    tensor_parallel: int = 1
    sleeps: bool = False
    """Whether it may leave its device; a GPU's engine alone can."""
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's engine, by its own names."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the engine's processes are started with."""
    role: str = "actor_infer"
    """Whose settings these are, for what is said of them."""
    layers: ExpertLayers | None = None
    """Those whose experts are recorded, where that is asked for in `args`."""

    @property
    def untied(self) -> bool:
        """Whether the engine's output layer is made a tensor of its own: on a CPU vLLM packs a copy of it when it starts,
        and would go on with that copy of a tied one."""
        return self.device == "cpu" and bool(self.shape.tie_word_embeddings)


def drawing(sampling: SamplingParams, prompt_tokens: int, routes_from: int | None = None) -> Any:
    """How tokens are drawn, for vLLM; it tells their experts from this one on, if at all."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # what ends a response is said by its request
        seed=seed_of(sampling.seed, prompt_tokens) >> 1,  # a resumed request draws new noise; vLLM's seeds are signed
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **_telling(routes_from),
    )


def probing() -> Any:
    """How a prompt's own log-probs are asked for."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, ignore_eos=True, detokenize=False)


def recalling(routes_from: int) -> Any:
    """How the experts of a prompt are asked for, from this token on."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, **_telling(routes_from))


def _telling(routes_from: int | None) -> dict[str, Any]:
    return {} if routes_from is None else {"routed_experts_prompt_start": routes_from}


def start(settings: VllmSettings, folder: str) -> Any:
    """An engine whose weights are noise."""
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
        said = " ".join(str(error).split())
        raise UserError(f"roles.{settings.role}: vLLM refuses its arguments {dict(settings.args)}: {said}") from error
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except RuntimeError as error:
        raise RunError(
            f"vLLM's engine did not start with {dict(settings.args)} ({error}): what its own processes said is above, "
            "with executor=ray in logs/ of the run; with VLLM_LOGGING_LEVEL=INFO in the environment they say more"
        ) from error


def _arguments(settings: VllmSettings) -> dict[str, Any]:
    """The user's, and what an engine on a CPU needs beside them: its output layer, and prompts that are computed whole,
    because with a seed of its own a request whose prompt is computed in parts ends vLLM's worker (0.32)."""
    given = dict(settings.args)
    if settings.device == "cpu":
        given.setdefault("enable_chunked_prefill", False)
    if settings.untied:
        given["hf_overrides"] = {**given.get("hf_overrides", {}), "tie_word_embeddings": False}
    return given


@contextmanager
def environment_of(settings: VllmSettings, more: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process while the engine's processes are started, which inherit them."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with roles that take turns
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled on first use
    }
    if settings.dtype == torch.float32:
        defaults["TRITON_F32_DEFAULT"] = "ieee"  # fp32 is asked for where log-probs shall be the trainer's: no TF32
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
