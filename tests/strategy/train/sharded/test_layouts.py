"""Every layout of four ranks computes, saves and publishes what one process does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

from roll.algorithm import LossSpec
from roll.algorithm.loss_inputs import CreditSpec
from roll.cluster.mesh import MeshShape
from roll.config.schema import TrainConfig
from roll.model.classifier import load_classifier
from roll.model.shard_loading import SafeFolder
from roll.strategy.train.reward_model import RewardModelStrategy
from roll.strategy.train.sharded.build import build_sharded
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.sizes import ShardSizes
from roll.weight_sync.digest import digests
from roll.weight_sync.stream import Sender
from tests.ranks import Ranks, ranks_of
from tests.strategy.train.sharded.test_build import scores_over_ranks, source
from tests.strategy.train.sharded.test_gradients import check, check_critic, spec_of
from tests.strategy.train.sharded.test_sharded_adapters import BATCH, Adapted
from tests.strategy.train.sharded.test_sharded_adapters import check as check_adapters
from tests.strategy.train.sharded.trainers import (
    CONFIGS,
    MIXTURES,
    VOCAB,
    Groups,
    Job,
    errors,
    make_batch,
    make_model,
    sharded_trainer,
    sharded_update,
    single_trainer,
    single_update,
    whole,
    with_routes,
)
from tests.thorough import but

LAYOUTS = {
    "tensor 2, shard 2": (MeshShape(shard=2, tensor=2), ("qwen3", "tied", "qwen3_moe")),
    "context 2, shard 2": (MeshShape(shard=2, context=2), ("qwen3", "qwen3_moe")),
    "expert 2, shard 2": (MeshShape(shard=4, expert=2), ("uneven", "deepseek_v3")),
    "expert 4": (MeshShape(shard=4, expert=4), ("mixtral", "uneven")),
    "expert 2, tensor 2": (MeshShape(shard=2, tensor=2, expert=2), ("qwen3_moe", "deepseek_v3")),
    "context 4": (MeshShape(context=4), ("tied",)),
    "context 2, tensor 2": (MeshShape(context=2, tensor=2), ("qwen3_moe",)),
    "context 2, expert 2": (MeshShape(shard=2, context=2, expert=2), ("mixtral",)),
    "tensor 2, two replicas": (MeshShape(replicate=2, tensor=2), ("qwen3",)),
    "expert 2, two replicas": (MeshShape(replicate=2, shard=2, expert=2), ("qwen3_moe",)),
}
"""And models of which they divide something: seven experts make ranks of different sizes, two key-value heads are fewer
than four ranks, DeepSeek's attention is not divided and some of its experts are shared by all rows."""
CLIPPED: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
SEQUENCES = LossSpec("clipped", {**CLIPPED, "ratio": "sequence"}, kl_coef=0.1, entropy_coef=0.01)
"""A loss that needs whole samples."""

Layout = tuple[Ranks, tuple[str, ...]]


