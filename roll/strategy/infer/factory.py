"""Builds the engine that a config names, for a worker's placement."""

from __future__ import annotations

from transformers import PreTrainedModel

from roll.cluster.worker import WorkerPlacement
from roll.config.schema import Config
from roll.config.secrets import resolved
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model, load_model_config, load_tokenizer
from roll.strategy.infer.base import InferStrategy


def make_engine(placement: WorkerPlacement, config: Config, *, own_weights: bool) -> InferStrategy:
    """Without `own_weights`, the embedded engine uses the parameters of the trainer in the same process."""
    if config.roles.actor_infer.strategy == "vllm":
        return vllm_engine(placement, config)
    return _native(placement, config, own_weights)


def _native(placement: WorkerPlacement, config: Config, own_weights: bool) -> InferStrategy:
    from roll.strategy.infer.native import NativeStrategy

    source = find_model(config.model.path)

    def make_model() -> PreTrainedModel:
        return load_model(source, choose_dtype(config.model.dtype, placement.device), config.seed).to(placement.device)

    return NativeStrategy(
        load_tokenizer(source, config.model),
        max_running=config.rollout.max_running,
        exact=config.deterministic,
        kv_tokens=config.rollout.kv_cache_tokens,
        records_routes=config.rollout.router_replay,
        model=make_model() if own_weights else None,
        make_model=make_model,
    )


def vllm_engine(placement: WorkerPlacement, config: Config, role: str = "actor_infer") -> InferStrategy:
    """A vLLM engine as described by `roles.actor_infer`; `role` is the role these settings came from, for messages."""
    from roll.engine.routes import ExpertLayers
    from roll.strategy.infer.vllm import VllmStrategy
    from roll.strategy.infer.vllm_args import check_vllm, environment, length_args, memory_args, process_args, route_args
    from roll.strategy.infer.vllm_engine import VllmSettings

    wanted = config.roles.actor_infer
    check_vllm(config, wanted, role)  # again, because the worker's machine may differ from the one the run was started on
    source = find_model(config.model.path)
    shape, dtype = load_model_config(source), choose_dtype(config.model.dtype, placement.device)
    layers = ExpertLayers.of(shape) if config.rollout.router_replay and role == "actor_infer" else None
    args = {
        **route_args(layers, placement.device, role),
        **process_args(placement, wanted.parallel.tensor),
        **length_args(shape, wanted, role),
        **memory_args(shape, dtype.itemsize, config, placement),
    }
    settings = VllmSettings(
        model=source.location,
        shape=shape,
        dtype=dtype,
        max_running=config.rollout.max_running,
        device=placement.device,
        tensor_parallel=wanted.parallel.tensor,
        sleeps=placement.device != "cpu" and config.offload != "never",
        seed=config.seed,
        args=args | resolved(wanted.engine_args, f"roles.{role}.engine_args"),
        environment=environment(placement, config),
        role=role,
        layers=layers,
    )
    return VllmStrategy(load_tokenizer(source, config.model), settings, placement.name)
