"""The plan of a run: device map, residency, step sizes and memory, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.schema import Config
from roll.devices.disk_estimate import DiskEstimate, planned_writes
from roll.devices.inventory import Inventory, this_machine
from roll.devices.map import SCORING_ROLES, DeviceMap, RolePlacement, make_map
from roll.devices.memory import CACHE, FULL, PURPOSES, MemoryEstimate, MemoryItem, ModelSize, estimate, largest
from roll.devices.memory_inputs import MemoryInputs
from roll.devices.mesh_division import check_divides
from roll.devices.residency import ResidencyTable, make_residency_table
from roll.devices.run_requirements import RunRequirements
from roll.devices.sharded_memory import shard_sizes
from roll.model.classifier import load_classifier_config
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model_config
from roll.model.shape import ModelShape
from roll.strategy.registry import TRAIN_ROLES
from roll.strategy.train.microbatch_budget import FEWEST_ROWS, Budget
from roll.strategy.train.sharded.sizes import ShardSizes

GIB = 2**30
MAX_RANKS = 4096
"""Largest number of ranks that is tried for a model that does not fit."""


@dataclass(frozen=True)
class Plan:
    model: str
    parameters: int
    adapters: int
    """Parameters of the LoRA adapters, which are not among the model's own."""
    dtype: str
    """Precision of the trainer's parameters."""
    map: DeviceMap
    offload: bool
    offload_reason: str
    """A sentence on why roles are offloaded between phases, or why not."""
    residency: ResidencyTable
    memory: MemoryEstimate
    roles: list[tuple[str, str]]
    """Each role and a description of how it computes."""
    sizes: tuple[tuple[str, str], ...]
    problem: str | None
    """Why the run cannot start, and what to write instead; None if it can."""
    writes: DiskEstimate
    """What the run will write to disk."""


def make_plan(config: Config, requirements: RunRequirements, inventory: Inventory | None = None) -> Plan:
    """Maps the roles to the inventory (this machine's by default) and estimates the memory of each device."""
    map = make_map(config, inventory or this_machine(), roles_in_use=requirements.roles)
    shape = load_model_config(find_model(config.model.path))
    dtypes = {
        role: dtype_of(config, role_placement) for role, role_placement in map.roles.items() if role_placement.strategy
    }
    other_models = _other_models(config, map)
    model = ModelSize(
        shape,
        ModelShape.of(shape, config.model.adapters),
        dtypes,
        other_models,
        _shards(config, map, shape, other_models),
    )
    inputs = requirements.memory_inputs
    if map.roles["actor_train"].mesh is not None and "actor_infer" in map.roles:  # engines are other processes
        inputs = replace(inputs, bucket_bytes=config.weight_sync.bucket_mb << 20)
    offload, offload_reason = choose_offload(config, map, model, inputs)
    residency = make_residency_table(map, offload)
    memory = estimate(map, residency, model, inputs)
    return Plan(
        model=config.model.path,
        parameters=model.sizes.parameters,
        adapters=model.sizes.adapters,
        dtype=str(dtypes["actor_train"]).removeprefix("torch."),
        map=map,
        offload=offload,
        offload_reason=offload_reason,
        residency=residency,
        memory=memory,
        roles=_roles(config, map),
        sizes=(*requirements.sizes, ("tokens per micro-batch", _micro_batch(memory.budgets["actor_train[0]"]))),
        problem=_problem(config, map, residency, model, memory, inputs),
        writes=planned_writes(config, map, model, inputs),
    )


def check_memory(plan: Plan) -> None:
    if plan.problem is not None:
        raise UserError(plan.problem)


def dtype_of(config: Config, role_placement: RolePlacement) -> torch.dtype:
    """The precision in which a role holds the model. For a GPU that is not on this machine, `auto` is bf16."""
    device, role = role_placement.placements[0].device, role_placement.role
    dtype = getattr(config.roles, role).model.dtype if role in SCORING_ROLES else config.model.dtype
    if role_placement.on_gpus and dtype == "auto" and not torch.cuda.is_available():
        return torch.bfloat16
    return choose_dtype(dtype, device)


def _other_models(config: Config, map: DeviceMap) -> dict[str, tuple[PretrainedConfig, ModelShape]]:
    """The models of roles that do not use the actor's."""
    found = {}
    if "judge" in map.roles:
        shape = load_model_config(find_model(config.roles.judge.model.path))
        found["judge"] = shape, ModelShape.of(shape)
    if "reward_model" in map.roles:
        shape = load_classifier_config(find_model(config.roles.reward_model.model.path))
        found["reward_model"] = shape, ModelShape.of_classifier(shape)
    return found


