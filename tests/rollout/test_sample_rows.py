"""The rows of a samples file: token columns that are joined once have the values of each sample's own columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.atomic_files import to_json_line
from roll.data import Response, Sample, Task
from roll.data.tokenlog import TokenLog, branches
from roll.rollout.messages import FinalState
from roll.rollout.sample_rows import rows_of

tokens = st.lists(st.integers(0, 99), max_size=4)
logprob = st.floats(-30, 0, width=32)


@st.composite
def logs(draw: st.DrawFn) -> TokenLog:
    log = TokenLog()
    if draw(st.booleans()):
        return log
    log.prompt(draw(tokens))
    for kind in draw(st.lists(st.sampled_from(["respond", "observe", "fork"]), max_size=5)):
        ids = draw(tokens)
        if kind == "respond":
            count = len(ids)
            log.respond(
                ids, [draw(logprob) for _ in ids], draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
            )
        elif kind == "observe":
            log.observe(ids)
        else:
            log.fork(ids or [7])
    return log


def sample(number: int, log: TokenLog) -> Sample:
    made = Sample(f"3.{number}", Task.ask("t", "why?", 5, domain="math"), 3, 1.0, log, tries=2, finish="stop")
    made.response = Response("because", 1, "stop") if number % 2 else None
    made.reward, made.parts, made.turn_rewards, made.turns = 0.5, {"right": 1.0}, [0.25, 0.25], 2
    made.seconds = {"queued": 0.123456, "generating": 2.0}
    return made


def plain_row(sample: Sample, final: FinalState) -> dict[str, Any]:
    """The row from the sample's own columns."""
    return {
        "sample": sample.id,
        "task": sample.task.id,
        "domain": sample.task.domain,
        "group": sample.group,
        "state": final.state,
        "reason": final.reason,
        "question": sample.task.question,
        "answer": sample.task.answer,
        "response": sample.response.text if sample.response else None,
        "finish": sample.finish,
        "reward": sample.reward,
        "parts": sample.parts,
        "turns": sample.turns,
        "turn_rewards": sample.turn_rewards,
        "tries": sample.tries,
        "ids": sample.log.ids,
        "loss_mask": sample.log.loss_mask.astype(np.int32),
        "branches": [span.start for span in branches(sample.log.turn)],
        "logprobs": np.round(sample.log.behaviour.astype(np.float64), 6),
        "versions": sample.log.versions,
        "seconds": {state: round(seconds, 4) for state, seconds in sample.seconds.items()},
    }


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(logs(), max_size=5))
def test_the_lines_of_a_step_are_those_of_its_samples_alone(found: list[TokenLog]) -> None:
    samples = [sample(number, log) for number, log in enumerate(found)]
    finals = [FinalState(each.id, "dropped", "no signal") for each in samples]
    lines = [to_json_line(row) for row in rows_of(samples, finals)]
    assert lines == [to_json_line(plain_row(*each)) for each in zip(samples, finals, strict=True)]
