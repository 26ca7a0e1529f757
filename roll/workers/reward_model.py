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

_EXIT_DELAY_S = 5.0
"""Delay before a failed rank exits, so that the controller can detect the death of another rank first, if that was the
cause."""


class RewardModelWorker(GroupWorker):
    def __init__(self, placement: WorkerPlacement, config: Config) -> None:
        self._config = config
        self._strategy: RewardStrategy | None = None
        self._residency_gate = ResidencyGate()
        self._waiting: list[tuple[IntArray, asyncio.Future[float | None]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._desynchronized = False
        """Whether the ranks have lost synchronization."""
        self._commands: RankCommands | None = None
        self._following: asyncio.Task[None] | None = None
        self._residency_changes: asyncio.Queue[None] = asyncio.Queue()
        """One entry per `set_residency` command that this rank has executed."""
        super().__init__(placement, config.deterministic)

    def build(self, group: RankGroup | None) -> None:
        from roll.strategy.registry import trainer_of

        backend = trainer_of(self._config, self.placement)
        self._strategy, self._tokenizer, self._max_tokens = backend.scorer(self._config, self.placement, group)
        if group is None:
            return
        from roll.workers.rank_commands import RankCommands

        assert self.rendezvous is not None
        self._commands = RankCommands(self.rendezvous, group.ranks - 1)
        if not self.is_first:
            self._following = asyncio.get_running_loop().create_task(self._follow(self._commands))

    @property
    def strategy(self) -> RewardStrategy:
        """The Parallel Strategy of this rank's part of the model; available once the ranks have joined their group."""
        assert self._strategy is not None, "the ranks of a role join their process group before they compute"
        return self._strategy

    @dispatch(Dispatch.ONE, raises=(ValueError,))
    async def score(self, messages: Sequence[Message]) -> float | None:
        """The score of a conversation; None while this worker is offloaded: ask again. Raises `ValueError` if it cannot
        be scored."""
        ids = self._tokens(messages)
        if not await self._residency_gate.wait_resident():
            return None
        answer: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, answer))
        if not self._desynchronized and (self._scoring is None or self._scoring.done()):
            self._scoring = asyncio.create_task(self._score_all())
        # waits: the caller has a deadline
        return await answer

    @dispatch(Dispatch.ALL)
    async def set_residency(self, level: Residency) -> None:
        """Sets the residency level: keeps that much on the device and offloads the rest to host memory. Below `all` the
        worker scores nothing."""
        if not self.is_first:
            # waits: for rank 0, which is called too; a call has a deadline
            await self._residency_changes.get()
            return
        if level != "all":
            self._residency_gate.close()
            for _, answer in self._take_waiting():
                if not answer.done():
                    answer.set_result(None)
        if self._commands is not None:
            self._commands.send(level)
        self.strategy.set_residency(level)
        if level == "all":
            self._residency_gate.open()

    async def _follow(self, commands: RankCommands) -> None:
        """Executes the commands of rank 0: scores conversations, or sets a residency level."""
        while True:
            # waits: for as long as rank 0 lives, and this process with it
            command = await commands.next()
            if isinstance(command, str):
                self.strategy.set_residency(cast("Residency", command))
                self._residency_changes.put_nowait(None)
                continue
            try:
                self.strategy.scores(command)
            except UserError:  # rank 0 gets the same error and raises it to the caller
                _log.exception("scores with the other ranks")
            except Exception as error:
                self._exit_desynchronized(error)
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
        if not 1 < len(ids) <= self._max_tokens:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, but the reward model takes 2 to {self._max_tokens}"
            )
        return ids

    async def _score_all(self) -> None:
        """Scores the waiting conversations, and those that arrive in the meantime."""
        await asyncio.sleep(0)  # calls of this iteration of the event loop join the first batch
        while self._waiting:
            batch = self._take_waiting()
            try:
                if self._commands is not None:
                    self._commands.send([ids for ids, _ in batch])
                scores = self.strategy.scores([ids for ids, _ in batch])
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                if self._commands is not None and self._commands.followers and not isinstance(error, UserError):
                    self._exit_desynchronized(error)
                    return
                continue
            for (_, answer), score in zip(batch, scores.tolist(), strict=True):
                if not answer.done():
                    answer.set_result(score)
            await asyncio.sleep(0)

    def _exit_desynchronized(self, error: Exception) -> None:
        """Exits this process after `_EXIT_DELAY_S`. If one rank alone fails, for example in an allocation, the others
        wait for it in a collective, which the next scores would be mixed up with. The supervisor restarts all ranks."""
        self._desynchronized = True
        _log.error("this rank ends, because the others may wait for it", exc_info=error)
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)

    def _take_waiting(self) -> list[tuple[IntArray, asyncio.Future[float | None]]]:
        batch, self._waiting = self._waiting, []
        return batch
