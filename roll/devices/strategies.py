"""Chooses the strategy of a role from the config and its devices, and the mesh of a sharded one."""

from __future__ import annotations

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.suggest import either
from roll.config.workers import ParallelConfig, RoleConfig
from roll.devices.inventory import Inventory
from roll.devices.spec import parse_devices

TRAIN_ROLES = ("actor_train", "critic", "reference", "reward_model")
"""Roles computed by a training strategy, with or without gradients."""
INFER_ROLES = ("actor_infer", "judge")
"""Roles computed by an engine."""
STRATEGIES = {**dict.fromkeys(TRAIN_ROLES, ("single", "sharded")), **dict.fromkeys(INFER_ROLES, ("native", "vllm"))}
"""Possible strategies per role with a model. `auto` is the first one, except for a trainer with several GPUs of its own:
`sharded`."""


def choose_strategy(role: str, role_config: RoleConfig, inventory: Inventory) -> str:
    """The role's strategy; empty for a role without a model. Raises for a strategy that the role cannot have, and for
    settings that only another strategy uses."""
    possible = STRATEGIES.get(role, ("",))
    strategy = _auto(role, role_config, inventory) if role_config.strategy == "auto" else role_config.strategy
    if strategy in possible:
        _check_vllm_alone(role, role_config, strategy)
        _check_parallel(role, role_config, strategy)
        return strategy
    if not possible[0]:
        raise UserError(
            f"roles.{role}.strategy is {role_config.strategy!r}, but {role} has no model: remove roles.{role}.strategy"
        )
    does = "trains" if strategy in STRATEGIES["actor_train"] else "generates"
    raise UserError(
        f"roles.{role}.strategy is {role_config.strategy!r}, which {does}, but {role} does not: "
        f"write roles.{role}.strategy={either(possible)}"
    )


def mesh_of(role: str, role_config: RoleConfig, ranks: int, on_gpus: bool) -> MeshShape:
    """The mesh of a sharded role's ranks. Ranks not taken by the configured dimensions shard the parameters."""
    parallel = role_config.parallel
    divided = parallel.replicate * parallel.context * parallel.tensor
    if ranks % divided:
        written = [f"{name}={count}" for name, count in parallel if name in _DIVIDING and count > 1]
        larger = (ranks // divided + 1) * divided
        more = f"{larger} devices in roles.{role}.devices" if on_gpus else f"roles.{role}.replicas={larger}"
        if len(written) == 1:
            name = written[0].partition("=")[0]
            possible = either([str(count) for count in range(1, ranks + 1) if ranks % count == 0])
            raise UserError(
                f"roles.{role}.parallel.{name} is {divided}, but its {_ranks(ranks)} cannot be divided into {divided} "
                f"equal parts: write roles.{role}.parallel.{name}={possible}, or {more}"
            )
        raise UserError(
            f"roles.{role}.parallel has {', '.join(written)}, together {divided}, which does not divide its "
            f"{_ranks(ranks)}: write other numbers, or {more}"
        )
    copy = ranks // parallel.replicate
    if copy % parallel.expert:
        possible = either([str(count) for count in range(1, copy + 1) if copy % count == 0])
        raise UserError(
            f"roles.{role}.parallel.expert is {parallel.expert}, which does not divide the {_ranks(copy)} that hold a "
            f"copy of the parameters: write roles.{role}.parallel.expert={possible}"
        )
    return MeshShape(parallel.replicate, ranks // divided, parallel.context, parallel.tensor, parallel.expert)


_DIVIDING = ("replicate", "context", "tensor")


def _auto(role: str, role_config: RoleConfig, inventory: Inventory) -> str:
    if role in TRAIN_ROLES:
        written = parse_devices(role_config.devices, inventory, f"roles.{role}.devices")
        if not isinstance(written, str) and len(written) > 1 and written[0].kind == "gpu":
            return "sharded"
    return STRATEGIES.get(role, ("",))[0]


def _check_vllm_alone(role: str, role_config: RoleConfig, strategy: str) -> None:
    """Raises if settings that only vLLM uses are given for a role that vLLM does not compute."""
    if strategy == "vllm":
        return
    other = f", or roles.{role}.strategy=vllm" if role in INFER_ROLES else ""
    if role_config.engine_args:
        raise UserError(
            f"roles.{role}.engine_args has {next(iter(role_config.engine_args))!r}, but {role} is not computed by vLLM: "
            f"remove roles.{role}.engine_args{other}"
        )


def _check_parallel(role: str, role_config: RoleConfig, strategy: str) -> None:
    """Raises for mesh dimensions that the role's strategy does not have."""
    if strategy == "sharded":
        return
    defaults = dict(ParallelConfig())
    known = ("tensor",) if strategy == "vllm" else ()
    written = next((key for key, value in role_config.parallel if value != defaults[key] and key not in known), None)
    if written is None:
        return
    given = f"roles.{role}.parallel.{written} is {str(getattr(role_config.parallel, written)).lower()}"
    if not strategy:
        raise UserError(f"{given}, but {role} has no model: remove roles.{role}.parallel")
    if strategy == "native":
        several = f"write roles.{role}.strategy=vllm, or " if written == "tensor" else ""
        raise UserError(
            f"{given}, but strategy native keeps the whole model on one device: {several}remove "
            f"roles.{role}.parallel; more devices or roles.{role}.replicas give more engines"
        )
    if strategy == "vllm":
        raise UserError(
            f"{given}, but an engine divides layers alone: remove roles.{role}.parallel.{written}; parallel.tensor is "
            f"how many GPUs hold a copy, and more devices or roles.{role}.replicas give more engines"
        )
    raise UserError(
        f"{given}, but strategy {strategy} computes on one device: write roles.{role}.strategy=sharded, or remove "
        f"roles.{role}.parallel"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
