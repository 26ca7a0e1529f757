"""The device map (AutoDeviceMapping, arXiv 2506.06122): which role's workers run on which devices. Pure arithmetic over a
config and an inventory.

Invariants: a worker is on one node; its GPU or core numbers exist on that node; every role in use has at least one
worker, and under `executor: local` exactly one, except for the ranks of a sharded trainer.

Model roles take GPUs or cores. A worker on GPUs has one GPU, or as many as hold its weights together. A worker on cores
given by number is pinned to them (`WorkerPlacement.cores`). A worker on `cpu` may use every core of its node and shares
them with all other workers there. The workers of a sharded role are the ranks of one trainer: one GPU or an equal part of
the cores each, in device order; they may be on several nodes. Process roles (`rollout`, `reward`, `env`) take cores only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from roll.cluster.mesh import MeshShape
from roll.cluster.worker import WorkerPlacement
from roll.config.errors import UserError
from roll.config.schema import Config, RoleConfig, RolesConfig
from roll.config.suggest import either
from roll.devices.inventory import Device, Inventory
from roll.devices.spec import format_devices, parse_devices
from roll.devices.strategies import Backend, choose_strategy, mesh_of, on_one_device, over_ranks
from roll.strategy.registry import InferBackend

SCORING_ROLES = ("reward_model", "judge")
"""Roles with their own models that compute rewards while samples are generated."""
PROCESS_ROLES = ("rollout", "reward", "env")
"""Roles without a model."""
LAST_DEVICE_ROLES = ("reference", "reward_model", "judge")
"""Roles that `auto` puts on the last device, as far from the trainer as possible."""

Layout = Literal["colocated", "disaggregated", "partly shared", "trainer only"]


@dataclass(frozen=True)
class RolePlacement:
    """A role's workers: the devices and the placement of each."""

    role: str
    strategy: str
    """Empty for a role without a model."""
    backend: Backend | None
    workers: tuple[tuple[Device, ...], ...]
    placements: tuple[WorkerPlacement, ...]

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset(device for worker in self.workers for device in worker)

    @property
    def on_gpus(self) -> bool:
        return self.workers[0][0].kind == "gpu"

    @property
    def engine(self) -> type[InferBackend] | None:
        """Of a role that generates."""
        return self.backend if self.backend is not None and issubclass(self.backend, InferBackend) else None

    @property
    def in_place(self) -> bool:
        """Whether its engine serves the very tensors that it is given."""
        return self.engine is not None and self.engine.in_place

    @property
    def mesh(self) -> MeshShape | None:
        """The mesh of its ranks, if the role is sharded."""
        return self.placements[0].mesh


@dataclass(frozen=True)
class DeviceMap:
    """Every role in use and where it runs."""

    inventory: Inventory
    executor: Literal["local", "ray"]
    roles: dict[str, RolePlacement]

    def devices(self, role: str) -> frozenset[Device]:
        return self.roles[role].devices

    @property
    def kind(self) -> Layout:
        """How the devices of the trainer and of the engines overlap."""
        if "actor_infer" not in self.roles:
            return "trainer only"
        train, infer = self.devices("actor_train"), self.devices("actor_infer")
        if train == infer:
            return "colocated"
        return "partly shared" if train & infer else "disaggregated"

    @property
    def one_copy(self) -> bool:
        """Whether the engine uses the trainer's own parameters: both are in one process, on the same GPU or both on the
        CPU."""
        if self.executor != "local" or "actor_infer" not in self.roles or not self.roles["actor_infer"].in_place:
            return False
        if self.roles["actor_train"].mesh is not None:  # its ranks have processes of their own
            return False
        train, infer = self.roles["actor_train"].workers[0][0], self.roles["actor_infer"].workers[0][0]
        return train == infer if train.kind == "gpu" else infer.kind == "cpu"


def make_map(config: Config, inventory: Inventory, *, roles_in_use: Collection[str]) -> DeviceMap:
    """Places every role in use as the config says. Raises a `UserError` for the first role that cannot be placed."""
    if config.executor == "local":
        inventory = Inventory(inventory.nodes[:1])
    _refuse_unused(config, roles_in_use)
    roles = {
        role: _place_role(role, getattr(config.roles, role), config, inventory)
        for role in RolesConfig.model_fields
        if role in roles_in_use
    }
    for role in ("actor_train", "critic"):
        if config.train.optimizer == "adamw_8bit" and role in roles and roles[role].mesh is not None:
            raise UserError(
                f"train.optimizer is adamw_8bit, which works with strategy single alone, but roles.{role} is sharded: "
                "its moments are quantised in blocks of what a rank holds, so that no other number of ranks could resume "
                "from them; write train.optimizer=adamw"
            )
    if config.deterministic:
        roles = _with_equal_threads(roles, config, inventory)
    device_map = DeviceMap(inventory, config.executor, roles)
    in_place = "actor_infer" in roles and roles["actor_infer"].in_place
    shares = in_place and roles["actor_train"].mesh is None
    if config.executor == "local" and shares and not device_map.one_copy:
        raise UserError(
            "roles.actor_train and roles.actor_infer are on different devices, but in one process the engine uses the "
            "trainer's own parameters: give both the same devices, or write executor=ray"
        )
    return device_map


