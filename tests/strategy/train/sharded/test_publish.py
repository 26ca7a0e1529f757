"""What a sharded trainer publishes, against one process that publishes the whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import ALL, examples
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from roll.config.errors import RunError
from roll.config.schema import LoraConfig
from roll.model import lora
from roll.model.lora import Adapters, BaseModelRef, is_adapter
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.publish import served_dtype, sharded_source
from roll.weight_sync import shards
from roll.weight_sync.broadcast import BroadcastGroup
from roll.weight_sync.digest import BLOCK_WORDS, digests
from roll.weight_sync.layout import specs_of
from roll.weight_sync.merged_state_dict import published_tensors
from roll.weight_sync.rendezvous import Rendezvous
from roll.weight_sync.stream import Receiver, Sender, WeightManifest
from tests.ranks import Ranks
from tests.thorough import but


@dataclass(frozen=True)
class Model:
    """What a test publishes. Sizes that no number of ranks divides make uneven and empty shards."""

    vocab: int = 29
    inner: int = 37
    heads: int = 2
    tied: bool = False
    bias: bool = True
    experts: int = 0
    rank: int = 0
    """Of adapters; 0 for a model without."""
    dtype: torch.dtype = torch.bfloat16
    """That it is served in."""
    buffer: bool = False


def make_model(wanted: Model) -> PreTrainedModel:
    """The model in fp32, with adapters that have learned something if it is to have any, whose base then is in the
    serving precision."""
    sizes: dict[str, Any] = {
        "vocab_size": wanted.vocab,
        "hidden_size": 4 * wanted.heads,
        "intermediate_size": wanted.inner,
        "num_hidden_layers": 2,
        "num_attention_heads": wanted.heads,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "tie_word_embeddings": wanted.tied,
        "attention_bias": wanted.bias,
        "initializer_range": 0.3,
    }
    config: Any = LlamaConfig(**sizes)
    if wanted.experts:
        config = Qwen3MoeConfig(
            **sizes, num_experts=wanted.experts, moe_intermediate_size=6, num_experts_per_tok=1, decoder_sparse_step=1
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.vocab)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if wanted.buffer:
            model.get_decoder().register_buffer("odd", torch.randn(5))
            model.get_decoder().register_buffer("count", torch.tensor(7))
        if wanted.rank:
            model.to(wanted.dtype)
            targets = ("q_proj", "v_proj") if wanted.experts else ("all-linear",)
            Adapters(model, LoraConfig(rank=wanted.rank, targets=targets), BaseModelRef("x"), 0)
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    parameter.data = torch.randn(parameter.shape) * 0.2
    return model


def whole(wanted: Model) -> Mapping[str, Tensor]:
    """What one process publishes: parameters are the masters rounded."""
    return published_tensors(make_model(wanted).to(wanted.dtype))


def made_sharded(group: RankGroup, wanted: Model) -> TrainModule:
    model = make_model(wanted)
    module = TrainModule(model)
    shard(module, model.get_decoder(), group.meshes, wanted.dtype)
    return module


def publish(
    group: RankGroup, wanted: Model, bucket_bytes: int, block: int = 1 << 22, damage: Callable[..., None] | None = None
) -> tuple[dict[str, int], dict[str, Tensor], list[str]]:
    """Every rank's digests; on the first also what a receiver has afterwards, and what it finds damaged."""
    shards.BLOCK_ELEMENTS = lora.BLOCK_ELEMENTS = block
    sender = Sender(sharded_source(made_sharded(group, wanted), group, wanted.dtype), bucket_bytes)
    manifest = sender.manifest(3, torch.zeros(2), torch.zeros(1))
    if damage is not None:
        damage(group, sender)
    if not group.is_first:
        for bucket in range(len(sender.layout.buckets)):
            sender.contribute(bucket)
        return manifest.digests, {}, []
    received = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in sender.layout.tensors}
    receiver = Receiver(received)
    receiver.begin(manifest, sender.open("shared_memory"))
    for bucket in range(len(sender.layout.buckets)):
        sender.write(bucket)
        receiver.load(bucket)
    wrong = receiver.finish()
    receiver.close()
    sender.close()
    return manifest.digests, received, wrong


def assert_published(ranks: Ranks, wanted: Model, bucket_bytes: int, block: int = 1 << 22) -> None:
    expected = whole(wanted)
    names = specs_of(expected)
    found = ranks.run(publish, wanted, bucket_bytes, block)
    for own, _, _ in found:
        assert own == digests(expected)
    _, received, wrong = found[0]
    assert not wrong
    assert specs_of(received) == names
    for name, tensor in expected.items():
        assert torch.equal(received[name].view(-1).view(torch.uint8), tensor.detach().reshape(-1).view(torch.uint8)), name


