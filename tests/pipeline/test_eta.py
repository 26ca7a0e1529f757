"""The time left of a run counts every step, evaluation and checkpoint that is still to come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roll.pipeline.eta import seconds_left

Everys = st.integers(0, 12)


def lived_through(step: int, steps: int, evaluate_every: int, checkpoint_every: int) -> list[str]:
    """What the loop of a pipeline does after it has reported a step."""
    done = []
    while True:
        last = step == steps
        done += ["evaluate"] if evaluate_every and step % evaluate_every == 0 and not last else []
        done += ["checkpoint"] if checkpoint_every and step % checkpoint_every == 0 and not last else []
        if last:
            return [*done, "evaluate", "checkpoint"]
        step += 1
        done.append("step")


@given(st.integers(1, 40), st.integers(0, 40), Everys, Everys)
def test_it_is_the_time_of_all_that_the_loop_will_do(step: int, more: int, evaluate: int, checkpoint: int) -> None:
    done = lived_through(step, step + more, evaluate, checkpoint)
    left = seconds_left(
        step,
        step + more,
        step_s=1.0,
        evaluation_s=1000.0,
        evaluate_every=evaluate,
        checkpoint_s=1_000_000.0,
        checkpoint_every=checkpoint,
    )
    counts = (done.count("step"), done.count("evaluate"), done.count("checkpoint"))
    assert left == counts[0] + 1000.0 * counts[1] + 1_000_000.0 * counts[2]


def test_after_step_10_of_40_with_an_evaluation_every_10_steps_four_are_left() -> None:
    assert seconds_left(10, 40, step_s=0.0, evaluation_s=1.0, evaluate_every=10) == 4
