"""What no scheduler can beat: lower bounds of a run's seconds, from the samples alone.

Three things take their time whatever the order:

- **decode**: every sample of every group that had to be tried is drawn by some engine. A token costs an engine least when
  its batch is full, because the batch then shares most what a step costs anyway; so the sum of these shares over all
  samples, divided by the number of engines, is the least time the engines need. The prompt of a group is computed once at
  the least, an observation once for each sample.
- **longest**: the turns of one sample follow each other, and so do its tokens. Alone on an engine, a step is as short as
  it can be; with the environment's steps and its grading, the sample with the longest such path takes that long.
- **training**: the steps follow each other, each with its own samples and its publishing.

On one set of weights after another (on-policy) no sample of a step begins before the step before is published and
training begins after the step's last sample, so that these times add up, step by step. When generation may run ahead of
training, only the greatest of the three over the whole run is left.

Nothing here knows a scheduler, an engine's queue or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulation.workload import Episode, StepGroups, Workload


@dataclass(frozen=True)
class Bound:
    decode_s: float
    longest_s: float
    training_s: float
    """With publishing."""

    @property
    def seconds(self) -> float:
        """Of a run in which generation and training overlap."""
        return max(self.decode_s, self.longest_s, self.training_s)

    @property
    def in_turns_s(self) -> float:
        """Of a step in which training follows generation."""
        return max(self.decode_s, self.longest_s) + self.training_s


def run_bound(workload: Workload, steps: Sequence[StepGroups]) -> Bound:
    """Of a whole run, however much of it overlaps."""
    parts = step_bounds(workload, steps)
    return Bound(
        decode_s=sum(part.decode_s for part in parts),
        longest_s=max((part.longest_s for part in parts), default=0.0),
        training_s=sum(part.training_s for part in parts),
    )


def on_policy_bound_s(workload: Workload, steps: Sequence[StepGroups]) -> float:
    """Seconds of a whole run in which each step's samples are drawn from the step before's weights."""
    return sum(part.in_turns_s for part in step_bounds(workload, steps))


def step_bounds(workload: Workload, steps: Sequence[StepGroups]) -> list[Bound]:
    return [_step_bound(workload, groups) for groups in steps]


def _step_bound(workload: Workload, groups: StepGroups) -> Bound:
    engine_s = longest_s = 0.0
    for group in groups.tried:
        episodes = [workload.episode(sample) for sample in workload.samples_of(group)]
        engine_s += _least_engine_s(workload, episodes)
        longest_s = max(longest_s, *(_path_s(workload, episode) for episode in episodes))
    return Bound(engine_s / workload.engines, longest_s, workload.train_s(groups.kept) + workload.publish_s)


def _least_engine_s(workload: Workload, siblings: Iterable[Episode]) -> float:
    """Seconds of one engine for a group, in full batches, all that was seen before found in its cache."""
    spec = workload.engine
    prompt_s = seconds = 0.0
    for episode in siblings:
        prompt_s = spec.prefill_s(episode.turns[0].prompt_tokens)
        seconds += spec.prefill_s(_observed_tokens(episode))
        seconds += sum(spec.share_s(turn.prompt_tokens, turn.new_tokens) for turn in episode.turns)
    return prompt_s + seconds


def _path_s(workload: Workload, episode: Episode) -> float:
    """Seconds from a sample's beginning to its reward if it never waits."""
    spec = workload.engine
    prefill_s = spec.prefill_s(episode.turns[0].prompt_tokens + _observed_tokens(episode))
    decode_s = sum(spec.alone_s(turn.prompt_tokens, turn.new_tokens) for turn in episode.turns)
    return prefill_s + decode_s + sum(turn.environment_s for turn in episode.turns) + episode.grade_s


def _observed_tokens(episode: Episode) -> int:
    """Tokens of its context that came from the environment."""
    return episode.tokens - episode.turns[0].prompt_tokens - episode.new_tokens