@st.composite
def models(draw: st.DrawFn) -> Model:
    experts = draw(st.sampled_from([0, 0, 3, 4]))
    return Model(
        vocab=draw(st.integers(2, 40)),
        inner=draw(st.integers(1, 40)),
        heads=draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        experts=experts,
        rank=draw(st.sampled_from([0, 1, 3, 5])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        buffer=draw(st.booleans()),
    )


BUCKETS = st.sampled_from([16, 80, 1000, 1 << 20])


@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(15))
@given(wanted=models(), bucket_bytes=BUCKETS)
def test_two_ranks_publish_the_bytes_of_one_process(two: Ranks, wanted: Model, bucket_bytes: int) -> None:
    assert_published(two, wanted, bucket_bytes)


@settings(deadline=None, max_examples=8 if ALL else 3)
@given(wanted=models(), bucket_bytes=BUCKETS)
def test_two_replicas_of_two_ranks_publish_the_bytes_of_one_process(
    replicas: Ranks, wanted: Model, bucket_bytes: int
) -> None:
    assert_published(replicas, wanted, bucket_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 3])
def test_blocks_smaller_than_a_shard_change_no_bit(three: Ranks, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of B A is computed in the same block whichever rank and bucket it is for; with 40 elements a block has five
    rows, and the bounds of the ranks' 8, 13 and 29 rows are inside of blocks."""
    monkeypatch.setattr(lora, "BLOCK_ELEMENTS", 40)
    assert_published(three, Model(experts=4, rank=rank), 96, block=40)
    assert_published(three, Model(rank=rank, tied=True, dtype=torch.float32), 1000, block=40)


def cut(group: RankGroup, wanted: Model) -> dict[str, tuple[Any, tuple[int, ...]]]:
    parameters = made_sharded(group, wanted).model.named_parameters()
    return {name: (p.placements, tuple(p.to_local().shape)) for name, p in parameters if isinstance(p, DTensor)}


def test_the_models_here_have_experts_cut_inside_and_ranks_without_a_row(three: Ranks) -> None:
    found = three.run(cut, Model(experts=4, rank=1))
    placement, shape = found[0]["model.layers.0.mlp.experts.gate_up_proj"]
    assert (placement[0].dim, shape) == (1, (4, 4, 8))
    assert [own["model.layers.0.self_attn.q_proj.lora_A.default.weight"][1][0] for own in found] == [1, 0, 0]
    assert [own["model.layers.0.mlp.gate.weight"][1][0] for own in found] == [2, 2, 0]


def publish_after_a_pass(group: RankGroup, wanted: Model) -> dict[str, int]:
    module = made_sharded(group, wanted)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        module(lambda: module.model(ids).logits)
    assert not all(isinstance(p, DTensor) for p in module.parameters()), "a pass leaves the root's parameters gathered"
    return sharded_source(module, group, wanted.dtype).digests()


def test_weights_that_a_pass_left_gathered_are_published_from_shards(two: Ranks) -> None:
    wanted = Model(dtype=torch.float32)
    for found in two.run(publish_after_a_pass, wanted):
        assert found == digests(whole(wanted))


@dataclass(frozen=True)
class Flip:
    """Flips a bit of one rank's part of a tensor, after the digests were computed."""

    rank: int
    tensor: str

    def __call__(self, group: RankGroup, sender: Sender) -> None:
        source = sender._source
        assert isinstance(source, shards.ShardedTensors)
        shard_of = source._shard_of

        def damaged(name: str) -> shards.Shard:
            found = shard_of(name)
            if (group.rank, name) != (self.rank, self.tensor):
                return found
            size = (found.rows.stop - found.rows.start) * (found.columns.stop - found.columns.start)
            values = found.read(0, size).to(found.dtype).clone()
            values.view(torch.int16)[0] ^= 1
            return replace(found, read=lambda start, end: values[start:end])

        source._shard_of = damaged


@pytest.mark.parametrize("rank", but([1], [0, 1]))
@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("adapters", but([2], [0, 2]))
def test_the_tensor_of_a_damaged_shard_is_named(
    two: Ranks, replicas: Ranks, rank: int, tensor: str, adapters: int
) -> None:
    for ranks in (two, replicas):
        _, _, wrong = ranks.run(publish, Model(rank=adapters), 200, 1 << 22, Flip(rank, tensor))[0]
        assert wrong == [tensor]


def test_what_transformers_keeps_in_fp32_is_served_so() -> None:
    model: Any = make_model(Model())
    model._keep_in_fp32_modules_strict = {"input_layernorm", "mlp.*.bias"}

    def served(name: str, tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
        return served_dtype(model, name, tensor, dtype)

    one, number = torch.ones(1), torch.ones(1, dtype=torch.int64)
    assert served("model.layers.0.input_layernorm.weight", one) == torch.float32
    assert served("model.layers.0.mlp.experts.bias", one) == torch.float32
    assert served("model.layers.0.mlp.experts.weight", one) == torch.bfloat16
    assert served("model.layers.0.mlp.experts.weight", one, torch.float32) == torch.float32
    assert served("model.count", number) == torch.int64


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that tensors made by the work take at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    events: Any = seen.profiler.kineto_results
    changes = [event for event in events.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())), default=0)


