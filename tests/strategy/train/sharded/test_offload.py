"""Offload of a sharded trainer changes where its tensors are, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from roll.cluster.mesh import MeshShape
from roll.config.schema import LoraConfig, TrainConfig
from roll.model.lora import Adapters, BaseModelRef
from roll.strategy.train.optimizer import MasterAdamW
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.offload import PinnedMemory, ShardOffload, replace_locals
from roll.strategy.train.sharded.process_group import RankGroup
from tests.ranks import ranks_of
from tests.strategy.train.sharded.trainers import make_model
from tests.thorough import but


class Trained:
    """A sharded model of this rank, and steps of its optimizer on a loss of its own."""

    def __init__(self, group: RankGroup, kind: str, *, adapters: bool = False) -> None:
        """With adapters, what is frozen is in bf16 and what learns in fp32."""
        dtype = torch.bfloat16 if adapters else torch.float32
        self.model: PreTrainedModel = make_model(kind).to(dtype)
        self.model.set_attn_implementation("sdpa")
        if adapters:
            for parameter in Adapters(self.model, LoraConfig(rank=2), BaseModelRef("base"), 0).parameters().values():
                parameter.data = parameter.data.float()
        self.module = TrainModule(self.model)
        shard(self.module, self.model.get_decoder(), group.meshes, dtype)
        self.optimizer = MasterAdamW(self.model, TrainConfig(lr=1e-2))
        self._ids = torch.arange(24).view(2, 12) + group.rank

    def step(self, number: int) -> float:
        loss: Tensor = self.module(lambda: self.model(self._ids).logits.float().logsumexp(-1).square().mean())
        loss.backward()  # type: ignore[no-untyped-call]
        return self.optimizer.step(number).norm

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **self.optimizer.tensors()}


def local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def moved_and_not(group: RankGroup, kind: str, adapters: bool) -> dict[str, Any]:
    """What two trainers end with, one of which is given new storage for all its tensors after every step, as on its way
    from a GPU and back; the old storage is spoiled, so that nobody can still be using it."""
    still, moving = (Trained(group, kind, adapters=adapters) for _ in range(2))
    norms, same = [], []
    for number in range(3):
        norms.append((still.step(number), moving.step(number)))
        with torch.no_grad():
            moving.module(lambda: moving.model(moving._ids).logits)  # leaves the root's parameters gathered
        ShardOffload(moving.module, torch.device("cpu")).set_residency("none", moving.optimizer.tensors())
        tensors = moving.tensors()
        before = {name: id(tensor) for name, tensor in tensors.items()}
        old = {name: local(tensor) for name, tensor in tensors.items()}
        replace_locals(moving.module, moving.optimizer.tensors(), {name: local(t).clone() for name, t in tensors.items()})
        for tensor in old.values():
            tensor.fill_(torch.nan)
        same.append({name: id(tensor) for name, tensor in moving.tensors().items()} == before)
    ends = {name: (local(tensor).clone(), local(moving.tensors()[name])) for name, tensor in still.tensors().items()}
    return {
        "norms": norms,
        "same": same,
        "equal": {name: torch.equal(*pair) for name, pair in ends.items()},
        "moments": len(moving.optimizer.tensors()),
    }


@pytest.mark.parametrize(("kind", "adapters"), but([("tied", True)], [("qwen3", False), ("tied", False), ("tied", True)]))
def test_a_trainer_that_was_moved_trains_on_as_one_that_stayed(kind: str, adapters: bool) -> None:
    with ranks_of(MeshShape(shard=3)) as ranks:  # which divides no size of the model: shards are padded
        for found in ranks.run(moved_and_not, kind, adapters):
            assert found["moments"] > 0
            assert all(found["same"]), "a tensor became another object, for which the optimizer has no moments"
            assert all(one == other for one, other in found["norms"])
            assert all(found["equal"].values()), [name for name, fine in found["equal"].items() if not fine]


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])


@given(st.lists(st.tuples(st.integers(0, 3000), DTYPES), max_size=20))
def test_pinned_memory_gives_each_tensor_room_of_its_own(sizes: list[tuple[int, torch.dtype]]) -> None:
    memory = PinnedMemory(4096, pinned=False)
    wanted = [torch.randint(0, 100, (size,)).to(dtype) for size, dtype in sizes]
    rooms = [memory.like(tensor) for tensor in wanted]
    for room, tensor in zip(rooms, wanted, strict=True):
        assert room.shape == tensor.shape
        assert room.dtype == tensor.dtype
        assert room.is_contiguous()
        room.copy_(tensor)
    for room, tensor in zip(rooms, wanted, strict=True):
        assert torch.equal(room, tensor)
