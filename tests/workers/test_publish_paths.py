"""By which path weights travel, from where the trainer's first rank and the engines are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.cluster import WorkerPlacement
from roll.cluster.mesh import MeshShape
from roll.workers.publish import choose_backend, choose_path


def trainer(*devices: str) -> list[WorkerPlacement]:
    """The ranks of a sharded trainer; `b:3` is GPU 3 of node b, `b:` its CPU."""
    mesh = MeshShape(shard=len(devices))
    return [place("actor_train", rank, device, mesh) for rank, device in enumerate(devices)]


def engines(*devices: str, tensor_parallel: int = 1) -> list[WorkerPlacement]:
    return [place("actor_infer", rank, device, None, tensor_parallel) for rank, device in enumerate(devices)]


def place(role: str, rank: int, device: str, mesh: MeshShape | None, gpus: int = 1) -> WorkerPlacement:
    node, _, number = device.partition(":")
    own = tuple(range(int(number), int(number) + gpus)) if number else ()
    return WorkerPlacement(role, rank, device=f"cuda:{number}" if number else "cpu", node=node, gpus=own, mesh=mesh)


def on(node: str, count: int, step: int = 1) -> list[str]:
    return [f"{node}:{number}" for number in range(0, count, step)]


@dataclass(frozen=True)
class Case:
    trainer: list[WorkerPlacement]
    engines: list[WorkerPlacement]
    path: str
    backend: str


CASES = {
    "one CPU": Case(trainer("a:"), engines("a:"), "shared_memory", "gloo"),
    "two ranks and an engine on one CPU": Case(trainer("a:", "a:"), engines("a:"), "shared_memory", "gloo"),
    "all on one GPU": Case(trainer("a:0"), engines("a:0"), "cuda_ipc", "gloo"),
    "two GPUs, one engine on the first": Case(trainer("a:0", "a:1"), engines("a:0"), "cuda_ipc", "gloo"),
    "two GPUs, one engine on the second": Case(trainer("a:0", "a:1"), engines("a:1"), "shared_memory", "nccl"),
    "eight GPUs that take turns": Case(trainer(*on("a", 8)), engines(*on("a", 8)), "shared_memory", "gloo"),
    "eight GPUs that take turns, engines of two": Case(
        trainer(*on("a", 8)), engines(*on("a", 8, 2), tensor_parallel=2), "shared_memory", "gloo"
    ),
    "one engine over all GPUs": Case(trainer(*on("a", 4)), engines("a:0", tensor_parallel=4), "cuda_ipc", "gloo"),
    "GPUs apart on one node": Case(trainer("a:0", "a:1"), engines("a:2", "a:3"), "shared_memory", "nccl"),
    "two nodes that take turns": Case(
        trainer(*on("a", 2), *on("b", 2)), engines(*on("a", 2), *on("b", 2)), "broadcast", "gloo"
    ),
    "trainer and engines on nodes of their own": Case(trainer(*on("a", 2)), engines(*on("b", 2)), "broadcast", "nccl"),
    "the same GPU numbers on another node": Case(trainer("a:0"), engines("b:0"), "broadcast", "nccl"),
    "partly shared over two nodes": Case(trainer("a:0", "a:1"), engines("a:1", "b:0"), "broadcast", "nccl"),
    "shared with the first rank, over two nodes": Case(trainer("a:0"), engines("a:0", "b:0"), "broadcast", "gloo"),
    "two engines on one GPU of another node": Case(trainer("a:0"), engines("b:0", "b:0"), "broadcast", "gloo"),
    "trainer on two nodes, engine beside its first rank": Case(
        trainer("a:0", "b:0"), engines("a:1"), "shared_memory", "nccl"
    ),
    "trainer on two nodes, engine beside its last rank": Case(trainer("a:0", "b:0"), engines("b:0"), "broadcast", "nccl"),
    "engines on a CPU": Case(trainer("a:0"), engines("a:"), "shared_memory", "gloo"),
    "engines on another node's CPU": Case(trainer("a:0"), engines("b:", "b:"), "broadcast", "gloo"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_paths_by_placements(case: Case) -> None:
    assert choose_path(case.trainer[0], case.engines) == case.path
    assert choose_backend(case.trainer[0], case.engines) == case.backend


DEVICES = [f"{node}:{number}" for node, number in product("ab", ["", "0", "1"])]


@given(first=st.sampled_from(DEVICES), others=st.lists(st.sampled_from(DEVICES), min_size=1, max_size=5))
def test_a_path_reaches_every_engine(first: str, others: list[str]) -> None:
    """Memory is of one node, IPC of one GPU, and no GPU is twice in a group of NCCL."""
    (sender,), places = trainer(first), engines(*others)
    path = choose_path(sender, places)
    if path != "broadcast":
        assert {place.node for place in places} == {sender.node}
    if path == "cuda_ipc":
        assert sender.device != "cpu"
        assert {place.device for place in places} == {sender.device}
    if choose_backend(sender, places) == "nccl":
        assert "a:" not in (first, *others)
        assert "b:" not in (first, *others)
        assert len({first, *others}) == 1 + len(others)
