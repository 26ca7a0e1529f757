"""The rows of a step's samples file.

Token columns are joined once for all samples and cut into the samples' rows, so that the cost per sample is that of a few
slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.data.sample import Sample
from roll.data.tokenlog import NO_VERSION, Segment
from roll.rollout.messages import FinalState


def rows_of(samples: Sequence[Sample], final_states: Sequence[FinalState]) -> Iterator[dict[str, Any]]:
    """One row per sample, with its final state."""
    logs = [sample.log.segments for sample in samples]
    columns = _joined_columns([segment for segments in logs for segment in segments])
    ends = list(accumulate((sum(len(segment.ids) for segment in segments) for segments in logs), initial=0))
    for sample, final, segments, span in zip(samples, final_states, logs, pairwise(ends), strict=True):
        yield {
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
            "ids": columns["ids"][slice(*span)],
            "loss_mask": columns["loss_mask"][slice(*span)],
            "branches": _branch_starts(segments),
            "logprobs": columns["logprobs"][slice(*span)],
            "versions": columns["versions"][slice(*span)],
            "seconds": {state: round(seconds, 4) for state, seconds in sample.seconds.items()},
        }


def _joined_columns(segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    """The token columns of all segments, one after the other; log-probs are rounded to 6 digits."""
    responses = [segment for segment in segments if segment.kind == "response"]
    lengths = [len(segment.ids) for segment in segments]
    sampled = np.repeat(np.array([segment.kind == "response" for segment in segments], np.bool_), lengths)
    logprobs, versions = np.zeros(len(sampled)), np.full(len(sampled), NO_VERSION, np.int32)
    if responses:
        logprobs[sampled] = np.concatenate([segment.logprobs for segment in responses if segment.logprobs is not None])
        versions[sampled] = np.concatenate([segment.versions for segment in responses if segment.versions is not None])
    return {
        "ids": np.concatenate([np.zeros(0, np.int32), *(segment.ids for segment in segments)]),
        "loss_mask": sampled.astype(np.int32),
        "logprobs": np.round(logprobs, 6),
        "versions": versions,
    }


def _branch_starts(segments: Sequence[Segment]) -> list[int]:
    """Index of the first token of each branch: the first token, and that of each later prompt."""
    starts, end = [0], 0
    for number, segment in enumerate(segments):
        if number and segment.kind == "prompt":
            starts.append(end)
        end += len(segment.ids)
    return starts
