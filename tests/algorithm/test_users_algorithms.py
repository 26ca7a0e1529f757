"""Losses and algorithms of the user's are held to what they promise; one that breaks it is named, with what to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithm import Algorithm, LossInputs, TokenLoss, make_algorithm
from roll.algorithm.base import check_advantages
from roll.algorithm.loss_inputs import LossSpec
from roll.algorithm.losses import resolve_loss
from roll.algorithm.metric_names import OF_ALGORITHM, OF_TRAINER
from roll.config import RunError, UserError, load_config
from roll.data import Batch


def sound(inputs: LossInputs, *, factor: float = 1.0) -> TokenLoss:
    return TokenLoss(-factor * inputs.current * inputs.advantage, {"moved": inputs.current.detach()})


def no_token_loss(inputs: LossInputs) -> torch.Tensor:
    return inputs.current * 2


def already_a_mean(inputs: LossInputs) -> TokenLoss:
    return TokenLoss((-inputs.current * inputs.advantage).mean())


def too_few(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.current[:1])


def a_column_too_many(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.current[:, None])


def without_gradient(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.proximal * inputs.advantage)


def a_number_for_a_metric(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.current, {"moved": 3})  # type: ignore[dict-item]


def a_mean_for_a_metric(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.current, {"moved": inputs.current.detach().mean()})


def named(inputs: LossInputs, *, metric: str) -> TokenLoss:
    return TokenLoss(inputs.current, {"moved": inputs.current.detach(), metric: inputs.current.detach()})


def given_something(inputs: LossInputs, *, needed: float) -> TokenLoss:
    return TokenLoss(needed * inputs.current)


class OneMany(Algorithm):
    def relative(self, batch: Batch, scores: Any) -> Any:
        return scores[:1]


class Forgetful(Algorithm):
    def relative(self, batch: Batch, scores: Any) -> Any:
        scores - scores.mean()


class Listed(Algorithm):
    def relative(self, batch: Batch, scores: Any) -> Any:
        return [1, 0, -1]


class NoAlgorithm:
    pass


def no_class(config: Any, longest: int) -> Any:
    return Algorithm(config, longest)


def inputs() -> LossInputs:
    def column() -> torch.Tensor:
        return torch.tensor([-1.0, -2.0, -0.5])

    number = torch.tensor([0, 0, 1])
    return LossInputs(column().requires_grad_(), column(), column(), column(), sample=number, turn=number)


def users_loss(name: str, **options: Any) -> TokenLoss:
    return resolve_loss(LossSpec(f"{__file__}:{name}", options))(inputs())


def users_algorithm(name: str) -> Algorithm:
    return make_algorithm(load_config({"algorithm": f"{__file__}:{name}"}))


def batch() -> Batch:
    return Batch(np.arange(4), {}).with_columns(reward=np.array([0.0, 0.5, 1.0]), group=np.array([0, 0, 0]))


def test_a_sound_loss_is_taken_as_it_is() -> None:
    made = users_loss("sound", factor=2.0)
    assert made.values.tolist() == [-2.0, -8.0, -0.5]
    assert made.metrics["moved"].tolist() == [-1.0, -2.0, -0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_token_loss", "gave a Tensor: return roll.algorithm.TokenLoss"),
        ("already_a_mean", r"the loss has shape \[\], but there are 3 tokens"),
        ("too_few", r"the loss has shape \[1\], but there are 3 tokens"),
        ("a_column_too_many", r"the loss has shape \[3, 1\], but there are 3 tokens"),
        ("without_gradient", "has no gradient: compute its values from inputs.current"),
        ("a_number_for_a_metric", "the metric 'moved' is a int, but there are 3 tokens"),
        ("a_mean_for_a_metric", r"the metric 'moved' has shape \[\], but there are 3 tokens"),
    ],
)
def test_a_loss_that_is_not_a_value_a_token_is_refused(name: str, message: str) -> None:
    """One that broadcasts would train, with a gradient that depends on how the work is cut."""
    with pytest.raises(UserError, match=f"algorithm.loss '.*{name}'.*{message}"):
        users_loss(name)


@pytest.mark.parametrize("metric", sorted(OF_TRAINER | OF_ALGORITHM | {"critic_loss"}))
def test_a_loss_cannot_give_a_metric_that_is_not_its_own(metric: str) -> None:
    with pytest.raises(UserError, match=f"algorithm.loss '.*:named' gives a metric '{metric}'.*as 'my_{metric}'"):
        users_loss("named", metric=metric)
    assert f"my_{metric}" in users_loss("named", metric=f"my_{metric}").metrics


def test_options_a_loss_does_not_take_are_refused_before_it_runs() -> None:
    with pytest.raises(UserError, match=r"'facto'.*takes: factor\); did you mean 'factor'\?"):
        resolve_loss(LossSpec(f"{__file__}:sound", {"facto": 2.0}))
    with pytest.raises(UserError, match=r"missing a required.* 'needed'.*takes: needed"):
        resolve_loss(LossSpec(f"{__file__}:given_something"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoAlgorithm", "is a class that is no roll.algorithm.Algorithm: make it a subclass"),
        ("no_class", "is a function that is no roll.algorithm.Algorithm: make it a subclass"),
    ],
)
def test_what_is_no_algorithm_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        users_algorithm(name)


@pytest.mark.parametrize(("name", "shape"), [("OneMany", r"\(1,\)"), ("Forgetful", r"\(\)")])
def test_advantages_that_are_not_one_a_sample_are_refused(name: str, shape: str) -> None:
    with pytest.raises(UserError, match=f"{name}': `relative` gave advantages of shape {shape} for 3 samples"):
        users_algorithm(name).credit(batch())


@pytest.mark.parametrize("sickness", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("sick", "more"), [([1], ""), ([1, 2], " and to 1 more")])
def test_advantages_that_are_not_finite_are_told_with_what_to_look_for(
    sickness: float, sick: list[int], more: str
) -> None:
    advantage = np.zeros(3)
    advantage[sick] = sickness
    credited = batch().with_columns(
        advantage=advantage, sample=np.array(["7.0", "7.1", "7.2"]), task=np.array(["a", "b", "c"]), kl=np.ones(3)
    )
    with pytest.raises(RunError) as told:
        check_advantages(credited, "mine.py:Mine")
    assert str(told.value).startswith(
        f"algorithm.name 'mine.py:Mine' gave the advantage {sickness:g} to sample 7.1 of task 'b' (reward 0.5, kl 1)"
        f"{more}: look for a reward that is not finite or too large, and for a division by a spread that is 0"
    )
    check_advantages(credited.with_columns(advantage=np.zeros(3)), "mine.py:Mine")


def test_advantages_may_be_a_list() -> None:
    assert users_algorithm("Listed").credit(batch())["advantage"].tolist() == [1.0, 0.0, -1.0]
