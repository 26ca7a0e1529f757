"""The sample runner: drives one sample from its task to its verdict, as a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from roll.cluster import Cluster
from roll.config.schema import RolloutConfig
from roll.data.sample import Sample
from roll.data.task import Response
from roll.engine.request import Request, Sampling, seed_of
from roll.model.chat import ChatRenderer, Conversation
from roll.reward import ScoreFailure
from roll.rollout.door import EngineDoor, RequestRefused
from roll.rollout.lifecycle import Lifecycle
from roll.workers.reward import RewardWorker


class SampleRunner:
    """What always holds: `run` ends with the sample scored or failed, never raises for the sample's own fault, and no
    wait in it is unbounded."""

    def __init__(
        self,
        engines: EngineDoor,
        rewards: Cluster[RewardWorker],
        renderer: ChatRenderer,
        lifecycle: Lifecycle,
        *,
        sampling: Sampling,
        deadline_s: float,
        seed: int,
        grader: int = 0,
    ) -> None:
        """`grader`: the reward worker that the first sample goes to; the others take turns from there."""
        self._engines = engines
        self._rewards = rewards
        self._renderer = renderer
        self._lifecycle = lifecycle
        self._sampling = sampling
        self._deadline_s = deadline_s
        self._seed = seed
        self._next_grader = grader

    async def run(self, sample: Sample, engine: int) -> None:
        """Carries a queued sample to its verdict; its tokens are drawn by that engine."""
        self._lifecycle.move(sample, "generating")
        try:
            conversation = Conversation(self._renderer, sample.task.messages, sample.log)
        except TemplateError as error:
            self._lifecycle.move(sample, "failed", f"the chat template refused the task: {error}")
            return
        sampling = replace(self._sampling, temperature=sample.temperature, seed=seed_of(self._seed, sample.id))
        request = Request(sample.id, sample.log.ids, sampling)
        try:
            async with asyncio.timeout(self._deadline_s):
                completion = await self._engines.generate(request, engine)
        except TimeoutError:
            self._lifecycle.move(sample, "failed", f"generation took more than {self._deadline_s:g} s")
            return
        except RequestRefused as refused:
            self._lifecycle.move(sample, "failed", str(refused))
            return
        text = conversation.respond(completion.ids, completion.logprobs, completion.versions)
        sample.response = Response(text, len(completion.ids), completion.finish)
        sample.tokens, sample.response_tokens = len(sample.log), len(completion.ids)
        sample.finish = completion.finish
        self._lifecycle.move(sample, "scoring", tokens=len(completion.ids), finish=completion.finish)
        try:
            verdict = await self._rewards.call_rank(self._grader(), RewardWorker.score, sample.task, sample.response)
        except ScoreFailure as failure:
            self._lifecycle.move(sample, "failed", f"reward {failure}")
            return
        sample.reward, sample.parts = verdict.reward, verdict.parts
        self._lifecycle.move(sample, "scored", reward=verdict.reward)

    def _grader(self) -> int:
        self._next_grader += 1
        return (self._next_grader - 1) % len(self._rewards)


async def run_all(run: Callable[[Sample], Coroutine[Any, Any, None]], samples: Sequence[Sample]) -> None:
    """Runs samples side by side. An error that is no sample's own fault, or being cancelled, ends all of them."""
    tasks = [asyncio.create_task(run(sample)) for sample in samples]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # else it is cleaning up, which a second cancellation would cut short
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def training_sampling(config: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    """How training samples are drawn."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        stop_ids=stop_ids,
    )
