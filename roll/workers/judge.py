"""The judge worker: an engine with frozen weights that generates replies to conversations.

Invariants: the engine serves only the weights loaded from the judge's files, once the probe prompt agrees; a question
gets all of its replies, or None because the judge is offloaded, or a `ValueError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from roll.cluster import Dispatch, WorkerPlacement, dispatch
from roll.config.schema import Config
from roll.data.task import Message
from roll.engine.request import Completion, Request, SamplingParams, seed_of
from roll.reward.model_reward import JudgeSampling
from roll.workers.device import DeviceWorker
from roll.workers.residency_gate import ResidencyGate

if TYPE_CHECKING:
    from roll.strategy.offload import Residency

_ABORT_S = 60.0
"""Deadline for the engine to abort its requests."""


class JudgeWorker(DeviceWorker):
    def __init__(self, placement: WorkerPlacement, config: Config) -> None:
        from roll.model.chat import ChatRenderer
        from roll.model.find import find_model
        from roll.model.loading import context_of, load_tokenizer, stop_ids_of
        from roll.strategy.infer.frozen_engine import FrozenEngine

        super().__init__(placement, config.deterministic)
        role = config.roles.judge.model
        source = find_model(role.path)
        tokenizer = load_tokenizer(source, role)
        self._stop_ids = stop_ids_of(tokenizer, source)
        self._renderer = ChatRenderer(tokenizer, self._stop_ids)
        self._context = config.roles.judge.context_within(context_of(source))
        self._seed = config.seed
        self._engine = FrozenEngine(placement, config)
        self._residency_gate = ResidencyGate()
        self._pending: dict[str, asyncio.Future[Completion]] = {}
        """Replies in progress, by request id."""
        self._delivering: asyncio.Task[None] | None = None

    @dispatch(Dispatch.ALL)
    async def start(self) -> None:
        """Loads and verifies the weights, then serves them."""
        await self._engine.start()

    @dispatch(Dispatch.ONE, raises=(ValueError,))
    async def replies(
        self, question: str, messages: Sequence[Message], judge_sampling: JudgeSampling
    ) -> list[str] | None:
        """One reply per seed; None while this worker is offloaded: ask again. Raises `ValueError` if no reply is
        possible."""
        prompt = self._prompt(messages)
        budget = min(judge_sampling.max_tokens, self._context - len(prompt))
        if budget < 1:
            raise ValueError(
                f"the judge's prompt has {len(prompt)} tokens, which leaves none for a reply in its context of "
                f"{self._context}"
            )
        if not await self._residency_gate.wait_resident():
            return None
        for number, seed in enumerate(judge_sampling.seeds):
            reply_seed = seed_of(self._seed, seed)
            sampling = SamplingParams(budget, judge_sampling.temperature, stop_ids=self._stop_ids, seed=reply_seed)
            self._submit(Request(f"{question}.{number}", np.array(prompt, np.int32), sampling))
        replies = [self._pending[f"{question}.{number}"] for number in range(len(judge_sampling.seeds))]
        # waits: the caller has a deadline and calls `cancel` after it
        completions = await asyncio.gather(*replies)
        if any(completion.finish == "abort" for completion in completions):
            return None
        return [self._renderer.text(completion.ids) for completion in completions]

    @dispatch(Dispatch.ONE)
    def cancel(self, question: str) -> None:
        """Aborts the replies to a question that its caller no longer waits for."""
        self._engine.strategy.abort([id for id in self._pending if id.rpartition(".")[0] == question])

    @dispatch(Dispatch.ALL)
    async def set_residency(self, level: Residency) -> None:
        """Sets the residency level: keeps that much on the device. Below `all` the judge answers nothing: it aborts
        replies in progress, and their callers ask again."""
        if level != "all":
            self._residency_gate.close()
            self._engine.strategy.abort(list(self._pending))
            async with asyncio.timeout(_ABORT_S):
                while self._pending:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await self._engine.set_residency(level)
        if level == "all":
            self._residency_gate.open()

    async def close(self) -> None:
        if self._delivering is not None:
            self._delivering.cancel()
        await self._engine.close()

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        try:
            return self._renderer.opening(messages).tokens
        except TemplateError as error:
            raise ValueError(f"the judge's chat template refused its question: {error}") from None

    def _submit(self, request: Request) -> None:
        self._engine.strategy.submit([request])
        self._pending[request.id] = asyncio.get_running_loop().create_future()
        if self._delivering is None or self._delivering.done():
            self._delivering = asyncio.create_task(self._deliver())

    async def _deliver(self) -> None:
        """Resolves the future of every completion, while there are any requests."""
        try:
            while self._pending:
                for completion in await self._engine.strategy.results():
                    reply = self._pending.pop(completion.id)
                    if not reply.done():
                        reply.set_result(completion)
                await asyncio.sleep(0)
        except Exception as error:
            replies, self._pending = self._pending, {}
            for reply in replies.values():
                if not reply.done():
                    reply.set_exception(error)
