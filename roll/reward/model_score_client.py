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
from roll.reward.model_reward import ModelBackedReward, Said, ScoreBackend, ScoreTimeout
from roll.reward.pool import pack


class ModelScoreClient:
    """`rewards` are those of each domain (None: of all others), by part name; `cache` is the number of cached answers."""

    def __init__(
        self, rewards: Mapping[str | None, Mapping[str, ModelBackedReward]], models: ScoreBackend, cache: int = 0
    ) -> None:
        self._rewards = rewards
        self._models = models
        self._cache = cache
        self._answers: OrderedDict[bytes, asyncio.Task[Said]] = OrderedDict()
        """By the bytes of the job, including those still awaited; the most recently used is last."""

    async def said(self, task: Task, response: Response) -> Said:
        """The roles' scores of an attempt; empty if its reward needs none."""
        rewards = self._rewards.get(task.domain, self._rewards.get(None))
        if not rewards:
            return {}
        key = hashlib.blake2b(pack(task, response, {}), digest_size=16).digest()
        if key not in self._answers:
            self._answers[key] = asyncio.create_task(self._ask(rewards, task, response))
            self._answers[key].add_done_callback(lambda asked: self._ended(key, asked))
        self._answers.move_to_end(key)
        # waits: every request has a deadline; a cancelled caller does not cancel it for the others
        return await asyncio.shield(self._answers[key])

    async def close(self) -> None:
        asked = list(self._answers.values())
        for each in asked:
            each.cancel()
        # waits: they were cancelled
        await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, rewards: Mapping[str, ModelBackedReward], task: Task, response: Response) -> Said:
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

    def _ended(self, key: bytes, asked: asyncio.Task[Said]) -> None:
        """Caches an answer and evicts the least recently used ones; a failure is not cached."""
        if asked.cancelled() or asked.exception() is not None:
            if self._answers.get(key) is asked:
                del self._answers[key]
            return
        surplus = len(self._answers) - self._cache
        for old in [old for old, answer in self._answers.items() if answer.done()][: max(surplus, 0)]:
            del self._answers[old]
