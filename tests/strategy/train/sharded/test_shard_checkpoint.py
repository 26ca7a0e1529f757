"""Checkpoints that ranks write in the background: the captured bits, on any number of ranks, from and to one process."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.algorithm import LossSpec
from roll.atomic_files import file_digest
from roll.config.errors import RunError, UserError
from roll.config.schema import LoraConfig, TrainConfig
from roll.model import attention
from roll.model.lora import Adapters, BaseModelRef
from roll.model.safetensors_writer import INDEX
from roll.model.shard_box import local_box
from roll.model.shard_export import export_shards
from roll.model.shard_folder import ShardFolder
from roll.model.tiny import character_tokenizer
from roll.model.value_head import ValueModel
from roll.strategy.train.critic import CriticStrategy
from roll.strategy.train.forward import FILE, ForwardRunner
from roll.strategy.train.optimizer import MasterAdamW
from roll.strategy.train.sharded.build import ShardedModel
from roll.strategy.train.sharded.module import TrainModule, shard
from roll.strategy.train.sharded.process_group import RankGroup
from roll.strategy.train.sharded.state import ShardedState
from roll.strategy.train.single import SingleStrategy
from tests.model.test_shard_loading import CONFIGS
from tests.ranks import Ranks
from tests.strategy.train.sharded.trainers import Groups, Job, make_batch, sharded_trainer
from tests.thorough import but

TRAIN = TrainConfig(lr=0.01, weight_decay=0.1, schedule="constant")
LORA = LoraConfig(rank=3)
BF16, FP32 = torch.bfloat16, torch.float32


def make_model(kind: str, dtype: torch.dtype = FP32) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype).eval()
    model.set_attn_implementation(attention.NAME)
    return model


class Trainer:
    """The parts of a sharded trainer that a checkpoint is about, with gradients drawn at random."""

    def __init__(self, group: RankGroup, kind: str, *, lora: bool = False, critic: bool = False) -> None:
        self.group = group
        self.model = make_model(kind)
        self.adapters = Adapters(self.model, LORA, BaseModelRef("base"), 0) if lora else None
        self.whole: nn.Module = ValueModel(self.model) if critic else self.model
        module = TrainModule(self.whole)
        shard(module, self.model.get_decoder(), group.meshes, FP32)
        self.optimizer = MasterAdamW(self.whole, TRAIN)
        self.passes = ForwardRunner(self.model, TRAIN, dtype=FP32, retries=False)
        value = self.whole if isinstance(self.whole, ValueModel) else None
        sharded = ShardedModel(module, self.model, FP32, value, self.adapters)
        tokenizer = None if critic else character_tokenizer()
        state = ShardedState(sharded, self.optimizer, self.passes, group, tokenizer=tokenizer)
        self.save, self.saved, self.load = state.save, state.saved, state.load

    def learn(self, *steps: int) -> None:
        for step in steps:
            push(self.optimizer, step)
            self.optimizer.step(step)

    def bits(self) -> dict[str, Tensor]:
        return bits(self.optimizer)


def push(optimizer: MasterAdamW, step: int) -> None:
    """Gradients of a step, the same however they are cut."""
    for number, master in enumerate(optimizer._masters.values()):
        drawn = torch.randn(master.shape, generator=torch.Generator().manual_seed(1000 * step + number))
        master.grad = torch.zeros_like(master)
        if isinstance(master.grad, DTensor):
            master.grad.to_local().copy_(drawn[local_box(master.grad)])
        else:
            master.grad.copy_(drawn)


def bits(optimizer: MasterAdamW) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in optimizer.state().items()
    }


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def saves(
    group: RankGroup, folder: Path, kind: str, options: dict[str, bool]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Saves after two steps; gives the bits then, the bits after two more, and the digests."""
    trainer = Trainer(group, kind, **options)
    trainer.learn(0, 1)
    before = trainer.bits()
    trainer.save(folder)
    trainer.learn(2, 3)
    return before, trainer.bits(), trainer.saved()


