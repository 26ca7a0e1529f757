"""The SFT dataset: all conversations of a run as two batches of token logs, one to train on and one held out.

Invariants: the loss mask is exactly the assistants' answers to be learned, with the tokens that end their turns; the
samples of a step depend only on the seed and the step, and every epoch has each sample once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import TemplateError

from roll.config.errors import UserError
from roll.config.schema import DataConfig
from roll.data.batch import Batch
from roll.data.chat import Chat
from roll.data.chat_sources import ChatSet
from roll.data.remote_columns import Indices
from roll.data.sample import Sample
from roll.data.task import Task
from roll.data.tokenlog import TokenLog
from roll.model.chat import ChatRenderer, NotTrainable


@dataclass(frozen=True)
class SkippedExample:
    """A conversation that is not trained on, and why."""

    chat: str
    reason: str


@dataclass(frozen=True)
class SFTDataset:
    train: Batch
    held_out: Batch | None
    skipped: tuple[SkippedExample, ...] = ()

    @property
    def longest_tokens(self) -> int:
        batches = [batch for batch in (self.train, self.held_out) if batch is not None]
        return max(int(batch.lengths.max()) for batch in batches)

    def digest(self) -> str:
        """A hash that identifies the training samples."""
        parts = (self.train.offsets, self.train.ids, self.train.loss_mask)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def make_dataset(chats: ChatSet, renderer: ChatRenderer, config: DataConfig, context: int) -> SFTDataset:
    """Tokenises all conversations; `context` is the longest sequence that the model takes."""
    limit = min(config.max_tokens or context, context)
    train, skipped = _batch(chats.train, renderer, config, limit)
    held_out, _ = _batch(chats.held_out, renderer, config, limit)
    if train is None:
        raise UserError(
            f"data: none of the {len(chats.train)} conversations of {config.source!r} has {limit} tokens or fewer: "
            "write a larger data.max_tokens, or data.too_long=cut"
        )
    return SFTDataset(train, held_out, tuple(skipped))


def _batch(
    chats: Sequence[Chat], renderer: ChatRenderer, config: DataConfig, limit: int
) -> tuple[Batch | None, list[SkippedExample]]:
    """The samples of some chats (None if there are none), and the chats that were skipped."""
    samples: list[Sample] = []
    skipped: list[SkippedExample] = []
    for chat in chats:
        task = Task(chat.id, chat.messages)
        for log in _logs(chat, renderer):
            fitted = _fitted(chat, log, limit, config)
            if fitted is None:
                skipped.append(SkippedExample(chat.id, f"too long: {len(log)} tokens"))
            else:
                samples.append(Sample(f"{len(samples)}.0", task, len(samples), temperature=1.0, log=fitted))
    if not samples:
        return None, skipped
    return Batch.from_samples(samples).with_columns(advantage=np.ones(len(samples))), skipped


def _logs(chat: Chat, renderer: ChatRenderer) -> list[TokenLog]:
    if chat.log is not None:
        unknown = [int(token) for token in chat.log.ids if token >= len(renderer.tokenizer)]
        if unknown:
            raise UserError(
                f"data: conversation {chat.id!r} has the token {unknown[0]}, but the model has tokens 0 to "
                f"{len(renderer.tokenizer) - 1}: write a model with the tokenizer that made it"
            )
        return [chat.log]
    try:
        logs = renderer.demonstrations(chat.messages, chat.tools)
        return [_last_answer(logs[-1])] if chat.learn == "last" else logs
    except NotTrainable as error:
        raise UserError(f"data: {error}: write model.chat_template=FILE with a Jinja template that does") from error
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"data: the chat template cannot render conversation {chat.id!r} ({type(error).__name__}: {error}): change "
            "its messages, or write model.chat_template=FILE with a Jinja template that takes them"
        ) from error


def _last_answer(log: TokenLog) -> TokenLog:
    """The log with only the last response as a response."""
    return TokenLog.from_loss_mask(log.ids, log.loss_mask & (log.turn == log.turn.max()))


def _fitted(chat: Chat, log: TokenLog, limit: int, config: DataConfig) -> TokenLog | None:
    """The log, or the part of a too long one that is trained on; None if there is nothing to train on."""
    if len(log) <= limit:
        return log
    if config.too_long == "refuse":
        raise UserError(
            f"data: conversation {chat.id!r} has {len(log)} tokens, more than the {limit} that fit: write "
            "data.too_long=drop to leave out such conversations, or data.too_long=cut to cut off their ends"
        )
    shortened = TokenLog.from_loss_mask(log.ids[:limit], log.loss_mask[:limit])
    return shortened if config.too_long == "cut" and shortened.response_tokens else None


@dataclass(frozen=True)
class EpochPermutation:
    """Which samples make which step: epoch after epoch, each with a new permutation.

    Example: 5 samples, 2 per step, 2 epochs: 5 steps, the third with the last sample of the first epoch and the first of
    the second.
    """

    samples: int
    samples_per_step: int
    total: int
    """Samples of the whole run."""
    seed: int

    @classmethod
    def of(cls, samples: int, config: DataConfig, steps: int, seed: int) -> EpochPermutation:
        """The total number of samples comes from `data.epochs`, or else from `steps`."""
        each = config.samples_per_step
        total = max(round(config.epochs * samples), 1) if config.epochs else steps * each
        return cls(samples, each, total, seed)

    @property
    def steps(self) -> int:
        return -(-self.total // self.samples_per_step)

    @property
    def epochs(self) -> float:
        return self.total / self.samples

    def step(self, step: int) -> Indices:
        """The samples of a step, counted from 0."""
        first, last = step * self.samples_per_step, min((step + 1) * self.samples_per_step, self.total)
        positions = np.arange(first, last)
        shuffled = {epoch: self._epoch(epoch) for epoch in np.unique(positions // self.samples).tolist()}
        picked = [shuffled[p // self.samples][p % self.samples] for p in positions.tolist()]
        return np.array(picked, np.int64)

    def _epoch(self, epoch: int) -> Indices:
        return np.random.default_rng([self.seed, epoch]).permutation(self.samples)
