"""A device that runs out of memory in the middle of an update: what was begun is dropped and done again, bit for bit as
if it had been cut smaller from the beginning.

The device is a CPU whose model refuses passes: by their number, or by how many rows they have.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_critic import GAE, make_critic
from test_single_strategy import LOSS, WITH_KL, make_batch, make_model
from thorough import but
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from roll.algorithm import LossSpec
from roll.config.errors import RunError
from roll.config.schema import LoraConfig, TrainConfig
from roll.data import Batch
from roll.model import attention
from roll.model.lora import Adapters
from roll.model.tiny import character_tokenizer
from roll.strategy.train.base import UpdateStats
from roll.strategy.train.microbatch import largest_rows
from roll.strategy.train.out_of_memory import error_sentence, free_memory, is_out_of_memory
from roll.strategy.train.packing import pack
from roll.strategy.train.single import SingleStrategy

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB. Try PYTORCH_…"
ROWS = 32
"""More than the longest sample has."""


class Refusals:
    """Refuses passes of a decoder: those of these numbers (from 0), or with more rows than there is room for."""

    def __init__(self, model: nn.Module, *numbers: int, room: int = 10**9, backward: bool = False) -> None:
        self.passes = 0
        self._numbers, self._room, self._backward = numbers, room, backward
        last = model.get_decoder().layers[-1]  # type: ignore[operator, union-attr, index]
        last.register_forward_hook(self._seen)

    def _seen(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        number, self.passes = self.passes, self.passes + 1
        if number not in self._numbers and output.numel() // output.shape[-1] <= self._room:
            return None
        if not self._backward:
            raise torch.OutOfMemoryError(OOM)
        return _RefusedBackward.apply(output)  # type: ignore[no-untyped-call, no-any-return]


class _RefusedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError(OOM)


def actor(rows: int = ROWS, *, dtype: torch.dtype = torch.float32, **settings: Any) -> SingleStrategy:
    model = make_model(dtype=dtype)
    model.set_attn_implementation(attention.NAME)
    config = TrainConfig(micro_batch_tokens=rows, **{"lr": 1e-2, **settings})
    return SingleStrategy(model, character_tokenizer(), config)


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = bits(one), bits(other)
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


def plain(stats: UpdateStats) -> dict[str, Any]:
    """All that does not say how the work was cut."""
    return {**vars(stats), "micro_batch_tokens": None, "oom_retries": None}


def batch_of(groups: int = 6, seed: int = 0) -> Batch:
    batch = make_batch(seed, groups=groups)
    return batch.with_columns(ref=np.where(batch.loss_mask, batch.behaviour - 0.1, 0.0).astype(np.float32))


def cuts(batch: Batch, rows: int) -> int:
    """How many micro-batches an update of one part has."""
    return len(list(actor(rows)._runner.over(batch)))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("spec", [LOSS, WITH_KL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", but({1}, [0, 1, 2]))
def test_an_update_is_done_again_as_if_it_had_been_cut_smaller(
    number: int, dtype: torch.dtype, spec: LossSpec, backward: bool
) -> None:
    """In bf16 gradients are summed in masters beside the parameters; those of the refused pass are dropped too."""
    batch = batch_of()
    assert cuts(batch, 2 * ROWS) > number
    refused, small = actor(2 * ROWS, dtype=dtype), actor(ROWS, dtype=dtype)
    Refusals(refused.model, number, backward=backward)
    got, wanted = refused.update(batch, spec, 0), small.update(batch, spec, 0)
    assert plain(got) == plain(wanted)
    assert (got.micro_batch_tokens, got.oom_retries) == (ROWS, 1)
    assert (wanted.micro_batch_tokens, wanted.oom_retries) == (ROWS, 0)
    assert_same(refused.model, small.model)
    again, also = refused.update(batch, spec, 1), small.update(batch, spec, 1)
    assert again == also, "the smaller budget stays, and the retry is not counted again"
    assert_same(refused.model, small.model)


def test_only_the_part_that_ran_out_is_done_again() -> None:
    """Two updates in the step; memory runs out in the second micro-batch of the second."""
    batch = batch_of(groups=8)
    settings: dict[str, Any] = {"updates_per_step": 2}
    counted = actor(2 * ROWS, **settings)
    passes = Refusals(counted.model)
    counted.log_probs(batch)
    before = passes.passes  # the proximal log-probs come first
    counted.update(batch, LOSS, 0)
    first = [len(list(actor(2 * ROWS)._runner.over(part))) for part in _halves(batch)]
    assert passes.passes == 2 * before + sum(first)
    assert first[1] > 1
    refused = actor(2 * ROWS, **settings)
    seen = Refusals(refused.model, before + first[0] + 1)
    stats = refused.update(batch, LOSS, 0)
    assert (stats.updates, stats.oom_retries, stats.micro_batch_tokens) == (2, 1, ROWS)
    smaller = len(list(actor(ROWS)._runner.over(_halves(batch)[1])))
    assert seen.passes == before + first[0] + 2 + smaller, "the first update was not done again"
    by_hand = actor(2 * ROWS, **settings)
    ours = batch.with_columns(proximal=by_hand.log_probs(batch))
    wanted = _by_parts(by_hand, ours)
    assert stats.loss == pytest.approx(wanted, rel=1e-12)
    assert_same(refused.model, by_hand.model)


def _halves(batch: Batch) -> list[Batch]:
    groups = np.unique(batch["group"])
    pieces = np.array_split(groups, 2)
    return [batch.select(np.flatnonzero(np.isin(batch["group"], piece))) for piece in pieces]


def _by_parts(strategy: SingleStrategy, batch: Batch) -> float:
    """The same two updates by hand, the second cut smaller; the mean of their losses."""
    from roll.algorithm.credit import token_credit

    batch = batch.with_columns(advantages=token_credit(batch, LOSS.credit).advantages)
    one, two = _halves(batch)
    first = strategy._update_once(one, LOSS, 0)
    strategy._runner._shrink(two, "")
    second = strategy._update_once(two, LOSS, 0)
    tokens = [int(part.loss_mask.sum()) for part in (one, two)]
    return (tokens[0] * first.loss + tokens[1] * second.loss) / sum(tokens)


def test_log_probs_are_computed_again() -> None:
    batch, refused, small = batch_of(), actor(2 * ROWS), actor(ROWS)
    Refusals(refused.model, 1)
    np.testing.assert_array_equal(refused.log_probs(batch), small.log_probs(batch))
    stats = refused.update(batch, LOSS, 0)
    assert (stats.micro_batch_tokens, stats.oom_retries) == (ROWS, 1), "the next update tells it"


def test_a_frozen_model_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    model.set_attn_implementation(attention.NAME)
    config = TrainConfig(micro_batch_tokens=2 * ROWS)
    reference = SingleStrategy(model, character_tokenizer(), config, trainable=False)
    Refusals(model, 0)
    with caplog.at_level(logging.WARNING):
        reference.log_probs(batch_of())
        reference.log_probs(batch_of())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["the GPU ran out of memory"]
    assert f"train.micro_batch_tokens={ROWS}" in caplog.text


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_critic_is_trained_as_if_it_had_been_cut_smaller(number: int, backward: bool) -> None:
    batch = batch_of()
    refused, small = make_critic(2 * ROWS), make_critic(ROWS)
    batch = batch.with_columns(values=small.values(batch))
    Refusals(refused.model.model, number, backward=backward)
    got, wanted = refused.update(batch, GAE, 0), small.update(batch, GAE, 0)
    assert plain(got) == plain(wanted)
    assert (got.micro_batch_tokens, got.oom_retries) == (ROWS, 1)
    assert_same(refused.model, small.model)


def test_a_critics_predictions_are_made_again() -> None:
    refused, small = make_critic(2 * ROWS), make_critic(ROWS)
    Refusals(refused.model.model, 1)
    np.testing.assert_array_equal(refused.values(batch_of()), small.values(batch_of()))


def test_what_is_dropped_at_random_is_dropped_alike() -> None:
    def adapted(rows: int) -> SingleStrategy:
        model = make_model()
        model.set_attn_implementation(attention.NAME)
        lora = LoraConfig(rank=4, dropout=0.4)
        adapters = Adapters(model, lora, "base", 0)
        config = TrainConfig(micro_batch_tokens=rows, lr=1e-2)
        return SingleStrategy(model, character_tokenizer(), config, adapters=adapters)

    batch, refused, small = batch_of(), adapted(2 * ROWS), adapted(ROWS)
    Refusals(refused.model, 2)
    got, wanted = refused.update(batch, LOSS, 0), small.update(batch, LOSS, 0)
    assert plain(got) == plain(wanted)
    assert_same(refused.model, small.model)


def test_a_micro_batch_smaller_than_its_limit_is_halved_until_it_is_cut() -> None:
    batch = batch_of()
    whole = largest_rows(batch, 10**6)
    strategy = actor(4096)
    Refusals(strategy.model, room=whole - 1)
    stats = strategy.update(batch, LOSS, 0)
    assert stats.oom_retries == 1
    assert whole // 2 <= stats.micro_batch_tokens < whole
    assert 4096 % stats.micro_batch_tokens == 0


def test_a_second_time_ends_the_run_with_the_setting() -> None:
    strategy, batch = actor(4 * ROWS), batch_of()
    before = bits(strategy.model)
    Refusals(strategy.model, room=ROWS)
    with pytest.raises(RunError) as raised:
        strategy.update(batch, LOSS, 0)
    said = str(raised.value)
    assert f"train.micro_batch_tokens is {4 * ROWS}" in said
    assert f"write train.micro_batch_tokens={ROWS} or train.activation_checkpointing=on" in said
    assert "Tried to allocate 2.00 GiB" in said
    assert "PYTORCH" not in said
    assert all(torch.equal(before[name], now) for name, now in bits(strategy.model).items())


def test_later_steps_may_run_out_again() -> None:
    """Answers grow: what fitted in one step need not in a later one."""
    strategy, batch = actor(4 * ROWS), batch_of()
    Refusals(strategy.model, room=largest_rows(batch, 4 * ROWS) - 1)
    assert strategy.update(batch, LOSS, 0).micro_batch_tokens == 2 * ROWS
    Refusals(strategy.model, room=largest_rows(batch, 2 * ROWS) - 1)
    stats = strategy.update(batch, LOSS, 1)
    assert (stats.micro_batch_tokens, stats.oom_retries) == (ROWS, 1)


@pytest.mark.parametrize("checkpointing", ["auto", "on"])
def test_a_sample_that_does_not_fit_alone_is_named(checkpointing: str) -> None:
    batch = batch_of()
    longest = int(batch.lengths.argmax())
    one = batch.select(np.array([longest]))
    tokens = int(batch.lengths[longest])
    strategy = actor(4096, activation_checkpointing=checkpointing)
    Refusals(strategy.model, 0)
    with pytest.raises(RunError, match=f"sample {one['sample'][0]} has {tokens} tokens and is not cut") as raised:
        strategy.update(one, LOSS, 0)
    assert ("train.activation_checkpointing=on" in str(raised.value)) == (checkpointing == "auto")


def test_other_errors_are_as_they_are() -> None:
    strategy = actor()

    def broken(*_: Any) -> None:
        raise RuntimeError("expected scalar type Half")

    strategy.model.get_decoder().layers[-1].register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="scalar type Half"):
        strategy.update(batch_of(), LOSS, 0)


def test_an_optimizer_without_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights may have been written: there is no second try."""
    strategy = actor()
    assert strategy._optimizer is not None

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(OOM)

    monkeypatch.setattr(strategy._optimizer._adamw, "step", full)
    seen = Refusals(strategy.model)
    passes = cuts(batch_of(), ROWS)
    with pytest.raises(RunError, match=r"in the optimizer's step .*train\.optimizer=adamw_8bit"):
        strategy.update(batch_of(), LOSS, 0)
    assert seen.passes == passes


