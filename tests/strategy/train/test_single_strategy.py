"""The single trainer against plain `transformers` and autograd, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from roll.algorithm import CorrectionSpec, LossInputs, LossSpec, TokenLoss
from roll.algorithm.loss_inputs import Aggregation
from roll.algorithm.losses import resolve_loss
from roll.config.errors import RunError, UserError
from roll.config.schema import TrainConfig
from roll.data import Batch, Sample, Task
from roll.data.tokenlog import branches
from roll.model import attention
from roll.model.tiny import character_tokenizer
from roll.strategy.train import forward as forward_module
from roll.strategy.train.base import NotFinite
from roll.strategy.train.optimizer import MasterAdamW, OptimizerStep
from roll.strategy.train.single import SingleStrategy

VOCAB = 40
LOSS = LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.3}, correction=CorrectionSpec())
WITH_KL = replace(LOSS, kl_coef=0.2, aggregation="sequence_mean")

Gradients = dict[str, Tensor]


def make_model(
    seed: int = 0, *, tied: bool = True, layers: int = 2, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,  # far from uniform, so that differences show
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(shape).to(dtype).eval()


def make_strategy(model: LlamaForCausalLM | None = None, **settings: Any) -> SingleStrategy:
    model = model or make_model()
    model.set_attn_implementation(attention.NAME)
    return SingleStrategy(model, character_tokenizer(), TrainConfig(**{"lr": 1e-2, **settings}))


def make_batch(seed: int = 0, groups: int = 3, temperatures: tuple[float, ...] = (1.0, 0.7), longest: int = 8) -> Batch:
    """Groups with a common prompt; answers of every length, some of two turns, some forked; the last group has none."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    samples = []
    for group in range(groups):
        prompt = tokens(int(rng.integers(2, 10)))
        for n in range(3):
            temperature = temperatures[(group + n) % len(temperatures)]
            sample = Sample(f"{group}.{n}", Task.ask("t", "?"), group, temperature)
            sample.log.prompt(prompt)
            size = 0 if group == groups - 1 > 0 else (1, *rng.integers(2, longest, 2).tolist())[n]
            sample.log.respond(tokens(size), -rng.exponential(2.0, size), [0] * size)
            if n == 2 and size:
                sample.log.observe(tokens(3))
                sample.log.respond(tokens(2), -rng.exponential(2.0, 2), [0, 0])
            if n == 1 and size:
                sample.log.fork([*prompt, *tokens(2)])
                sample.log.respond(tokens(2), -rng.exponential(2.0, 2), [0, 0])
            samples.append(sample)
    batch = Batch.from_samples(samples)
    return batch.with_columns(advantage=rng.normal(0, 1, len(batch)))


def plain_log_probs(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """[tokens]: each branch in a batch of one through the model's own forward and `transformers`' own attention."""
    parts = []
    logs = zip(batch.rows("ids"), batch.rows("turn"), batch["temperature"], strict=True)
    for ids, temperature in ((ids[span], heat) for ids, turn, heat in logs for span in branches(turn)):
        wanted = torch.from_numpy(ids.astype(np.int64))
        logits = model(input_ids=wanted[None]).logits[0].float() / float(temperature)
        following = torch.log_softmax(logits[:-1], dim=-1).gather(1, wanted[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), following]))
    return torch.cat(parts)


