"""How fast bytes move between processes, beside a plain memory copy of as many bytes in the same run.

The measure is NumPy's `dst[:] = src` on one core over memory used before; every path is given in its terms, so that
figures of two machines can be compared. Paths move over memory used before, and count a byte once. Weights:

- `shared_memory`: a sender writes buckets while a receiver in another process loads them;
- `gloo`: a broadcast to one other process through the loopback interface;
- `cuda_ipc`: as shared_memory, with slots on the GPU; only where there is one;
- `digest`: the digest of the tensors, on the CPU, by one process; each end of a path computes it once a version.

Ragged batches of token columns (samples of about 10,000 tokens, log-normal), in blocks of some tens of megabytes, from a
Ray actor that has made them to where they are used, by the calls that training makes, once all of the object store's
memory was used before:

- `batch`: to one other actor, which has every sample's rows then, without having read them;
- `batch_split`: to two actors, half of the samples each;
- `batch_flat`: to one other actor, which joins the rows of each column into one array.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.cluster import Cluster, Dispatch, Worker, WorkerPlacement, dispatch
from roll.config.schema import RayConfig
from roll.data import Batch, Sample, Task
from roll.data.batch import LOG_COLUMNS, TOKEN_COLUMNS
from roll.data.remote_columns import ColumnBlock, Indices, cut_into_blocks
from roll.weight_sync.broadcast import BroadcastGroup
from roll.weight_sync.channel import ChannelKind
from roll.weight_sync.digest import digests
from roll.weight_sync.stream import Receiver, Sender, stream

LOCAL = "127.0.0.1"
DEADLINE_S = 120.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--gb", type=float, default=1.0, help="bytes of weights, in 10^9")
    options.add_argument("--bucket-mb", type=float, default=64.0, help="bytes of a bucket, in 10^6")
    options.add_argument("--only", choices=["weights", "batches"])
    options.add_argument("--slots", type=int, default=2)
    options.add_argument("--repeats", type=int, default=5, help="the best of so many is taken")
    args = options.parse_args()
    threads = max(args.threads // 2, 1)  # two processes work at once
    torch.set_num_threads(threads)

    size = int(args.gb * 1e9)
    memcpy = size / best(memory_copy(size), args.repeats) / 1e9
    speeds: dict[str, float] = {}
    if args.only != "batches":
        speeds |= weights(size, int(args.bucket_mb * 1e6), args.slots, threads, args.repeats)
    if args.only != "weights":
        speeds |= asyncio.run(batches(size, args.repeats))
    result = {
        "gb": args.gb,
        "bucket_mb": args.bucket_mb,
        "threads_a_process": threads,
        "memcpy_gb_s": memcpy,
        "gb_s": speeds,
        "of_memcpy": {path: speed / memcpy for path, speed in speeds.items()},
    }
    if args.json:
        report(result, as_json=True)
        return
    print(f"{args.gb:g} GB in buckets of {args.bucket_mb:g} MB, {threads} thread(s) a process\n")
    print(f"{'path':16} {'GB/s':>8} {'of_memcpy':>10}")
    for path, speed in {"memcpy": memcpy, **speeds}.items():
        print(f"{path:16} {speed:8.2f} {speed / memcpy:10.2f}")


def weights(size: int, bucket_bytes: int, slots: int, threads: int, repeats: int) -> dict[str, float]:
    """GB/s of every path that weights take."""
    tensors = model_of(size, "cpu")
    moved = sum(tensor.nbytes for tensor in tensors.values())
    seconds = {}
    with other_process(size, "cpu", threads) as pipe:
        sender = Sender(tensors, bucket_bytes)
        seconds["shared_memory"] = best(lambda: through_slots(sender, pipe, "shared_memory", slots), repeats)
        seconds["gloo"] = best_of(by_broadcast(sender, pipe, repeats))
        sender.close()
    seconds["digest"] = best(lambda: digests(tensors), repeats)
    if torch.cuda.is_available():
        with other_process(size, "cuda", threads) as pipe:
            sender = Sender(model_of(size, "cuda"), bucket_bytes)
            seconds["cuda_ipc"] = best(lambda: through_slots(sender, pipe, "cuda_ipc", slots), repeats)
            ask(pipe, "close")
            sender.close()
    return {path: moved / value / 1e9 for path, value in seconds.items()}


TOKEN_BYTES = sum(np.dtype(TOKEN_COLUMNS[name]).itemsize for name in LOG_COLUMNS)
LONGEST = 32768


FIRST_MOVES = 8
"""Before any is measured: pages of the object store are slow when they are used for the first time."""


class Maker(Worker):
    """Has made samples with so many bytes in all."""

    def __init__(self, place: WorkerPlacement, size: int) -> None:
        super().__init__(place)
        chance = np.random.default_rng(0)
        lengths = np.minimum(chance.lognormal(9, 0.7, size // TOKEN_BYTES // 5000).astype(np.int64) + 1, LONGEST)
        self._lengths = lengths[np.cumsum(lengths) * TOKEN_BYTES <= size]
        sizes = [self._lengths[block].sum() for block in cut_into_blocks(self._lengths)]
        self._blocks = [ColumnBlock({name: np.ones(n, TOKEN_COLUMNS[name]) for name in LOG_COLUMNS}) for n in sizes]

    @dispatch(Dispatch.ONE)
    def lengths(self) -> Indices:
        return self._lengths

    @dispatch(Dispatch.ONE)
    def blocks(self) -> list[ColumnBlock]:
        return list(self._blocks)


class Reader(Worker):
    @dispatch(Dispatch.DATA, join=lambda results, parts, whole: sum(results))
    def look(self, batch: Batch) -> int:
        """Every row of every column, without reading them."""
        return sum(row.nbytes for name in LOG_COLUMNS for row in batch.rows(name))

    @dispatch(Dispatch.DATA, join=lambda results, parts, whole: sum(results))
    def join(self, batch: Batch) -> int:
        """Every column in one array."""
        return sum(batch[name].nbytes for name in LOG_COLUMNS)


async def batches(size: int, repeats: int) -> dict[str, float]:
    """GB/s of ragged batches between actors."""
    from roll.cluster.ray_executor import RayExecutor

    executor = RayExecutor(RayConfig(object_store_gb=max(2.5 * size / 1e9, 0.5)))
    places = [
        WorkerPlacement("maker", threads=1),
        WorkerPlacement("reader", threads=1),
        *(WorkerPlacement("readers", r, 2, threads=1) for r in (0, 1)),
    ]
    try:
        executor.reserve(places)
        maker = await Cluster.start(executor, lambda place: Maker(place, size), places[:1])
        one = await Cluster.start(executor, Reader, places[1:2])
        two = await Cluster.start(executor, Reader, places[2:])
        lengths = await maker.call(Maker.lengths)
        which, starts = np.zeros_like(lengths), np.zeros_like(lengths)
        for number, block in enumerate(cut_into_blocks(lengths)):
            which[block], starts[block] = number, np.cumsum(lengths[block]) - lengths[block]
        samples = [Sample(str(i), Task.ask("t", "q"), i // 8, 1.0) for i in range(len(lengths))]

        async def move(readers: Cluster[Reader], look: Callable[[Reader, Batch], int]) -> float:
            started = time.perf_counter()
            blocks = await maker.call(Maker.blocks)
            batch = Batch.from_blocks(samples, lengths, blocks, which, starts)
            assert await readers.call(look, batch) == batch.tokens * TOKEN_BYTES
            return time.perf_counter() - started

        paths = {"batch": (one, Reader.look), "batch_split": (two, Reader.look), "batch_flat": (one, Reader.join)}
        moved = int(lengths.sum()) * TOKEN_BYTES / 1e9
        for _ in range(FIRST_MOVES):
            await move(one, Reader.look)
        return {path: moved / best_of([await move(*how) for _ in range(repeats + 1)]) for path, how in paths.items()}
    finally:
        await executor.close()


def model_of(size: int, device: str) -> dict[str, Tensor]:
    """Tensors as of a language model, in bf16: matrices of 32 MB, each with a small vector."""
    width = 4096
    tensors = {}
    for layer in range(max(round(size / (2 * width * (width + 1))), 1)):
        tensors[f"{layer}.weight"] = torch.ones(width, width, dtype=torch.bfloat16, device=device)
        tensors[f"{layer}.norm"] = torch.ones(width, dtype=torch.bfloat16, device=device)
    return tensors


def memory_copy(size: int) -> Callable[[], None]:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def copy() -> None:
        target[:] = source

    return copy


def through_slots(sender: Sender, pipe: Connection, kind: ChannelKind, slots: int) -> float:
    """Seconds from the first write to the last load; digests, computed beforehand and afterwards, are not in it."""
    manifest = sender.manifest(1, torch.arange(1), torch.zeros(0))
    ask(pipe, "begin", manifest, sender.open(kind, slots))

    async def write(bucket: int) -> None:
        await asyncio.to_thread(sender.write, bucket)

    async def load(bucket: int) -> None:
        await asyncio.to_thread(ask, pipe, "load", bucket)

    started = time.perf_counter()
    asyncio.run(stream(len(sender.layout.buckets), slots, write, [load]))
    seconds = time.perf_counter() - started
    assert ask(pipe, "finish") == []
    return seconds


def by_broadcast(sender: Sender, pipe: Connection, repeats: int) -> list[float]:
    """Seconds of each of the broadcasts through one group."""
    ask(pipe, "begin", sender.manifest(1, torch.arange(1), torch.zeros(0)), None)
    port = BroadcastGroup.free_port()
    pipe.send(("join", (port,)))
    group = BroadcastGroup(0, 2, LOCAL, port, "gloo", DEADLINE_S)
    pipe.recv()
    seconds = []
    for _ in range(repeats):
        pipe.send(("receive", ()))
        started = time.perf_counter()
        sender.broadcast(group)
        pipe.recv()
        seconds.append(time.perf_counter() - started)
    assert ask(pipe, "finish") == []
    group.close()
    return seconds


class Engine:
    """The other process: calls by name, one at a time."""

    def __init__(self, size: int, device: str) -> None:
        self._receiver = Receiver(model_of(size, device))
        self.begin, self.load, self.finish = self._receiver.begin, self._receiver.load, self._receiver.finish
        self.close = self._receiver.close
        self._group: BroadcastGroup | None = None

    def join(self, port: int) -> None:
        self._group = BroadcastGroup(1, 2, LOCAL, port, "gloo", DEADLINE_S)

    def receive(self) -> None:
        assert self._group is not None
        self._receiver.receive(self._group)


def serve(pipe: Connection, size: int, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    engine = Engine(size, device)
    while (call := pipe.recv()) is not None:
        method, arguments = call
        pipe.send(getattr(engine, method)(*arguments))


def ask(pipe: Connection, method: str, *arguments: object) -> object:
    pipe.send((method, arguments))
    return pipe.recv()


@contextmanager
def other_process(size: int, device: str, threads: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, size, device, threads), daemon=True)
    process.start()
    there.close()
    yield here
    here.send(None)
    process.join()


def best(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run, those the action itself returns where it does; one more run goes first, unmeasured."""
    return best_of([_seconds(action) for _ in range(repeats + 1)])


def best_of(seconds: list[float]) -> float:
    return min(seconds[1:] or seconds)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    measured = action()
    return measured if isinstance(measured, float) else time.perf_counter() - started


if __name__ == "__main__":
    main()
