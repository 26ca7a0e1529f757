"""Queries model roles for their parts of a reward, before a grader gets the job.

Invariants: every attempt ends with the roles' scores or with a `ScoreFailure` that names the part; the same response to
the same task is sent once, also while the first answer is still awaited.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping

from roll.data.task import Response, Task
from roll.process.child_main import reason
from roll.process.structured_gather import structured_gather
from roll.reward.base import ScoreFailure
from roll.reward.model_reward import ModelBackedReward, RoleScores, ScoreBackend, ScoreTimeout
from roll.reward.pool import pack


class ModelScoreClient:
    """`rewards` are those of each domain (None: of all others), by part name; `cache` is the number of cached answers."""

    def __init__(
        self, rewards: Mapping[str | None, Mapping[str, ModelBackedReward]], models: ScoreBackend, cache: int = 0
    ) -> None:
        self._rewards = rewards
        self._models = models
        self._cache = cache
        self._answers: OrderedDict[bytes, asyncio.Task[RoleScores]] = OrderedDict()
        """By the bytes of the job, including those still awaited; the most recently used is last."""

    async def scores(self, task: Task, response: Response) -> RoleScores:
        """The roles' scores of an attempt; empty if its reward needs none."""
        rewards = self._rewards.get(task.domain, self._rewards.get(None))
        if not rewards:
            return {}
        key = hashlib.blake2b(pack(task, response, {}), digest_size=16).digest()
        if key not in self._answers:
            self._answers[key] = asyncio.create_task(self._ask(rewards, task, response))
            self._answers[key].add_done_callback(lambda request: self._on_done(key, request))
        self._answers.move_to_end(key)
        # waits: every request has a deadline; a cancelled caller does not cancel it for the others
        return await asyncio.shield(self._answers[key])

    async def close(self) -> None:
        requests = list(self._answers.values())
        for request in requests:
            request.cancel()
        # waits: they were cancelled
        await asyncio.gather(*requests, return_exceptions=True)

    async def _ask(self, rewards: Mapping[str, ModelBackedReward], task: Task, response: Response) -> RoleScores:
        answers = await structured_gather(self._part(part, reward, task, response) for part, reward in rewards.items())
        return dict(zip(rewards, answers, strict=True))

    async def _part(self, part: str, reward: ModelBackedReward, task: Task, response: Response) -> Mapping[str, float]:
        where = f"part {part!r}: " if part else ""
        try:
            return await reward.ask(task, response, self._models)
        except ScoreTimeout as error:
            raise ScoreFailure("unanswered", f"{where}{error}") from None
        except (ValueError, LookupError) as error:
            raise ScoreFailure("raised", f"{where}{reason(error)}") from error

    def _on_done(self, key: bytes, request: asyncio.Task[RoleScores]) -> None:
        """Caches an answer and evicts the least recently used ones; a failure is not cached."""
        if request.cancelled() or request.exception() is not None:
            if self._answers.get(key) is request:
                del self._answers[key]
            return
        surplus = len(self._answers) - self._cache
        for old in [old for old, answer in self._answers.items() if answer.done()][: max(surplus, 0)]:
            del self._answers[old]
