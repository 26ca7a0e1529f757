"""The memory model against what autograd keeps and what the allocator gives, and the choices made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from roll.algorithm import LossSpec
from roll.config.errors import UserError
from roll.config.schema import Config, TrainConfig
from roll.data import Batch, Sample, Task
from roll.data.sources import load_tasks
from roll.devices.inventory import Inventory
from roll.devices.map import make_map
from roll.devices.memory import (
    CACHE,
    MemoryItem,
    ModelSize,
    cache_bytes,
    engine_working,
    estimate,
    forward_working,
    train_working,
)
from roll.devices.memory_inputs import JudgeWork, MemoryInputs, micro_batch_of
from roll.devices.plan import Plan, check_memory, make_plan
from roll.devices.residency import make_residency_table
from roll.devices.run_requirements import rlvr_requirements
from roll.engine.cache import SlotCache
from roll.engine.kv_sizing import CacheShape
from roll.engine.paged.kv_cache import BLOCK
from roll.engine.paged.sizing import PagedSizing
from roll.engine.request import Request, SamplingParams
from roll.engine.routes import RouteShape
from roll.engine.slot_engine import SlotEngine
from roll.model import attention
from roll.model.shape import ModelShape
from roll.model.tiny import character_tokenizer
from roll.strategy.train.activation_memory import Footprint, PackedSize, Spans
from roll.strategy.train.logprobs import CHUNK_ELEMENTS
from roll.strategy.train.microbatch_budget import FEWEST_ROWS, MOST_ROWS, Checkpointing
from roll.strategy.train.packing import cut, pack
from roll.strategy.train.single import SingleStrategy
from roll.strategy.train.tree_attention import BucketPlan

LOSS = LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3})
GIB = 1 << 30


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
    )


def qwen3() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )


def trainer(
    shape: PretrainedConfig, dtype: torch.dtype, limit: int = 1 << 20, checkpointing: Checkpointing = "auto"
) -> SingleStrategy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).to(dtype).eval()
    model.set_attn_implementation(attention.NAME)
    config = TrainConfig(micro_batch_tokens=limit, activation_checkpointing=checkpointing)
    return SingleStrategy(model, character_tokenizer(), config)


def mixture() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=3,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )


def ragged(groups: int, size: int, prompt: int, response: tuple[int, int], vocab: int) -> Batch:
    """Groups with a common prompt and answers of random length."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(groups):
        opening = rng.integers(0, vocab, prompt).tolist()
        for n in range(size):
            sample = Sample(f"{group}.{n}", Task.ask("t", "?"), group, 1.0)
            sample.log.prompt(opening)
            length = int(rng.integers(*response, endpoint=True))
            sample.log.respond(rng.integers(0, vocab, length).tolist(), -rng.exponential(2.0, length), [0] * length)
            samples.append(sample)
    batch = Batch.from_samples(samples)
    return batch.with_columns(advantage=rng.normal(0, 1, len(batch)))


def packed_size(batch: Batch, dtype: torch.dtype) -> PackedSize:
    """The size of a batch packed into one micro-batch, as the trainer's attention pads it."""
    tree = pack(batch.rows("ids"))
    buckets = BucketPlan(tree, torch.device("cpu"), dtype).buckets
    spans = tuple(Spans(len(bucket.spans), bucket.queries, bucket.keys) for bucket in buckets)
    rows = [path[np.flatnonzero(mask) - 1] for path, mask in zip(tree.paths, batch.rows("loss_mask"), strict=True)]
    return PackedSize(tree.rows, len(np.unique(np.concatenate(rows))), spans)


