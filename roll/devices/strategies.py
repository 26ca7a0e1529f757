"""Chooses the strategy of a role from the config and its devices, and the mesh of a sharded one."""

from __future__ import annotations

from typing import TypeAlias

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.suggest import either
from roll.config.workers import ParallelConfig, RoleConfig
from roll.devices.inventory import Inventory
from roll.devices.spec import parse_devices
from roll.strategy.registry import (
    AUTO_INFER,
    AUTO_TRAIN,
    INFER,
    INFER_ROLES,
    TRAIN,
    TRAIN_ROLES,
    InferBackend,
    TrainBackend,
    infer_backend,
    train_backend,
)

Backend: TypeAlias = type[TrainBackend] | type[InferBackend]


def choose_strategy(
    role: str, role_config: RoleConfig, inventory: Inventory, root: str = ""
) -> tuple[str, Backend | None]:
    """The role's strategy and its backend; empty and None for a role without a model. Raises for a strategy that the role
    cannot have, and for settings that only another strategy uses. Code of the user's is looked for from `root`."""
    written = role_config.strategy
    if role not in (*TRAIN_ROLES, *INFER_ROLES):
        if written != "auto":
            raise UserError(
                f"roles.{role}.strategy is {written!r}, but {role} has no model: remove roles.{role}.strategy"
            )
        _check_arguments(role, role_config, None)
        _check_parallel(role, role_config, "", None)
        return "", None
    own, other = (TRAIN, INFER) if role in TRAIN_ROLES else (INFER, TRAIN)
    if written in other.own:
        does = "trains" if other is TRAIN else "generates"
        raise UserError(
            f"roles.{role}.strategy is {written!r}, which {does}, but {role} does not: "
            f"write roles.{role}.strategy={either([*own.own])}"
        )
    strategy = _auto(role, role_config, inventory) if written == "auto" else written
    backend: Backend = (train_backend if own is TRAIN else infer_backend)(strategy, role, root)
    _check_arguments(role, role_config, backend)
    _check_parallel(role, role_config, strategy, backend)
    return strategy, backend


def over_ranks(backend: Backend | None) -> bool:
    """Whether a role's workers are the ranks of one model."""
    return backend is not None and issubclass(backend, TrainBackend) and backend.over_ranks


def on_one_device(backend: Backend | None) -> bool:
    """Whether a role is one worker on one device."""
    return backend is not None and issubclass(backend, TrainBackend) and not backend.over_ranks


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
            return AUTO_TRAIN[True]
        return AUTO_TRAIN[False]
    return AUTO_INFER


def _check_arguments(role: str, role_config: RoleConfig, backend: Backend | None) -> None:
    """Raises for `engine_args` of a role whose engine takes none."""
    if backend is not None and issubclass(backend, InferBackend) and backend.takes_arguments:
        return
    other = f", or roles.{role}.strategy=vllm" if role in INFER_ROLES else ""
    if role_config.engine_args:
        raise UserError(
            f"roles.{role}.engine_args has {next(iter(role_config.engine_args))!r}, but {role} is not computed by vLLM: "
            f"remove roles.{role}.engine_args{other}"
        )


def _check_parallel(role: str, role_config: RoleConfig, strategy: str, backend: Backend | None) -> None:
    """Raises for mesh dimensions that the role's strategy does not have."""
    if over_ranks(backend):
        return
    defaults = dict(ParallelConfig())
    known = backend.parallel if backend is not None and issubclass(backend, InferBackend) else frozenset()
    written = next((key for key, value in role_config.parallel if value != defaults[key] and key not in known), None)
    if written is None:
        return
    given = f"roles.{role}.parallel.{written} is {str(getattr(role_config.parallel, written)).lower()}"
    if not strategy:
        raise UserError(f"{given}, but {role} has no model: remove roles.{role}.parallel")
    if backend is not None and issubclass(backend, InferBackend) and not known:
        several = f"write roles.{role}.strategy=vllm, or " if written == "tensor" else ""
        raise UserError(
            f"{given}, but strategy {strategy} keeps the whole model on one device: {several}remove "
            f"roles.{role}.parallel; more devices or roles.{role}.replicas give more engines"
        )
    if known:
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