@pytest.fixture(scope="module", params=but(["expert 2, tensor 2"], LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Iterator[Layout]:
    shape, kinds = LAYOUTS[request.param]
    with ranks_of(shape) as made:
        yield made, kinds


def test_the_gradient_is_that_of_one_process(layout: Layout) -> None:
    """With several micro-batches, and samples that fork."""
    ranks, kinds = layout
    for seed, kind in enumerate(kinds):
        check(ranks, Job(make_batch(Groups(seed=seed + 1)), SEQUENCES, kind, extra_rows=3))


@pytest.mark.thorough
def test_norms_of_queries_and_keys_have_the_gradients_of_all_micro_batches(layout: Layout) -> None:
    """Every rank of `tensor` computes a part of their heads: what is summed over ranks must not be summed again with the
    next micro-batch."""
    ranks, kinds = layout
    if ranks.shape.tensor == 1 or "qwen3" not in kinds[0]:
        pytest.skip("the layout does not divide heads that have norms")
    job = Job(make_batch(Groups(seed=8, groups=6)), spec_of("clipped", "token_mean"), kinds[0], extra_rows=0)
    assert len(list(single_trainer(job)._runner.over(job.batch))) > 4
    expected = single_update(replace(job, extra_rows=4096)).gradients[0]
    norms = [name for name in expected if "q_norm" in name or "k_norm" in name]
    assert len(norms) == 4
    for found in ranks.run(sharded_update, job):
        wrong = errors(found.gradients[0], expected)
        assert max(wrong[name] for name in norms) < 5e-6


@pytest.mark.thorough
def test_of_one_short_sample_too(layout: Layout) -> None:
    """Some ranks have no sample, or no row from which a token is predicted."""
    ranks, kinds = layout
    batch = make_batch(Groups(seed=1, groups=1, most_samples=1, longest=1, turns=1))
    check(ranks, Job(batch, spec_of("clipped", "token_mean"), kinds[0]))


@pytest.mark.thorough
def test_routers_are_balanced_alike_and_replay_what_the_sampler_chose(layout: Layout) -> None:
    """In fp64, which is compared more closely. The products of experts are those of the tests above, in fp32 too."""
    ranks, kinds = layout
    for kind in kinds:
        if kind in MIXTURES:
            batch = with_routes(make_batch(Groups(seed=3)), kind)
            job = Job(batch, SEQUENCES, kind, extra_rows=3, settings={"router_balance_loss": 0.5})
            check(ranks, job, [torch.float64])


@pytest.mark.thorough
def test_a_critics_value_loss(layout: Layout) -> None:
    ranks, kinds = layout
    spec = LossSpec("nll", credit=CreditSpec("gae", discount=0.9))
    check_critic(ranks, Job(make_batch(Groups(seed=4)), spec, kinds[0], extra_rows=20))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a reward model of each kind, on disk."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "mixtral_moe"):
        kind = name.removesuffix("_moe")
        make_model(kind).save_pretrained(folder / name)
        shape = deepcopy(CONFIGS[kind])
        shape.num_labels, shape.pad_token_id = 1, 0
        torch.manual_seed(4)
        judge = AutoModelForSequenceClassification.from_config(shape, dtype=torch.float32)
        judge.save_pretrained(folder / f"{name}_judge")
    return folder


def divided(ranks: Ranks) -> str:
    """A kind of model of which the layout divides something."""
    return "mixtral_moe" if ranks.shape.expert > 1 else "tied"


@pytest.mark.thorough
def test_adapters(layout: Layout, folders: Path) -> None:
    """In a mixture they are in its attention."""
    ranks, _ = layout
    check_adapters(ranks, Adapted(folders / divided(ranks)), make_batch(BATCH, "qwen3"))


def test_scores(layout: Layout, folders: Path) -> None:
    ranks, _ = layout
    folder, rng = folders / f"{divided(ranks)}_judge", np.random.default_rng(0)
    conversations = [rng.integers(1, VOCAB, length).astype(np.int32) for length in range(5, 12)]
    expected = RewardModelStrategy(load_classifier(source(folder), torch.float32), TrainConfig()).scores(conversations)
    for found in ranks.run(scores_over_ranks, folder, conversations):
        np.testing.assert_allclose(found, expected, atol=2e-5)


State = dict[str, Tensor]


def saves(group: RankGroup, job: Job, folder: Path) -> tuple[State, State, dict[str, int]]:
    """What a trainer has after two updates, which it saves and publishes, and after one more."""
    trainer = sharded_trainer(group, job)
    for step in range(2):
        trainer.update(job.batch, job.spec, step)
    trainer.save(folder)
    trainer.saved()
    kept, published = _state(trainer), _published(trainer)
    trainer.update(job.batch, job.spec, 2)
    return kept, _state(trainer), published


def loads(group: RankGroup, job: Job, folder: Path) -> tuple[State, State, dict[str, int]]:
    """The same of one that begins from what was saved."""
    trainer = sharded_trainer(group, job)
    trainer.load(folder)
    kept, published = _state(trainer), _published(trainer)
    trainer.update(job.batch, job.spec, 2)
    return kept, _state(trainer), published


def _state(trainer: Any) -> State:
    return {name: whole(tensor.detach()).clone() for name, tensor in trainer._optimizer.state().items()}


def _published(trainer: Any) -> dict[str, int]:
    found = Sender(trainer.published(), 1 << 12).manifest(1, torch.zeros(1), torch.zeros(1)).digests
    return dict(found)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.thorough
def test_what_it_saves_is_loaded_everywhere_and_what_it_publishes_is_what_it_has(layout: Layout, tmp_path: Path) -> None:
    ranks, kinds = layout
    settings: dict[str, Any] = {"lr": 1e-2, "schedule": "constant"}
    if kinds[-1] == "deepseek_v3":
        settings["router_bias_rate"] = 0.01
    job = Job(make_batch(Groups(seed=2)), SEQUENCES, kinds[-1], settings=settings)
    kept, after, published = ranks.run(saves, job, tmp_path / "layout")[0]
    for again in ranks.run(loads, job, tmp_path / "layout"):
        assert same(again[0], kept)
        assert same(again[1], after), "in the same layout, training continues in the same bits"
        assert again[2] == published
    one = single_trainer(job)
    one.load(tmp_path / "layout")
    assert same(_state(one), kept)
    assert digests(one.published()) == published
    one.save(tmp_path / "one")
    for back in ranks.run(loads, job, tmp_path / "one"):
        assert same(back[0], kept)
        assert back[2] == published


def reads(group: RankGroup, folder: Path) -> tuple[set[str], State]:
    """The names of what a rank reads whole from a model's files, and what all ranks have then."""
    names: set[str] = set()
    read = SafeFolder.whole

    def listed(files: SafeFolder, name: str) -> Tensor:
        names.add(name)
        return read(files, name)

    with patch.object(SafeFolder, "whole", listed):
        built = build_sharded(source(folder), "frozen", torch.float32, 0, group)
    return names, {name: whole(tensor.detach()) for name, tensor in built.model.state_dict().items()}


def test_a_rank_reads_its_own_experts_alone(layout: Layout, folders: Path) -> None:
    ranks, _ = layout
    if ranks.shape.expert == 1:
        pytest.skip("the layout does not divide experts")
    expected = dict(make_model("mixtral").state_dict())
    each = 8 // ranks.shape.expert
    for rank, (names, found) in enumerate(ranks.run(reads, folders / "mixtral_moe")):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        numbers = {int(part) for name in names for part in re.findall(r"experts\.(\d+)\.", name)}
        assert numbers == {each * (rank % ranks.shape.expert) + number for number in range(each)}


def held(group: RankGroup, job: Job) -> int:
    model = sharded_trainer(group, job).model
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())


def test_a_rank_holds_as_many_parameters_as_the_plan_counts(layout: Layout) -> None:
    ranks, kinds = layout
    for kind in kinds:
        found = ranks.run(held, Job(make_batch(Groups(groups=1)), SEQUENCES, kind))
        assert max(found) == ShardSizes.of(make_model(kind), ranks.shape).trained
