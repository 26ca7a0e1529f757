"""Creates the reward `judge` from its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from roll.data.task import Message
from roll.reward.judge import RUBRIC, Judge
from roll.reward.judge_role import RoleJudge
from roll.reward.openai_client import OpenAIClient, check_sampling


def judge(
    url: str = "",
    model: str = "",
    rubric: str = RUBRIC,
    system: str = "",
    low: float = 0.0,
    high: float = 10.0,
    words: dict[str, float] | None = None,
    votes: int = 1,
    combine: Literal["mean", "median", "majority"] = "mean",
    tries: int = 3,
    temperature: float | None = None,
    max_tokens: int = 512,
    token_env: str = "",
    timeout_s: float = 30.0,
) -> Judge | RoleJudge:
    """A judge behind an OpenAI-compatible server; without a `url`, the role `judge`."""
    rubric_judge = Judge(_no_model, rubric, system, low, high, words or {}, votes, combine, tries)
    if url:
        if not model:
            raise ValueError("model is missing: write the model's name at the server")
        return replace(
            rubric_judge,
            ask=OpenAIClient(url, model, rubric_judge.temperature_of(temperature), max_tokens, token_env, timeout_s).ask,
        )
    for name, value in (("model", model), ("token_env", token_env)):
        if value:
            raise ValueError(f"{name} is {value!r}, which is for a server: write its url too, or remove {name}")
    check_sampling(temperature, max_tokens)
    if timeout_s <= 0:
        raise ValueError(f"timeout_s is {timeout_s:g}, but takes a number > 0")
    return RoleJudge(rubric_judge, temperature, max_tokens, timeout_s)


def _no_model(messages: Sequence[Message]) -> str:
    raise LookupError("this judge has no model to ask")
