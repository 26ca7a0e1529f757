"""Samples small enough to work out on paper."""

from __future__ import annotations

from dataclasses import replace

from reference.samples import RefSample, RefToken


def token(cur: float = -1.0, prox: float = -1.0, beh: float = -1.0, ref: float = -1.0, turn: int = 0) -> RefToken:
    return RefToken(cur, prox, beh, ref, turn=turn)


def sample(*tokens: RefToken, group: int = 0, reward: float = 0.0, weight: float = 1.0) -> RefSample:
    return RefSample(group=group, reward=reward, response_tokens=tokens, weight=weight)


def valued(answer: RefSample, *values: float) -> RefSample:
    pairs = zip(answer.response_tokens, values, strict=True)
    return replace(answer, response_tokens=tuple(replace(each, value=value) for each, value in pairs))
