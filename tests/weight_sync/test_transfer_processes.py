"""Weights between processes: they arrive whole, faults are named, deaths are noticed, memory stays bounded."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor
from transfer_peer import (
    BUCKET_BYTES,
    LOCAL,
    MEETING_S,
    MEGABYTE,
    PeakMemory,
    answer,
    ask,
    die_in_a_broadcast,
    serve,
    spawn,
    tensors_of,
)

from roll.config.errors import RunError
from roll.weight_sync.broadcast import BroadcastGroup, GroupBroke
from roll.weight_sync.channel import SHM, Handle
from roll.weight_sync.stream import Receiver, Sender, WeightManifest, stream

FLIPPED = 5 * MEGABYTE + 77
"""A byte in the middle of `embed`."""

SLACK = 28 * MEGABYTE
"""A digest's block, weights and sums, and the allocator's rounding."""


@pytest.fixture(scope="module")
def peer() -> Iterator[Connection]:
    process, pipe = spawn(serve)
    yield pipe
    pipe.send(None)
    process.join(10)
    assert process.exitcode == 0
    assert not [path for pid in (os.getpid(), process.pid) for path in SHM.glob(f"*roll-{pid}-*")]


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender(tensors_of(seed=1), BUCKET_BYTES)
    yield sender
    sender.close()


def manifest_of(sender: Sender) -> WeightManifest:
    return sender.manifest(3, torch.arange(3), torch.zeros(2))


def publish(sender: Sender, peer: Connection, manifest: WeightManifest, handle: Handle, slots: int = 2) -> None:
    async def write(bucket: int) -> None:
        await asyncio.to_thread(sender.write, bucket)

    async def load(bucket: int) -> None:
        await asyncio.to_thread(ask, peer, "load", bucket)

    ask(peer, "begin", manifest, handle)
    asyncio.run(stream(len(sender.layout.buckets), slots, write, [load]))


@pytest.mark.parametrize("slots", [1, 2])
def test_shared_memory_brings_every_tensor(sender: Sender, peer: Connection, slots: int) -> None:
    ask(peer, "make", 2)
    publish(sender, peer, manifest_of(sender), sender.open("shared_memory", slots), slots)
    assert ask(peer, "finish") == []
    for name, tensor in tensors_of(seed=1).items():
        assert ask(peer, "sum_of", name) == float(tensor.double().sum())


def test_a_byte_flipped_in_a_slot_is_named(sender: Sender, peer: Connection) -> None:
    ask(peer, "make", 2)
    ask(peer, "begin", manifest_of(sender), sender.open("shared_memory"))
    channel = sender._channel
    assert channel is not None
    for bucket, spans in enumerate(sender.layout.buckets):
        sender.write(bucket)
        for span in spans:
            if span.tensor == "embed" and span.start <= FLIPPED < span.start + span.size:
                channel.slot(bucket % 2)[span.offset + FLIPPED - span.start] ^= 128
        ask(peer, "load", bucket)
    assert ask(peer, "finish") == ["embed"]


def test_a_broadcast_brings_every_tensor(sender: Sender, peer: Connection) -> None:
    ask(peer, "make", 2)
    ask(peer, "begin", manifest_of(sender), None)
    broadcast(sender, peer)
    assert ask(peer, "finish") == []
    assert ask(peer, "sum_of", "embed") == float(tensors_of(seed=1)["embed"].double().sum())


def broadcast(sender: Sender, peer: Connection) -> None:
    port = BroadcastGroup.free_port()
    peer.send(("receive", (port,)))
    group = BroadcastGroup(0, 2, LOCAL, port, "gloo", MEETING_S)
    sender.broadcast(group)
    answer(peer)
    group.close()


def test_a_byte_flipped_in_a_broadcast_is_named(
    sender: Sender, peer: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(peer, "make", 2)
    ask(peer, "begin", manifest_of(sender), None)
    whole = BroadcastGroup.broadcast

    def flipped(group: BroadcastGroup, tensor: Tensor) -> None:
        if len(tensor) < BUCKET_BYTES:  # the last bucket, which ends with `half` and `steps`
            tensor[-1] ^= 1
        whole(group, tensor)

    monkeypatch.setattr(BroadcastGroup, "broadcast", flipped)
    broadcast(sender, peer)
    assert ask(peer, "finish") == ["steps"]


def test_neither_side_needs_more_than_its_slots(peer: Connection) -> None:
    sender = Sender(tensors_of(1, "cpu", 64), BUCKET_BYTES)
    ask(peer, "make", 2, "cpu", 64)
    manifest, handle = manifest_of(sender), sender.open("shared_memory")
    publish(sender, peer, manifest, handle)  # code that runs for the first time takes memory too
    assert ask(peer, "finish") == []
    memory = PeakMemory()
    publish(sender, peer, manifest, handle)
    assert memory.growth_bytes() < 2 * BUCKET_BYTES + SLACK
    assert ask(peer, "finish") == []
    assert ask(peer, "peak") < 2 * BUCKET_BYTES + SLACK
    memory = PeakMemory()
    ask(peer, "begin", manifest, None)
    broadcast(sender, peer)
    assert memory.growth_bytes() < BUCKET_BYTES + SLACK
    assert ask(peer, "peak") < BUCKET_BYTES + SLACK
    sender.close()


def test_a_sender_killed_in_a_broadcast_is_an_error_at_the_receiver() -> None:
    process, pipe = spawn(die_in_a_broadcast)
    receiver = Receiver(tensors_of(seed=1))
    manifest = pipe.recv()
    receiver.begin(manifest)
    port = BroadcastGroup.free_port()
    pipe.send(port)
    group = BroadcastGroup(1, 2, LOCAL, port, "gloo", MEETING_S)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"\(rank 1 of 2, gloo\) broke: the sender or a rank before this one died"):
        receiver.receive(group)
    assert time.monotonic() - started < MEETING_S
    group.close()
    assert "embed" in receiver.finish()
    process.join(10)
    assert process.exitcode == -9


def both_ranks(deadline_s: float) -> tuple[BroadcastGroup, BroadcastGroup]:
    port, made = BroadcastGroup.free_port(), {}

    def make(rank: int) -> None:
        made[rank] = BroadcastGroup(rank, 2, LOCAL, port, "gloo", deadline_s)

    thread = threading.Thread(target=make, args=(1,))
    thread.start()
    make(0)
    thread.join()
    return made[0], made[1]


def test_a_sender_that_hangs_is_an_error_within_the_deadline() -> None:
    sender, receiver = both_ranks(deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"took longer than 0\.5 s"):
        receiver.broadcast(torch.zeros(10, dtype=torch.uint8))
    assert 0.3 < time.monotonic() - started < 5
    for group in (receiver, sender):
        group.close()
        group.close()
    with pytest.raises(RunError, match="is closed"):
        receiver.broadcast(torch.zeros(10, dtype=torch.uint8))


def test_groups_beside_each_other_do_not_mix() -> None:
    first, second = both_ranks(10), both_ranks(10)
    results = [torch.zeros(4, dtype=torch.uint8) for _ in range(2)]
    threads = [
        threading.Thread(target=group.broadcast, args=(result,))
        for (_, group), result in zip((first, second), results, strict=True)
    ]
    for thread in threads:
        thread.start()
    second[0].broadcast(torch.full((4,), 2, dtype=torch.uint8))
    first[0].broadcast(torch.full((4,), 1, dtype=torch.uint8))
    for thread in threads:
        thread.join()
    assert [result.tolist() for result in results] == [[1] * 4, [2] * 4]
    assert not torch.distributed.is_initialized()
    for group in (*first, *second):
        group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone_says_so_within_the_deadline(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=rf"\(rank {rank} of 2, gloo\) did not form within 0.5 s: check that all 2 ranks"):
        BroadcastGroup(rank, 2, LOCAL, BroadcastGroup.free_port(), "gloo", deadline_s=0.5)
    assert time.monotonic() - started < 10


def abandoned_while(wait: Callable[[threading.Event], object]) -> str:
    """What a thread that waits in a group says when the group is cancelled, long before the deadline."""
    abandoned, said = threading.Event(), []

    def run() -> None:
        with pytest.raises(GroupBroke) as raised:
            wait(abandoned)
        said.append(str(raised.value))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.2)
    abandoned.set()
    thread.join(60)
    assert not thread.is_alive()
    return said[0]


def test_who_waits_for_the_others_to_join_can_abandon_the_group() -> None:
    port = BroadcastGroup.free_port()
    said = abandoned_while(
        lambda abandoned: BroadcastGroup(0, 2, LOCAL, port, "gloo", deadline_s=600, cancelled=abandoned)
    )
    assert "it was cancelled" in said


def test_who_waits_for_a_silent_sender_can_abandon_the_group() -> None:
    port, made = BroadcastGroup.free_port(), []
    thread = threading.Thread(target=lambda: made.append(BroadcastGroup(0, 2, LOCAL, port, "gloo", 600)))
    thread.start()

    def wait(abandoned: threading.Event) -> None:
        receiver = BroadcastGroup(1, 2, LOCAL, port, "gloo", 600, cancelled=abandoned)
        made.append(receiver)
        receiver.broadcast(torch.zeros(10, dtype=torch.uint8))

    assert "it was cancelled" in abandoned_while(wait)
    thread.join()
    for group in made:
        group.close()


def test_nccl_without_nccl_is_refused() -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    with pytest.raises(RunError, match="has no NCCL: broadcast with gloo"):
        BroadcastGroup(0, 1, LOCAL, 1, "nccl", deadline_s=1)


def test_this_machine_has_an_address() -> None:
    parts = BroadcastGroup.host().split(".")
    assert len(parts) == 4
    assert all(0 <= int(part) < 256 for part in parts)