def _shards(
    config: Config,
    map: DeviceMap,
    shape: PretrainedConfig,
    other_models: Mapping[str, tuple[PretrainedConfig, ModelShape]],
) -> dict[str, ShardSizes]:
    """What a rank holds of each sharded role's model."""
    sizes = {}
    for role, role_placement in map.roles.items():
        if role_placement.mesh is not None:
            role_shape = other_models[role][0] if role in other_models else shape
            check_divides(role, role_placement.mesh, role_shape)
            sizes[role] = shard_sizes(role_shape, role_placement.mesh, PURPOSES[role], config.model.adapters)
    return sizes


def choose_offload(config: Config, map: DeviceMap, model: ModelSize, inputs: MemoryInputs) -> tuple[bool, str]:
    """Whether roles are offloaded between phases, and a sentence that says why."""
    resident, offloading = make_residency_table(map, False), make_residency_table(map, True)
    if config.offload != "auto":
        always = config.offload == "always"
        return always, f"offload is {config.offload}: roles {'take turns on' if always else 'stay on'} shared devices."
    if resident.levels == offloading.levels:
        return False, "Nothing is offloaded: no phase needs the devices of a role that is not in it."
    inputs = _with_preferred_micro_batches(inputs, map.roles["actor_train"])
    full = estimate(map, resident, model, inputs).too_full()
    if not full:
        return False, f"Nothing is offloaded: all roles together fit into {FULL:.0%} of every memory."
    offloaded = estimate(map, offloading, model, inputs)
    together = estimate(map, resident, model, inputs)
    relieved_pools = [pool for pool in full if offloaded.peak(pool)[1] < together.peak(pool)[1]]
    if not relieved_pools:
        return False, "Nothing is offloaded: it would not free enough memory."
    pool = max(relieved_pools, key=lambda pool: together.peak(pool)[1] / max(pool.capacity, 1))
    return True, (
        f"Roles take turns and leave shared devices: all together would need {_gib(together.peak(pool)[1])} of "
        f"{pool.name}, which has {_gib(pool.capacity)}; in turns it is {_gib(offloaded.peak(pool)[1])}."
    )


def _with_preferred_micro_batches(inputs: MemoryInputs, trainer: RolePlacement) -> MemoryInputs:
    """The work with micro-batches that keep a GPU busy and without recomputed activations: offloading is worthwhile if
    roles do not fit together under these conditions."""
    if not trainer.on_gpus:
        return inputs
    checkpointing = "off" if inputs.checkpointing == "auto" else inputs.checkpointing
    return replace(inputs, limit_rows=inputs.limit_rows or FEWEST_ROWS, checkpointing=checkpointing)


def _problem(
    config: Config,
    map: DeviceMap,
    residency: ResidencyTable,
    model: ModelSize,
    memory: MemoryEstimate,
    inputs: MemoryInputs,
) -> str | None:
    """The memory that is too full, and what to write instead; None if everything fits."""
    full = memory.too_full()
    if not full:
        return None
    pool = max(full, key=lambda pool: memory.peak(pool)[1] / max(pool.capacity, 1))
    phase, needed_bytes = memory.peak(pool)
    part = largest(memory.parts[pool, phase])
    where = "the machine" if pool.name == "memory" else pool.name
    return (
        f"in the phase {phase} this run needs about {_gib(needed_bytes)} and {where} has {_gib(pool.capacity)}, of which "
        f"{FULL:.0%} may be planned; the largest part is {part.worker}'s {part.what} ({_gib(part.bytes)}): "
        f"{_remedy(config, map, residency, model, inputs, part)}"
    )


