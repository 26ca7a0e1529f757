"""ROLL's engines, as backends of the registry. Each imports its engine when it makes one."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from roll.cluster.worker import WorkerPlacement
from roll.config.schema import Config, RoleConfig
from roll.config.secrets import resolved
from roll.engine.routes import ExpertLayers
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model, load_model_config, load_tokenizer
from roll.model.rope import longest_sequence
from roll.strategy.infer import vllm_args
from roll.strategy.infer.base import InferStrategy
from roll.strategy.infer.engine_role import EngineRole
from roll.strategy.registry import InferBackend


class NativeBackend(InferBackend):
    """The embedded engine."""

    in_place = True

    @classmethod
    def engine(cls, config: Config, placement: WorkerPlacement, role: EngineRole, *, own_weights: bool) -> InferStrategy:
        from roll.strategy.infer.native import NativeStrategy

        source = find_model(role.model.path)

        def make_model() -> PreTrainedModel:
            return load_model(source, choose_dtype(role.model.dtype, placement.device), config.seed).to(placement.device)

        return NativeStrategy(
            load_tokenizer(source, role.model),
            max_running=role.max_running,
            exact=config.deterministic,
            kv_tokens=role.kv_cache_tokens,
            records_routes=role.records_routes,
            model=make_model() if own_weights else None,
            make_model=make_model,
        )


class VllmBackend(InferBackend):
    parallel = frozenset({"tensor"})
    takes_arguments = True
    starting = "vLLM"
    host_bytes = 700 << 20
    loads_through_host = True

    @classmethod
    def check(cls, config: Config, role: str) -> None:
        vllm_args.check_vllm(config, role)

    @classmethod
    def cache_bytes(
        cls, shape: PretrainedConfig, itemsize: int, settings: RoleConfig, running: int, response: int
    ) -> int:
        context, together = settings.context_within(longest_sequence(shape)), settings.parallel.tensor
        planned = vllm_args.cache_bytes(shape, itemsize, context, running, response, together)
        return int(settings.engine_args.get("kv_cache_memory_bytes", planned))

    @classmethod
    def engine(cls, config: Config, placement: WorkerPlacement, role: EngineRole, *, own_weights: bool) -> InferStrategy:
        from roll.strategy.infer.vllm import VllmStrategy
        from roll.strategy.infer.vllm_engine import VllmSettings

        cls.check(config, role.name)  # again, because the worker's machine may differ from the one the run was started on
        source, wanted = find_model(role.model.path), role.settings
        shape, dtype = load_model_config(source), choose_dtype(role.model.dtype, placement.device)
        layers = ExpertLayers.of(shape) if role.records_routes else None
        args = {
            **vllm_args.route_args(layers, placement.device, role.name),
            **vllm_args.process_args(placement, wanted.parallel.tensor),
            **vllm_args.length_args(shape, wanted, role.name),
            **vllm_args.memory_args(shape, dtype.itemsize, role, placement),
        }
        settings = VllmSettings(
            model=source.location,
            shape=shape,
            dtype=dtype,
            max_running=role.max_running,
            device=placement.device,
            tensor_parallel=wanted.parallel.tensor,
            sleeps=placement.device != "cpu" and config.offload != "never",
            seed=config.seed,
            args=args | resolved(wanted.engine_args, f"roles.{role.name}.engine_args"),
            environment=vllm_args.environment(placement, config),
            role=role.name,
            layers=layers,
        )
        return VllmStrategy(load_tokenizer(source, role.model), settings, placement.name)
