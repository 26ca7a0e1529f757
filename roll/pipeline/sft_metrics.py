"""The records of an SFT step: its samples in the ledger, its metrics, and a report."""

from __future__ import annotations

from collections.abc import Sequence

from roll.data.batch import Batch
from roll.model.sft_dataset import EpochPermutation, SkippedExample
from roll.pipeline.recorder import Recorder, update_metrics
from roll.pipeline.report import HeldOutResult
from roll.pipeline.roles import TrainRoles
from roll.pipeline.sft_eval import SFTEval
from roll.pipeline.state import SFTState
from roll.run import Panel, Transition
from roll.scheduler.rollout_result import NOT_FINITE
from roll.strategy.train.base import UpdateStats

PANELS = (
    Panel("loss (nats per token)", "train/loss", "training", {"eval/loss": "held out"}),
    Panel("mean probability of a held-out token", dots={"eval/token_probability": ""}),
)
SAMPLING_METRICS = ("train/rollout_", "train/is_")
"""Metrics that compare the trainer with the sampler; in SFT the tokens were not sampled."""


class SFTMetrics:
    def __init__(self, roles: TrainRoles, permutation: EpochPermutation, recorder: Recorder) -> None:
        self._roles = roles
        self._permutation = permutation
        self._recorder = recorder

    def left_out(self, examples: Sequence[SkippedExample]) -> None:
        """Records conversations that are not trained on in the ledger."""
        for number, example in enumerate(examples):
            self._record_sample(f"left-out-{number}.0", example.chat, "dropped", example.reason)

    def _record_sample(self, sample: str, chat: str, end: str, reason: str = "", **info: int) -> None:
        """Records a sample's two transitions: queued, then its end."""
        self._recorder.ledger.append(Transition(sample, "queued", info={"task": chat}))
        self._recorder.ledger.append(Transition(sample, end, reason, info=info))

    def evaluated(self, step: int, evaluation: SFTEval) -> None:
        values = {
            "eval/loss": evaluation.loss,
            "eval/perplexity": evaluation.perplexity,
            "eval/token_probability": evaluation.token_probability,
        }
        detail = f"a token's probability {evaluation.token_probability:.3f}"
        self._recorder.evaluated(step, values, HeldOutResult("held-out loss", evaluation.loss, detail))

    async def step(self, state: SFTState, batch: Batch, stats: UpdateStats, training_s: float) -> None:
        """Writes a finished step to disk and reports it. `state.step` already includes it."""
        recorder, first = self._recorder, (state.step - 1) * self._permutation.samples_per_step
        seconds = recorder.lap()
        end = ("dropped", NOT_FINITE) if stats.skipped else ("trained", "")  # a step is one update
        for position, task in enumerate(batch["task"].tolist(), first):
            self._record_sample(f"{position}.0", task, *end, step=state.step)
        learned = 0 if stats.skipped else int(batch.loss_mask.sum())
        state.seconds += seconds
        state.seconds_training += training_s
        state.trained_samples += 0 if stats.skipped else len(batch)
        state.trained_tokens += learned
        epoch = (first + len(batch)) / self._permutation.samples
        values = {name: value for name, value in update_metrics(stats).items() if not name.startswith(SAMPLING_METRICS)}
        values |= {"train/epoch": epoch, "train/learned_tokens": learned}
        values |= {"time/step_s": seconds, "time/train_s": training_s}
        values["time/tokens_per_s"] = stats.tokens / max(training_s, 1e-9)
        values |= await self._roles.peak_memory()
        recorder.log(state.step, values)
        facts = [
            ("tokens", f"{stats.tokens} in {len(batch)} samples, {learned} trained on"),
            ("speed", f"{values['time/tokens_per_s']:.0f} tokens/s"),
            ("epoch", f"{epoch:.2f} of {self._permutation.epochs:.3g}"),
        ]
        recorder.report(state.step, "loss", stats.loss, facts, values, worked_s=training_s)
