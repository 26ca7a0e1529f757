"""The parts of `sharded.py` that need a GPU: FSDP of size 1 beside `single`, offload, grouped experts beside eager ones,
and rank 0 of large worlds."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parent))
from train_step import LOSS, LR, PEAK_FLOPS, make_batch

from roll.cluster.mesh import MeshShape
from roll.config.schema import TrainConfig
from roll.data import Batch, Sample, Task
from roll.devices.memory import sharded_peak
from roll.model import attention
from roll.model.tiny import character_tokenizer
from roll.strategy.train.activation_memory import PackedSize, Spans
from roll.strategy.train.packing import pack
from roll.strategy.train.policy import PolicyTrainer
from roll.strategy.train.sharded import experts
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import Meshes, RankGroup, open_store
from roll.strategy.train.sharded.strategy import ShardedStrategy
from roll.strategy.train.single import SingleStrategy
from roll.strategy.train.work_split import RankShare

T = TypeVar("T")
GIB = 1 << 30
DTYPE = torch.bfloat16
LINK_BYTES = 1 << 30
MICRO_BATCH_TOKENS = 12_288
UPDATE_TOKENS = 23_000
"""Two micro-batches."""
LONG = 131_072
QWEN: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": LONG}
SHAPE_1_7B = Qwen3Config(
    **QWEN, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, tie_word_embeddings=True,
)  # fmt: skip
DENSE_32B = Qwen3Config(
    **QWEN, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
DENSE_70B = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=LONG, tie_word_embeddings=False,
)  # fmt: skip
MIXTURE_235B = Qwen3MoeConfig(
    **QWEN, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
    num_attention_heads=64, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    tie_word_embeddings=False,
)  # fmt: skip
FOUR_OF_30B = Qwen3MoeConfig(
    **{**QWEN, "vocab_size": 512}, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
    num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True,
)  # fmt: skip
"""Four layers of Qwen3-30B-A3B."""
EXPERT_TOKENS = 16_000


@dataclass(frozen=True)
class LargeWorld:
    name: str
    config: PretrainedConfig
    mesh: MeshShape
    tokens: int
    """Of the one micro-batch of rank 0, or of all ranks of its context together: short samples, or a single one."""
    single: bool = False

    def batch(self) -> Batch:
        make = one_sample if self.single else make_batch
        return make(self.tokens, self.config.vocab_size)


WORLDS = (
    LargeWorld("dense 32B over 64", DENSE_32B, MeshShape(shard=64), 24_000),
    LargeWorld("dense 32B over 64, context 8", DENSE_32B, MeshShape(shard=8, context=8), LONG, single=True),
    LargeWorld("dense 70B over 64, tensor 8", DENSE_70B, MeshShape(shard=8, tensor=8), 24_000),
    LargeWorld("235B mixture over 256", MIXTURE_235B, MeshShape(shard=256), 16_000),
    LargeWorld("235B mixture over 256, expert 8", MIXTURE_235B, MeshShape(shard=256, expert=8), 16_000),
    LargeWorld("235B mixture over 256, expert 64", MIXTURE_235B, MeshShape(shard=256, expert=64), 16_000),
    LargeWorld(
        "235B mixture over 256, tensor 4, expert 64", MIXTURE_235B, MeshShape(shard=64, tensor=4, expert=64), 16_000
    ),
    LargeWorld(
        "235B mixture over 256, context 16, expert 64",
        MIXTURE_235B,
        MeshShape(shard=16, context=16, expert=64),
        LONG,
        single=True,
    ),
)


def measure(parts: Sequence[str], repeats: int) -> Iterator[dict[str, Any]]:
    """The figures of each part, as it is done. A world is left before the next begins."""
    device = torch.device("cuda", 0)
    if "single" in parts or "offload" in parts:
        store, rendezvous = open_store("127.0.0.1", 60.0)
        group = RankGroup(0, MeshShape(), rendezvous, device, store)
        if "single" in parts:
            found = {"eager": over_single(group, "off", repeats)}
            yield {"over_single": dict(found)}
            found["compiled"] = over_single(group, "on", repeats)
            yield {"over_single": found}
        if "offload" in parts:
            yield {"offload": offload(group)}
        group.close()
    if "experts" in parts:
        yield {"experts_over_eager": experts_over_eager(device, repeats)}
    if "plans" in parts:
        errors = {}
        for world in WORLDS:
            errors[world.name] = in_new_process(plan_error, world, device)
            yield {"plan_error": dict(errors)}


def in_new_process(work: Callable[..., T], *arguments: Any) -> T:
    """In one process torch would mistake the groups of a world for those of one that was left before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def over_single(group: RankGroup, compiled: str, repeats: int, config: PretrainedConfig = SHAPE_1_7B) -> dict[str, float]:
    """Both trainers are on the device, so that they can take turns. Each one's peak is without what the other holds."""
    settings = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "compile": compiled, "activation_checkpointing": "off"}
    batch = make_batch(UPDATE_TOKENS, config.vocab_size)
    free()
    makers: tuple[Callable[[], PolicyTrainer], ...] = (
        lambda: single_trainer(config, group.device, settings),
        lambda: sharded_trainer(config, group, settings),
    )
    trainers, held = [], []
    for make in makers:
        before = allocated()
        trainers.append(make())
        for _ in range(2):
            trainers[-1].update(batch, LOSS, 0)
        held.append(allocated() - before)
    seconds, peaks = [float("inf")] * 2, [0] * 2
    for _ in range(repeats):
        for which, trainer in enumerate(trainers):
            reset_peak()
            seconds[which] = min(seconds[which], timed(lambda trainer=trainer: trainer.update(batch, LOSS, 0))[1])  # type: ignore[misc]
            peaks[which] = peak() - held[1 - which]
    return {
        "time": seconds[1] / seconds[0],
        "memory": peaks[1] / max(peaks[0], 1),
        "single_ms": 1e3 * seconds[0],
        "sharded_ms": 1e3 * seconds[1],
        "single_gib": peaks[0] / GIB,
        "sharded_gib": peaks[1] / GIB,
    }


