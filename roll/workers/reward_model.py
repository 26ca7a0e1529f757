"""The reward model worker: scores conversations, batching all that wait into micro-batches.

If the model has several ranks, clients call rank 0, which sends commands to the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from jinja2 import TemplateError

from roll.cluster import Dispatch, WorkerPlacement, dispatch
from roll.config.errors import UserError
from roll.config.schema import Config
from roll.data.task import Message
from roll.data.tokenlog import IntArray
from roll.workers.rank_group import GroupWorker
from roll.workers.residency_gate import ResidencyGate

if TYPE_CHECKING:  # processes that only call it do not import torch
    from roll.strategy.offload import Residency
    from roll.strategy.train.base import RewardStrategy
    from roll.strategy.train.sharded.process_group import RankGroup
    from roll.workers.rank_commands import RankCommands

_log = logging.getLogger(__name__)

_APART_S = 5.0
"""Delay before a failed rank exits, so that the controller can detect the death of another rank first, if that was the
cause."""


class RewardModelWorker(GroupWorker):
    def __init__(self, place: WorkerPlacement, config: Config) -> None:
        self._config = config
        self._strategy: RewardStrategy | None = None
        self._residency_gate = ResidencyGate()
        self._waiting: list[tuple[IntArray, asyncio.Future[float | None]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._apart = False
        """Whether the ranks have lost synchronization."""
        self._orders: RankCommands | None = None
        self._following: asyncio.Task[None] | None = None
        self._holds: asyncio.Queue[None] = asyncio.Queue()
        """One entry per `set_residency` command that this rank has executed."""
        super().__init__(place, config.deterministic)

    def build(self, group: RankGroup | None) -> None:
        from roll.strategy.train.factory import make_scorer

        self._strategy, self._tokenizer, self._longest = make_scorer(self._config, self.placement, group)
        if group is None:
            return
        from roll.workers.rank_commands import RankCommands

        assert self.rendezvous is not None
        self._orders = RankCommands(self.rendezvous, group.ranks - 1)
        if not self.is_first:
            self._following = asyncio.get_running_loop().create_task(self._follow(self._orders))

    @property
    def strategy(self) -> RewardStrategy:
        """The Parallel Strategy of this rank's part of the model; available once the ranks have joined their group."""
        assert self._strategy is not None, "the ranks of a role meet before they compute"
        return self._strategy

    @dispatch(Dispatch.ONE, raises=(ValueError,))
    async def score(self, messages: Sequence[Message]) -> float | None:
        """The score of a conversation; None while this worker is offloaded: ask again. Raises `ValueError` if it cannot
        be scored."""
        ids = self._tokens(messages)
        if not await self._residency_gate.come():
            return None
        answer: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, answer))
        if not self._apart and (self._scoring is None or self._scoring.done()):
            self._scoring = asyncio.create_task(self._score_all())
        # waits: the caller has a deadline
        return await answer

    @dispatch(Dispatch.ALL)
    async def set_residency(self, level: Residency) -> None:
        """Sets the residency level: keeps that much on the device and offloads the rest to host memory. Below `all` the
        worker scores nothing."""
        if not self.is_first:
            # waits: for rank 0, which is called too; a call has a deadline
            await self._holds.get()
            return
        if level != "all":
            self._residency_gate.end()
            for _, answer in self._taken():
                if not answer.done():
                    answer.set_result(None)
        if self._orders is not None:
            self._orders.give(level)
        self.strategy.set_residency(level)
        if level == "all":
            self._residency_gate.begin()

    async def _follow(self, orders: RankCommands) -> None:
        """Executes the commands of rank 0: scores conversations, or sets a residency level."""
        while True:
            # waits: for as long as rank 0 lives, and this process with it
            order = await orders.next()
            if isinstance(order, str):
                self.strategy.set_residency(cast("Residency", order))
                self._holds.put_nowait(None)
                continue
            try:
                self.strategy.scores(order)
            except UserError:  # rank 0 gets the same error and raises it to the caller
                _log.exception("scores with the other ranks")
            except Exception as error:
                self._end_apart(error)
                return

    async def close(self) -> None:
        for task in (self._scoring, self._following):
            if task is not None:
                task.cancel()
        if self._strategy is not None:
            self._strategy.close()

    def _tokens(self, messages: Sequence[Message]) -> IntArray:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        except TemplateError as error:
            raise ValueError(f"the reward model's chat template refused the conversation: {error}") from None
        ids = np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        if not 1 < len(ids) <= self._longest:
            raise ValueError(f"the conversation has {len(ids)} tokens, but the reward model takes 2 to {self._longest}")
        return ids

    async def _score_all(self) -> None:
        """Scores the waiting conversations, and those that arrive in the meantime."""
        await asyncio.sleep(0)  # calls of this iteration of the event loop join the first batch
        while self._waiting:
            some = self._taken()
            try:
                if self._orders is not None:
                    self._orders.give([ids for ids, _ in some])
                scores = self.strategy.scores([ids for ids, _ in some])
            except Exception as error:
                for _, answer in some:
                    if not answer.done():
                        answer.set_exception(error)
                if self._orders is not None and self._orders.followers and not isinstance(error, UserError):
                    self._end_apart(error)
                    return
                continue
            for (_, answer), score in zip(some, scores.tolist(), strict=True):
                if not answer.done():
                    answer.set_result(score)
            await asyncio.sleep(0)

    def _end_apart(self, error: Exception) -> None:
        """Exits this process after `_APART_S`: if one rank alone fails, for example in an allocation, the others wait for
        it in a collective that the next scores would be mixed up with. The supervisor then restarts the group."""
        self._apart = True
        _log.error("this rank ends, because the others may wait for it", exc_info=error)
        asyncio.get_running_loop().call_later(_APART_S, os._exit, 1)

    def _taken(self) -> list[tuple[IntArray, asyncio.Future[float | None]]]:
        some, self._waiting = self._waiting, []
        return some
