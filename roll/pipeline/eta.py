"""Estimates the remaining time of a run."""

from __future__ import annotations


def seconds_left(
    step: int,
    steps: int,
    *,
    step_s: float,
    evaluation_s: float = 0.0,
    evaluate_every: int = 0,
    checkpoint_s: float = 0.0,
    checkpoint_every: int = 0,
) -> float:
    """Seconds to the end of a run that has just finished `step` of `steps`: the remaining steps, evaluations and
    checkpoints, including those after this step and after the last one. `every` is 0 if there is only the one after the
    last step.

    Example: after step 10 of 40, with an evaluation every 10 steps, 30 steps and 4 evaluations (of the steps 10, 20, 30
    and 40) are left.
    """
    evaluations = remaining_occurrences(step, steps, evaluate_every)
    checkpoints = remaining_occurrences(step, steps, checkpoint_every)
    return (steps - step) * step_s + evaluations * evaluation_s + checkpoints * checkpoint_s


def remaining_occurrences(step: int, steps: int, every: int) -> int:
    """How often something that is done every `every` steps and after the last one is still to be done when `step` has
    just been trained."""
    between = (steps - 1) // every - (step - 1) // every if every else 0
    return between + 1