def loads(group: RankGroup, folder: Path, kind: str, options: dict[str, bool]) -> tuple[dict[str, Tensor], ...]:
    """The bits that are loaded, over what other steps left, and those after two more steps."""
    trainer = Trainer(group, kind, **options)
    trainer.learn(7)
    trainer.load(folder)
    loaded = trainer.bits()
    trainer.learn(2, 3)
    return loaded, trainer.bits()


def loads_in_one(folder: Path, kind: str, dtype: torch.dtype, options: dict[str, bool]) -> tuple[dict[str, Tensor], Any]:
    model = make_model(kind, dtype)
    if options.get("critic"):
        critic = CriticStrategy(model, TRAIN, None)
        critic.load(folder)
        return bits(critic._optimizer), critic.model
    adapters = Adapters(model, LORA, BaseModelRef("base"), 0) if options.get("lora") else None
    strategy = SingleStrategy(model, character_tokenizer(), TRAIN, adapters=adapters)
    strategy.load(folder)
    assert strategy._optimizer is not None
    return bits(strategy._optimizer), model


KINDS: list[tuple[str, dict[str, bool]]] = [
    ("llama", {}),
    ("tied", {}),
    ("experts", {}),
    ("llama", {"lora": True}),
    ("llama", {"critic": True}),
    ("tied", {"critic": True}),
]


@pytest.mark.parametrize(("kind", "options"), but([KINDS[0], KINDS[2]], KINDS))
def test_the_same_bits_on_any_number_of_ranks(
    two: Ranks, three: Ranks, replicas: Ranks, tmp_path: Path, kind: str, options: dict[str, bool]
) -> None:
    before, after, _ = two.run(saves, tmp_path, kind, options)[0]
    for loaded, resumed in two.run(loads, tmp_path, kind, options):
        assert differing(loaded, before) == []
        assert differing(resumed, after) == [], "at the same world size, training continues in the same bits"
    others = {"experts": [three, replicas], "llama": [] if options.get("lora") else [three]}
    for ranks in others.get(kind, []):
        for loaded, _ in ranks.run(loads, tmp_path, kind, options):
            assert differing(loaded, before) == []
    for dtype in (FP32, BF16):
        loaded, model = loads_in_one(tmp_path, kind, dtype, options)
        assert differing(loaded, before) == []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter, before[f"master/{name}"].to(parameter.dtype)), name


@pytest.mark.parametrize("dtype", but([BF16], [FP32, BF16]))
@pytest.mark.parametrize(("kind", "options"), but([KINDS[0], KINDS[2]], KINDS))
def test_what_one_process_saved_is_loaded_by_ranks(
    two: Ranks, three: Ranks, tmp_path: Path, kind: str, options: dict[str, bool], dtype: torch.dtype
) -> None:
    model = make_model(kind, dtype)
    if options.get("critic"):
        strategy: Any = CriticStrategy(model, TRAIN, None)
    else:
        adapters = Adapters(model, LORA, BaseModelRef("base"), 0) if options.get("lora") else None
        strategy = SingleStrategy(model, character_tokenizer(), TRAIN, adapters=adapters)
    for step in range(2):
        push(strategy._optimizer, step)
        strategy._optimizer.step(step)
    strategy.save(tmp_path)
    ranks = two if options.get("lora") or dtype == BF16 else three
    for loaded, _ in ranks.run(loads, tmp_path, kind, options):
        assert differing(loaded, bits(strategy._optimizer)) == []
    loaded, _ = loads_in_one(tmp_path, kind, dtype, options)
    assert differing(loaded, bits(strategy._optimizer)) == []


@pytest.mark.thorough
def test_one_replica_writes_and_each_rank_hashes_its_own_files(replicas: Ranks, three: Ranks, tmp_path: Path) -> None:
    results = replicas.run(saves, tmp_path, "experts", {})
    before = results[0][0]
    digests = [written for _, _, written in results]
    assert digests[0].keys() == {"shards/__0_0.distcp", "shards/.metadata"}
    assert digests[1].keys() == {"shards/__1_0.distcp"}
    assert digests[2:] == [{}, {}]
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    for name, digest in (digests[0] | digests[1]).items():
        assert file_digest(tmp_path / name) == digest
    for loaded, _ in three.run(loads, tmp_path, "experts", {}):
        assert differing(loaded, before) == []


