"""How a role computes: the strategy that the config and its devices give it, and the mesh of a sharded one."""

from __future__ import annotations

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.names import either
from roll.config.workers import ParallelConfig, RoleConfig
from roll.devices.inventory import Inventory
from roll.devices.spec import parse_devices

TRAIN_ROLES = ("actor_train", "critic", "reference", "reward_model")
"""Computed by a training strategy, with or without gradients."""
INFER_ROLES = ("actor_infer", "judge")
"""Computed by an engine."""
STRATEGIES = {**dict.fromkeys(TRAIN_ROLES, ("single", "sharded")), **dict.fromkeys(INFER_ROLES, ("native", "vllm"))}
"""How roles with a model may compute; `auto` is the first, but `sharded` for a trainer with several GPUs of its own."""


def choose_strategy(role: str, wanted: RoleConfig, inventory: Inventory) -> str:
    """The role's strategy, empty for a role without a model; refuses one that it cannot have, and settings that only
    another one reads."""
    possible = STRATEGIES.get(role, ("",))
    strategy = _auto(role, wanted, inventory) if wanted.strategy == "auto" else wanted.strategy
    if strategy in possible:
        _check_vllm_alone(role, wanted, strategy)
        _check_sharded_alone(role, wanted, strategy)
        return strategy
    if not possible[0]:
        raise UserError(
            f"roles.{role}.strategy is {wanted.strategy!r}, but {role} has no model: remove roles.{role}.strategy"
        )
    does = "trains" if strategy in STRATEGIES["actor_train"] else "generates"
    raise UserError(
        f"roles.{role}.strategy is {wanted.strategy!r}, which {does}, but {role} does not: "
        f"write roles.{role}.strategy={either(possible)}"
    )


def mesh_of(role: str, wanted: RoleConfig, ranks: int, on_gpus: bool) -> MeshShape:
    """How the ranks of a sharded role are arranged: replicas are runs of neighbouring ranks."""
    replicate = wanted.parallel.replicate
    if ranks % replicate:
        possible = either([str(count) for count in range(1, ranks + 1) if ranks % count == 0])
        larger = (ranks // replicate + 1) * replicate
        more = f"{larger} devices in roles.{role}.devices" if on_gpus else f"roles.{role}.replicas={larger}"
        raise UserError(
            f"roles.{role}.parallel.replicate is {replicate}, but its {_ranks(ranks)} cannot be divided into {replicate} "
            f"equal copies: write roles.{role}.parallel.replicate={possible}, or {more}"
        )
    return MeshShape(replicate, ranks // replicate)


def _auto(role: str, wanted: RoleConfig, inventory: Inventory) -> str:
    if role in TRAIN_ROLES:
        written = parse_devices(wanted.devices, inventory, f"roles.{role}.devices")
        if not isinstance(written, str) and len(written) > 1 and written[0].kind == "gpu":
            return "sharded"
    return STRATEGIES.get(role, ("",))[0]


def _check_vllm_alone(role: str, wanted: RoleConfig, strategy: str) -> None:
    """Refuses what only vLLM reads where the role computes otherwise."""
    if strategy == "vllm":
        return
    other = f", or roles.{role}.strategy=vllm" if role in INFER_ROLES else ""
    if wanted.tensor_parallel > 1:
        reason = f"strategy {strategy} keeps the whole model on one device" if strategy else f"{role} has no model"
        if strategy == "sharded":
            reason = "strategy sharded cuts the parameters over all its ranks and splits no layer"
        raise UserError(
            f"roles.{role}.tensor_parallel is {wanted.tensor_parallel}, but {reason}: "
            f"write roles.{role}.tensor_parallel=1{other}"
        )
    if wanted.engine_args:
        raise UserError(
            f"roles.{role}.engine_args has {next(iter(wanted.engine_args))!r}, but {role} is not computed by vLLM: "
            f"remove roles.{role}.engine_args{other}"
        )


def _check_sharded_alone(role: str, wanted: RoleConfig, strategy: str) -> None:
    """Refuses what only a sharded trainer reads where the role computes otherwise."""
    if strategy == "sharded":
        return
    defaults = dict(ParallelConfig())
    written = next((key for key, value in wanted.parallel if value != defaults[key]), None)
    if written is None:
        return
    got = f"roles.{role}.parallel.{written} is {str(getattr(wanted.parallel, written)).lower()}"
    if role in INFER_ROLES:
        raise UserError(
            f"{got}, but {role} generates, and each of its workers is an engine with a copy of the model: remove "
            f"roles.{role}.parallel; more devices or roles.{role}.replicas give more engines"
        )
    if not strategy:
        raise UserError(f"{got}, but {role} has no model: remove roles.{role}.parallel")
    raise UserError(
        f"{got}, but strategy {strategy} computes on one device: write roles.{role}.strategy=sharded, or remove "
        f"roles.{role}.parallel"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
