"""Supervised fine-tuning: the whole dataflow on one page.

next samples → update → record
"""

from __future__ import annotations

import time
from pathlib import Path

from roll.algorithm import LossSpec
from roll.config.schema import Config
from roll.model.sft_dataset import EpochPermutation, SFTDataset
from roll.pipeline.nan_guard import NanGuard
from roll.pipeline.recorder import Recorder
from roll.pipeline.roles import TrainRoles
from roll.pipeline.sft_eval import measure
from roll.pipeline.sft_metrics import SFTMetrics
from roll.pipeline.state import SFTState
from roll.workers.train import TrainWorker

LOSS = LossSpec("nll")


class SFT:
    """The SFT loop. Invariants: the epoch permutation alone decides which samples a step has, also after a resume;
    `state` holds everything a checkpoint needs besides the weights to resume."""

    def __init__(
        self,
        config: Config,
        roles: TrainRoles,
        corpus: SFTDataset,
        permutation: EpochPermutation,
        recorder: Recorder,
        state: SFTState,
    ) -> None:
        self._config = config
        self._roles = roles
        self._corpus = corpus
        self._permutation = permutation
        self._recorder = recorder
        self._metrics = SFTMetrics(roles, permutation, recorder)
        self._nan_guard = NanGuard(recorder.reporter, config.train.max_skipped_in_a_row)
        self.state = state

    async def run(self) -> SFTState:
        """Trains until the last step or until a stop is requested; then evaluates and saves."""
        config, state, recorder = self._config, self.state, self._recorder
        if state.evaluated_step < 0:
            self._metrics.left_out(self._corpus.skipped)
            await self._evaluate()
        while state.step < self._permutation.steps and not recorder.stop_requested:
            await self._step()
            last = state.step == self._permutation.steps
            if config.eval.every and state.step % config.eval.every == 0 and not last:
                await self._evaluate()
            if config.run.checkpoint_every and state.step % config.run.checkpoint_every == 0 and not last:
                await self._save()
        if not recorder.stop_requested and state.evaluated_step != state.step:
            await self._evaluate()
        await self._save()
        return state

    async def _step(self) -> None:
        state, started = self.state, time.monotonic()
        batch = self._corpus.train.select(self._permutation.step(state.step))
        with self._recorder.span("train"):
            stats = await self._roles.actor.call(TrainWorker.update, batch, LOSS, state.step)
        state.step += 1
        await self._metrics.step(state, batch, stats, time.monotonic() - started)
        self._nan_guard.check(state.step, stats)

    async def _evaluate(self) -> None:
        state = self.state
        state.evaluated_step = state.step
        if self._corpus.held_out is None:
            return
        self._recorder.reporter.phase("evaluating held-out samples")
        with self._recorder.span("evaluate"):
            evaluation = await measure(self._roles, self._corpus.held_out, self._config.eval.samples)
        state.seconds += self._recorder.lap()  # this time belongs to no step
        state.loss = evaluation.loss
        state.loss_before = evaluation.loss if state.loss_before is None else state.loss_before
        self._metrics.evaluated(state.step, evaluation)

    async def _save(self) -> None:
        with self._recorder.span("checkpoint"):
            written = self._roles.saved if self._roles.saves_in_background else None
            await self._recorder.save(self.state, self._write, written)

    async def _write(self, folder: Path) -> None:
        await self._roles.save(folder)
