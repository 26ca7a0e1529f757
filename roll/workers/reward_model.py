"""The reward model's role: scores conversations, those that wait together in the trainer's micro-batches.

Of a model over several ranks the first one is asked, and gives the others their orders.
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

if TYPE_CHECKING:  # those who only ask it do without torch
    from roll.strategy.offload import Level
    from roll.strategy.train.base import RewardStrategy
    from roll.strategy.train.sharded.process_group import RankGroup
    from roll.workers.rank_commands import RankCommands

_log = logging.getLogger(__name__)

_APART_S = 5.0
"""After a rank has failed, for the controller to notice that another one is lost, if that is why."""


class RewardModelWorker(GroupWorker):
    def __init__(self, place: WorkerPlacement, config: Config) -> None:
        self._config = config
        self._strategy: RewardStrategy | None = None
        self._turn = ResidencyGate()
        self._waiting: list[tuple[IntArray, asyncio.Future[float | None]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._apart = False
        """Whether the ranks are no longer in step."""
        self._orders: RankCommands | None = None
        self._following: asyncio.Task[None] | None = None
        self._holds: asyncio.Queue[None] = asyncio.Queue()
        """One entry per order to hold that this rank has carried out."""
        super().__init__(place, config.deterministic)

    def build(self, group: RankGroup | None) -> None:
        from roll.strategy.train.factory import make_scorer

        self._strategy, self._tokenizer, self._longest = make_scorer(self._config, self.place, group)
        if group is None:
            return
        from roll.workers.rank_commands import RankCommands

        assert self.rendezvous is not None
        self._orders = RankCommands(self.rendezvous, group.ranks - 1)
        if not self.is_first:
            self._following = asyncio.get_running_loop().create_task(self._follow(self._orders))

    @property
    def strategy(self) -> RewardStrategy:
        """What computes with this rank's share of the model: there once the ranks have met."""
        assert self._strategy is not None, "the ranks of a role meet before they compute"
        return self._strategy

    @dispatch(Dispatch.ONE, raises=(ValueError,))
    async def score(self, messages: Sequence[Message]) -> float | None:
        """The score of a conversation; None while it is not this worker's turn. `ValueError` if it can have none."""
        ids = self._tokens(messages)
        if not await self._turn.come():
            return None
        answer: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, answer))
        if not self._apart and (self._scoring is None or self._scoring.done()):
            self._scoring = asyncio.create_task(self._score_all())
        # waits: who asks has a deadline
        return await answer

    @dispatch(Dispatch.ALL)
    async def hold(self, level: Level) -> None:
        """Keeps so much on the device and lays the rest aside in host memory; below `all` nothing is scored."""
        if not self.is_first:
            # waits: for the first rank, which is called too; a call has a deadline
            await self._holds.get()
            return
        if level != "all":
            self._turn.end()
            for _, answer in self._taken():
                if not answer.done():
                    answer.set_result(None)
        if self._orders is not None:
            self._orders.give(level)
        self.strategy.hold(level)
        if level == "all":
            self._turn.begin()

    async def _follow(self, orders: RankCommands) -> None:
        """Does what the first rank does: scores conversations, or holds a level."""
        while True:
            # waits: for as long as the first rank lives, and this process with it
            order = await orders.next()
            if isinstance(order, str):
                self.strategy.hold(cast("Level", order))
                self._holds.put_nowait(None)
                continue
            try:
                self.strategy.scores(order)
            except UserError:  # the first rank has it too, and says it to whoever asked
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
        """Scores what waits, and what comes meanwhile."""
        await asyncio.sleep(0)  # what is asked in this turn of the loop goes along
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
        """Ends this process soon: what one rank alone failed in, such as an allocation, leaves the others waiting for it
        in messages that the next scores would mix with. The group is then lost, and is restarted."""
        self._apart = True
        _log.error("this rank ends, because the others may wait for it", exc_info=error)
        asyncio.get_running_loop().call_later(_APART_S, os._exit, 1)

    def _taken(self) -> list[tuple[IntArray, asyncio.Future[float | None]]]:
        some, self._waiting = self._waiting, []
        return some
