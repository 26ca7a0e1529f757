"""`judge` without a server: the model of `roles.judge` judges by a rubric."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from roll.data.task import Message, Response, Task
from roll.reward.judge import Judge
from roll.reward.model_reward import JudgeSampling, ScoreBackend


@dataclass(frozen=True)
class RoleJudge:
    """A rubric for the judge role. The sampling seeds depend only on the conversation, the vote and the attempt, so the
    same response always gets the same verdict."""

    judge: Judge
    temperature: float | None
    max_tokens: int
    timeout_s: float

    role: ClassVar[str] = "judge"
    deterministic: ClassVar[bool] = True

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        raise LookupError(
            "the role judge gave no score for this attempt: this reward works only in a run that has that role"
        )

    async def ask(self, task: Task, response: Response, models: ScoreBackend) -> Mapping[str, float]:
        """Requests all votes at once; votes without a verdict are repeated up to `tries` times."""
        messages = self.judge.messages(task, response)
        votes: list[float | str] = [""] * self.judge.votes
        for attempt in range(self.judge.tries):
            temperature = self.judge.temperature_of(self.temperature, attempt)
            missing = [number for number, vote in enumerate(votes) if isinstance(vote, str)]
            if not missing or (attempt and not temperature):  # a greedy judge would repeat its reply
                break
            sampling = JudgeSampling(tuple(_seed(messages, n, attempt) for n in missing), temperature, self.max_tokens)
            for number, reply in zip(missing, await models.replies(messages, sampling, self.timeout_s), strict=True):
                verdict = self.judge.read(reply)
                votes[number] = reply if verdict is None else verdict
        return self.judge.verdict(votes)


def _seed(messages: Sequence[Message], vote: int, attempt: int) -> int:
    shown = "\x1f".join([str(vote), str(attempt), *(f"{m['role']}\x1f{m['content']}" for m in messages)])
    return int.from_bytes(hashlib.blake2b(shown.encode(), digest_size=8).digest(), "little")