def plain_gradients(model: LlamaForCausalLM, batch: Batch, spec: LossSpec) -> tuple[float, Gradients]:
    """The loss and its gradients by plain autograd, with the mean written out."""
    current = plain_log_probs(model, batch)
    proximal = torch.from_numpy(batch["proximal"]) if "proximal" in batch else current.detach()
    ref = torch.from_numpy(batch["ref"]) if "ref" in batch else None
    total = torch.zeros(())
    counts = [int(mask.sum()) for mask in batch.rows("loss_mask")]
    for i, count in enumerate(counts):
        spots = torch.from_numpy(batch.offsets[i] + np.flatnonzero(batch.rows("loss_mask")[i]))
        inputs = LossInputs(
            current=current[spots],
            proximal=proximal[spots],
            behaviour=torch.from_numpy(batch.behaviour)[spots],
            advantage=torch.full((count,), float(batch["advantage"][i])),
            sample=torch.zeros(count, dtype=torch.int64),
            turn=torch.zeros(count, dtype=torch.int64),
            ref=None if ref is None else ref[spots],
        )
        loss = resolve_loss(spec)(inputs).values.sum()
        if count:
            answered = sum(c > 0 for c in counts)
            total = total + loss / (sum(counts) if spec.aggregation == "token_mean" else answered * count)
    model.zero_grad()
    total.backward()
    return total.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[SingleStrategy, Batch, LossSpec], tuple[float, Gradients]]:
    """The loss and the gradients the trainer hands to its optimizer, which then does nothing."""

    def capture(strategy: SingleStrategy, batch: Batch, spec: LossSpec) -> tuple[float, Gradients]:
        gradients: Gradients = {}

        def step(self: MasterAdamW, step: int, loss: Tensor) -> OptimizerStep:
            gradients.update({n: p.grad.clone() for n, p in strategy.model.named_parameters() if p.grad is not None})
            self.zero_grad()
            return OptimizerStep(1.0, applied=True)

        monkeypatch.setattr(MasterAdamW, "step", step)
        stats = strategy.update(batch, spec, 0)
        monkeypatch.undo()
        return stats.loss, gradients

    return capture


def assert_close(one: Gradients, other: Gradients, tolerance: float) -> None:
    assert one.keys() == other.keys()
    scale = math.sqrt(sum(float(g.square().sum()) for g in other.values()))
    assert scale > 0
    for name in one:
        assert float((one[name] - other[name]).norm()) <= tolerance * scale, name


