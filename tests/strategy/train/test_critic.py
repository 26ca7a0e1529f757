"""The critic against plain forward passes of the same model and autograd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_single_strategy import make_batch, make_model
from transformers import LlamaForCausalLM

from roll.algorithm import CreditSpec
from roll.algorithm.credit import token_credit
from roll.algorithm.value import value_loss
from roll.config.schema import TrainConfig
from roll.data import Batch
from roll.data.tokenlog import branches
from roll.model import attention
from roll.strategy.train.critic import CriticStrategy
from roll.strategy.train.optimizer import OptimizerStep

GAE = CreditSpec("gae", discount=0.9, gae_lambda=0.8)


def prepared() -> LlamaForCausalLM:
    model = make_model()
    model.set_attn_implementation(attention.NAME)
    return model


def make_critic(
    micro_batch_tokens: int = 64, clip: float | None = 0.2, lr: float = 1e-2, updates: int = 1, epochs: int = 1
) -> CriticStrategy:
    config = TrainConfig(
        micro_batch_tokens=micro_batch_tokens,
        lr=lr,
        clip_grad_norm=1e9,
        updates_per_step=updates,
        epochs_per_step=epochs,
    )
    critic = CriticStrategy(prepared(), config, clip)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.model.head.weight, std=0.5)
    return critic


def plain_values(critic: CriticStrategy, batch: Batch) -> torch.Tensor:
    """Each branch alone through the model; the value before a token is read at the token before it."""
    model = critic.model.model
    model.set_attn_implementation("sdpa")
    found = []
    logs = zip(batch.rows("ids"), batch.rows("turn"), strict=True)
    for ids in (ids[span] for ids, turn in logs for span in branches(turn)):
        hidden = model.get_decoder()(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        values = critic.model.head(hidden.float())[:, 0]
        found.append(torch.cat([torch.zeros(1), values[:-1]]))
    model.set_attn_implementation(attention.NAME)
    return torch.cat(found)


@pytest.mark.parametrize("rows", [32, 64, 4096])
def test_values_are_read_from_the_state_before_each_token(rows: int) -> None:
    critic, batch = make_critic(rows), make_batch()
    got = critic.values(batch)
    wanted = plain_values(critic, batch).detach().numpy()
    np.testing.assert_allclose(got[batch.loss_mask], wanted[batch.loss_mask], atol=2e-5)
    assert not got[~batch.loss_mask].any()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("rows", [32, 4096])
def test_gradients_are_those_of_plain_autograd(rows: int, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    critic, batch = make_critic(rows, clip), make_batch()
    batch = batch.with_columns(values=critic.values(batch) + 0.1 * batch.loss_mask)
    mask = torch.from_numpy(batch.loss_mask)
    returns = token_credit(batch, GAE).returns
    assert returns is not None
    losses = value_loss(
        plain_values(critic, batch)[mask],
        torch.from_numpy(batch["values"])[mask],
        torch.from_numpy(returns).float()[mask],
        clip,
    )
    losses.mean().backward()
    wanted = {n: p.grad.clone() for n, p in critic.model.named_parameters() if p.grad is not None}
    critic.model.zero_grad()
    found: dict[str, torch.Tensor] = {}

    def keep(step: int, loss: torch.Tensor) -> OptimizerStep:
        found.update({name: gradient.clone() for name, gradient in critic._optimizer.gradients().items()})
        return OptimizerStep(1.0, applied=True)

    monkeypatch.setattr(critic._optimizer, "step", keep)
    stats = critic.update(batch, GAE, 0)
    assert stats.loss == pytest.approx(float(losses.mean().detach()), rel=1e-4)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=2e-3)


def test_it_makes_as_many_updates_as_the_actor() -> None:
    batch = make_batch(groups=4)
    critic, one_by_one = make_critic(updates=2, epochs=2), make_critic()
    batch = batch.with_columns(values=critic.values(batch))
    stats = critic.update(batch, GAE, 0)
    assert (stats.updates, stats.skipped, stats.untrained) == (4, 0, ())
    for groups in 2 * [[0, 1], [2, 3]]:  # the returns of a sample are its own, whatever part it is in
        one_by_one.update(batch.select(np.flatnonzero(np.isin(batch["group"], groups))), GAE, 0)
    np.testing.assert_array_equal(critic.values(batch), one_by_one.values(batch))


def test_the_clip_holds_predictions_that_have_moved() -> None:
    """By an optimizer without momentum: a prediction on its way to the return moves once, then no further."""
    batch = make_batch(groups=2)
    batch = batch.with_columns(advantage=np.ones(len(batch), np.float32))
    moved = {}
    for clip in (None, 1e-4):
        critic = CriticStrategy(prepared(), TrainConfig(lr=1e-3, betas=(0, 0), epochs_per_step=20), clip)
        before = critic.values(batch)
        batch = batch.with_columns(values=before)
        critic.update(batch, CreditSpec("gae"), 0)
        moved[clip] = float(np.abs(critic.values(batch) - before)[batch.loss_mask].mean())
    assert moved[1e-4] < moved[None] / 2


def test_what_is_explained_was_predicted_before_the_step() -> None:
    critic, batch = make_critic(updates=2), make_batch(groups=4)
    batch = batch.with_columns(values=critic.values(batch))
    returns = token_credit(batch, GAE).returns
    assert returns is not None
    wanted, said = returns[batch.loss_mask], batch["values"][batch.loss_mask]
    explained = 1 - ((said - wanted) ** 2).mean() / wanted.var()
    assert critic.update(batch, GAE, 0).metrics["explained"] == pytest.approx(explained, rel=1e-4)


def test_a_sick_return_is_skipped_and_named() -> None:
    critic, batch = make_critic(), make_batch()
    before = {name: parameter.clone() for name, parameter in critic.model.named_parameters()}
    values = critic.values(batch)
    values[batch.offsets[1] : batch.offsets[2]] = np.nan
    stats = critic.update(batch.with_columns(values=values), GAE, 0)
    assert (stats.skipped, stats.not_finite.samples) == (1, (str(batch["sample"][1]),))
    assert "head.weight" in stats.not_finite.parameters
    assert list(stats.untrained) == batch["sample"].tolist()
    for name, parameter in critic.model.named_parameters():
        torch.testing.assert_close(parameter, before[name], atol=0, rtol=0)


def test_a_fresh_critic_predicts_nothing_and_learns_the_mean_return() -> None:
    critic = CriticStrategy(prepared(), TrainConfig(lr=1e-2), None)
    batch = make_batch()
    batch = batch.with_columns(advantage=np.ones(len(batch), np.float32))
    spec = CreditSpec("gae")
    assert not critic.values(batch).any()
    explained = []
    for step in range(30):
        batch = batch.with_columns(values=critic.values(batch))
        explained.append(critic.update(batch, spec, step).loss)
    assert explained[-1] < explained[0] / 20
    np.testing.assert_allclose(critic.values(batch)[batch.loss_mask], 1.0, atol=0.25)


def test_it_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    batch = make_batch()
    one, other = make_critic(), make_critic(lr=1e-2)
    batch = batch.with_columns(values=one.values(batch))
    one.update(batch, GAE, 0)
    one.save(tmp_path / "critic")
    other.load(tmp_path / "critic")
    for critic in (one, other):
        critic.update(batch, GAE, 1)
    np.testing.assert_array_equal(one.values(batch), other.values(batch))


def test_rewards_that_the_actor_would_not_have_are_refused() -> None:
    """With several updates the actor takes its KL penalties from the proximal log-probs."""
    critic, batch = make_critic(updates=2), make_batch()
    batch = batch.with_columns(values=critic.values(batch), ref=batch["behaviour"])
    with pytest.raises(ValueError, match="'proximal'"):
        critic.update(batch, CreditSpec("gae", kl_coef=0.1), 0)
    critic.update(batch.with_columns(proximal=batch["behaviour"]), CreditSpec("gae", kl_coef=0.1), 0)
