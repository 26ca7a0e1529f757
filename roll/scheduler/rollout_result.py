"""The result of one step's rollout, and counters of the groups that ended since the previous one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.config.errors import RunError
from roll.data.batch import Batch
from roll.data.remote_columns import Array
from roll.data.sample import Group, Sample
from roll.rollout.messages import FinalState

LEFT_OUT = "left out: the algorithm does not train on it"
NOT_FINITE = "update not finite: the weights stayed as they were"
BASELINE = "baseline: not trained on"


@dataclass(frozen=True)
class RolloutBatch:
    """The result of one step's rollout: the batch (None if no group was kept), all groups that ended since the previous
    batch, and the number of dropped groups per reason."""

    batch: Batch | None
    kept: list[Group]
    groups: list[Group]
    dropped: dict[str, int]
    dropped_by_domain: dict[str, Counter[str]] = field(default_factory=dict)
    version: int = 0
    """Version of the weights that the step trains."""
    length_bias: float = 0.0
    """Mean response length of the batch relative to that of all samples so far, minus 1: negative if short responses are
    selected first."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def trained_samples(self) -> list[Sample]:
        """The samples of the batch; after the update, without those that the trainer left out."""
        return [sample for group in self.kept for sample in group.samples if sample.state in ("kept", "trained")]

    def final_states(self) -> list[FinalState]:
        """Final states of all samples. Before the update, samples of the batch are listed as `trained`, although the
        trainer may still leave some out."""
        states = {sample.id: FinalState(sample.id, sample.state, sample.reason) for sample in self.samples}
        for group in self.kept:
            states |= {
                sample.id: FinalState(sample.id, "trained", "") for sample in group.samples if sample.state == "kept"
            }
            if group.baseline is not None:
                states[group.baseline.id] = FinalState(group.baseline.id, "dropped", BASELINE)
        return list(states.values())

    @property
    def ages(self) -> list[int]:
        """Staleness of each sample of the batch in versions, by its oldest token."""
        return [self.version - sample.oldest for sample in self.trained_samples if sample.oldest is not None]


@dataclass
class StepCounters:
    """Counters since the previous batch."""

    ended: list[Group] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    by_domain: dict[str, Counter[str]] = field(default_factory=dict)
    rejected: int = 0

    def count(self, reason: str, domain: str) -> None:
        kind = reason_kind(reason)
        self.reasons[kind] += 1
        self.by_domain.setdefault(domain, Counter())[kind] += 1

    def count_group(self, group: Group, reason: str) -> None:
        self.ended.append(group)
        self.count(reason, group.task.domain)


def reason_kind(reason: str) -> str:
    """A reason without its group-specific details, for counting."""
    return (
        reason.partition(":")[0] if reason.startswith(("stale", "mean reward", "solve rate", "quarantined")) else reason
    )


def baselines(groups: Sequence[Group]) -> Array:
    """The reward of the group's greedy sample, repeated for each of its training samples."""
    return np.array([g.baseline.reward for g in groups if g.baseline is not None for _ in g.scored])


def too_few_reason(needed: int) -> str:
    if needed == 1:
        return "no sample could be judged"
    return f"fewer than {'two' if needed == 2 else needed} samples could be judged"


def raise_if_all_failed(groups: list[Group]) -> None:
    """Raises `RunError` if every sample failed."""
    samples = [sample for group in groups for sample in group.samples if not sample.greedy]
    reasons = [sample.reason for sample in samples if sample.state == "failed"]
    if len(reasons) < len(samples) or not samples:
        return
    most_common = max(set(reasons), key=reasons.count)
    raise RunError(
        f"all {len(samples)} samples of the step failed, so there is nothing to train on; "
        f"the reason of {reasons.count(most_common)} of them: {most_common}"
    )