def test_a_gradient_that_was_not_summed_yet_is_dropped_too() -> None:
    """Memory may run out between a parameter's gradient and its master's."""
    strategy = actor(dtype=torch.bfloat16)
    for parameter in strategy.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert strategy._optimizer is not None
    strategy._optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in strategy.model.parameters())


def test_a_checkpoint_holds_the_smaller_size(tmp_path: Path) -> None:
    batch, strategy = batch_of(), actor(2 * ROWS)
    Refusals(strategy.model, 0)
    strategy.update(batch, LOSS, 0)
    strategy.save(tmp_path)
    resumed, other = actor(2 * ROWS), actor(4 * ROWS)
    for each in (resumed, other):
        each.load(tmp_path)
    assert strategy.update(batch, LOSS, 1) == resumed.update(batch, LOSS, 1)
    assert_same(strategy.model, resumed.model)
    assert other.update(batch, LOSS, 1).micro_batch_tokens == 4 * ROWS, "another size was asked for"


def test_a_checkpoint_of_a_run_with_memory_holds_nothing_of_it(tmp_path: Path) -> None:
    strategy = actor()
    strategy.update(batch_of(), LOSS, 0)
    strategy.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "optimizer.safetensors"]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError(OOM), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_a_full_device_are_recognised(error: Exception, wanted: bool) -> None:
    assert is_out_of_memory(error) == wanted


