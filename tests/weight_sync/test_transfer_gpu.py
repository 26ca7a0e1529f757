"""The GPU's paths: the same digests as on the CPU, and memory of one GPU seen by two processes."""

from __future__ import annotations

import pytest
import torch
from transfer_peer import BUCKET_BYTES, BY_SOCKETS, LOCAL, answer, ask, serve, serve_on_another_host, spawn, tensors_of

from roll.weight_sync.broadcast import BroadcastGroup
from roll.weight_sync.channel import ChannelKind
from roll.weight_sync.digest import BLOCK_WORDS, digest, digests
from roll.weight_sync.stream import Sender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("size", [0, 1, 7, 4096, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS, 8 * BLOCK_WORDS + 5])
def test_both_devices_give_the_same_digest(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert digest(data.cuda()) == digest(data)
    assert digest(data.cuda()[1:]) == digest(data[1:])


def test_tensors_on_two_devices_at_once() -> None:
    tensors = tensors_of(seed=1)
    mixed = {name: tensor.cuda() if name != "half" else tensor for name, tensor in tensors.items()}
    assert digests(mixed) == digests(tensors)


@pytest.mark.parametrize(("kind", "there"), [("cuda_ipc", "cuda"), ("shared_memory", "cuda"), ("shared_memory", "cpu")])
def test_a_gpu_s_tensors_reach_another_process(kind: ChannelKind, there: str) -> None:
    process, pipe = spawn(serve)
    sender = Sender(tensors_of(seed=1, device="cuda"), BUCKET_BYTES)
    for version, flip in ((1, False), (2, True), (3, False)):
        ask(pipe, "make", 2, there)
        ask(pipe, "begin", sender.manifest(version, torch.arange(3), torch.zeros(2)), sender.open(kind))
        channel = sender._channel
        assert channel is not None
        for bucket in range(len(sender.layout.buckets)):
            sender.write(bucket)
            if flip and bucket == 3:
                channel.slot(1)[1000] ^= 1
                channel.settle()
            ask(pipe, "load", bucket)
        assert ask(pipe, "finish") == (["embed"] if flip else [])
    ask(pipe, "close")
    sender.close()
    pipe.send(None)
    process.join(30)
    assert process.exitcode == 0


def test_gpu_memory_is_given_back_however_many_attached() -> None:
    """None, one, and three times, by two processes."""
    peers = [spawn(serve) for _ in range(2)]
    for _, pipe in peers:
        ask(pipe, "make", 2, "cuda")
    sender = Sender(tensors_of(seed=1, device="cuda"), BUCKET_BYTES)
    manifest = sender.manifest(1, torch.arange(3), torch.zeros(2))
    before = torch.cuda.memory_allocated()
    for attaching in ([], peers[:1], [*peers, peers[0]]):
        handle = sender.open("cuda_ipc")
        assert torch.cuda.memory_allocated() >= before + 2 * sender.layout.slot_bytes
        for _, pipe in attaching:
            ask(pipe, "begin", manifest, handle)
            sender.write(0)
            ask(pipe, "load", 0)
            ask(pipe, "close")
            ask(pipe, "make", 2, "cuda")
        sender.close()
        assert torch.cuda.memory_allocated() == before
    for process, pipe in peers:
        pipe.send(None)
        process.join(30)
        assert process.exitcode == 0


def test_nccl_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL lets a GPU take part once a host, so that on one GPU the two are told that they are on different hosts: they
    then talk by sockets, as hosts do."""
    for name, value in BY_SOCKETS.items():
        monkeypatch.setenv(name, value)
    process, pipe = spawn(serve_on_another_host)
    sender = Sender(tensors_of(seed=1, device="cuda"), BUCKET_BYTES)
    ask(pipe, "make", 2, "cuda")
    ask(pipe, "begin", sender.manifest(1, torch.arange(3), torch.zeros(2)), None)
    port = BroadcastGroup.free_port()
    pipe.send(("receive", (port, "nccl")))
    group = BroadcastGroup(0, 2, LOCAL, port, "nccl", deadline_s=60, device=torch.device("cuda", 0))
    sender.broadcast(group)
    assert answer(pipe) is None
    assert ask(pipe, "finish") == []
    group.close()
    ask(pipe, "close")
    pipe.send(None)
    process.join(30)
    assert process.exitcode == 0
