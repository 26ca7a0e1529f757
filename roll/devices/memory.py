"""How much memory a run will take, by device, stage and part, before anything starts.

A pool is memory of its own: a GPU's, or a node's. What a worker keeps between stages (weights, masters, moments, cache)
counts wherever it is resident; what it works in (gradients, activations, logits) only in its own stage. The need of a
pool is the largest sum over stages. On a CPU there is nowhere to go: an offloaded worker gives up its cache and keeps the
rest. What leaves a GPU lies in its node's memory meanwhile.

The sizes of activations are what autograd keeps for a Llama-like decoder behind ROLL's attention, tensor by tensor;
tests compare them with what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from roll.config.schema import Config, LoraConfig
from roll.devices.inventory import Inventory, Kind
from roll.devices.inventory import available_bytes as available_bytes
from roll.devices.map import DeviceMap
from roll.devices.stages import Stage, StageTable
from roll.engine.cache import SlotCache
from roll.engine.engine import EXACT_ROWS, PROMPT_ROWS
from roll.model.lora import inject
from roll.strategy.shelf import Level
from roll.strategy.train.logprobs import CHUNK_ELEMENTS

RUNTIME = "interpreter and libraries"
RUNTIME_BYTES = 700 << 20
"""The interpreter, torch, transformers and their libraries."""
CACHE = "key-value cache"
FULL = 0.9
"""The share of a pool that may be planned: the rest is for fragments, contexts and what nobody counts."""
LOGITS_FORWARD_BYTES, LOGITS_BACKWARD_BYTES = 12, 20
"""For each logit of a chunk: scaled logits, exponentials and their product; in the backward pass two more gradients."""
DRAW_BYTES = 28
"""For each logit an engine draws from: logits, scaled, log-probs, probabilities, those padded to blocks, and in fp64."""
MASK_ALIGNMENT = {"cpu": 1, "gpu": 16}
"""Keys an attention mask is padded to a multiple of."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model its memory depends on."""

    parameters: int
    output: int
    """Parameters of the output layer."""
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    normed_heads: bool = False
    """Whether queries and keys are normalised (Qwen3)."""
    adapters: int = 0
    """Parameters of the trainer's adapters, which are then all that learns; 0 without."""

    @property
    def trained(self) -> int:
        """Parameters that have gradients and moments."""
        return self.adapters or self.parameters

    @classmethod
    def of(cls, config: PretrainedConfig, lora: LoraConfig | None = None) -> ModelShape:
        """Counted on a model without storage."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        heads = config.num_attention_heads
        sizes = cls(
            parameters=sum(p.numel() for p in model.parameters()),
            output=model.get_output_embeddings().weight.numel(),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            normed_heads=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        )
        if lora is None:
            return sizes
        with torch.device("meta"):
            inject(model, lora)
        return replace(sizes, adapters=sum(p.numel() for p in model.parameters() if p.requires_grad))


@dataclass(frozen=True)
class Spans:
    """Attentions of one size: `count` of them, each of `queries` new rows over `keys` rows of its path."""

    count: int
    queries: int
    keys: int


@dataclass(frozen=True)
class MicroBatch:
    """The size of a packed micro-batch: distinct rows, those a token is predicted from, and the attentions over them."""

    rows: int
    predicting: int
    spans: tuple[Spans, ...]

    @property
    def queries(self) -> int:
        return sum(span.count * span.queries for span in self.spans)

    @property
    def keys(self) -> int:
        return sum(span.count * span.keys for span in self.spans)

    def pairs(self, align: int = 1) -> int:
        """Query-key pairs, keys padded to a multiple of `align`."""
        return sum(span.count * span.queries * (ceil(span.keys / align) * align) for span in self.spans)


def micro_batch_of(limit: int, prompt: int, response: int, group_size: int, groups: int) -> MicroBatch:
    """The fullest micro-batch of at most `limit` rows where every prompt and response is that long: whole groups first,
    then a part of one. A group's first sample brings its prompt, the others their responses."""
    full = min(limit // (prompt + group_size * response), groups)
    left = limit - full * (prompt + group_size * response)
    openers, siblings = full, full * (group_size - 1)
    if full < groups and (left >= prompt + response or not full):  # one sample is computed even if it is too long
        openers += 1
        siblings += min(max(left - prompt - response, 0) // response, group_size - 1)
    path = prompt + response
    spans = [Spans(openers, path, path), Spans(siblings, response, path)]
    rows = openers * path + siblings * response
    return MicroBatch(rows, (openers + siblings) * response, tuple(span for span in spans if span.count))


def saved_bytes(model: ModelShape, dtype: torch.dtype, batch: MicroBatch, kind: Kind = "cpu") -> int:
    """What the forward pass of a micro-batch keeps for its backward pass, without the logits.

    A row and layer: two norms (their input in fp32, the normalised and the scaled vector), the attention's output, and
    gate, activation, up and product of the MLP. An attention: padded queries and outputs, keys and values gathered for
    every sequence, sums of exponentials, and its mask in the serving precision once for each query head of a key head.
    """
    size = dtype.itemsize
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm = (4 + 2 * size) * model.hidden
    a_row = 2 * norm + size * (query + 4 * model.inner)
    if model.normed_heads:
        a_row += (4 + size) * (query + key)
    repeats = model.heads // model.kv_heads
    attention = batch.queries * (2 * size * query + 4 * model.heads) + batch.keys * 2 * size * key
    mask = batch.pairs(MASK_ALIGNMENT[kind]) * repeats * size
    ends = batch.rows * (norm + 2 * size * model.head_dim) + batch.predicting * size * model.hidden
    return model.layers * (batch.rows * a_row + attention + mask) + ends + batch.pairs()


def layer_bytes(model: ModelShape, dtype: torch.dtype, batch: MicroBatch, kind: Kind = "cpu") -> int:
    """What one layer works in without keeping it: hidden states, the larger of attention and MLP."""
    size = dtype.itemsize
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    repeats = model.heads // model.kv_heads
    mask = batch.pairs(MASK_ALIGNMENT[kind]) * repeats * (size + 1)
    attention = batch.queries * 2 * size * query + batch.keys * 2 * size * key + mask
    return batch.rows * (2 * size + 4) * model.hidden + max(attention, batch.rows * 3 * size * model.inner)


def chunk_logits(model: ModelShape, predicting: int) -> tuple[int, bool]:
    """Logits held at once when tokens are predicted from so many rows, and whether they come in several chunks."""
    rows = max(1, CHUNK_ELEMENTS["cpu"] // model.vocab)
    return min(rows, predicting) * model.vocab, predicting > rows


Sizes = list[tuple[str, int]]
"""Parts and their bytes."""


@dataclass(frozen=True)
class Workload:
    """The sizes of a run that memory depends on, besides the model's."""

    shortest_prompt: int
    longest_prompt: int
    response: int
    group_size: int
    groups: int
    """Groups of one update."""
    limit_rows: int
    running: int
    """Sequences an engine holds at once; 0 without engines."""
    exact: bool
    bucket_bytes: int
    """Size of the pieces in which weights travel, of which a side has two; 0 in one process."""

    @classmethod
    def of(cls, config: Config, shortest_prompt: int, longest_prompt: int) -> Workload:
        return cls(
            shortest_prompt=shortest_prompt,
            longest_prompt=longest_prompt,
            response=config.rollout.max_new_tokens,
            group_size=config.rollout.group_size,
            groups=ceil(config.rollout.groups_per_step / config.train.updates_per_step),
            limit_rows=config.train.micro_batch_tokens,
            running=config.rollout.max_running,
            exact=config.deterministic,
            bucket_bytes=config.weights.bucket_mb << 20 if config.executor == "ray" else 0,
        )

    @classmethod
    def of_chats(cls, config: Config, longest_tokens: int) -> Workload:
        """Conversations of at most so many tokens: each a group of its own, any token of which may be an answer's."""
        return cls(
            shortest_prompt=1,
            longest_prompt=1,
            response=max(longest_tokens - 1, 1),
            group_size=1,
            groups=config.data.samples_per_step,
            limit_rows=config.train.micro_batch_tokens,
            running=0,
            exact=config.deterministic,
            bucket_bytes=0,
        )

    def micro_batches(self) -> list[MicroBatch]:
        """The fullest micro-batches, for responses of the longest size and its halves: long ones make large attentions,
        many short ones many keys."""
        lengths = {max(self.response >> halvings, 1) for halvings in range(self.response.bit_length())}
        return [
            micro_batch_of(self.limit_rows, self.longest_prompt, length, self.group_size, self.groups)
            for length in sorted(lengths, reverse=True)
        ]

    @property
    def several(self) -> bool:
        """Whether an update takes more than one micro-batch."""
        return self.groups * (self.longest_prompt + self.group_size * self.response) > self.limit_rows


def train_working(model: ModelShape, dtype: torch.dtype, work: Workload, kind: Kind = "cpu") -> Sizes:
    """Gradients, activations and logits of an update at its fullest moment.

    With several micro-batches the gradients of all parameters are there while activations are; with one they appear as
    activations go, and the fullest moment is the end of the forward pass or of the backward pass.
    """
    size = dtype.itemsize
    batch = max(work.micro_batches(), key=lambda batch: saved_bytes(model, dtype, batch, kind))
    logits, chunks = chunk_logits(model, batch.predicting)
    saved = saved_bytes(model, dtype, batch, kind)
    beside = max(
        LOGITS_BACKWARD_BYTES * logits + size * model.output * chunks,
        layer_bytes(model, dtype, batch, kind) + size * model.output,
    )
    gradients = 4 * model.trained
    last = size * 2 * model.output + (4 * model.output if size < 4 and work.several else 0)
    if gradients * work.several + saved + beside >= gradients + last:
        found = [("activations of a micro-batch", saved), ("logits and one layer's gradients", beside)]
        return [("gradients, fp32", gradients), *found] if work.several else found
    return [("gradients, fp32", gradients), ("the output layer's gradient", last)]


def forward_working(model: ModelShape, dtype: torch.dtype, work: Workload, kind: Kind = "cpu") -> Sizes:
    """What a pass without gradients over a micro-batch works in."""
    needs = []
    for batch in work.micro_batches():
        logits, _ = chunk_logits(model, batch.predicting)
        hidden = dtype.itemsize * model.hidden * (batch.rows + batch.predicting)
        layer = layer_bytes(model, dtype, batch, kind) + batch.pairs()
        needs.append(max(layer, LOGITS_FORWARD_BYTES * logits + hidden))
    return [("a forward pass", max(needs))]


def cache_bytes(shape: PretrainedConfig, dtype: torch.dtype, work: Workload) -> int:
    """An engine's keys and values for its longest sequences, and the smaller cache it outgrows on the way."""
    cache = SlotCache(shape, work.running, dtype, torch.device("cpu"))
    largest = cache.rounded(work.longest_prompt + work.response)
    smaller = largest // 2 if cache.rounded(work.shortest_prompt + work.response) < largest else 0
    return cache.slots * (largest + smaller) * cache.bytes_a_token


def engine_working(model: ModelShape, dtype: torch.dtype, work: Workload, kind: Kind = "cpu") -> Sizes:
    """What an engine's step works in: the rows of its largest pass, and the logits it draws from."""
    rows = EXACT_ROWS if work.exact else max(PROMPT_ROWS, work.running)
    positions = work.longest_prompt + work.response
    passed = MicroBatch(rows, 0, (Spans(1, min(rows, positions), positions),))
    drawn = (EXACT_ROWS if work.exact else work.running) * model.vocab
    return [("an engine's step", max(layer_bytes(model, dtype, passed, kind), DRAW_BYTES * drawn))]


@dataclass(frozen=True)
class Part:
    """What one thing of a worker takes in a pool."""

    worker: str
    """`actor_train[0]`, or `controller`."""
    what: str
    bytes: int


@dataclass(frozen=True, order=True)
class Pool:
    """Memory of its own: a node's, or that of one of its GPUs."""

    node: int
    gpu: int | None
    """None for the node's own memory."""
    name: str
    capacity: int


@dataclass(frozen=True)
class Estimate:
    """What is in every pool in every stage."""

    parts: Mapping[tuple[Pool, Stage], tuple[Part, ...]]

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(dict.fromkeys(pool for pool, _ in self.parts))

    def bytes(self, pool: Pool, stage: Stage) -> int:
        return sum(part.bytes for part in self.parts[pool, stage])

    def peak(self, pool: Pool) -> tuple[Stage, int]:
        """The stage in which a pool is fullest, and how full."""
        stages = [stage for other, stage in self.parts if other == pool]
        fullest = max(stages, key=lambda stage: self.bytes(pool, stage))
        return fullest, self.bytes(pool, fullest)

    def too_full(self) -> tuple[Pool, ...]:
        """Pools that would hold more than may be planned; of one whose size is not known (0) nothing can be said."""
        return tuple(pool for pool in self.pools if pool.capacity and self.peak(pool)[1] > FULL * pool.capacity)


@dataclass(frozen=True)
class Model:
    """The model of all roles, and how each role holds it."""

    shape: PretrainedConfig
    sizes: ModelShape
    dtypes: Mapping[str, torch.dtype]
    """By role."""

    def sizes_of(self, role: str) -> ModelShape:
        """The trainer alone has adapters."""
        return self.sizes if role == "actor_train" else replace(self.sizes, adapters=0)


def estimate(map: DeviceMap, table: StageTable, model: Model, work: Workload) -> Estimate:
    """The memory of a mapped run whose workers are resident as the table says."""
    hosts = {number: host(map.inventory, number) for number in range(len(map.inventory.nodes))}
    found: dict[tuple[Pool, Stage], list[Part]] = {}
    for stage in table.stages:
        for pool in hosts.values():
            found[pool, stage] = []
        found[hosts[0], stage].append(Part("controller", RUNTIME, RUNTIME_BYTES))
        for placement in map.roles.values():
            for devices, place in zip(placement.workers, placement.places, strict=True):
                home = hosts[devices[0].node]
                if map.executor == "ray":
                    found[home, stage].append(Part(place.name, RUNTIME, RUNTIME_BYTES))
                if not placement.strategy:
                    continue
                pool = home
                if devices[0].kind == "gpu":
                    pool = gpu(map.inventory, devices[0].node, devices[0].index)
                    found.setdefault((pool, stage), [])
                level = table.level(stage, place.role, place.rank)
                here, away = _resident(map, place.role, level, stage, model, work, devices[0].kind)
                found[pool, stage].extend(Part(place.name, *size) for size in here)
                found[home, stage].extend(Part(place.name, *size) for size in away)
    used = {node for node in hosts if any(found[hosts[node], stage] for stage in table.stages)}
    return Estimate(
        {key: tuple(parts) for key, parts in sorted(found.items(), key=_pool_order) if key[0].node in used or parts}
    )


def host(inventory: Inventory, node: int) -> Pool:
    several = len(inventory.nodes) > 1
    return Pool(node, None, f"node{node} memory" if several else "memory", inventory.nodes[node].memory_bytes)


def gpu(inventory: Inventory, node: int, index: int) -> Pool:
    name = f"node{node}:gpu{index}" if len(inventory.nodes) > 1 else f"gpu{index}"
    return Pool(node, index, name, inventory.nodes[node].gpu_bytes)


def _pool_order(item: tuple[tuple[Pool, Stage], object]) -> tuple[bool, int, int]:
    """GPUs first, then nodes' own memory; stages stay in order."""
    pool = item[0][0]
    return pool.gpu is None, pool.node, pool.gpu or 0


def _resident(
    map: DeviceMap, role: str, level: Level, stage: Stage, model: Model, work: Workload, kind: Kind
) -> tuple[Sizes, Sizes]:
    """What a worker has on its device in a stage, and what lies in its node's memory meanwhile."""
    kept = _kept(map, role, model, work)
    on_device = {"none": (), "weights": ("weights",), "all": tuple(what for what, _ in kept)}[level]
    here = [size for size in kept if size[0] in on_device]
    away = [size for size in kept if size[0] not in on_device and size[0] != CACHE]
    if kind == "cpu":
        here, away = [*here, *away], []
    return [*here, *_working(map, role, stage, model, work, kind)], [(f"{what}, offloaded", n) for what, n in away]


def _kept(map: DeviceMap, role: str, model: Model, work: Workload) -> Sizes:
    """What a worker keeps from stage to stage."""
    dtype, sizes = model.dtypes[role], model.sizes_of(role)
    weights = ("weights", (sizes.parameters + sizes.adapters) * dtype.itemsize)
    if role in ("actor_train", "critic"):
        masters = [] if dtype == torch.float32 else [("master weights, fp32", sizes.trained * 4)]
        return [weights, *masters, ("optimizer moments, fp32", sizes.trained * 8)]
    if role in ("actor_infer", "judge"):
        weights = ("weights", 0) if map.one_copy and role == "actor_infer" else weights
        return [weights, (CACHE, cache_bytes(model.shape, dtype, work))]
    return [weights]


def _working(map: DeviceMap, role: str, stage: Stage, model: Model, work: Workload, kind: Kind) -> Sizes:
    """What a worker works in, in the stage that is its own."""
    arguments = (model.sizes_of(role), model.dtypes[role], work, kind)
    if (role, stage) in (("actor_train", "train"), ("critic", "critic")):
        return train_working(*arguments)
    if (role, stage) == ("actor_infer", "generate"):
        return engine_working(*arguments)
    if (role, stage) == ("reference", "reference"):
        return forward_working(*arguments)
    if stage == "publish" and role in ("actor_train", "actor_infer") and work.bucket_bytes:
        return [("weights in transit", 2 * min(work.bucket_bytes, model.sizes.parameters * model.dtypes[role].itemsize))]
    return []


def largest(parts: Iterable[Part]) -> Part:
    return max(parts, key=lambda part: part.bytes)