def room_of_publishing(group: RankGroup, wanted: Model, bucket_bytes: int, block: int) -> dict[str, int]:
    """What this rank needs beside its shards: for digests, for all buckets, and, for comparison, for one whole tensor."""
    shards.BLOCK_ELEMENTS = lora.BLOCK_ELEMENTS = block
    module = made_sharded(group, wanted)
    sender = Sender(sharded_source(module, group, wanted.dtype), bucket_bytes)
    slots = sender.open("shared_memory") if group.is_first else None
    embedding = module.model.get_input_embeddings().weight

    def send() -> None:
        for bucket in range(len(sender.layout.buckets)):
            sender.contribute(bucket) if slots is None else sender.write(bucket)

    found = {
        "digests": peak_bytes(lambda: sender.manifest(1, torch.zeros(2), torch.zeros(1))),
        "buckets": peak_bytes(send),
        "tensor": peak_bytes(lambda: embedding.full_tensor()),
    }
    sender.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("adapters", but([4], [0, 4]))
def test_publishing_takes_the_room_of_a_bucket_and_of_a_block(two: Ranks, adapters: int) -> None:
    """The first rank adds in the slots that engines read. A block is read in fp32, merged and cast; the adapters of one
    layer are gathered, which takes three times their room. Digests have tables of bounded size instead of a bucket."""
    wanted, bucket, block = Model(vocab=200_000, inner=4096, heads=4, rank=adapters), 1 << 16, 1 << 13
    blocks = (3 if adapters else 2) * 4 * block + 3 * 2 * adapters * (4096 + 16)
    for rank, found in enumerate(two.run(room_of_publishing, wanted, bucket, block)):
        assert found["tensor"] >= 200_000 * 16 * 2, "the meter sees a whole tensor"
        assert found["buckets"] <= (bucket if rank else 0) + blocks
        assert found["digests"] <= 16 * BLOCK_WORDS + blocks


OFFERED: dict[str, Sender] = {}
"""The sender of each rank's process, between an offer and what is sent."""


def offer(group: RankGroup, wanted: Model, bucket_bytes: int) -> WeightManifest:
    OFFERED["sender"] = Sender(sharded_source(made_sharded(group, wanted), group, wanted.dtype), bucket_bytes)
    return OFFERED["sender"].manifest(3, torch.zeros(2), torch.zeros(1))


def broadcast(group: RankGroup, meeting: Rendezvous) -> None:
    sender = OFFERED.pop("sender")
    if group.is_first:
        company = meeting.join(0, "cpu")
        sender.broadcast(company)
        company.close()
    else:
        sender.contribute_all()


@pytest.mark.parametrize("adapters", but([2], [0, 2]))
def test_ranks_broadcast_to_engines_of_other_processes(two: Ranks, replicas: Ranks, adapters: int) -> None:
    wanted = Model(rank=adapters, experts=4)
    for ranks in (two, replicas):
        manifest = ranks.run(offer, wanted, 500)[0]
        meeting = Rendezvous("127.0.0.1", BroadcastGroup.free_port(), {0: 1, 1: 2}, "gloo", 60.0)
        ranks.send(broadcast, meeting)

        def receive(engine: int, meeting: Rendezvous = meeting, manifest: WeightManifest = manifest) -> Any:
            received = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in manifest.layout.tensors}
            receiver, company = Receiver(received), meeting.join(meeting.ranks[engine], "cpu")
            receiver.begin(manifest)
            receiver.receive(company)
            company.close()
            return receiver.finish(), received

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(receive, range(2)))
        for rank in range(ranks.shape.ranks):
            ranks.answer(rank)
        for wrong, received in found:
            assert not wrong
            assert digests(received) == digests(whole(wanted))


def broadcast_in_vain(group: RankGroup, meeting: Rendezvous) -> tuple[str, float]:
    """What the sender says of it, and the number of ranks as they count themselves afterwards."""
    said = ""
    try:
        broadcast(group, meeting)
    except RunError as error:
        said = str(error)
    return said, float(group.sum(torch.ones(1)))


def test_ranks_stay_in_step_when_an_engine_is_lost_while_they_broadcast(two: Ranks) -> None:
    two.run(offer, Model(), 500)
    meeting = Rendezvous("127.0.0.1", BroadcastGroup.free_port(), {0: 1}, "gloo", 60.0)
    two.send(broadcast_in_vain, meeting)
    meeting.join(1, "cpu").close()
    (said, first), (nothing, second) = (two.answer(rank) for rank in range(2))
    assert said.startswith("the broadcast group at 127.0.0.1")
    assert (nothing, first, second) == ("", 2.0, 2.0)