def test_what_was_said_is_short() -> None:
    assert error_sentence(torch.OutOfMemoryError(OOM)) == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert error_sentence(RuntimeError("")) == "RuntimeError"


def test_largest_rows_are_those_of_the_micro_batches() -> None:
    batch = batch_of()
    strategy = actor()
    for rows in (ROWS, 2 * ROWS, 4096):
        found = max(micro.rows for micro in actor(rows)._runner.over(batch))
        assert largest_rows(batch, rows) == found
    alone = max(pack([ids]).rows for ids in batch.rows("ids"))
    assert largest_rows(batch, 1) <= alone <= ROWS
    assert strategy._runner.limit_rows == 0


@pytest.mark.gpu
def test_a_gpu_that_runs_out_goes_on_with_smaller_micro_batches() -> None:
    """A real device: all of its memory but what half of the micro-batch needs is taken by a ballast."""
    device = torch.device("cuda")

    def strategy(rows: int) -> SingleStrategy:
        model = _wide_model().to(device)
        model.set_attn_implementation(attention.NAME)
        settings: dict[str, Any] = {"lr": 1e-3, "compile": "off", "activation_checkpointing": "off"}
        return SingleStrategy(model, character_tokenizer(), TrainConfig(micro_batch_tokens=rows, **settings))

    batch = make_batch(groups=65, longest=96)
    whole = largest_rows(batch, 10**6)
    needed = {rows: _peak_bytes(strategy(rows), batch) for rows in (whole, whole // 2)}
    assert needed[whole] > needed[whole // 2] + (64 << 20), f"the two sizes hardly differ: {needed}"
    small = strategy(whole // 2)
    wanted = small.update(batch, LOSS, 0)
    tight = strategy(whole)
    free_memory(torch.device("cuda"))
    room = (needed[whole] + needed[whole // 2]) // 2
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        got = tight.update(batch, LOSS, 0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (got.micro_batch_tokens, got.oom_retries) == (whole // 2, 1)
    assert got.loss == pytest.approx(wanted.loss, rel=1e-4)
    assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)
    assert got.metrics["entropy"] == pytest.approx(wanted.metrics["entropy"], rel=1e-4)


@pytest.mark.gpu
def test_a_gpu_without_room_for_half_ends_the_run() -> None:
    device = torch.device("cuda")
    model = _wide_model().to(device)
    model.set_attn_implementation(attention.NAME)
    batch = make_batch(groups=65, longest=96)
    whole = largest_rows(batch, 10**6)
    settings: dict[str, Any] = {"compile": "off", "activation_checkpointing": "off"}
    strategy = SingleStrategy(model, character_tokenizer(), TrainConfig(micro_batch_tokens=whole, **settings))
    free_memory(torch.device("cuda"))
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
        with pytest.raises(RunError, match=r"train\.micro_batch_tokens"):
            strategy.update(batch, LOSS, 0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _wide_model() -> LlamaForCausalLM:
    """Wide and of few parameters: what a pass keeps is much more than what the model takes."""
    from transformers import LlamaConfig

    shape = LlamaConfig(
        vocab_size=40,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(shape).eval()


def _peak_bytes(strategy: SingleStrategy, batch: Batch) -> int:
    """What an update needs beside what is there before it."""
    free_memory(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    strategy.update(batch, LOSS, 0)
    needed: int = torch.cuda.max_memory_reserved() - before
    return needed
