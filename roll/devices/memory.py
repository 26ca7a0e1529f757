"""Estimates how much memory a run will take, by device, phase and item, before anything starts.

A pool is one memory: a GPU's, or a node's. What a worker keeps between phases (weights, master weights, moments, KV
cache) counts wherever it is resident; what it allocates while it computes (gradients, activations, logits) counts only in
its own phase. The need of a pool is the largest sum over phases. On a CPU there is no other memory to offload to: an
offloaded worker frees its KV cache and keeps the rest. Tensors offloaded from a GPU are in its node's memory.

`roll.strategy.train.activation_memory` estimates what a forward and backward pass allocate, and
`roll.devices.sharded_memory` what sharding adds to that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

import torch
from transformers import PretrainedConfig

from roll.cluster.mesh import MeshShape
from roll.config.schema import LoraConfig
from roll.config.workers import RoleConfig
from roll.devices.inventory import Inventory, Kind
from roll.devices.map import DeviceMap
from roll.devices.memory_inputs import MemoryInputs
from roll.devices.residency import Phase, ResidencyTable
from roll.devices.sharded_memory import Peak, Purpose, Sizes, gathered_parts, shard_sizes, update_parts
from roll.engine.cache import SlotCache
from roll.engine.kv_sizing import CacheShape, SlotSizing, rounded
from roll.engine.paged.sizing import roomy
from roll.engine.routes import RouteShape
from roll.engine.slot_engine import EXACT_ROWS, PROMPT_ROWS
from roll.model.rope import longest_sequence
from roll.model.shape import ModelShape
from roll.strategy.offload import Residency
from roll.strategy.registry import InferBackend
from roll.strategy.train.activation_memory import Footprint, PackedSize, Spans
from roll.strategy.train.layer_wrapping import compiles
from roll.strategy.train.microbatch_budget import MOMENT_BYTES, Budget, activation_budget
from roll.strategy.train.sharded.sizes import ShardSizes, of_rank

RUNTIME = "interpreter and libraries"
RUNTIME_BYTES = 700 << 20
"""The interpreter, torch, transformers and their libraries."""
CACHE = "key-value cache"
MASTERS = "master weights, fp32"
MOMENTS = {"adamw": "optimizer moments, fp32", "adamw_8bit": "optimizer moments, 8 bits"}
FULL = 0.9
"""The share of a pool that may be planned; the rest is for fragmentation, CUDA contexts and everything not counted."""
SAMPLING_BYTES = 12
"""Bytes per logit that an engine samples from: logits, scaled logits, and probability mass."""
PURPOSES: dict[str, Purpose] = {
    "actor_train": "policy",
    "reference": "frozen",
    "critic": "critic",
    "reward_model": "scorer",
}
"""The purpose of the model of each role that may be sharded."""
COMPUTE_PHASE: dict[str, Phase] = {
    "actor_train": "train",
    "reference": "reference",
    "critic": "critic",
    "reward_model": "generate",
}
"""The phase in which such a role computes."""
TORCH_DEVICE: dict[Kind, str] = {"cpu": "cpu", "gpu": "cuda"}


def sharded_peak(
    shape: PretrainedConfig,
    mesh: MeshShape,
    rows: int | PackedSize,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    checkpointed: bool = True,
    compiled: bool = False,
    several: bool = False,
    purpose: Purpose = "policy",
    adapters: LoraConfig | None = None,
    optimizer: str = "adamw",
) -> Peak:
    """The peak memory of one rank of a sharded model: master weights, moments and everything that a micro-batch of this
    size adds, in an update, or in a forward pass of a frozen model.

    `shape` is the transformers config of the model, `rows` the packed tokens of a micro-batch, `dtype` the precision that
    layers compute in. `several`: an update has several micro-batches. The CUDA context, NCCL's buffers and fragmentation
    are not included.

    Example: `sharded_peak(AutoConfig.from_pretrained(path), MeshShape(1, 64), 24_576).bytes / 2**30`
    """
    size = rows if isinstance(rows, PackedSize) else PackedSize(rows, rows, (Spans(rows, 1, 1),))
    sizes = shard_sizes(shape, mesh, purpose, adapters)
    model = ModelShape.of_classifier(shape) if purpose == "scorer" else ModelShape.of(shape, adapters)
    footprint = Footprint(of_rank(model, mesh), dtype, device, compiled)
    state = sharded_state(sizes, dtype, purpose, optimizer)
    if purpose in ("frozen", "scorer"):
        working = [*gathered_parts(sizes, footprint), ("a forward pass", _forward_bytes(footprint, size))]
    else:
        predicts = purpose == "policy"
        working = update_parts(sizes, footprint, size, checkpointed=checkpointed, several=several, predicts=predicts)
    return Peak((*state, *working))


def sharded_state(sizes: ShardSizes, dtype: torch.dtype, purpose: Purpose, optimizer: str) -> Sizes:
    """What a rank keeps from phase to phase. Trained parameters are fp32 master weights. Frozen ones have the precision
    that layers compute in, except in a critic, where all parameters are kept in fp32."""
    frozen = sizes.frozen * (4 if purpose == "critic" else dtype.itemsize)
    found = [
        ("weights", frozen),
        (MASTERS, 4 * sizes.trained),
        (MOMENTS[optimizer], MOMENT_BYTES[optimizer] * sizes.trained),
    ]
    return [part for part in found if part[1]]


def train_working(footprint: Footprint, inputs: MemoryInputs, budget: Budget) -> Sizes:
    """Gradients, activations and logits at the peak of an update.

    With several micro-batches, the gradients of all parameters exist at the same time as activations. With one, gradients
    are allocated while activations are freed, and the peak is at the end of the forward pass or of the backward pass.
    """
    model, item = footprint.model, footprint.dtype.itemsize
    sizes = [_activations(footprint, size, budget.checkpointed) for size in inputs.micro_batches(budget.rows)]
    kept, transient = max(sizes, key=sum)
    several = inputs.has_several_micro_batches(budget.rows)
    gradients = 4 * model.trained
    last = item * 2 * model.trained_output + (4 * model.trained_output if item < 4 and several else 0)
    if gradients * several + kept + transient >= gradients + last:
        found = [("activations of a micro-batch", kept), ("logits and one layer's gradients", transient)]
        return [("gradients, fp32", gradients), *found] if several else found
    return [("gradients, fp32", gradients), ("the output layer's gradient", last)]


def _activations(footprint: Footprint, size: PackedSize, checkpointed: bool) -> tuple[int, int]:
    """The bytes that the layers keep of a micro-batch, and the most that is allocated besides: the logits at the end of
    the forward pass, or the working memory of the current layer in the backward pass."""
    logits, chunks = footprint.chunk_logits(size.predicting)
    output_gradient = footprint.model.trained_output * (4 if chunks else footprint.dtype.itemsize)
    predicting = footprint.ends_bytes(size) + footprint.logits_bytes(logits) + output_gradient * chunks
    layer = footprint.layer_bytes(size) if checkpointed else 0
    working = max(footprint.working_bytes(size), footprint.dispatching_bytes(size))
    backward = layer + working + output_gradient
    return footprint.kept_bytes(size, checkpointed=checkpointed), max(predicting, backward)


def forward_working(footprint: Footprint, inputs: MemoryInputs, budget: Budget) -> Sizes:
    """Working memory of a pass without gradients over a micro-batch."""
    return [("a forward pass", max(_forward_bytes(footprint, size) for size in inputs.micro_batches(budget.rows)))]


def _forward_bytes(footprint: Footprint, size: PackedSize) -> int:
    logits, _ = footprint.chunk_logits(size.predicting)
    hidden = footprint.dtype.itemsize * footprint.model.hidden * (size.rows + size.predicting)
    layer = max(footprint.working_bytes(size), footprint.routed_bytes(size))
    return max(layer, footprint.logits_bytes(logits) + hidden) + footprint.mask_bytes(size)


def sharded_working(
    sizes: ShardSizes, footprint: Footprint, inputs: MemoryInputs, budget: Budget, purpose: Purpose
) -> Sizes:
    """Working memory of a rank, for its part of the samples."""
    if purpose in ("frozen", "scorer"):
        return [*gathered_parts(sizes, footprint), *forward_working(footprint, inputs, budget)]
    found = [
        update_parts(
            sizes,
            footprint,
            size,
            checkpointed=budget.checkpointed,
            several=inputs.has_several_micro_batches(budget.rows),
            predicts=purpose == "policy",
        )
        for size in inputs.micro_batches(budget.rows)
    ]
    return max(found, key=lambda parts: sum(size for _, size in parts))


def cache_bytes(
    shape: PretrainedConfig,
    dtype: torch.dtype,
    inputs: MemoryInputs,
    paged: bool = False,
    recorded: RouteShape | None = None,
) -> int:
    """Bytes of an engine's KV cache for its longest sequences, including what remains of a smaller cache while it grows:
    one layer of a slot cache, or all of a paged one. If `kv_tokens` is set, a paged cache takes exactly that. `recorded`
    adds the routes."""
    cache, context = SlotCache(shape, dtype, torch.device("cpu"), recorded), longest_sequence(shape)
    if paged and inputs.kv_tokens:
        return inputs.kv_tokens * cache.bytes_per_token
    if paged:
        sizes = {roomy(prompt + inputs.response, context) for prompt in (inputs.shortest_prompt, inputs.longest_prompt)}
        return inputs.running * sum(sizes) * cache.bytes_per_token
    sizing = SlotSizing(inputs.running, context, len(cache.layers))
    largest = sizing.shape(inputs.longest, inputs.running, inputs.kv_tokens or sys.maxsize)
    grows = rounded(inputs.shortest_prompt + inputs.response) < largest.positions
    smaller = CacheShape(largest.slots, largest.positions // 2) if grows else CacheShape()
    return sizing.peak(smaller, largest) * cache.bytes_per_token


def engine_working(footprint: Footprint, inputs: MemoryInputs) -> Sizes:
    """Working memory of an engine's step: the rows of its largest pass, their mask, and the logits it samples from."""
    model, item = footprint.model, footprint.dtype.itemsize
    rows = EXACT_ROWS if inputs.exact else max(PROMPT_ROWS, inputs.running + PROMPT_ROWS // 4)
    span = Spans(1, min(rows, inputs.longest), inputs.longest)
    mask = span.pairs * model.heads // model.kv_heads * (item + 1)
    sampled_logits = (EXACT_ROWS if inputs.exact else inputs.running) * model.vocab
    layer = footprint.working_bytes(PackedSize(rows, 0, (span,))) + mask
    return [("an engine's step", max(layer, SAMPLING_BYTES * sampled_logits))]


@dataclass(frozen=True)
class MemoryItem:
    """One item of a worker in a pool."""

    worker: str
    """`actor_train[0]`, or `controller`."""
    what: str
    bytes: int

    @property
    def role(self) -> str:
        """`actor_train`, or `controller`."""
        return self.worker.partition("[")[0]


@dataclass(frozen=True, order=True)
class DeviceMemory:
    """One memory: a node's, or that of one of its GPUs."""

    node: int
    gpu: int | None
    """None for the node's memory."""
    name: str
    capacity: int


@dataclass(frozen=True)
class MemoryEstimate:
    """The items in every pool in every phase."""

    parts: Mapping[tuple[DeviceMemory, Phase], tuple[MemoryItem, ...]]
    budgets: Mapping[str, Budget]
    """How trainers split their batches into micro-batches, by worker."""

    @property
    def pools(self) -> tuple[DeviceMemory, ...]:
        return tuple(dict.fromkeys(pool for pool, _ in self.parts))

    def bytes(self, pool: DeviceMemory, phase: Phase) -> int:
        return sum(part.bytes for part in self.parts[pool, phase])

    def peak(self, pool: DeviceMemory) -> tuple[Phase, int]:
        """The phase in which a pool is fullest, and its bytes."""
        phases = [phase for other, phase in self.parts if other == pool]
        fullest = max(phases, key=lambda phase: self.bytes(pool, phase))
        return fullest, self.bytes(pool, fullest)

    def too_full(self) -> tuple[DeviceMemory, ...]:
        """Pools that would hold more than may be planned. A pool of unknown capacity (0) is never too full."""
        return tuple(pool for pool in self.pools if pool.capacity and self.peak(pool)[1] > FULL * pool.capacity)


@dataclass(frozen=True)
class ModelSize:
    """The actor's model, the models of other roles, and the precision of each role."""

    shape: PretrainedConfig
    sizes: ModelShape
    dtypes: Mapping[str, torch.dtype]
    """By role."""
    other_models: Mapping[str, tuple[PretrainedConfig, ModelShape]] = field(default_factory=dict)
    """Models of roles that do not use the actor's, by role."""
    shards: Mapping[str, ShardSizes] = field(default_factory=dict)
    """What a rank holds of each sharded role's model."""

    def sizes_of(self, role: str) -> ModelShape:
        """The shape of the role's model. Only the trainer has adapters."""
        if role in self.other_models:
            return self.other_models[role][1]
        return self.sizes if role == "actor_train" else replace(self.sizes, adapters=0)

    def shape_of(self, role: str) -> PretrainedConfig:
        return self.other_models[role][0] if role in self.other_models else self.shape


@dataclass(frozen=True)
class _Worker:
    """A worker that holds a model, and where."""

    role: str
    name: str
    rank: int
    kind: Kind
    pool: DeviceMemory
    host_memory: DeviceMemory
    """The memory of its node."""
    engine: type[InferBackend] | None
    """Of a role that generates."""
    devices: int = 1
    """Number of devices that hold its weights together; this is one of them."""
    mesh: MeshShape | None = None
    """The mesh of its role, if this is one of the role's ranks."""


def estimate(map: DeviceMap, table: ResidencyTable, model: ModelSize, inputs: MemoryInputs) -> MemoryEstimate:
    """The memory of a mapped run whose workers have the residency of the table."""
    hosts = {number: host(map.inventory, number) for number in range(len(map.inventory.nodes))}
    workers = _workers(map, hosts)
    pools = dict.fromkeys([*hosts.values(), *(worker.pool for worker in workers)])
    found: dict[tuple[DeviceMemory, Phase], list[MemoryItem]] = {}
    budgets: dict[str, Budget] = {}
    for phase in table.phases:
        found.update({(pool, phase): [] for pool in pools})
        found[hosts[0], phase].append(MemoryItem("controller", RUNTIME, RUNTIME_BYTES))
        for role_placement in map.roles.values():
            if map.executor == "ray" or role_placement.mesh is not None:
                for devices, placement in zip(role_placement.workers, role_placement.placements, strict=True):
                    found[hosts[devices[0].node], phase].append(MemoryItem(placement.name, RUNTIME, RUNTIME_BYTES))
        for worker in workers:
            level = table.level(phase, worker.role, worker.rank)
            device_items, offloaded_items = _resident(map, worker, level, model, inputs)
            found[worker.pool, phase].extend(MemoryItem(worker.name, *size) for size in device_items)
            found[worker.host_memory, phase].extend(
                MemoryItem(worker.name, *size) for size in (*offloaded_items, *_host_items(worker, model))
            )
        resident = {pool: tuple(found[pool, phase]) for pool in pools}
        for worker in workers:
            sizes, budget = _working(worker, phase, model, inputs, resident[worker.pool])
            found[worker.pool, phase].extend(MemoryItem(worker.name, *size) for size in sizes)
            if budget is not None:
                budgets[worker.name] = budget
    used = {node for node in hosts if any(found[hosts[node], phase] for phase in table.phases)}
    names = [
        "controller",
        *(placement.name for role_placement in map.roles.values() for placement in role_placement.placements),
    ]
    order = {name: number for number, name in enumerate(names)}
    parts = {
        key: tuple(sorted(parts, key=lambda part: order[part.worker]))
        for key, parts in sorted(found.items(), key=_pool_order)
        if key[0].node in used or parts
    }
    return MemoryEstimate(parts, budgets)


def _workers(map: DeviceMap, hosts: Mapping[int, DeviceMemory]) -> list[_Worker]:
    workers = []
    for role_placement in map.roles.values():
        for devices, placement in zip(role_placement.workers, role_placement.placements, strict=True):
            if role_placement.backend is None:
                continue
            for device in devices if role_placement.on_gpus else devices[:1]:
                host_memory = hosts[device.node]
                pool = gpu(map.inventory, device.node, device.index) if device.kind == "gpu" else host_memory
                together = len(devices) if role_placement.on_gpus else 1
                worker = _Worker(
                    placement.role,
                    placement.name,
                    placement.rank,
                    device.kind,
                    pool,
                    host_memory,
                    role_placement.engine,
                    together,
                    role_placement.mesh,
                )
                workers.append(worker)
    return workers


def host(inventory: Inventory, node: int) -> DeviceMemory:
    several = len(inventory.nodes) > 1
    return DeviceMemory(node, None, f"node{node} memory" if several else "memory", inventory.nodes[node].memory_bytes)


def gpu(inventory: Inventory, node: int, index: int) -> DeviceMemory:
    name = f"node{node}:gpu{index}" if len(inventory.nodes) > 1 else f"gpu{index}"
    return DeviceMemory(node, index, name, inventory.nodes[node].gpu_bytes)


def _pool_order(item: tuple[tuple[DeviceMemory, Phase], object]) -> tuple[bool, int, int]:
    """GPUs first, then the memories of nodes; phases stay in order."""
    pool = item[0][0]
    return pool.gpu is None, pool.node, pool.gpu or 0


def _resident(
    map: DeviceMap, worker: _Worker, level: Residency, model: ModelSize, inputs: MemoryInputs
) -> tuple[Sizes, Sizes]:
    """What a worker keeps on its device in a phase, and what it has offloaded to its node's memory."""
    items = [(what, size // worker.devices) for what, size in _resident_items(map, worker, model, inputs)]
    weights = ("weights", MASTERS) if worker.role in model.shards else ("weights",)
    on_device = {"none": (), "weights": weights, "all": tuple(what for what, _ in items)}[level]
    device_items = [size for size in items if size[0] in on_device]
    offloaded_items = [size for size in items if size[0] not in on_device and size[0] != CACHE]
    if worker.kind == "cpu":
        device_items, offloaded_items = [*device_items, *offloaded_items], []
    return device_items, [(f"{what}, offloaded", n) for what, n in offloaded_items]


def _host_items(worker: _Worker, model: ModelSize) -> Sizes:
    """What an engine takes of its node's memory: its processes, and the weights that it reads from there."""
    engine = worker.engine
    if engine is None:
        return []
    items = [(f"{engine.starting}'s processes", engine.host_bytes)] if engine.host_bytes else []
    if engine.loads_through_host:
        weights = model.sizes_of(worker.role).parameters * model.dtypes[worker.role].itemsize
        items.append((f"weights on their way to {engine.starting}", weights // worker.devices))
    return items


def _own_cache(worker: _Worker, shape: PretrainedConfig, dtype: torch.dtype, inputs: MemoryInputs) -> int | None:
    """The KV cache that an engine allocates by its own rule, on all devices of the worker together."""
    if worker.engine is None:
        return None
    settings = inputs.engines.get(worker.role, RoleConfig())
    each = worker.engine.cache_bytes(shape, dtype.itemsize, settings, inputs.running, inputs.response)
    return None if each is None else settings.parallel.tensor * each


def _resident_items(map: DeviceMap, worker: _Worker, model: ModelSize, inputs: MemoryInputs) -> Sizes:
    """What a worker keeps from phase to phase."""
    role = worker.role
    dtype, sizes = model.dtypes[role], model.sizes_of(role)
    if role in model.shards:
        return sharded_state(model.shards[role], dtype, PURPOSES[role], inputs.optimizer)
    weights = ("weights", (sizes.parameters + sizes.adapters) * dtype.itemsize)
    if role in ("actor_train", "critic"):
        masters = [] if dtype == torch.float32 else [(MASTERS, sizes.trained * 4)]
        return [weights, *masters, (MOMENTS[inputs.optimizer], sizes.trained * MOMENT_BYTES[inputs.optimizer])]
    if role in ("actor_infer", "judge"):
        weights = ("weights", 0) if map.one_copy and role == "actor_infer" else weights
        shape, inputs = model.shape_of(role), inputs.of_role(role)
        if (own := _own_cache(worker, shape, dtype, inputs)) is not None:
            return [weights, (CACHE, own)]
        paged = worker.kind == "gpu" and not inputs.exact
        recorded = RouteShape(sizes.chosen, sizes.experts) if inputs.router_replay and sizes.experts else None
        return [weights, (CACHE, cache_bytes(shape, dtype, inputs, paged, recorded))]
    return [weights]


def _working(
    worker: _Worker, phase: Phase, model: ModelSize, inputs: MemoryInputs, resident: tuple[MemoryItem, ...]
) -> tuple[Sizes, Budget | None]:
    """The working memory of a worker in its own phase, in addition to what is resident, and how a trainer splits its
    batch."""
    role, dtype, sizes = worker.role, model.dtypes[worker.role], model.sizes_of(worker.role)
    device = TORCH_DEVICE[worker.kind]
    tensor = 1 if worker.mesh is None else worker.mesh.tensor
    compiled = compiles(inputs.compile, device, dtype, adapted=bool(sizes.adapters), tensor=tensor)
    footprint = Footprint(sizes if worker.mesh is None else of_rank(sizes, worker.mesh), dtype, device, compiled)
    if role in model.shards:
        return _rank_working(worker, phase, model.shards[role], footprint, inputs, resident)
    if (role, phase) in (("actor_train", "train"), ("critic", "critic")):
        budget = inputs.budget(footprint, _free_bytes(worker, resident, footprint, inputs, sizes.trained))
        return train_working(footprint, inputs, budget), budget
    if (role, phase) == ("reference", "reference"):
        budget = inputs.budget(footprint, _free_bytes(worker, resident, footprint, inputs, 0))
        return forward_working(footprint, inputs, budget), budget
    if role in ("actor_infer", "judge") and phase == "generate":
        return engine_working(footprint, inputs.of_role(role)), None
    if (role, phase) == ("reward_model", "generate"):
        inputs = inputs.of_role(role)
        budget = inputs.budget(footprint, _free_bytes(worker, resident, footprint, inputs, 0))
        return forward_working(footprint, inputs, budget), None
    if phase == "publish" and role in ("actor_train", "actor_infer") and inputs.bucket_bytes:
        return [("weights in transit", 2 * min(inputs.bucket_bytes, sizes.parameters * dtype.itemsize))], None
    return [], None


def _rank_working(
    worker: _Worker,
    phase: Phase,
    sizes: ShardSizes,
    footprint: Footprint,
    inputs: MemoryInputs,
    resident: tuple[MemoryItem, ...],
) -> tuple[Sizes, Budget | None]:
    """As `_working`, for a rank, which gets its data-parallel share of the groups."""
    role = worker.role
    if (role, phase) == ("actor_train", "publish"):  # the forward pass of the probe gathers parameters
        transit = 2 * min(inputs.bucket_bytes, footprint.model.parameters * footprint.dtype.itemsize)
        return [*gathered_parts(sizes, footprint), ("weights in transit", transit)], None
    if phase != COMPUTE_PHASE[role]:
        return [], None
    inputs = inputs.of_role(role)
    assert worker.mesh is not None
    inputs = replace(inputs, groups=ceil(inputs.groups / worker.mesh.data))
    transient = sizes.gathered_bytes(footprint.dtype.itemsize) + sizes.reducing_bytes(footprint.dtype.itemsize)
    budget = inputs.budget(footprint, _free_bytes(worker, resident, footprint, inputs, sizes.trained, transient))
    return sharded_working(sizes, footprint, inputs, budget, PURPOSES[role]), budget


def _free_bytes(
    worker: _Worker,
    resident: tuple[MemoryItem, ...],
    footprint: Footprint,
    inputs: MemoryInputs,
    trained: int,
    transient_bytes: int = 0,
) -> int | None:
    """The free memory of a trainer's GPU when it first measures it, before the moments are allocated; None on a CPU."""
    if worker.kind == "cpu":
        return None
    if not worker.pool.capacity:
        return sys.maxsize
    resident_bytes = sum(
        part.bytes for part in resident if (part.worker, part.what) != (worker.name, MOMENTS[inputs.optimizer])
    )
    return activation_budget(footprint, worker.pool.capacity - resident_bytes, trained, inputs.optimizer, transient_bytes)


def largest(parts: Iterable[MemoryItem]) -> MemoryItem:
    """The largest item, with equal items of a role's workers in the pool summed."""
    found: dict[tuple[str, str], MemoryItem] = {}
    for part in parts:
        key = part.role, part.what
        found[key] = MemoryItem(part.role, part.what, found[key].bytes + part.bytes) if key in found else part
    return max(found.values(), key=lambda part: part.bytes)