def _refuse_unused(config: Config, roles_in_use: Collection[str]) -> None:
    for role in RolesConfig.model_fields:
        if role in roles_in_use or (written := getattr(config.roles, role)) == type(written)():
            continue
        if "actor_infer" not in roles_in_use:  # the pipeline generates no samples
            raise UserError(f"roles.{role}: pipeline {config.pipeline} has no {role}: remove roles.{role}")
        algorithm = config.algorithm.name
        if role == "reference" and config.model.adapters is not None:
            raise UserError(
                "roles.reference: with model.lora the actor without its adapters is the reference: remove roles.reference"
            )
        if role == "reference":
            raise UserError(
                f"roles.reference: algorithm {algorithm} with algorithm.kl_coef={config.algorithm.kl_coef:g} has no "
                "reference: remove roles.reference, or write algorithm.kl_coef=0.01"
            )
        if role in SCORING_ROLES:
            raise UserError(
                f"roles.{role} is written, but no reward asks it: write reward.name={role}, or remove roles.{role}"
            )
        raise UserError(f"roles.{role}: algorithm {algorithm} has no {role}: remove roles.{role}")


def _place_role(role: str, role_config: RoleConfig, config: Config, inventory: Inventory) -> RolePlacement:
    strategy, backend = choose_strategy(role, role_config, inventory, config.root)
    if role in PROCESS_ROLES:
        workers, pinned = _process_workers(role, role_config, inventory)
    else:
        workers, pinned = _model_workers(role, role_config, backend, config, inventory)
    _check_cpus(role, role_config, workers, pinned, inventory)
    mesh = None
    if over_ranks(backend):
        mesh = mesh_of(role, role_config, len(workers), workers[0][0].kind == "gpu")
    if config.executor == "local" and len(workers) > 1 and mesh is None:
        if role_config.replicas > 1:
            given = f"roles.{role}.replicas is {role_config.replicas}"
        else:
            given = f"roles.{role}.devices is {role_config.devices!r}, which makes {len(workers)} workers"
        raise UserError(f"{given}, but executor local runs one worker a role: write executor=ray")
    threads = [_threads(role, role_config, config, inventory, workers, rank, pinned) for rank in range(len(workers))]
    placements = tuple(
        WorkerPlacement(
            role,
            rank,
            len(workers),
            device=f"cuda:{worker[0].index}" if worker[0].kind == "gpu" else "cpu",
            threads=threads[rank],
            node=inventory.nodes[worker[0].node].id,
            cores=tuple(device.index for device in worker) if pinned and worker[0].kind == "cpu" else (),
            gpus=tuple(device.index for device in worker if device.kind == "gpu"),
            mesh=mesh,
        )
        for rank, worker in enumerate(workers)
    )
    return RolePlacement(role, strategy, backend, tuple(workers), placements)


Workers = list[tuple[Device, ...]]


def _process_workers(role: str, role_config: RoleConfig, inventory: Inventory) -> tuple[Workers, bool]:
    """Round robin over the nodes: all nodes, or those of the configured cores."""
    parsed = parse_devices(role_config.devices, inventory, f"roles.{role}.devices", cores=True)
    if isinstance(parsed, str):
        per_node = [inventory.cores_of(number) for number in range(len(inventory.nodes))]
    else:
        per_node = list(_by_node(parsed).values())
    return [per_node[rank % len(per_node)] for rank in range(role_config.replicas or 1)], not isinstance(parsed, str)


def _model_workers(
    role: str, role_config: RoleConfig, backend: Backend | None, config: Config, inventory: Inventory
) -> tuple[Workers, bool]:
    """The workers of a model role, and whether they are pinned to configured devices."""
    own_devices = parse_devices(role_config.devices, inventory, f"roles.{role}.devices")
    choice = parse_devices(config.devices, inventory, "devices") if own_devices == "auto" else own_devices
    if choice == "auto":
        choice = inventory.devices("gpu") or "cpu"
    if isinstance(choice, str):
        return _unpinned_workers(role, role_config, backend, inventory), False
    if own_devices == "auto" and over_ranks(backend):
        choice = _auto_rank_devices(role, role_config, choice)
    elif own_devices == "auto":
        choice = _auto_devices(role, choice, config.executor)
    if choice[0].kind == "gpu":
        return _gpu_workers(role, role_config, backend, choice, inventory), True
    return _core_workers(role, role_config, backend, choice, inventory), True


