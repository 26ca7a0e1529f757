"""Parts of rewards that roles give: how they are asked, what travels, and what happens when no answer comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from roll.config import UserError
from roll.config.schema import RewardConfig
from roll.data import Message, Response, Task
from roll.reward import RewardSpec, ScoreFailure, Verdict
from roll.reward.model_reward import JudgeSampling, ScoreBackend, ScoreTimeout
from roll.reward.model_score_client import ModelScoreClient
from roll.reward.pool import GraderPool

TASK = Task.ask("t1", "Capital of Italy?", "Rome")
RESPONSE = Response("It is Rome.", 4, "stop")
BOTH = {
    "liked": {"name": "reward_model", "weight": 2.0, "options": {"scale": 0.5, "shift": 1}},
    "sound": {"name": "judge", "weight": 0.5, "options": {"votes": 3}},
    "brief": {"name": "length", "options": {"budget": 100}},
}
IN_A_PROCESS = {"name": "format", "weight": 0, "options": {"pattern": "Rome", "search": True}}


class Told(ScoreBackend):
    """Says what it was told to, and keeps what it was asked."""

    def __init__(self, score: float | Exception = 3.0, *replies: list[str], slow_s: float = 0.0) -> None:
        self._score, self._replies, self._slow_s = score, list(replies), slow_s
        self.scored: list[list[Message]] = []
        self.drawn: list[JudgeSampling] = []

    async def score(self, messages: Sequence[Message], timeout_s: float) -> float:
        self.scored.append(list(messages))
        await asyncio.sleep(self._slow_s)
        if isinstance(self._score, Exception):
            raise self._score
        return self._score

    async def replies(self, messages: Sequence[Message], drawing: JudgeSampling, timeout_s: float) -> list[str]:
        self.drawn.append(drawing)
        return self._replies.pop(0)


def asking(parts: dict[str, Any], models: ScoreBackend, cache: int = 16) -> tuple[ModelScoreClient, RewardSpec]:
    source = RewardSpec.of_config(RewardConfig.model_validate({"parts": parts}))
    source.check()
    return ModelScoreClient(source.model_backed_rewards(), models, cache), source


def verdict_of(parts: dict[str, Any], models: ScoreBackend) -> Verdict:
    async def main() -> Verdict:
        asks, source = asking(parts, models)
        async with GraderPool(source) as pool:
            return await pool.score(TASK, RESPONSE, await asks.scores(TASK, RESPONSE))

    return asyncio.run(main())


@pytest.mark.parametrize("parts", [BOTH, {**BOTH, "form": IN_A_PROCESS}])
def test_what_roles_say_is_weighed_like_any_part(parts: dict[str, Any]) -> None:
    """Without a process, and, where a part needs one, in a grader."""
    models = Told(3.0, ["Score: 4", "hm", "Score: 6"], ["Score: 8"])
    verdict = verdict_of(parts, models)
    assert verdict.reward == pytest.approx(2 * (0.5 * 3 + 1) + 0.5 * 0.6 + 1)
    assert verdict.parts["liked/score"] == 3
    assert verdict.parts["sound"] == pytest.approx(0.6)
    assert verdict.parts["sound/spread"] == pytest.approx(0.4)
    assert models.scored == [[*TASK.messages, {"role": "assistant", "content": "It is Rome."}]]
    assert [len(drawing.seeds) for drawing in models.drawn] == [3, 1]
    assert len({seed for drawing in models.drawn for seed in drawing.seeds}) == 4
    assert {drawing.temperature for drawing in models.drawn} == {0.7}


def test_a_single_vote_is_greedy_and_a_second_try_is_not() -> None:
    models = Told(0.0, ["hm"], ["hm"], ["5"])
    assert verdict_of({"sound": "judge"}, models).reward == 0.5
    assert [drawing.temperature for drawing in models.drawn] == [0, 0.7, 0.7]


def test_a_greedy_judge_is_not_queried_again() -> None:
    models = Told(0.0, ["hm"])
    with pytest.raises(ScoreFailure, match=r"part 'sound': ValueError: the judge's reply has no verdict"):
        verdict_of({"sound": {"name": "judge", "options": {"temperature": 0.0}}}, models)
    assert len(models.drawn) == 1


def test_a_judge_that_talks_nonsense_fails_the_attempt_by_name() -> None:
    with pytest.raises(
        ScoreFailure, match=r"raised: part 'sound': ValueError: the judge's reply has no verdict \(3 tries"
    ):
        verdict_of(BOTH, Told(0.0, ["x", "y", "z"], ["x", "y", "z"], ["x", "y", "z"]))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            ScoreTimeout("the role reward_model has not answered for 2 s"),
            "unanswered: part 'liked': the role reward_model",
        ),
        (ValueError("the conversation has 9 tokens"), "raised: part 'liked': ValueError: the conversation has 9 tokens"),
    ],
)
def test_a_role_without_an_answer_fails_the_attempt_by_name(error: Exception, says: str) -> None:
    with pytest.raises(ScoreFailure, match=says):
        verdict_of({"liked": "reward_model"}, Told(error))


def test_the_same_response_is_sent_once_also_while_its_answer_is_awaited() -> None:
    async def main() -> None:
        models = Told(1.0, slow_s=0.05)
        asks, _ = asking({"liked": "reward_model"}, models, cache=1)
        await asyncio.gather(*(asks.scores(TASK, RESPONSE) for _ in range(3)))
        await asks.scores(TASK, RESPONSE)
        assert len(models.scored) == 1
        await asks.scores(TASK, Response("No.", 1, "stop"))
        await asks.scores(TASK, RESPONSE)  # one answer is kept
        assert len(models.scored) == 3

    asyncio.run(main())


def test_a_cancelled_caller_does_not_cancel_the_others_and_a_failure_is_not_cached() -> None:
    async def main() -> None:
        models = Told(1.0, slow_s=0.05)
        asks, _ = asking({"liked": "reward_model"}, models)
        first, second = (asyncio.create_task(asks.scores(TASK, RESPONSE)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        assert (await second)["liked"]["reward"] == 1
        models._score = ScoreTimeout("gone")
        other = Response("No.", 1, "stop")
        for _ in range(2):
            with pytest.raises(ScoreFailure):
                await asks.scores(TASK, other)
        assert len(models.scored) == 3
        await asks.close()

    asyncio.run(main())


def test_a_reward_that_asks_no_role_asks_none() -> None:
    async def main() -> None:
        asks, _ = asking(
            {"right": "number", "good": {"name": "judge", "options": {"url": "http://x", "model": "m"}}}, Told()
        )
        assert await asks.scores(TASK, RESPONSE) == {}

    asyncio.run(main())


def test_a_whole_reward_may_be_a_roles() -> None:
    async def main() -> Verdict:
        source = RewardSpec.of_config(RewardConfig(name="reward_model", options={"sigmoid": True}))
        asks = ModelScoreClient(source.model_backed_rewards(), Told(2.0))
        async with GraderPool(source) as pool:
            return await pool.score(TASK, RESPONSE, await asks.scores(TASK, RESPONSE))

    assert asyncio.run(main()).reward == pytest.approx(1 / (1 + math.exp(-2)))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"name": "judge", "options": {"model": "m"}}, "model is 'm', which is for a server: write its url too"),
        ({"name": "judge", "options": {"url": "http://x"}}, "model is missing"),
        ({"name": "judge", "options": {"max_tokens": 0}}, "max_tokens is 0"),
        (
            {"name": "reward_model", "options": {"scale": math.inf}},
            "scale is Infinity, but takes a number, and a finite one",
        ),
        ({"name": "reward_model", "options": {"timeout_s": 0.0}}, "timeout_s is 0"),
        ({"name": "reward_model", "options": {"sigmoi": True}}, "did you mean 'sigmoid'"),
    ],
)
def test_options_that_cannot_work_are_refused(part: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        asking({"x": part}, Told())