def offload(group: RankGroup, config: PretrainedConfig = SHAPE_1_7B) -> dict[str, float]:
    """There and back a second time: the first pins the host's memory."""
    free()
    trainer = sharded_trainer(config, group, {"compile": "off", "micro_batch_tokens": MICRO_BATCH_TOKENS})
    trainer.update(make_batch(2048, config.vocab_size), LOSS, 0)
    first = timed(lambda: trainer.set_residency("none"))[1]
    trainer.set_residency("all")
    optimizer = trainer._optimizer
    assert optimizer is not None
    moved = sum(local_bytes(tensor) for tensor in optimizer.state().values())
    out = timed(lambda: trainer.set_residency("none"))[1]
    reserved = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    back = timed(lambda: trainer.set_residency("all"))[1]
    link_out, link_back = link_bytes_per_s(group.device)
    return {
        "gb": moved / 1e9,
        "reserved_gib": reserved / GIB,
        "first_s": first,
        "out_s": out,
        "back_s": back,
        "out_gb_per_s": moved / out / 1e9,
        "back_gb_per_s": moved / back / 1e9,
        "link_out_gb_per_s": link_out / 1e9,
        "link_back_gb_per_s": link_back / 1e9,
        "out_of_link": moved / out / link_out,
        "back_of_link": moved / back / link_back,
    }


def link_bytes_per_s(device: torch.device) -> tuple[float, float]:
    """From the device to pinned host memory, and back: the best of some plain copies."""
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = min(timed(lambda: there.copy_(here))[1] for _ in range(4))
    back = min(timed(lambda: here.copy_(there))[1] for _ in range(4))
    return LINK_BYTES / out, LINK_BYTES / back


