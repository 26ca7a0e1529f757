"""The sharded trainer beside `single`: its gradients, what a second rank brings, and on a GPU what sharding costs.

- `gradient_error`: of each layout of ranks (shards, replicas, and rows, layers and experts divided over them), the worst
  relative error of a parameter's gradient against one process; in fp32 on the CPU, processes with gloo;
- `over_one_rank`: tokens per second of an update on two ranks with one thread each, over one rank with one thread, by
  turns; the best of each. Where others use the cores too, the CPU time of the busiest rank says more
  (`over_one_rank_in_cpu_time`), without what ranks wait for each other;
- `over_single` (GPU): an update of a Qwen3-1.7B shape over FSDP of size 1 (NCCL), and its peak of memory, over those of
  `single`, measured alternately, with eager layers and compiled ones;
- `offload` (GPU): the same trainer's shards and moments to host memory and back, beside plain copies of pinned memory;
- `experts_over_eager` (GPU): how much longer layers of a Qwen3-30B-A3B shape take, forward and back, if experts are
  computed one by one, than with the grouped products that the sharded trainer uses;
- `plan_error` (GPU): the peak of rank 0 of large worlds against what `roll plan` would say of the same micro-batch. The
  other ranks are not there: torch's fake process group runs this rank's own kernels and allocations without wires.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report
from train_step import LOSS, make_batch

from roll.cluster.mesh import MeshShape
from roll.config.schema import LoraConfig, TrainConfig
from roll.data import Batch
from roll.model import attention
from roll.model.lora import Adapters, BaseModelRef
from roll.model.tiny import character_tokenizer
from roll.strategy.train.optimizer import OptimizerStep
from roll.strategy.train.policy import PolicyTrainer
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup, RankRendezvous, open_store
from roll.strategy.train.sharded.strategy import ShardedStrategy
from roll.strategy.train.single import SingleStrategy

DEADLINE_S = 300.0
PARTS = ("gradients", "ranks")
GPU_PARTS = ("single", "offload", "experts", "plans")
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(**SIZES),
    "mixture": Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=7, num_experts_per_tok=2),
    "timed": Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=True,
    ),
}  # fmt: skip
LAYOUTS: dict[str, tuple[MeshShape, str, bool]] = {
    "2 ranks": (MeshShape(shard=2), "dense", False),
    "4 ranks": (MeshShape(shard=4), "dense", False),
    "2 replicas of 2": (MeshShape(replicate=2, shard=2), "dense", False),
    "2 ranks, mixture": (MeshShape(shard=2), "mixture", False),
    "2 ranks, LoRA": (MeshShape(shard=2), "dense", True),
    "tensor 2, shard 2": (MeshShape(shard=2, tensor=2), "dense", False),
    "tensor 2, shard 2, mixture": (MeshShape(shard=2, tensor=2), "mixture", False),
    "context 2, shard 2": (MeshShape(shard=2, context=2), "dense", False),
    "context 2, shard 2, mixture": (MeshShape(shard=2, context=2), "mixture", False),
    "expert 2, shard 2": (MeshShape(shard=4, expert=2), "mixture", False),
    "expert 4": (MeshShape(shard=4, expert=4), "mixture", False),
    "tensor 2, expert 2": (MeshShape(shard=2, tensor=2, expert=2), "mixture", False),
    "tensor 2, shard 2, LoRA": (MeshShape(shard=2, tensor=2), "dense", True),
    "context 2, shard 2, LoRA": (MeshShape(shard=2, context=2), "dense", True),
}
Gradients = dict[str, Tensor]


def main() -> None:
    options = parser(__doc__)
    has_gpu = torch.cuda.is_available()
    options.add_argument("--parts", default=",".join([*PARTS, *(GPU_PARTS if has_gpu else ())]), help="which to run")
    options.add_argument("--tokens", type=int, default=2048, help="tokens of a micro-batch on a rank of the CPU")
    options.add_argument("--repeats", type=int, default=5, help="measurements, of which the best is reported")
    args = options.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - {*PARTS, *GPU_PARTS}:
        sys.exit(f"--parts: there is no {', '.join(sorted(unknown))}; write some of {', '.join((*PARTS, *GPU_PARTS))}")
    if not has_gpu and set(parts) & set(GPU_PARTS):
        sys.exit(f"--parts: {', '.join(GPU_PARTS)} need a GPU; without one write {','.join(PARTS)}")
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    if "gradients" in parts:
        result |= said(gradients())
    if "ranks" in parts:
        result |= said(two_ranks(args.tokens, args.repeats))
    if set(parts) & set(GPU_PARTS):
        from sharded_gpu import measure

        for found in measure([part for part in GPU_PARTS if part in parts], args.repeats):
            result |= said(found)
    if args.json:
        report(result, as_json=True)
    else:
        table(result)


def said(found: dict[str, Any]) -> dict[str, Any]:
    """Figures at once on the error stream: a later part may take long or fail."""
    print(found, file=sys.stderr, flush=True)
    return found


def table(result: dict[str, Any]) -> None:
    """What was measured, a row each."""
    print("| what | of | result |")
    print("| --- | --- | --- |")
    for name, value in result.items():
        for part, figures in value.items() if isinstance(value, dict) else [("", value)]:
            row = figures if isinstance(figures, dict) else {"": figures}
            text = ", ".join(f"{key} {number:.4g}".strip() for key, number in row.items())
            print(f"| {name} | {part} | {text} |")


def gradients() -> dict[str, Any]:
    """The worst parameter of each layout. Micro-batches are so small that ranks have several, and not equally many."""
    found = {}
    batch = make_batch(8000, SIZES["vocab_size"], group_size=2)
    for name, (shape, kind, adapted) in LAYOUTS.items():
        expected = Trainer(None, kind, batch, 2048, adapted).gradients()
        with world(shape, Trainer, kind, batch, 2048, adapted) as ranks:
            ours = ranks.run("gradients")[0]
        assert ours.keys() == expected.keys()
        found[name] = max(float((ours[n] - right).norm() / right.norm()) for n, right in expected.items())
    return {"gradient_error": found}


def two_ranks(tokens: int, repeats: int) -> dict[str, Any]:
    """Updates on one rank and on two, alternately, in micro-batches of up to `tokens` tokens."""
    batch = make_batch(4 * tokens, SHAPES["timed"].vocab_size)
    best, busiest = {1: float("inf"), 2: float("inf")}, {1: float("inf"), 2: float("inf")}
    settings = ("timed", batch, max(tokens, int(batch.lengths.max())))
    with world(MeshShape(), Trainer, *settings) as one, world(MeshShape(shard=2), Trainer, *settings) as two:
        for ranks in (one, two):
            ranks.run("update")
        for _ in range(repeats):
            for count, ranks in ((1, one), (2, two)):
                started = time.perf_counter()
                busiest[count] = min(busiest[count], max(ranks.run("update")))
                best[count] = min(best[count], time.perf_counter() - started)
    return {
        "micro_batch_tokens": settings[2],
        "one_rank_tokens_per_s": batch.tokens / best[1],
        "two_ranks_tokens_per_s": batch.tokens / best[2],
        "over_one_rank": best[1] / best[2],
        "over_one_rank_in_cpu_time": busiest[1] / busiest[2],
    }


class Trainer:
    """A trainer of one of the small shapes, on one rank of several or in one process."""

    def __init__(
        self, group: RankGroup | None, kind: str, batch: Batch, micro_batch_tokens: int, adapted: bool = False
    ) -> None:
        self._batch = batch
        config = TrainConfig(lr=1e-6, micro_batch_tokens=micro_batch_tokens, compile="off")
        model = small_model(SHAPES[kind])
        adapters = Adapters(model, LoraConfig(rank=4), BaseModelRef(kind), 0) if adapted else None
        if adapters is not None:
            stir(model)
        self._strategy: PolicyTrainer
        if group is None:
            self._strategy = SingleStrategy(model, character_tokenizer(), config, adapters=adapters)
        else:
            module = TrainModule(model)
            shard(module, model.get_decoder(), group.meshes, torch.float32)
            self._strategy = ShardedStrategy(ShardedModel(module, model, torch.float32, adapters=adapters), config, group)

    def update(self) -> float:
        """The CPU time of this process that it took."""
        started = time.process_time()
        self._strategy.update(self._batch, LOSS, 0)
        return time.process_time() - started

    def gradients(self) -> Gradients:
        """Whole ones, of an update that is not applied."""
        optimizer, found = self._strategy._optimizer, {}
        assert optimizer is not None

        def keep(step: int, loss: Tensor | None = None) -> OptimizerStep:
            found.update({name: whole(gradient).clone() for name, gradient in optimizer.gradients().items()})
            return OptimizerStep(1.0, applied=True)

        optimizer.step = keep  # type: ignore[method-assign]
        self.update()
        return found


def small_model(config: PretrainedConfig) -> PreTrainedModel:
    """The same weights in every process."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation(attention.NAME)
    return model