def saves_while_training(group: RankGroup, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Trains on while the write of rank 1 is held back and rank 0 waits for it in the middle of a collective; gives the
    bits that were captured, those after training, and the collectives of the save in the trainer's own group."""
    trainer, may_write, waiting = Trainer(group, "llama"), threading.Event(), threading.Event()
    inside, in_default = threading.local(), 0
    write, gather = FileSystemWriter.write_data, dist.gather_object
    trainer.learn(0)

    def held(*arguments: Any) -> Any:
        if group.rank:
            assert may_write.wait(60)
        inside.written = True
        return write(*arguments)

    def seen(*arguments: Any, **options: Any) -> Any:
        nonlocal in_default
        in_default += options.get("group") in (None, dist.group.WORLD)
        if getattr(inside, "written", False):
            waiting.set()
        return gather(*arguments, **options)

    with patch.object(FileSystemWriter, "write_data", held), patch.object(dist, "gather_object", seen):
        before = trainer.bits()
        trainer.save(folder)
        if group.is_first:
            assert waiting.wait(60)
        trainer.learn(1, 2)
        after = trainer.bits()
        may_write.set()
        assert trainer.saved()
    return before, after, in_default


def test_training_continues_while_files_are_written(two: Ranks, tmp_path: Path) -> None:
    """What is saved is what was captured, and the writers' messages are none of the trainer's."""
    results = two.run(saves_while_training, tmp_path)
    before = results[0][0]
    for _, after, in_default in results:
        assert in_default == 0
        assert differing(after, two.run(learns, (0, 1, 2))[0]) == []
    assert differing(loads_in_one(tmp_path, "llama", FP32, {})[0], before) == []


def learns(group: RankGroup, steps: tuple[int, ...]) -> dict[str, Tensor]:
    trainer = Trainer(group, "llama")
    trainer.learn(*steps)
    return trainer.bits()


def full_for_torch(tensor: Tensor, stream: Any) -> None:
    """As torch says it of a file on a full disk."""
    try:
        raise OSError(28, "No space left on device")
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def fails_to_save(group: RankGroup, folder: Path) -> tuple[str, dict[str, str]]:
    """What is said of a save that one rank cannot write; then one that can."""
    trainer, said = Trainer(group, "llama"), ""
    with patch("torch.distributed.checkpoint.filesystem.torch.save", full_for_torch) if group.rank else nullcontext():
        trainer.save(folder / "first")
        try:
            trainer.saved()
        except RunError as error:
            said = str(error)
    trainer.save(folder / "second")
    return said, trainer.saved()


def test_all_ranks_know_of_one_that_cannot_write(two: Ranks, tmp_path: Path) -> None:
    for said, written in two.run(fails_to_save, tmp_path):
        assert said == f"cannot write to {tmp_path / 'first' / 'shards'}: No space left on device (rank 1)"
        assert written


def test_adapters_are_those_of_one_process(two: Ranks, tmp_path: Path) -> None:
    before, _, _ = two.run(saves, tmp_path, "llama", {"lora": True})[0]
    model = make_model("llama")
    adapters = Adapters(model, LORA, BaseModelRef("base"), 0)
    adapters.load(tmp_path / "model")
    for name, parameter in adapters.parameters().items():
        assert torch.equal(parameter, before[f"master/{name}"])
    other = tmp_path / "single"
    adapters.save(other)
    assert {path.name for path in other.iterdir()} <= {path.name for path in (tmp_path / "model").iterdir()}
    one, many = (load_file(folder / "adapter_model.safetensors") for folder in (other, tmp_path / "model"))
    assert differing(one, many) == []


def test_what_shards_lack_is_named(two: Ranks, tmp_path: Path) -> None:
    two.run(saves, tmp_path, "llama", {})
    with pytest.raises(UserError, match=r"'model.layers.0.self_attn.q_proj.weight' are \[24, 24\], but the model has"):
        loads_in_one(tmp_path, "experts", FP32, {})
    (tmp_path / "shards" / "__1_0.distcp").unlink()
    shards = ShardFolder(tmp_path / "shards")
    with pytest.raises(
        RunError, match=r"master/lm_head.weight cannot be read from .*/shards/__1_0.distcp: .*No such file"
    ):
        shards.whole("master/lm_head.weight")
    file = tmp_path / "shards" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(RunError, match=r"master/lm_head.weight cannot be read from .*/shards/__0_0.distcp: "):
        shards.whole("master/lm_head.weight")
    index = tmp_path / "shards" / ".metadata"
    index.write_bytes(index.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"/shards/.metadata cannot be read: pickle data was truncated"):
        ShardFolder(tmp_path / "shards")


@pytest.mark.parametrize("dtype", but([BF16], [FP32, BF16]))
@pytest.mark.parametrize("kind", CONFIGS)
def test_shards_become_the_files_of_the_whole_model(two: Ranks, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Those that `save_pretrained` writes, in the served precision, in one file or several."""
    before, _, _ = two.run(saves, tmp_path, kind, {})[0]
    settings = tmp_path / "model" / "config.json"
    settings.write_text(settings.read_text().replace("float32", str(dtype).removeprefix("torch.")))
    model = make_model(kind, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[f"master/{name}"])
    model.save_pretrained(tmp_path / "whole")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for limit, several in ((10**9, False), (20_000, True)):
        out = tmp_path / f"limit {limit}"
        export_shards(tmp_path / "model", tmp_path / "shards", out, limit)
        files = sorted(out.glob("*.safetensors"))
        assert (len(files) > 1, (out / INDEX).exists()) == (several, several)
        written = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert differing(written, expected) == []
        assert {tensor.dtype for tensor in written.values()} == {dtype}
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert loaded.dtype == dtype
        assert differing(dict(loaded.state_dict()), dict(model.state_dict())) == []
        assert (out / "tokenizer.json").is_file()
        if several:
            index, theirs = json.loads((out / INDEX).read_text()), tmp_path / "theirs"
            model.save_pretrained(theirs, max_shard_size="20KB")
            named = json.loads((theirs / INDEX).read_text())
            assert index["weight_map"].keys() == named["weight_map"].keys()
            assert index["metadata"]["total_size"] == named["metadata"]["total_size"]
            assert all(name in load_file(out / file) for name, file in index["weight_map"].items())


def keeps_small(group: RankGroup, folder: Path) -> int | None:
    trainer = Trainer(group, "llama")
    trainer.passes._most_rows = 300
    trainer.save(folder)
    trainer.saved()
    other = Trainer(group, "llama")
    other.load(folder)
    return other.passes._most_rows


def test_how_small_micro_batches_had_to_be_made_is_kept(two: Ranks, tmp_path: Path) -> None:
    assert two.run(keeps_small, tmp_path) == [300, 300]
    assert (tmp_path / FILE).is_file()


def loaded_after_passes(group: RankGroup, folder: Path) -> list[Tensor]:
    """Log-probs of a trainer that is saved, after one more update, and once it has loaded what was saved."""
    job = Job(make_batch(Groups()), LossSpec("nll"), settings={"lr": 0.01, "schedule": "constant"})
    trainer = sharded_trainer(group, job)
    trainer.update(job.batch, job.spec, 0)
    found = [trainer.log_probs(job.batch)]
    trainer.save(folder)
    trainer.saved()
    trainer.update(job.batch, job.spec, 1)
    found.append(trainer.log_probs(job.batch))  # leaves embedding and output layer gathered
    trainer.load(folder)
    return [torch.from_numpy(each) for each in (*found, trainer.log_probs(job.batch))]


def test_what_is_loaded_counts_also_where_a_pass_has_gathered_parameters(two: Ranks, tmp_path: Path) -> None:
    before, trained, loaded = two.run(loaded_after_passes, tmp_path)[0]
    assert not torch.equal(before, trained)
    assert torch.equal(before, loaded)