def _auto_rank_devices(role: str, role_config: RoleConfig, devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The part of all devices that `auto` gives to a sharded role: all cores, or one GPU per rank; all GPUs if `replicas`
    is not set."""
    if devices[0].kind == "cpu" or not role_config.replicas:
        return devices
    if role_config.replicas > len(devices):
        raise UserError(
            f"roles.{role}.replicas is {role_config.replicas}, but there {_gpus(len(devices), 'is', 'are')} for its "
            f"ranks: write roles.{role}.replicas={len(devices)}, or roles.{role}.devices=cpu"
        )
    return devices[-role_config.replicas :] if role in LAST_DEVICE_ROLES else devices[: role_config.replicas]


def _auto_devices(role: str, devices: tuple[Device, ...], executor: str) -> tuple[Device, ...]:
    """The part of all devices that `auto` gives to a role. On GPUs: the first GPU to a trainer, the last to the roles of
    `LAST_DEVICE_ROLES`, all to `actor_infer` (under `executor: local` the trainer's GPU). On cores: those of one node, or
    all to `actor_infer`."""
    end = -1 if role in LAST_DEVICE_ROLES else 0
    if devices[0].kind == "gpu":
        return devices if role == "actor_infer" and executor == "ray" else (devices[end],)
    return devices if role == "actor_infer" else list(_by_node(devices).values())[end]


def _unpinned_workers(role: str, role_config: RoleConfig, backend: Backend | None, inventory: Inventory) -> Workers:
    """Workers that are not pinned to cores. A `single` worker is on the first node (or the last, see
    `LAST_DEVICE_ROLES`); engines are placed round robin over the nodes; so are ranks, with those of one node next to each
    other."""
    if on_one_device(backend):
        _check_one_worker(role, role_config)
    nodes = len(inventory.nodes)
    first = nodes - 1 if role in LAST_DEVICE_ROLES else 0
    nodes_of_workers = [(first + rank) % nodes for rank in range(role_config.replicas or 1)]
    return [inventory.cores_of(node) for node in (sorted(nodes_of_workers) if over_ranks(backend) else nodes_of_workers)]


def _gpu_workers(
    role: str, role_config: RoleConfig, backend: Backend | None, gpus: tuple[Device, ...], inventory: Inventory
) -> Workers:
    if over_ranks(backend) and role_config.replicas not in (0, len(gpus)):
        instead = f", or write {_gpus(role_config.replicas)} in roles.{role}.devices"
        if role_config.replicas < len(gpus):
            instead = f", or write roles.{role}.devices={format_devices(gpus[: role_config.replicas], inventory)}"
        raise UserError(
            f"roles.{role}.replicas is {role_config.replicas}, but its {_gpus(len(gpus))} "
            f"{format_devices(gpus, inventory)} make a rank each: remove roles.{role}.replicas{instead}"
        )
    if over_ranks(backend):
        return [(gpu,) for gpu in gpus]
    if on_one_device(backend):
        _check_one_worker(role, role_config)
        if len(gpus) > 1:
            raise UserError(
                f"roles.{role}.devices is {role_config.devices!r}, which is {len(gpus)} GPUs, but strategy single "
                f"computes on one device: write roles.{role}.strategy=sharded, or "
                f"roles.{role}.devices={format_devices(gpus[:1], inventory)}"
            )
        return [gpus]
    size = role_config.parallel.tensor
    workers = _split_evenly(gpus, len(gpus) // size) if len(gpus) % size == 0 else None
    if workers is None:
        raise UserError(
            f"roles.{role}.parallel.tensor is {size}, but the GPU(s) {format_devices(gpus, inventory)} do not make "
            f"workers of {size} on one node: write other roles.{role}.devices, or roles.{role}.parallel.tensor=1"
        )
    if role_config.replicas not in (0, len(workers)):
        each = "one GPU" if size == 1 else f"{size} GPUs"
        raise UserError(
            f"roles.{role}.replicas is {role_config.replicas}, but its {len(gpus)} GPU(s) make {len(workers)} worker(s) "
            f"of {each} each: remove roles.{role}.replicas, or write {role_config.replicas * size} device(s) in "
            f"roles.{role}.devices"
        )
    return workers


def _core_workers(
    role: str, role_config: RoleConfig, backend: Backend | None, cores: tuple[Device, ...], inventory: Inventory
) -> Workers:
    """Divides the cores evenly among the role's workers; no worker spans nodes."""
    written = format_devices(cores, inventory)
    if on_one_device(backend):
        _check_one_worker(role, role_config)
    replicas = role_config.replicas or 1
    if (device_map := _split_evenly(cores, replicas)) is not None:
        return device_map
    possible = either([str(count) for count in range(1, len(cores) + 1) if _split_evenly(cores, count) is not None])
    if len(cores) % replicas:
        raise UserError(
            f"roles.{role}.replicas is {replicas}, but the {len(cores)} cores {written} cannot be shared evenly: "
            f"write roles.{role}.replicas={possible}"
        )
    where = f"roles.{role}.devices is {written}, where a worker would span nodes"
    if on_one_device(backend):
        node = format_devices(next(iter(_by_node(cores).values())), inventory)
        raise UserError(f"{where}: write cores of one node, such as roles.{role}.devices={node}")
    raise UserError(f"{where}: write roles.{role}.replicas={possible}")


def _split_evenly(cores: tuple[Device, ...], replicas: int) -> Workers | None:
    """Divides the devices into equal parts in order; None if they do not divide evenly or a part would span nodes."""
    size, rest = divmod(len(cores), replicas)
    if rest or not size:
        return None
    parts = [cores[start : start + size] for start in range(0, len(cores), size)]
    return parts if all(part[0].node == part[-1].node for part in parts) else None


def _check_one_worker(role: str, role_config: RoleConfig) -> None:
    if role_config.replicas > 1:
        raise UserError(
            f"roles.{role}.replicas is {role_config.replicas}, but strategy single has one worker: "
            f"remove roles.{role}.replicas, or write roles.{role}.strategy=sharded"
        )


def _gpus(count: int, *is_are: str) -> str:
    """`2 GPUs`; with the verbs `is` and `are`, preceded by the one that agrees with the number."""
    verb = f"{is_are[count != 1]} " if is_are else ""
    return f"{verb}{count} GPU" + ("" if count == 1 else "s")


def _check_cpus(role: str, role_config: RoleConfig, workers: Workers, pinned: bool, inventory: Inventory) -> None:
    for worker in workers:
        if (
            role_config.cpus
            and pinned
            and role not in PROCESS_ROLES
            and worker[0].kind == "cpu"
            and len(worker) != role_config.cpus
        ):
            raise UserError(
                f"roles.{role}.cpus is {role_config.cpus}, but by "
                f"roles.{role}.devices={format_devices(worker, inventory)} a worker has {len(worker)} core(s): remove "
                f"roles.{role}.cpus"
            )
        have = len(worker) if worker[0].kind == "cpu" else inventory.nodes[worker[0].node].cores
        if role_config.cpus > have:
            raise UserError(
                f"roles.{role}.cpus is {role_config.cpus}, but a worker on {inventory.nodes[worker[0].node].name} has "
                f"{have} core(s) to run on: write roles.{role}.cpus={have} or less"
            )


def _threads(
    role: str,
    role_config: RoleConfig,
    config: Config,
    inventory: Inventory,
    workers: Workers,
    rank: int,
    pinned: bool,
) -> int:
    """Number of CPU threads of a worker."""
    worker = workers[rank]
    node = inventory.nodes[worker[0].node]
    if role in PROCESS_ROLES:
        return role_config.cpus or 1
    if worker[0].kind == "gpu":
        return config.threads or role_config.cpus or max(1, node.cores // node.gpus)
    if pinned:
        return min(config.threads or len(worker), len(worker))
    if config.threads or role_config.cpus:
        return config.threads or role_config.cpus
    beside = Counter(other[0].node for other in workers)[worker[0].node]
    return max(1, node.cores // beside)


def _with_equal_threads(
    roles: dict[str, RolePlacement], config: Config, inventory: Inventory
) -> dict[str, RolePlacement]:
    """Gives all workers with a model the same number of threads in a deterministic run, whatever the layout: sums over
    threads would round differently otherwise. If ranks share the cores of a node, the number is that of one rank."""
    ranks = [
        len(role_placement.workers)
        for role_placement in roles.values()
        if role_placement.mesh is not None and not role_placement.on_gpus
    ]
    threads = config.threads or max(1, inventory.nodes[0].cores // max(ranks, default=1))
    return {
        role: replace(
            role_placement,
            placements=tuple(replace(placement, threads=threads) for placement in role_placement.placements),
        )
        if role_placement.strategy
        else role_placement
        for role, role_placement in roles.items()
    }


def _by_node(devices: tuple[Device, ...]) -> dict[int, tuple[Device, ...]]:
    return {node: tuple(d for d in devices if d.node == node) for node in dict.fromkeys(d.node for d in devices)}