def stir(model: PreTrainedModel) -> None:
    """Gives adapters values: fresh ones are zero on one side, and the other side has no gradient then."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class World:
    """Processes that are the ranks of a group, each with an object of its own, whose methods are called on all."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, method: str) -> list[Any]:
        """Each rank's answer, by rank."""
        for pipe in self._pipes:
            pipe.send(method)
        answers = [pipe.recv() for pipe in self._pipes]
        for fine, answer in answers:
            if not fine:
                sys.exit(answer)
        return [answer for _, answer in answers]


@contextmanager
def world(shape: MeshShape, make: Callable[..., Any], *arguments: Any) -> Iterator[World]:
    """The ranks of a mesh on this machine's CPU, one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    processes = multiprocessing.get_context("forkserver")  # ranks are forked off a process that imports for all of them
    processes.set_forkserver_preload(["roll.strategy.train.sharded.strategy", "roll.strategy.train.single"])
    _store, rendezvous = open_store("127.0.0.1", DEADLINE_S)
    pairs = [processes.Pipe() for _ in range(shape.ranks)]
    started = [
        processes.Process(target=serve, args=(rank, shape, rendezvous, theirs, make, arguments), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process, (_, theirs) in zip(started, pairs, strict=True):
        process.start()
        theirs.close()  # so that a rank that has died is noticed
    try:
        yield World([ours for ours, _ in pairs])
    finally:
        for process in started:
            process.kill()
            process.join()


def serve(
    rank: int,
    shape: MeshShape,
    rendezvous: RankRendezvous,
    pipe: Connection,
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    made = make(RankGroup(rank, shape, rendezvous, torch.device("cpu")), *arguments)
    while True:
        method = pipe.recv()
        try:
            pipe.send((True, getattr(made, method)()))
        except Exception:
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main()