def _remedy(
    config: Config, map: DeviceMap, residency: ResidencyTable, model: ModelSize, inputs: MemoryInputs, part: MemoryItem
) -> str:
    """A setting that makes the run fit: offloading, fewer running sequences or smaller micro-batches, whichever suffices
    alone; otherwise which settings to look at."""
    if config.offload == "never" and not estimate(map, make_residency_table(map, True), model, inputs).too_full():
        return "write offload=auto"
    if (fewer := _fewer_copies(config, map, residency, model, inputs, part)) is not None:
        return fewer
    settings = [("rollout.max_running", "running"), ("train.micro_batch_tokens", "limit_rows")]
    current = replace(inputs, limit_rows=estimate(map, residency, model, inputs).budgets["actor_train[0]"].rows)
    for setting, size in settings if part.what == CACHE else reversed(settings):
        value, least = getattr(current, size), inputs.longest if size == "limit_rows" else 1
        while value > least:
            value = max(value // 2, least)
            if not estimate(map, residency, model, replace(inputs, **{size: value})).too_full():
                return f"write {setting}={value}"
    if (fewer := _fewer_workers(config, map, residency, model, inputs)) is not None:
        return fewer
    if (more := _more_ranks(config, map, residency, model, inputs, part)) is not None:
        return more
    role = part.role
    other_devices = f", or other devices for it in roles.{role}.devices" if role in map.roles else ""
    if role in TRAIN_ROLES and map.roles[role].on_gpus and map.roles[role].mesh is None:
        other_devices = f", or several GPUs for it in roles.{role}.devices, over which it is sharded"
    generation_settings = "rollout.max_running, rollout.max_new_tokens or " if "actor_infer" in map.roles else ""
    return f"choose a smaller model, or smaller {generation_settings}train.micro_batch_tokens{other_devices}"


def _fewer_copies(
    config: Config, map: DeviceMap, residency: ResidencyTable, model: ModelSize, inputs: MemoryInputs, part: MemoryItem
) -> str | None:
    """A smaller number of replicas of a sharded role, so that each copy of the parameters is sharded over more ranks."""
    mesh = map.roles[part.role].mesh if part.role in map.roles else None
    if mesh is None:
        return None
    for copies in (count for count in range(mesh.replicate - 1, 0, -1) if mesh.data % count == 0):
        fewer = replace(mesh, replicate=copies, shard=mesh.data // copies)
        if not estimate(map, residency, _sharded_over(config, model, part.role, fewer), inputs).too_full():
            return f"write roles.{part.role}.parallel.replicate={copies}"
    return None


def _more_ranks(
    config: Config, map: DeviceMap, residency: ResidencyTable, model: ModelSize, inputs: MemoryInputs, part: MemoryItem
) -> str | None:
    """The number of GPUs that would hold a sharded role, if there is one."""
    role_placement = map.roles.get(part.role)
    if role_placement is None or role_placement.mesh is None or not role_placement.on_gpus:
        return None
    mesh = role_placement.mesh
    while (mesh := replace(mesh, shard=2 * mesh.shard)).copy <= MAX_RANKS:
        if not estimate(map, residency, _sharded_over(config, model, part.role, mesh), inputs).too_full():
            return f"write {mesh.ranks} GPUs or more in roles.{part.role}.devices"
    return None


def _sharded_over(config: Config, model: ModelSize, role: str, mesh: MeshShape) -> ModelSize:
    """The model with a role's parameters sharded over another mesh."""
    sizes = shard_sizes(model.shape_of(role), mesh, PURPOSES[role], config.model.adapters)
    return replace(model, shards={**model.shards, role: sizes})


def _fewer_workers(
    config: Config, map: DeviceMap, residency: ResidencyTable, model: ModelSize, inputs: MemoryInputs
) -> str | None:
    """A role that would fit with fewer workers; roles with more workers are tried first."""
    for role, role_placement in sorted(map.roles.items(), key=lambda item: -len(item[1].workers)):
        if role_placement.on_gpus:
            continue  # the number of its workers is that of its devices
        mesh, sizes = role_placement.mesh, model
        each = 1 if mesh is None else mesh.ranks // mesh.shard
        shards = len(role_placement.workers) // each
        while shards > 1:
            shards //= 2
            count = shards * each
            placements = role_placement.placements[:count]
            if mesh is not None:  # fewer ranks hold more each
                if count // mesh.replicate % mesh.expert:
                    break
                fewer = replace(mesh, shard=shards)
                placements = tuple(replace(placement, mesh=fewer) for placement in placements)
                sizes = _sharded_over(config, model, role, fewer)
            smaller = replace(role_placement, workers=role_placement.workers[:count], placements=placements)
            if not estimate(replace(map, roles={**map.roles, role: smaller}), residency, sizes, inputs).too_full():
                return f"write roles.{role}.replicas={count}"
    return None


def _roles(config: Config, map: DeviceMap) -> list[tuple[str, str]]:
    descriptions = {
        "actor_train": f"adapters of rank {config.model.lora.rank}" if config.model.adapters else "",
        "actor_infer": f"{config.rollout.max_running} at once" + (", the actor's parameters" if map.one_copy else ""),
        "reference": "frozen",
        "critic": "predicts returns",
        "reward_model": config.roles.reward_model.model.path,
        "judge": f"{config.roles.judge.model.path}, {config.roles.judge.max_running} at once",
        "rollout": "drives samples",
        "env": f"{config.env.processes} processes each",
        "reward": f"{config.reward_label}, {config.reward.workers} grader(s) each",
    }
    found = []
    for role, role_placement in map.roles.items():
        mesh = "" if role_placement.mesh is None else str(role_placement.mesh)
        found.append((role, ", ".join(filter(None, [role_placement.strategy, mesh, descriptions.get(role, "")]))))
    return found


def _micro_batch(budget: Budget) -> str:
    return f"up to {budget.rows}, a shared prefix once" + (", activations computed twice" if budget.checkpointed else "")


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
