"""No metric of a step is given by two: the list of names is whole, and an algorithm that takes another's is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from small_runs import Remains
from thorough import but

from roll.algorithm import Algorithm
from roll.algorithm.metric_names import OF_ALGORITHM, OF_CRITIC, OF_MIXTURE, OF_TRAINER
from roll.config import UserError
from roll.pipeline.rlvr_metrics import domain_metrics, staleness_metrics
from roll.scheduler.rollout_result import RolloutBatch

ONE_STEP = ("train.steps=1", "eval.samples=1", "rollout.filter=none")


class Twice(Algorithm):
    """Gives a metric of the loss that it is trained with."""

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "clip_frac": 1.0}


class Hidden(Algorithm):
    """Gives a metric of the trainer."""

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "grad_norm": 1.0}


class Own(Algorithm):
    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "kl_coef": 0.125, "patience": 3.0}


def names(run: Remains) -> set[str]:
    """Of the metrics of its updates."""
    return {name.removeprefix("train/") for row in run.metrics() for name in row if name.startswith("train/")}


def test_every_metric_of_an_update_is_somebodys(run_small: Callable[..., Remains]) -> None:
    found = names(run_small(*ONE_STEP, "algorithm=ppo", "algorithm.kl_coef=0.1"))
    one_process = OF_TRAINER - OF_MIXTURE - {"imbalance"}  # which has nobody to wait for
    expected = one_process | OF_ALGORITHM | {"clip_frac"}
    assert {name for name in found if not name.startswith(OF_CRITIC)} == expected
    assert len(found) > len(expected), "there is a critic"


@pytest.mark.parametrize(
    ("name", "metric"), but({("Hidden", "grad_norm")}, [("Twice", "clip_frac"), ("Hidden", "grad_norm")])
)
def test_an_algorithm_cannot_give_a_metric_that_is_not_its_own(
    run_small: Callable[..., Remains], name: str, metric: str
) -> None:
    with pytest.raises(UserError, match=f"algorithm.name '.*:{name}' gives a metric '{metric}', but train/{metric} is"):
        run_small(*ONE_STEP, f"algorithm={__file__}:{name}")


def test_an_algorithm_may_give_others_and_its_own_anew(run_small: Callable[..., Remains]) -> None:
    run = run_small(*ONE_STEP, f"algorithm={__file__}:Own", "algorithm.kl_coef=0.1")
    (row,) = [row for row in run.metrics() if "train/loss" in row]
    assert (row["train/kl_coef"], row["train/patience"]) == (0.125, 3.0)


def test_groups_that_were_dropped_for_one_kind_of_reason_are_one_metric() -> None:
    reasons = Counter({"slow: 5 samples": 1, "slow: 6 samples": 2, "no signal": 4})
    rollout = RolloutBatch(None, [], [], dict(reasons), {"maths": reasons})
    dropped = {"dropped/slow": 3, "dropped/no signal": 4}
    assert staleness_metrics(rollout).items() >= dropped.items()
    assert domain_metrics("maths", rollout, []).items() >= {f"domain/maths/{k}": n for k, n in dropped.items()}.items()