def parameters(strategy: SingleStrategy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in strategy.model.named_parameters()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperatures", [(1.0,), (0.5, 1.0, 1.6)])
def test_log_probs_are_those_of_the_plain_model(attn: str, tied: bool, temperatures: tuple[float, ...]) -> None:
    batch = make_batch(1, temperatures=temperatures)
    plain = make_model(tied=tied)
    plain.set_attn_implementation(attn)
    with torch.no_grad():
        expected = plain_log_probs(plain, batch).numpy()
    got = make_strategy(make_model(tied=tied)).log_probs(batch)
    assert got.dtype == np.float32
    assert not got[~batch.loss_mask].any()
    np.testing.assert_allclose(got[batch.loss_mask], expected[batch.loss_mask], atol=1e-4, rtol=0)
    for limit in (int(batch.lengths.max()), 32):
        cut = make_strategy(make_model(tied=tied), micro_batch_tokens=limit).log_probs(batch)
        np.testing.assert_allclose(cut, got, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_gradients_are_those_of_plain_autograd(
    captured: Callable[..., tuple[float, Gradients]], tied: bool, aggregation: Aggregation, kl_coef: float
) -> None:
    batch = make_batch(2)
    rng = np.random.default_rng(3)
    with torch.no_grad():
        now = plain_log_probs(make_model(tied=tied), batch).numpy()
    near = {name: now + rng.normal(0, 0.2, batch.tokens) for name in ("proximal", "behaviour", "ref")}
    spec = replace(LOSS, kl_coef=kl_coef, aggregation=aggregation)
    for columns in (near, {name: near[name] for name in ("behaviour", "ref")}):
        given_batch = batch.with_columns(**columns)
        loss, expected = plain_gradients(make_model(tied=tied), given_batch, spec)
        got_loss, got = captured(make_strategy(make_model(tied=tied)), given_batch, spec)
        assert got_loss == pytest.approx(loss, abs=1e-5)
        assert_close(got, expected, 2e-5)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    extra=st.integers(0, 40) | st.sampled_from([0, 4096]), seed=st.integers(0, 5), spec=st.sampled_from([LOSS, WITH_KL])
)
def test_micro_batches_do_not_change_the_gradient(
    captured: Callable[..., tuple[float, Gradients]], extra: int, seed: int, spec: LossSpec
) -> None:
    batch, strategy = make_batch(seed), make_strategy(micro_batch_tokens=100_000)
    limit = int(batch.lengths.max()) + extra
    batch = batch.with_columns(ref=strategy.log_probs(batch) - 0.1)
    loss, whole = captured(strategy, batch, spec)
    cut_loss, cut = captured(make_strategy(micro_batch_tokens=limit), batch, spec)
    assert cut_loss == pytest.approx(loss, abs=1e-5)
    assert_close(cut, whole, 1e-5)


def test_an_update_says_what_it_did() -> None:
    batch = make_batch(4)
    strategy = make_strategy(warmup_steps=4)
    log_probs = strategy.log_probs(batch)
    before = parameters(strategy)
    storage = [p.data_ptr() for p in strategy.model.parameters()]
    stats = strategy.update(batch, LOSS, 0)
    mask = batch.loss_mask
    gap = np.abs(log_probs - batch.behaviour)[mask]
    assert (stats.updates, stats.skipped, stats.tokens) == (1, 0, batch.tokens)
    assert stats.lr == pytest.approx(1e-2 / 4)
    assert stats.metrics["rollout_logprob_diff"] == pytest.approx(gap.mean(), rel=1e-4)
    assert stats.metrics["rollout_logprob_diff_max"] == pytest.approx(gap.max(), rel=1e-4)
    assert 0 < stats.metrics["entropy"] <= math.log(VOCAB)
    assert stats.metrics["clip_frac"] == 0.0
    logs = zip(batch.rows("ids"), batch.rows("turn"), batch.rows("loss_mask"), strict=True)
    trained = [ids[span] for ids, turn, sampled in logs if sampled.any() for span in branches(turn)]
    prefixes = {tuple(ids[: i + 1].tolist()) for ids in trained for i in range(len(ids))}
    assert stats.rows == len(prefixes) < batch.tokens
    assert stats.grad_norm > 0
    after = parameters(strategy)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert [p.data_ptr() for p in strategy.model.parameters()] == storage
    assert all(p.grad is None for p in strategy.model.parameters())
    again = make_strategy(warmup_steps=4)
    again.update(batch, LOSS, 0)
    assert_same_bits(parameters(again), after)


def test_an_update_makes_good_answers_likelier() -> None:
    batch = make_batch(5, groups=1, temperatures=(1.0,)).with_columns(advantage=np.array([1.0, -1.0, 1.0]))
    strategy = make_strategy(lr=1e-3)
    batch = batch.with_columns(behaviour=strategy.log_probs(batch))
    before = batch.sum_tokens(batch.behaviour)
    for step in range(3):
        strategy.update(batch, LOSS, step)
    change = np.sign(batch.sum_tokens(strategy.log_probs(batch)) - before)
    assert change.tolist() == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("given_proximal", [True, False])
def test_several_updates_are_separate_steps_over_whole_groups(given_proximal: bool) -> None:
    whole = make_batch(6, groups=5)
    order = np.random.default_rng(0).permutation(len(whole))  # groups need not lie together
    whole = whole.select(order)
    strategy, one_by_one = make_strategy(updates_per_step=2), make_strategy()
    proximal = one_by_one.log_probs(whole)
    if given_proximal:
        proximal = proximal + np.float32(0.3)
        whole = whole.with_columns(proximal=proximal)
    stats = strategy.update(whole, LOSS, 3)
    assert (stats.updates, stats.skipped, stats.tokens) == (2, 0, whole.tokens)
    seen = list(dict.fromkeys(whole["group"].tolist()))
    parts = [np.flatnonzero(np.isin(whole["group"], part)) for part in (seen[:3], seen[3:])]
    by_hand = [one_by_one.update(whole.with_columns(proximal=proximal).select(part), LOSS, 3) for part in parts]
    assert_same_bits(parameters(strategy), parameters(one_by_one))
    assert stats.rows == sum(s.rows for s in by_hand)
    assert stats.grad_norm == max(s.grad_norm for s in by_hand)
    # Metrics are means over the step's sampled tokens.
    sampled = [int(whole.select(part).loss_mask.sum()) for part in parts]
    for name in ("entropy", "rollout_logprob_diff", "clip_frac", "is_weight_mean"):
        expected = sum(n * s.metrics[name] for n, s in zip(sampled, by_hand, strict=True)) / sum(sampled)
        assert stats.metrics[name] == pytest.approx(expected, rel=1e-6), name
    assert stats.metrics["rollout_logprob_diff_max"] == max(s.metrics["rollout_logprob_diff_max"] for s in by_hand)


def test_there_are_no_more_updates_than_groups_with_tokens() -> None:
    batch = make_batch(7, groups=3)  # the last group has no sampled token
    assert make_strategy(updates_per_step=9).update(batch, LOSS, 0).updates == 2


def test_epochs_go_through_the_same_parts_again() -> None:
    batch = make_batch(6, groups=5)
    strategy, one_by_one = make_strategy(updates_per_step=2, epochs_per_step=3), make_strategy()
    stats = strategy.update(batch, LOSS, 3)
    assert (stats.updates, stats.tokens) == (6, batch.tokens)
    held = batch.with_columns(proximal=one_by_one.log_probs(batch))  # once, before the first of them
    for groups in 3 * [[0, 1, 2], [3, 4]]:
        one_by_one.update(held.select(np.flatnonzero(np.isin(batch["group"], groups))), LOSS, 3)
    assert_same_bits(parameters(strategy), parameters(one_by_one))


def test_a_second_epoch_of_the_whole_batch_is_held_to_the_policy_before_the_first() -> None:
    batch = make_batch(6, groups=5)
    strategy = make_strategy(epochs_per_step=4, lr=1e-2)
    assert strategy.update(batch, LOSS, 3).metrics["clip_frac"] > 0
    assert make_strategy(lr=1e-2).update(batch, LOSS, 3).metrics["clip_frac"] == 0


def sick_loss(inputs: LossInputs) -> TokenLoss:
    """A finite loss with a gradient that is not."""
    return TokenLoss(torch.sqrt(inputs.current * 0.0))


@pytest.mark.parametrize("sickness", [math.nan, math.inf, "slope"])
def test_a_sick_update_is_skipped_and_named(sickness: float | str) -> None:
    batch = make_batch(8)
    trained = batch["sample"][batch.sum_tokens(batch.loss_mask) > 0].tolist()
    strategy, healthy = make_strategy(), make_strategy()
    for one in (strategy, healthy):
        one.update(batch, LOSS, 0)
    before = parameters(strategy)
    if isinstance(sickness, str):
        stats = strategy.update(batch, LossSpec(f"{__name__}:sick_loss"), 1)
        assert stats.loss == 0.0
        assert list(stats.not_finite.samples) == trained
    else:
        advantage = batch["advantage"].copy()
        advantage[1] = sickness
        stats = strategy.update(batch.with_columns(advantage=advantage), LOSS, 1)
        assert stats.not_finite.samples == (batch["sample"][1],)
    assert (stats.skipped, stats.updates) == (1, 1)
    assert list(stats.untrained) == batch["sample"].tolist(), "an update is skipped as a whole"
    assert not math.isfinite(stats.grad_norm)
    assert_same_bits(parameters(strategy), before)
    for one in (strategy, healthy):
        stats = one.update(batch, LOSS, 2)
        assert (stats.not_finite, stats.untrained) == (NotFinite(), ())
    assert_same_bits(parameters(strategy), parameters(healthy))


def test_a_poisoned_weight_makes_every_sample_sick() -> None:
    batch, strategy = make_batch(8), make_strategy()
    before = parameters(strategy)
    with torch.no_grad():
        dict(strategy.model.named_parameters())["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    stats = strategy.update(batch, LOSS, 0)
    assert stats.skipped == 1
    assert set(stats.not_finite.samples) == set(batch["sample"][batch.sum_tokens(batch.loss_mask) > 0].tolist())
    assert "model.layers.0.mlp.up_proj.weight" in stats.not_finite.parameters
    assert "and 3 more and the gradient of" in str(stats.not_finite)
    changed = {name for name, value in parameters(strategy).items() if not torch.equal(value, before[name])}
    assert changed == {"model.layers.1.mlp.up_proj.weight"}


def test_a_poisoned_gradient_is_named_alone() -> None:
    batch, strategy = make_batch(8), make_strategy()
    before, name = parameters(strategy), "model.layers.1.mlp.up_proj.weight"
    poisoned = dict(strategy.model.named_parameters())[name]
    handle = poisoned.register_hook(lambda slope: slope.index_fill(0, torch.tensor([2]), math.inf))  # type: ignore[no-untyped-call]
    stats = strategy.update(batch, LOSS, 0)
    assert (stats.skipped, stats.not_finite) == (1, NotFinite((), (name,)))
    assert str(stats.not_finite) == f"the gradient of {name}"
    assert_same_bits(parameters(strategy), before)
    handle.remove()
    assert strategy.update(batch, LOSS, 0).skipped == 0


@pytest.mark.parametrize(
    ("limit", "longest", "message"),
    [
        (
            0,
            900,
            r"sample 0\.[12] has \d+ tokens, but the model's context is 128: write a smaller rollout.max_new_",
        ),
        (
            10,
            30,
            r"sample 0\.[12] has (\d+) tokens, but train.micro_batch_tokens is 10: write train.micro_batch_tokens=\1",
        ),
    ],
)
def test_a_sample_that_is_too_long_is_named_before_anything_is_computed(limit: int, longest: int, message: str) -> None:
    batch, strategy = make_batch(1, groups=1, longest=longest), make_strategy(micro_batch_tokens=limit)
    assert batch.lengths.max() > (limit or 128)
    strategy.model.register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    strategy.model.get_decoder().register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    for compute in (lambda: strategy.log_probs(batch), lambda: strategy.update(batch, LOSS, 0)):
        with pytest.raises(UserError, match=message):
            compute()


def changing_loss(inputs: LossInputs) -> TokenLoss:
    """Its metrics are named after how many tokens it was given."""
    return TokenLoss(inputs.current * 0.0, {f"of_{len(inputs.current)}": inputs.current.detach()})


def test_a_loss_with_other_metrics_in_another_update_is_refused() -> None:
    batch = make_batch(9, groups=3)
    with pytest.raises(UserError, match="two updates of a step have other metrics"):
        make_strategy(updates_per_step=3).update(batch, LossSpec(f"{__file__}:changing_loss"), 0)


def test_one_sick_update_of_several_is_counted() -> None:
    batch = make_batch(9, groups=3)
    for group in (0, 1):
        advantage = np.where(batch["group"] == group, np.nan, batch["advantage"])
        stats = make_strategy(updates_per_step=3).update(batch.with_columns(advantage=advantage), LOSS, 0)
        assert (stats.updates, stats.skipped) == (2, 1)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(updates=st.integers(1, 6), epochs=st.integers(1, 2), sick=st.sets(st.integers(0, 4)), seed=st.integers(0, 3))
def test_the_samples_of_skipped_updates_are_told(updates: int, epochs: int, sick: set[int], seed: int) -> None:
    """Those of the last group have no sampled tokens: they are in no update unless others are in it too."""
    batch = make_batch(seed, groups=6)
    batch = batch.with_columns(advantage=np.where(np.isin(batch["group"], list(sick)), np.nan, batch["advantage"]))
    parts = [set(part.tolist()) for part in np.array_split(np.arange(6), updates)]
    skipped = set().union(*(part for part in parts if part & sick))
    stats = make_strategy(updates_per_step=updates, epochs_per_step=epochs).update(batch, LOSS, 0)
    assert list(stats.untrained) == batch["sample"][np.isin(batch["group"], list(skipped))].tolist()
    assert stats.skipped == epochs * sum(bool(part & sick) for part in parts)


def test_samples_without_sampled_tokens_cost_nothing_and_break_nothing(
    captured: Callable[..., tuple[float, Gradients]],
) -> None:
    batch = make_batch(10, groups=2)
    empty = batch["group"] == 1
    assert not batch.sum_tokens(batch.loss_mask)[empty].any()
    for limit in (int(batch.lengths.max()), 4096):
        for spec in (LOSS, LossSpec(LOSS.name, LOSS.params, "sequence_mean")):
            strategy = make_strategy(micro_batch_tokens=limit)
            loss, gradients = captured(strategy, batch, spec)
            rest_loss, rest = captured(strategy, batch.select(np.flatnonzero(~empty)), spec)
            assert loss == pytest.approx(rest_loss, abs=1e-6)
            assert_close(gradients, rest, 1e-5)
    strategy = make_strategy(micro_batch_tokens=1)
    nothing = batch.select(np.flatnonzero(empty))
    assert not strategy.log_probs(nothing).any()
    with pytest.raises(RunError, match="no sampled tokens to train on"):
        strategy.update(nothing, LOSS, 0)


def test_what_cannot_be_trained_on_is_refused() -> None:
    batch = make_batch(11)
    columns = {name: values for name, values in batch.columns.items() if name != "advantage"}
    with pytest.raises(ValueError, match="no column 'advantage'"):
        make_strategy().update(Batch(batch.offsets, columns), LOSS, 0)
    with pytest.raises(ValueError, match="no column 'ref'"):
        make_strategy().update(batch, WITH_KL, 0)


def test_a_frozen_model_computes_but_is_not_trained() -> None:
    batch = make_batch(12)
    model = make_model()
    model.set_attn_implementation(attention.NAME)
    frozen = SingleStrategy(model, character_tokenizer(), TrainConfig(), trainable=False)
    np.testing.assert_array_equal(frozen.log_probs(batch), make_strategy().log_probs(batch))
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(AssertionError):
        frozen.update(batch, LOSS, 0)


def round_trip(folder: Path, batch: Batch, make: Callable[[int], SingleStrategy]) -> None:
    strategy, other = make(0), make(1)
    strategy.update(batch, LOSS, 0)
    strategy.update(batch, LOSS, 1)
    strategy.save(folder)
    storage = [p.data_ptr() for p in other.model.parameters()]
    other.update(batch, LOSS, 0)  # what it had is overwritten
    other.load(folder)
    assert_same_bits(parameters(other), parameters(strategy))
    for step in (2, 3):
        stats = [one.update(batch, LOSS, step) for one in (strategy, other)]
        assert stats[0] == stats[1]
        assert_same_bits(parameters(other), parameters(strategy))
    assert [p.data_ptr() for p in other.model.parameters()] == storage


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_trainer_goes_on_in_the_same_bits(tmp_path: Path, tied: bool) -> None:
    round_trip(tmp_path, make_batch(13), lambda seed: make_strategy(make_model(seed, tied=tied), weight_decay=0.1))
    assert (tmp_path / "model" / "config.json").is_file()
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.tie_word_embeddings == tied


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_loaded_bf16_trainer_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    batch = make_batch(14, groups=1, longest=3)

    def make(seed: int) -> SingleStrategy:
        return make_strategy(make_model(seed, layers=1, dtype=torch.bfloat16), lr=1e-4)

    round_trip(tmp_path, batch, make)


def test_published_weights_are_the_trainers_own() -> None:
    strategy = make_strategy()
    weights = strategy.weights(7)
    assert weights.version == 7
    for name, parameter in strategy.model.named_parameters():
        assert weights.parameters[name] is parameter
    ids = weights.probe
    with torch.no_grad():
        logits = make_model()(input_ids=ids[None]).logits[0]
    expected = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(weights.log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_the_captured_probe_is_of_the_parameters_as_they_are_wherever_they_are() -> None:
    strategy = make_strategy(make_model().cuda(), lr=1e-2)
    twin = make_model()
    seen = []
    for step in range(4):
        if step == 2:
            for level in ("none", "all"):
                strategy.set_residency(level)  # type: ignore[arg-type]
        seen.append(strategy.weights(step).log_probs)
        twin.load_state_dict({name: tensor.cpu() for name, tensor in strategy.model.state_dict().items()})
        expected = make_strategy(twin).weights(step).log_probs
        torch.testing.assert_close(seen[-1], expected, atol=1e-4, rtol=0)
        strategy.update(make_batch(step, groups=3), LOSS, step)
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("checkpointing", ["on", "off"])
@pytest.mark.parametrize("compiled", ["on", "off"])
def test_bf16_gradients_on_a_gpu_are_as_near_to_fp32_as_plain_ones(
    captured: Callable[..., tuple[float, Gradients]], compiled: str, checkpointing: str, share: bool
) -> None:
    batch = make_batch(15, groups=6, temperatures=(1.0,), longest=60)
    exact = make_model(layers=3).to(torch.bfloat16)
    _, expected = plain_gradients(exact.float(), batch, LOSS)
    _, plain = plain_gradients(make_model(layers=3, dtype=torch.bfloat16), batch, LOSS)
    model = make_model(layers=3, dtype=torch.bfloat16).cuda()
    settings = {"compile": compiled, "activation_checkpointing": checkpointing, "share_prefixes": share}
    strategy = make_strategy(model, **settings)
    assert strategy._optimizer is not None
    got: Gradients = {}
    step = OptimizerStep(1.0, applied=True)
    strategy._optimizer.step = lambda *_: got.update(strategy._optimizer.gradients()) or step  # type: ignore
    strategy.update(batch, LOSS, 0)

    def error(gradients: Gradients) -> float:
        off = sum(float((gradients[n].float().cpu() - g).square().sum()) for n, g in expected.items())
        return math.sqrt(off / sum(float(g.square().sum()) for g in expected.values()))

    assert error(got) <= 1.5 * error(plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", ["on", "off"])
def test_one_compiled_graph_serves_all_layers_and_sizes(checkpointing: str) -> None:
    def graphs(layers: int, *seeds: int) -> int:
        """Compiled for updates on batches of different sizes."""
        torch._dynamo.reset()
        counters.clear()
        model = make_model(layers=layers, dtype=torch.bfloat16).cuda()
        strategy = make_strategy(model, compile="on", activation_checkpointing=checkpointing)
        for seed in seeds:
            strategy.update(make_batch(seed, groups=seed, longest=8 * seed), LOSS, 0)
        return int(counters["stats"]["unique_graphs"])

    one = graphs(1, 4)
    assert 1 <= one <= 2, "the layer, at most with and without a gradient"
    assert graphs(6, 4) == one
    assert graphs(6, 4, 5, 7, 3) == one


@pytest.mark.thorough
def test_padded_attention_is_no_reason_to_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    strategy = make_strategy(make_model(layers=2), compile="on")
    seen = []
    for seed in (4, 5, 7, 3):  # of other buckets each
        strategy.update(make_batch(seed, groups=seed, longest=15 * seed), LOSS, 0)
        seen.append(int(counters["stats"]["unique_graphs"]))
    assert seen[0] > 0
    assert len(set(seen)) == 1


def test_a_gpu_without_room_for_a_sample_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = make_batch(4)
    for available, told in ((1 << 30, False), (1 << 10, True)):
        monkeypatch.setattr(forward_module, "activation_budget_of", lambda *_, available=available: available)
        make_strategy().update(batch, LOSS, 0)
        assert ("trained on one by one" in caplog.text) == told
