"""Of a long sample each rank of a context has its part, and its memory is what was planned for that."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from roll.algorithm import LossSpec
from roll.cluster.mesh import MeshShape
from roll.config.schema import TrainConfig
from roll.data import Batch, Sample, Task
from roll.devices.memory import MASTERS, MOMENTS, sharded_peak
from roll.model import attention
from roll.strategy.train.activation_memory import PackedSize, Spans
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.strategy import ShardedStrategy
from tests.ranks import ranks_of

TOKENS = 2048
CONFIG = Qwen3Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=TOKENS,
    tie_word_embeddings=False,
)
"""So small that activations are nearly all of its memory."""
LOSS = LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3})


def one_long_sample() -> Batch:
    rng = np.random.default_rng(0)
    sample, answer = Sample("0.0", Task.ask("t", "?"), 0, 1.0), TOKENS - 8
    sample.log.prompt(rng.integers(0, CONFIG.vocab_size, 8).tolist())
    sample.log.respond(rng.integers(0, CONFIG.vocab_size, answer).tolist(), np.full(answer, -5.0), [0] * answer)
    return Batch.from_samples([sample]).with_columns(advantage=np.ones(1))


def update_peak(group: RankGroup, checkpointing: str) -> int:
    """The most that an update allocates beside masters and moments."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    model.set_attn_implementation(attention.NAME)
    module = TrainModule(model)
    shard(module, model.get_decoder(), group.meshes, torch.float32)
    settings = TrainConfig(
        micro_batch_tokens=TOKENS,
        compile="off",
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
    )
    trainer = ShardedStrategy(ShardedModel(module, model, torch.float32), settings, group)
    batch = one_long_sample()
    trainer.update(batch, LOSS, 0)
    with Peak() as peak:
        trainer.update(batch, LOSS, 1)
    return peak.bytes


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that were made within it and still live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for tensor in tensors(found):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._live.keys():
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.bytes = max(self.bytes, sum(self._live.values()))
        return found


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def planned(mesh: MeshShape, checkpointing: str) -> int:
    size = PackedSize(TOKENS, TOKENS - 8, (Spans(1, TOKENS, TOKENS),))
    found = sharded_peak(CONFIG, mesh, size, dtype=torch.float32, device="cpu", checkpointed=checkpointing == "on")
    return found.bytes - found.part(MASTERS) - found.part(MOMENTS["adamw"])


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_memory_falls_with_context_as_planned(checkpointing: str) -> None:
    measured, plans = {}, {}
    for context in (1, 4):
        mesh = MeshShape(context=context)
        with ranks_of(mesh) as ranks:
            found = ranks.run(update_peak, checkpointing)
        assert max(found) < 1.05 * min(found), "ranks have equal parts"
        measured[context], plans[context] = max(found), planned(mesh, checkpointing)
        assert 0.95 * measured[context] < plans[context] < 1.2 * measured[context]
    assert measured[1] / measured[4] == pytest.approx(plans[1] / plans[4], rel=0.1)
    assert measured[4] < 0.3 * measured[1]