def footprint_of(shape: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Footprint:
    return Footprint(ModelShape.of(shape), dtype, "cpu")


def planned_update(footprint: Footprint, work: MemoryInputs) -> int:
    return sum(size for _, size in train_working(footprint, work, work.budget(footprint)))


def kept_bytes(work: Callable[[], object], aside: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that autograd keeps, those of some tensors left out."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in aside}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return sum(size for size, _ in kept.values())


def peak_bytes(work: Callable[[], object]) -> int:
    """The most the allocator has given at once, above what it had given before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


SHAPES = {
    "grouped heads": llama(64, 160, 3, 4, 2, 128),
    "plain heads": llama(96, 200, 2, 3, 3, 96),
    "one key head": llama(64, 96, 4, 8, 1, 200),
    "normed heads": qwen3(),
    "experts": mixture(),
}
BATCHES = {
    "prefix sharing": (4, 6, 40, (10, 60)),
    "long prompts": (3, 5, 150, (5, 20)),
    "no sharing": (9, 2, 8, (30, 120)),
    "small": (2, 3, 20, (4, 24)),
}
CASES = [(torch.float32, shape, batch) for shape in SHAPES for batch in BATCHES if batch != "small"]
CASES += [(torch.bfloat16, shape, "small") for shape in SHAPES]  # many CPUs only emulate bf16


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize(("dtype", "shape", "batch"), CASES)
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, shape: str, batch: str) -> None:
    groups, size, prompt, response = BATCHES[batch]
    config = SHAPES[shape]
    data = ragged(groups, size, prompt, response, config.vocab_size)
    strategy = trainer(config, dtype)
    kept = kept_bytes(lambda: strategy.update(data, LOSS, 0), strategy.model.parameters())
    packed = packed_size(data, dtype)
    logits = dtype.itemsize * packed.predicting * config.vocab_size  # of one chunk, they are kept
    footprint = footprint_of(config, dtype)
    expected = footprint.kept_bytes(packed) + footprint.ends_bytes(packed) + logits
    assert expected == pytest.approx(kept, rel=0.05)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("shape", ["grouped heads", "normed heads"])
def test_a_compiled_layer_keeps_what_the_plan_says(shape: str) -> None:
    """Cut into forward and backward as for a GPU; its attention is one call, as there, without padding."""
    config, rows = SHAPES[shape], 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    layer, hidden = model.model.layers[0], torch.randn(1, rows, config.hidden_size, dtype=torch.bfloat16)
    angles = model.model.rotary_emb(hidden, torch.arange(rows)[None])
    forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition", dynamic=True)
    shared = [*model.parameters(), *angles]  # the angles by all layers
    found = kept_bytes(lambda: forward(hidden.requires_grad_(), position_embeddings=angles), shared)
    footprint = Footprint(ModelShape.of(config), torch.bfloat16, "cuda", compiled=True)
    assert footprint.layer_bytes(PackedSize(rows, 0, (Spans(1, rows, rows),))) == pytest.approx(found, rel=0.05)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize(
    ("dtype", "vocab", "limit"),
    [
        (torch.float32, 128, 256),
        (torch.float32, 128, 4096),
        (torch.float32, 2048, 256),
        (torch.float32, 2048, 4096),
        (torch.bfloat16, 128, 64),
        (torch.bfloat16, 128, 4096),
    ],
)
def test_an_update_peaks_where_the_plan_says(dtype: torch.dtype, vocab: int, limit: int) -> None:
    """Everything an update allocates, once the moments exist. Activations or parameters weigh most, by the case."""
    small = dtype == torch.bfloat16  # many CPUs only emulate it
    groups, size, prompt, response = (2, 3, 20, 20) if small else (4, 6, 40, 30)
    shape = llama(32, 80, 2, 4, 2, vocab) if small else llama(64, 160, 3, 4, 2, vocab)
    strategy = trainer(shape, dtype, limit)
    batch = ragged(groups, size, prompt, (response, response), vocab)
    strategy.update(batch, LOSS, 0)
    measured = peak_bytes(lambda: strategy.update(batch, LOSS, 1))
    work = MemoryInputs(prompt, prompt, response, size, groups, limit, running=1, exact=False, bucket_bytes=0)
    assert planned_update(footprint_of(shape, dtype), work) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_an_update_of_experts_peaks_where_the_plan_says(checkpointing: Checkpointing) -> None:
    shape = mixture()
    strategy = trainer(shape, torch.float32, checkpointing=checkpointing)
    batch = ragged(4, 6, 40, (30, 30), shape.vocab_size)
    strategy.update(batch, LOSS, 0)
    measured = peak_bytes(lambda: strategy.update(batch, LOSS, 1))
    work = MemoryInputs(40, 40, 30, 6, 4, 1 << 20, running=1, exact=False, bucket_bytes=0, checkpointing=checkpointing)
    assert planned_update(footprint_of(shape), work) == pytest.approx(measured, rel=0.2)


def test_chunks_of_logits_are_held_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 1 << 16)
    shape = llama(64, 160, 2, 4, 2, 1024)
    strategy = trainer(shape, torch.float32)
    batch = ragged(4, 6, 40, (30, 30), 1024)
    strategy.update(batch, LOSS, 0)
    measured = peak_bytes(lambda: strategy.update(batch, LOSS, 1))
    footprint = footprint_of(shape)
    assert footprint.chunk_logits(700) == (64 * 1024, True)
    work = MemoryInputs(40, 40, 30, 6, 4, 1 << 20, running=1, exact=False, bucket_bytes=0)
    assert planned_update(footprint, work) == pytest.approx(measured, rel=0.2)


def test_gradients_meet_activations_only_where_micro_batches_follow_each_other() -> None:
    footprint = footprint_of(llama(64, 160, 3, 4, 2, 128))
    gradients = 4 * footprint.model.parameters
    parts = []
    for limit in (18, 1 << 20):  # one sequence at a time, or a batch of two in one piece
        work = MemoryInputs(10, 10, 8, 2, 1, limit, running=1, exact=False, bucket_bytes=0)
        parts.append(dict(train_working(footprint, work, work.budget(footprint))))
        assert footprint.kept_bytes(work.micro_batches(limit)[0]) < gradients
    several, one = parts
    assert several["gradients, fp32"] == gradients
    assert several["activations of a micro-batch"] > 0
    assert "activations of a micro-batch" not in one or "gradients, fp32" not in one


@pytest.mark.parametrize("shape", [llama(64, 160, 3, 4, 2, 128), llama(64, 160, 3, 4, 2, 4096), mixture()])
def test_a_forward_pass_peaks_where_the_plan_says(shape: PretrainedConfig) -> None:
    strategy = trainer(shape, torch.float32)
    batch = ragged(4, 6, 40, (30, 30), shape.vocab_size)
    measured = peak_bytes(lambda: strategy.log_probs(batch))
    work = MemoryInputs(40, 40, 30, 6, 4, 1 << 20, running=1, exact=False, bucket_bytes=0)
    footprint = footprint_of(shape)
    ((_, planned),) = forward_working(footprint, work, work.budget(footprint))
    assert planned == pytest.approx(measured, rel=0.3)


def test_an_engine_peaks_where_the_plan_says() -> None:
    shape = llama(64, 160, 3, 4, 2, 4096)
    model = trainer(shape, torch.float32).model
    engine = SlotEngine(model, character_tokenizer(), max_running=32)
    rng = np.random.default_rng(0)

    def generate() -> None:
        for n in range(32):
            ids = rng.integers(0, 4096, 40).astype(np.int32)
            engine.add(Request(f"{n}", ids, SamplingParams(max_new_tokens=20, temperature=1.0, seed=n)))
        while engine.has_work:
            engine.step()

    measured = peak_bytes(generate)
    work = MemoryInputs(40, 40, 20, 6, 4, 4096, running=32, exact=False, bucket_bytes=0)
    ((_, step),) = engine_working(footprint_of(shape), work)
    assert cache_bytes(shape, torch.float32, work) + step == pytest.approx(measured, rel=0.2)


def test_a_cache_that_grows_has_a_layer_of_what_it_outgrows_beside_it() -> None:
    shape = llama(64, 160, 3, 4, 2, 128)
    token = 2 * 3 * 2 * 16 * 4
    even = MemoryInputs(100, 120, 8, 6, 4, 4096, running=10, exact=False, bucket_bytes=0)
    assert cache_bytes(shape, torch.float32, even) == 10 * 128 * token
    uneven = MemoryInputs(20, 120, 8, 6, 4, 4096, running=10, exact=False, bucket_bytes=0)
    assert cache_bytes(shape, torch.float32, uneven) == (10 * 128 + -(-10 * 64 // 3)) * token


def test_a_paged_cache_is_planned_as_large_as_it_is_made() -> None:
    shape = llama(64, 160, 3, 4, 2, 128)
    model, token = trainer(shape, torch.float32).model, 2 * 3 * 2 * 16 * 4
    for prompt, response in ((20, 8), (200, 200)):
        work = MemoryInputs(prompt, prompt, response, 6, 4, 4096, running=10, exact=False, bucket_bytes=0)
        blocks = PagedSizing(model, 10, 0).required_blocks(prompt + response) - 1  # one is padding's
        assert cache_bytes(shape, torch.float32, work, paged=True) == blocks * BLOCK * token
    grows = MemoryInputs(20, 400, 100, 6, 4, 4096, running=10, exact=False, bucket_bytes=0)
    assert cache_bytes(shape, torch.float32, grows, paged=True) == 10 * (256 + 512) * token, "both while it grows"


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("experts", "bytes_an_expert"), [(128, 1), (256, 2)])
def test_a_cache_with_routes_is_planned_as_large_as_it_is_made(paged: bool, experts: int, bytes_an_expert: int) -> None:
    shape, recorded = llama(64, 160, 3, 4, 2, 128), RouteShape(3 * 8, experts)
    work = MemoryInputs(100, 120, 8, 6, 4, 4096, running=10, exact=False, bucket_bytes=0)
    model, token = trainer(shape, torch.float32).model, 2 * 3 * 2 * 16 * 4 + 24 * bytes_an_expert
    if paged:
        sizing = PagedSizing(model, 10, 0, recorded)
        pages = sizing.make_cache(sizing.required_blocks(128))
        assert pages.routes is not None
        made = sum(part.nbytes for part in (pages.keys, pages.values, pages.routes)) - BLOCK * token
    else:
        cache = SlotCache(shape, torch.float32, torch.device("cpu"), recorded)
        cache.reshape(CacheShape(10, 128))
        assert cache.routes is not None
        made = sum(part.nbytes for part in (*cache.layers, cache.routes))
    assert cache_bytes(shape, torch.float32, work, paged, recorded) == made == 10 * (256 if paged else 128) * token


def test_a_mixtures_routes_are_in_the_plan_while_they_are_replayed() -> None:
    sizes = {"vocab_size": 90, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2)
    found = ModelShape.of(config)
    assert (found.experts, found.chosen) == (6, 2 * 2)
    assert (ModelShape.of(llama(64, 160, 3, 4, 2, 128)).experts, MemoryInputs.of(Config(), 5, 9).router_replay) == (
        0,
        True,
    )


def test_a_cache_is_planned_no_larger_than_it_may_be() -> None:
    shape = llama(64, 160, 3, 4, 2, 128)
    token = 2 * 3 * 2 * 16 * 4
    work = MemoryInputs(20, 120, 8, 6, 4, 4096, running=10, exact=False, bucket_bytes=0, kv_tokens=700)
    assert cache_bytes(shape, torch.float32, work) == (4 * 128 + -(-4 * 64 // 3)) * token, "four of ten"
    assert cache_bytes(shape, torch.float32, work, paged=True) == 700 * token
    assert work.of_role("judge") == work, "there is none"
    judging = replace(work, judging=JudgeWork(3, 10, 20))
    assert judging.of_role("judge").kv_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "rows", "samples"),
    [
        ((4096, 100, 50, 8, 4), 4 * (100 + 8 * 50), 32),
        ((600, 100, 50, 8, 4), 500, 8),
        ((700, 100, 50, 8, 4), 500 + 100 + 2 * 50, 8 + 2),
        ((100, 100, 50, 8, 4), 150, 1),
        ((300, 100, 50, 8, 1), 150 + 3 * 50, 4),
    ],
)
def test_a_micro_batch_is_filled_as_the_trainer_fills_it(
    arguments: tuple[int, int, int, int, int], rows: int, samples: int
) -> None:
    limit, prompt, response, size, groups = arguments
    made = micro_batch_of(*arguments)
    assert made.rows == rows
    assert sum(span.count for span in made.spans) == samples
    assert made.predicting == samples * response
    sequences = ragged(groups, size, prompt, (response, response), 1 << 15).rows("ids")
    largest = max(pack([sequences[i] for i in piece]).rows for piece in cut(sequences, limit))
    assert largest == pytest.approx(rows, rel=0.2)


def test_parameters_are_counted_without_making_the_model() -> None:
    assert ModelShape.of(llama(64, 160, 3, 4, 2, 128)).parameters == sum(
        p.numel() for p in LlamaForCausalLM(llama(64, 160, 3, 4, 2, 128)).parameters()
    )
    assert ModelShape.of(qwen3()).normed_heads
    assert not ModelShape.of(llama(64, 160, 3, 4, 2, 128)).normed_heads


FIXED = {"micro_batch_tokens": 4096, "activation_checkpointing": "off"}


def box(*, gpus: int = 0, gpu: float = 0, memory: float = 64, nodes: int = 1) -> Inventory:
    row = {"cores": 8, "gpus": gpus, "memory_bytes": int(memory * GIB), "gpu_bytes": int(gpu * GIB)}
    return Inventory.of([{"id": f"n{n}", **row} for n in range(nodes)])


def planned(inventory: Inventory, **settings: Any) -> Plan:
    base = {"model": {"path": "tiny", "dtype": "bf16"}, "tasks": "echo", "reward": "number"}
    config = Config.model_validate({**base, **settings})
    return make_plan(config, rlvr_requirements(config, load_tasks(config.tasks, None)), inventory)


def parts_of(plan: Plan, pool: str, phase: Any) -> dict[tuple[str, str], int]:
    (found,) = [p for p in plan.memory.pools if p.name == pool]
    return {(part.worker, part.what): part.bytes for part in plan.memory.parts[found, phase]}


def test_the_parts_of_a_gpu() -> None:
    plan = planned(box(gpus=1, gpu=80), executor="local", train={"micro_batch_tokens": 4096})
    parts = parts_of(plan, "gpu0", "train")
    count = plan.parameters
    assert parts["actor_train[0]", "weights"] == 2 * count
    assert parts["actor_train[0]", "master weights, fp32"] == 4 * count
    assert parts["actor_train[0]", "optimizer moments, fp32"] == 8 * count
    assert parts["actor_train[0]", "gradients, fp32"] == 4 * count
    assert parts["actor_infer[0]", "weights"] == 0, "the engine uses the trainer's"
    assert ("actor_infer[0]", "an engine's step") not in parts
    assert ("actor_train[0]", "gradients, fp32") not in parts_of(plan, "gpu0", "generate")
    assert set(parts_of(plan, "memory", "train")) == {("controller", "interpreter and libraries")}


def test_a_vllm_engines_cache_is_what_was_written() -> None:
    work = {"max_running": 64, "max_new_tokens": 600}

    def cache(together: int = 1, **args: int) -> int:
        """On each of the GPUs that hold it together."""
        role = {"devices": f"1-{together}", "strategy": "vllm", "parallel": {"tensor": together}, "engine_args": args}
        roles = {"actor_train": {"devices": "0"}, "actor_infer": role}
        plan = planned(box(gpus=3, gpu=80), executor="ray", roles=roles, rollout=work)
        found = {parts_of(plan, f"gpu{n}", "generate")["actor_infer[0]", CACHE] for n in range(1, together + 1)}
        (size,) = found
        return size

    assert cache(kv_cache_memory_bytes=1 << 20) == cache(2, kv_cache_memory_bytes=1 << 20) == 1 << 20
    assert cache() == pytest.approx(2 * cache(2))
    assert cache(max_model_len=2048) == cache()  # more than the model's own 1024
    assert cache(max_model_len=512) == pytest.approx(cache() * 512 / 856)


def test_moments_in_8_bits_are_a_quarter() -> None:
    plan = planned(box(gpus=1, gpu=80), executor="local", train={"optimizer": "adamw_8bit"})
    assert parts_of(plan, "gpu0", "train")["actor_train[0]", "optimizer moments, 8 bits"] == 2 * plan.parameters


def test_every_process_of_a_cluster_has_its_interpreter_and_its_copy() -> None:
    plan = planned(box(gpus=2, gpu=80), executor="ray")
    host = parts_of(plan, "memory", "train")
    processes = ("controller", "actor_train[0]", "actor_infer[0]", "actor_infer[1]", "rollout[0]", "reward[0]")
    assert set(host) == {(process, "interpreter and libraries") for process in processes}
    assert parts_of(plan, "gpu1", "generate")["actor_infer[1]", "weights"] == 2 * plan.parameters
    assert parts_of(plan, "gpu0", "publish")["actor_train[0]", "weights in transit"] == 2 * 2 * plan.parameters
    pieces = planned(box(gpus=1, gpu=80), executor="ray", weight_sync={"bucket_mb": 1})
    assert parts_of(pieces, "gpu0", "publish")["actor_train[0]", "weights in transit"] == 2 << 20
    assert "weights in transit" not in {what for _, what in parts_of(plan, "gpu0", "train")}


def test_what_leaves_a_gpu_lies_in_its_nodes_memory() -> None:
    plan = planned(box(gpus=1, gpu=80), executor="ray", offload="always")
    assert plan.offload
    generating = parts_of(plan, "gpu0", "generate")
    assert not any(worker == "actor_train[0]" for worker, _ in generating)
    away = parts_of(plan, "memory", "generate")
    assert away["actor_train[0]", "optimizer moments, fp32, offloaded"] == 8 * plan.parameters
    assert away["actor_train[0]", "weights, offloaded"] == 2 * plan.parameters
    training = parts_of(plan, "memory", "train")
    assert ("actor_infer[0]", "weights, offloaded") in training
    assert ("actor_infer[0]", "key-value cache, offloaded") not in training, "a cache is freed, not kept"


def test_a_cpu_gives_up_its_cache_only() -> None:
    plan = planned(box(), executor="ray", offload="always")
    idle = parts_of(plan, "memory", "train")
    assert idle["actor_infer[0]", "weights"] == 2 * plan.parameters
    assert ("actor_infer[0]", "key-value cache") not in idle
    assert parts_of(plan, "memory", "generate")["actor_train[0]", "optimizer moments, fp32"] == 8 * plan.parameters


def test_offloading_is_chosen_when_not_everything_fits() -> None:
    def plan_of(inventory: Inventory, **settings: Any) -> Plan:
        return planned(inventory, train=FIXED, **settings)

    roomy = plan_of(box(gpus=1, gpu=80), executor="ray")
    assert not roomy.offload
    assert "all roles together fit into 90%" in roomy.offload_reason
    (gpu,) = [pool for pool in roomy.memory.pools if pool.gpu is not None]
    whole = roomy.memory.peak(gpu)[1]
    turns = plan_of(box(gpus=1, gpu=80), executor="ray", offload="always")
    assert turns.memory.peak(gpu)[1] < whole
    between = (turns.memory.peak(gpu)[1] + whole) / 2 / GIB / 0.9
    tight = plan_of(box(gpus=1, gpu=between), executor="ray")
    assert tight.offload
    assert "Roles take turns and leave shared devices" in tight.offload_reason
    check_memory(tight)
    never = plan_of(box(gpus=1, gpu=between), executor="ray", offload="never")
    assert not never.offload
    with pytest.raises(UserError, match="write offload=auto"):
        check_memory(never)
    apart = plan_of(box(gpus=2, gpu=80), executor="ray", roles={"actor_train": "0", "actor_infer": "1"})
    assert "no phase needs the devices" in apart.offload_reason


def test_what_does_not_fit_is_said_with_what_to_write() -> None:
    def message(inventory: Inventory, **settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            check_memory(planned(inventory, **settings))
        return str(caught.value)

    full = message(box(gpus=1, gpu=0.5), executor="ray", rollout={"max_running": 4096})
    assert "in the phase generate this run needs about" in full
    assert "gpu0 has 0.5 GiB" in full
    assert "actor_infer[0]'s key-value cache" in full
    assert "write rollout.max_running=" in full
    value = int(full.rpartition("=")[2])
    check_memory(planned(box(gpus=1, gpu=0.5), executor="ray", rollout={"max_running": value}))

    rollout = {"max_running": 1, "groups_per_step": 64}
    full = message(box(gpus=1, gpu=0.1), executor="ray", rollout=rollout, train=FIXED)
    assert "in the phase train" in full
    assert "actor_train[0]'s activations of a micro-batch" in full
    value = int(full.rpartition("train.micro_batch_tokens=")[2])
    smaller = {**FIXED, "micro_batch_tokens": value}
    check_memory(planned(box(gpus=1, gpu=0.1), executor="ray", rollout=rollout, train=smaller))

    full = message(box(), executor="ray", roles={"reward": {"replicas": 3000}})
    value = int(full.rpartition("write roles.reward.replicas=")[2])
    check_memory(planned(box(), executor="ray", roles={"reward": {"replicas": value}}))

    def over(ranks: int) -> dict[str, Any]:
        return {"actor_train": {"strategy": "sharded", "replicas": ranks, "parallel": {"replicate": 2}}}

    full = message(box(), roles=over(96))
    assert "the largest part is actor_train's interpreter and libraries" in full
    value = int(full.rpartition("write roles.actor_train.replicas=")[2])
    assert value % 2 == 0
    check_memory(planned(box(), roles=over(value)))

    full = message(box(gpus=1, gpu=0.01), executor="ray", train=FIXED)
    assert "choose a smaller model" in full
    assert "several GPUs for it in roles.actor_train.devices, over which it is sharded" in full

    full = message(box(memory=0.5), executor="local")
    assert "the machine has 0.5 GiB" in full

    crowded = message(box(memory=3), executor="ray", roles={"rollout": {"replicas": 8}})
    assert "interpreter and libraries" in crowded


LONG = {"max_new_tokens": 512, "group_size": 8, "groups_per_step": 64, "max_running": 8}


def automatic(gpu: float, **settings: Any) -> tuple[int, bool]:
    """Tokens of a micro-batch and whether activations are computed twice, on a GPU of so many GiB."""
    plan = planned(box(gpus=1, gpu=gpu), rollout=LONG, **settings)
    budget = plan.memory.budgets["actor_train[0]"]
    assert dict(plan.sizes)["tokens per micro-batch"].startswith(f"up to {budget.rows}, a shared prefix once")
    check_memory(plan)
    return budget.rows, budget.checkpointed


def test_an_automatic_micro_batch_is_what_fits() -> None:
    assert automatic(80) == (MOST_ROWS, False)
    assert automatic(80, train={"micro_batch_tokens": 5000, "activation_checkpointing": "on"}) == (5000, True)
    sizes = [automatic(gpu, train={"activation_checkpointing": "off"})[0] for gpu in (0.3, 0.8, 2)]
    assert FEWEST_ROWS < sizes[1] < sizes[2] < MOST_ROWS
    assert sizes[0] < FEWEST_ROWS
    few, checkpointed = automatic(0.3)
    assert checkpointed
    assert few > sizes[0], "computing activations twice makes room for more"
    cpu = planned(box(), rollout=LONG)
    assert dict(cpu.sizes)["tokens per micro-batch"] == "up to 4096, a shared prefix once"


def test_checkpointing_keeps_the_layers_inputs() -> None:
    shape = llama(64, 160, 6, 4, 2, 128)
    footprint = footprint_of(shape)
    batch = ragged(4, 6, 40, (30, 30), 128)
    strategy = trainer(shape, torch.float32, checkpointing="on")
    strategy.update(batch, LOSS, 0)
    measured = peak_bytes(lambda: strategy.update(batch, LOSS, 1))
    work = MemoryInputs(40, 40, 30, 6, 4, 1 << 20, running=1, exact=False, bucket_bytes=0, checkpointing="on")
    assert planned_update(footprint, work) == pytest.approx(measured, rel=0.2)
    assert planned_update(footprint, replace(work, checkpointing="off")) > 2 * measured


def test_memory_is_counted_node_by_node() -> None:
    plan = planned(box(nodes=2), executor="ray", roles={"rollout": {"replicas": 4}})
    assert [pool.name for pool in plan.memory.pools] == ["node0 memory", "node1 memory"]
    assert {worker for worker, _ in parts_of(plan, "node1 memory", "train")} == {"rollout[1]", "rollout[3]"}


def test_the_need_of_a_pool_is_that_of_its_fullest_stage() -> None:
    config = Config.model_validate({"model": "tiny", "tasks": "echo"})
    made = make_map(config, box(), roles_in_use={"actor_train", "actor_infer", "rollout", "reward"})
    shape = llama(64, 160, 3, 4, 2, 128)
    dtypes = dict.fromkeys(("actor_train", "actor_infer"), torch.float32)
    found = estimate(
        made,
        make_residency_table(made, False),
        ModelSize(shape, ModelShape.of(shape), dtypes),
        MemoryInputs.of(config, 8, 8),
    )
    (pool,) = found.pools
    sums = {phase: sum(part.bytes for part in found.parts[pool, phase]) for phase in ("generate", "train", "publish")}
    assert found.peak(pool) == max(sums.items(), key=lambda item: item[1])
    assert all(isinstance(part, MemoryItem) and part.bytes >= 0 for parts in found.parts.values() for part in parts)
