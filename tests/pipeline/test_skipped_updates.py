"""Samples of updates that were skipped are on record as dropped, and all others as trained: every sample ends once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from small_runs import REWARDS, Remains
from torch import Tensor

from roll.run import LedgerIndex
from roll.scheduler.rollout_result import LEFT_OUT, NOT_FINITE

ABOVE = 0.3
PATIENT = ("train.max_skipped_in_a_row=9", "rollout.filter=none")
GROUP_BY_GROUP = (
    *(*PATIENT, "train.steps=3", "rollout.groups_per_step=3", "train.updates_per_step=3"),
    *("algorithm=raft_pp", f"algorithm.positive_above={ABOVE}"),
)
SICK_IF_ODD = f"{REWARDS.parent / 'odd_losses.py'}:sick_if_odd"
RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=600", "ray.call_deadline_s=600")


def too_large(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """A critic's loss that is too much for fp32."""
    return (values - returns) ** 2 * 1e30 * 1e30


def ends_of(run: Remains) -> dict[str, tuple[str, str]]:
    """State and reason of every sample, which ledger and samples agree on."""
    with LedgerIndex.open(run.folder.ledger_path) as index:
        assert index.balance().problems == ()
    ends = {id: (state, reason) for id, (state, reason, _) in run.lineage().items()}
    rows = [row for step in run.samples().values() for row in step]
    assert ends == {row["sample"]: (row["state"], row["reason"]) for row in rows}
    return ends


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_samples_end_as_the_update_they_were_in(run_small: Callable[..., Remains], executor: str) -> None:
    """Each group is an update of its own, with its better samples; an odd number of them is skipped."""
    run = run_small(*GROUP_BY_GROUP, f"algorithm.loss={SICK_IF_ODD}", *(RAY if executor == "ray" else ()))
    ends, metrics = ends_of(run), [row for row in run.metrics() if "samples/trained" in row]
    for rows, row in zip(run.samples().values(), metrics, strict=True):
        better = Counter(sample["group"] for sample in rows if sample["reward"] > ABOVE)
        expected = {}
        for sample in rows:
            used = ("dropped", NOT_FINITE) if better[sample["group"]] % 2 else ("trained", "")
            expected[sample["sample"]] = used if sample["reward"] > ABOVE else ("dropped", LEFT_OUT)
        assert {id: ends[id] for id in expected} == expected
        assert row["train/skipped"] == sum(count % 2 for count in better.values())
        assert row["samples/trained"] == list(expected.values()).count(("trained", ""))
    assert set(ends.values()) == {("trained", ""), ("dropped", NOT_FINITE), ("dropped", LEFT_OUT)}, "some of each"


@pytest.mark.thorough
def test_while_only_the_critic_learns_its_update_counts_and_then_the_policys(
    run_small: Callable[..., Remains], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the critic's updates are skipped; the policy's second step is its first."""
    monkeypatch.setattr("roll.strategy.train.critic.value_loss", too_large)
    ppo = ("algorithm=ppo", "algorithm.critic_warmup_steps=1", f"reward={REWARDS}:letters")
    run = run_small(*PATIENT, *ppo, "train.steps=2")
    rows = [row for row in run.metrics() if "train/updates" in row]
    assert [(row["train/updates"], row["train/skipped"], row["train/critic_skipped"]) for row in rows] == [
        (0, 0, 1),
        (1, 0, 1),
    ]
    ends = ends_of(run)
    for step, end in ((1, ("dropped", NOT_FINITE)), (2, ("trained", ""))):
        assert {ends[row["sample"]] for row in run.samples()[step]} == {end}
