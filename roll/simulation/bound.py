"""What no scheduler can beat: lower bounds of a run's seconds, from the samples alone.

Three things take their time whatever the order:

- **decode**: every sample of every group that had to be tried is drawn by some engine. A token costs an engine least when
  its batch is full, because the batch then shares most what a step costs anyway; so the sum of these shares over all
  samples, divided by the number of engines, is the least time the engines need. The prompt of a group is computed once at
  the least, an observation once for each sample.
- **longest**: the turns of one sample follow each other, and so do its tokens. Alone on an engine, a step is as short as
  it can be; with the environment's steps and its grading, the sample with the longest such path takes that long.
- **training**: the steps follow each other, each with its own samples and its publishing.

From these follow bounds of a **whole run, from its beginning**, when no token has been drawn, to the publishing of its
last step. Let `D_s`, `L_s` and `T_s` be the three for step s (1 to n), `S_s` when its training begins and `P_s` when it
is published, `P_0 = 0`. Steps are trained one after the other, so `S_s ≥ P_(s-1)` and `P_s ≥ S_s + T_s`.

- **Generation may run ahead** (`overlapping_bound_s`). When the training of step s begins, all samples of the steps 1 to
  s have been drawn and scored, and none was begun before 0. The engines have worked on all of them, so
  `S_s ≥ D_1 + … + D_s`; each took at least its path, so `S_s ≥ max(L_1, …, L_s)`. Hence, by induction over s,
  `P_s ≥ max(P_(s-1), D_1 + … + D_s, L_1, …, L_s) + T_s`.
- **On-policy** (`on_policy_bound_s`). No sample of step s is begun before `P_(s-1)`, nor is its prompt in a cache then
  (new weights empty it), so `S_s ≥ P_(s-1) + max(D_s, L_s)`, and `P_s ≥ P_(s-1) + max(D_s, L_s) + T_s`.

There is no such bound of a window that begins later where generation runs ahead: samples that are trained on within it
may have been drawn before it began. The sum of `D_s` over its steps can then be more than the window's own seconds.

Nothing here knows a scheduler, an engine's queue or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roll.simulation.workload import Episode, StepGroups, Workload


@dataclass(frozen=True)
class StepBound:
    """The least seconds that parts of a step take."""

    decode_s: float
    longest_s: float
    training_s: float
    """With publishing."""


def overlapping_bound_s(workload: Workload, steps: Sequence[StepGroups]) -> float:
    """Seconds of a whole run, from its first token on, however far generation runs ahead of training."""
    published_s = decoded_s = longest_s = 0.0
    for part in step_bounds(workload, steps):
        decoded_s += part.decode_s
        longest_s = max(longest_s, part.longest_s)
        published_s = max(published_s, decoded_s, longest_s) + part.training_s
    return published_s


def on_policy_bound_s(workload: Workload, steps: Sequence[StepGroups]) -> float:
    """Seconds of a whole run in which each step's samples are drawn from the step before's weights."""
    parts = step_bounds(workload, steps)
    return sum(max(part.decode_s, part.longest_s) + part.training_s for part in parts)


def step_bounds(workload: Workload, steps: Sequence[StepGroups]) -> list[StepBound]:
    return [_step_bound(workload, groups) for groups in steps]


def _step_bound(workload: Workload, groups: StepGroups) -> StepBound:
    engine_s = longest_s = 0.0
    for group in groups.tried:
        episodes = [workload.episode(sample) for sample in workload.samples_of(group)]
        engine_s += _least_engine_s(workload, episodes)
        longest_s = max(longest_s, *(_path_s(workload, episode) for episode in episodes))
    return StepBound(engine_s / workload.engines, longest_s, workload.train_s(groups.kept) + workload.publish_s)


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