def experts_over_eager(
    device: torch.device, repeats: int, config: PretrainedConfig = FOUR_OF_30B, tokens: int = EXPERT_TOKENS
) -> dict[str, float]:
    """Times forward and backward passes of layers with grouped and with eager experts, alternately in one process, and
    takes the fastest of each. The rank has all experts, so it exchanges no rows."""
    free()
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).train()
        ids = torch.randint(0, config.vocab_size, (tokens // 1000, 1000))
    experts.split_experts(model, None, None)
    seconds, peaks = {experts.NAME: float("inf"), "eager": float("inf")}, {experts.NAME: 0, "eager": 0}

    def pass_over() -> None:
        model.get_decoder()(ids, use_cache=False).last_hidden_state.sum().backward()
        model.zero_grad()

    for turn in range(repeats + 1):
        for kind in seconds:
            model.set_experts_implementation(kind)
            reset_peak()
            took = timed(pass_over)[1]
            seconds[kind] = min(seconds[kind], took) if turn else seconds[kind]  # the first one is a warm-up
            peaks[kind] = peak()
    return {
        "time": seconds["eager"] / seconds[experts.NAME],
        "grouped_ms": 1e3 * seconds[experts.NAME],
        "eager_ms": 1e3 * seconds["eager"],
        "grouped_gib": peaks[experts.NAME] / GIB,
        "eager_gib": peaks["eager"] / GIB,
        "rows": float(ids.numel()),
    }


class AloneGroup(RankGroup):
    """Rank 0 of a world in which no other rank is: collectives return at once, and what they would have received is
    whatever was in that memory. Rows go to experts as if every rank sent as many to each."""

    def __init__(self, shape: MeshShape, device: torch.device) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.ranks)
        self.rank, self.shape, self.device = 0, shape, device
        self.meshes = Meshes(shape, device.type)

    def gathered(self, value: T) -> list[T]:
        return [value]

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Meanwhile routers choose all experts equally often, and other ranks send what this one sends to itself."""
        dispatched = ALL_EXPERTS_FUNCTIONS[experts.NAME]

        def balanced(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            chosen = torch.arange(index.numel(), device=index.device) % module.num_experts
            found: Tensor = dispatched(module, hidden, chosen.view_as(index), weights)
            return found

        def exchange(
            found: Tensor,
            given: Tensor,
            receive: list[int] | None = None,
            send: list[int] | None = None,
            group: dist.ProcessGroup | None = None,
        ) -> None:
            if receive is not None and given.dtype == torch.int64:  # how many rows come for each expert
                found.copy_(given[: receive[0]].repeat(len(receive)))
            else:
                found.zero_()

        ALL_EXPERTS_FUNCTIONS[experts.NAME] = balanced
        try:
            with patch.object(dist, "all_to_all_single", exchange):
                yield
        finally:
            ALL_EXPERTS_FUNCTIONS[experts.NAME] = dispatched


def plan_error(world: LargeWorld, device: torch.device) -> dict[str, float]:
    """The peak of an update with one micro-batch, checkpointed, against the plan's; moments are there before it."""
    free()
    mesh, batch = world.mesh, world.batch()
    group = AloneGroup(mesh, device)
    settings = {"micro_batch_tokens": batch.tokens, "compile": "off", "activation_checkpointing": "on"}
    trainer = sharded_trainer(world.config, group, settings)
    trainer._split.share = lambda batch: RankShare(batch)  # type: ignore[method-assign]
    optimizer = trainer._optimizer
    assert optimizer is not None
    optimizer._make_state(list(optimizer._masters))  # what is gathered is no number: an update may not be applied
    size = packed_size(batch)
    with group.exchanging():
        reset_peak()
        seconds = timed(lambda: trainer.update(batch, LOSS, 0))[1]
    measured = peak()
    planned = sharded_peak(world.config, mesh, size).bytes
    flops = 3 * forward_flops(trainer.model, batch) / (mesh.context * mesh.tensor)
    group.close()
    return {
        "error": planned / max(measured, 1) - 1,
        "planned_gib": planned / GIB,
        "measured_gib": measured / GIB,
        "rows": float(size.rows) / mesh.context,
        "update_s": seconds,
        "mfu": flops / seconds / PEAK_FLOPS,
    }


def forward_flops(model: nn.Module, batch: Batch) -> float:
    """Of a forward pass over the batch, no two of whose prompts begin alike, with the experts that a row goes through."""
    config: Any = model.config
    head, layers = config.head_dim, config.num_hidden_layers
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    inner = config.intermediate_size
    if getattr(config, "num_experts", 0):
        inner = config.moe_intermediate_size * config.num_experts_per_tok
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * inner)
    pairs = float((batch.lengths.astype(np.float64) * (batch.lengths + 1) / 2).sum())
    words = float(batch.loss_mask.sum()) * config.vocab_size * config.hidden_size
    return 2 * layers * layer * batch.tokens + 2 * words + 4 * layers * queries * pairs


def one_sample(tokens: int, vocab: int) -> Batch:
    """A short prompt and a long answer."""
    rng = np.random.default_rng(0)
    sample, answer = Sample("0.0", Task.ask("t", "?"), 0, 1.0), tokens - 256
    sample.log.prompt(rng.integers(0, vocab, 256).tolist())
    sample.log.respond(rng.integers(0, vocab, answer).tolist(), np.full(answer, -10.0), [0] * answer)
    return Batch.from_samples([sample]).with_columns(advantage=np.ones(1))


def packed_size(batch: Batch) -> PackedSize:
    """Of the batch as one micro-batch; no two of its prompts begin alike."""
    rows = pack(batch.rows("ids")).rows
    return PackedSize(rows, int(batch.loss_mask.sum()), (Spans(rows, 1, 1),))


def single_trainer(config: PretrainedConfig, device: torch.device, settings: dict[str, Any]) -> SingleStrategy:
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    model.set_attn_implementation(attention.NAME)
    return SingleStrategy(model, character_tokenizer(), TrainConfig(lr=LR, **settings))


def sharded_trainer(config: PretrainedConfig, group: RankGroup, settings: dict[str, Any]) -> ShardedStrategy:
    """Made as from files, without storage first, with weights that are drawn shard by shard."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation(attention.NAME)
    module = TrainModule(model)
    shard(module, model.get_decoder(), group.meshes, DTYPE)
    module._apply(lambda tensor: torch.empty_like(tensor, device=group.device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(group.device))
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(0, 0.02) if parameter.ndim > 1 else local.fill_(1.0)
    return ShardedStrategy(ShardedModel(module, model, DTYPE), TrainConfig(lr=LR, **settings), group)


def local_bytes(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def timed(work: Callable[[], T]) -> tuple[T, float]:
    synchronize()
    started = time.perf_counter()
    done = work()
    synchronize()
    return done, time.perf_counter() - started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
