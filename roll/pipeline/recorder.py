"""The recorder: writes everything a run leaves on disk.

Invariants: the ledger is flushed before anything that depends on it (a checkpoint, the metrics of a step) is written; the
reporter gets a step after it is on disk.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.config import dump_config
from roll.config.schema import Config
from roll.config.secrets import KNOWN
from roll.pipeline.eta import seconds_left
from roll.pipeline.report import HeldOutResult, Reporter, StepReport
from roll.pipeline.resume import Change
from roll.pipeline.state import State
from roll.run import (
    Checkpoint,
    Checkpoints,
    Ledger,
    Metrics,
    Panel,
    RunFolder,
    Transition,
    drop_samples_after,
    drop_samples_before,
    plot_curve,
)
from roll.run.checkpoint import SCORE, Saving
from roll.run.code import Recording, RunCode, reward_of
from roll.run.disk import ClosingOnFullDisk
from roll.run.history import History
from roll.run.samples import check_samples
from roll.run.state_latency import StateClock
from roll.run.trace import MAX_BYTES, Trace
from roll.run.trackers import Trackers, find_trackers
from roll.strategy.train.base import UpdateStats

_SHOW_S = 0.5
"""Minimum interval between updates of the state table on the display."""


class Recorder:
    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        ledger: Ledger,
        metrics: Metrics,
        reporter: Reporter,
        trace: Trace | None = None,
    ) -> None:
        self.folder = folder
        self.ledger = ledger
        self.clock = StateClock()
        self.begun = False
        """Whether all roles of the run have been started."""
        self.steps = 0
        """Steps recorded by this process."""
        self.age: dict[str, Any] = {}
        """Staleness of the last batch, for the display."""
        self.reporter = reporter
        self.stop_signal: signal.Signals | None = None
        """The latest signal that requested an early stop."""
        self._trace = trace
        self._shown_s = 0.0
        self._config = config
        self._metrics = metrics
        self._history = History(folder)
        keep = config.run.keep
        self._checkpoints = Checkpoints(folder, keep.checkpoints, keep.checkpoints_every, keep.best)
        self._saving: asyncio.Task[None] | None = None
        """A checkpoint that is being written in the background."""
        self._score: tuple[int, float] | None = None
        """The step of the last evaluation on held-out data, and its score: higher is better."""
        self._clock = time.monotonic()
        self._recent: deque[float] = deque(maxlen=3)
        """Seconds of the latest steps; early steps do not predict later ones."""
        self._took_s: dict[str, float] = {}
        """Seconds that the controller's last span of each name took (evaluate, checkpoint …)."""

    @classmethod
    @contextmanager
    def open(cls, config: Config, folder: RunFolder, reporter: Reporter) -> Iterator[Recorder]:
        with ExitStack() as stack:
            ledger = Ledger.open(folder.ledger_path)
            stack.enter_context(ClosingOnFullDisk(ledger))
            metrics = Metrics(folder, _trackers(config, folder, reporter.warned))
            stack.enter_context(ClosingOnFullDisk(metrics))
            trace = _open_trace(config, folder) if config.run.trace else None
            recorder = cls(config, folder, ledger, metrics, reporter, trace)
            stack.enter_context(ClosingOnFullDisk(recorder))
            yield recorder

    def close(self) -> None:
        """Ends the trace. The context manager in `open` closes the ledger and the metrics."""
        if self._saving is not None and self._saving.done() and not self._saving.cancelled():
            self._saving.exception()  # the run ends with another error that this one accompanies
        if self._trace is not None:
            self._trace.close()

    @property
    def stop_requested(self) -> bool:
        """Whether the run should end after this step."""
        return self.stop_signal is not None

    def append(self, transition: Transition) -> None:
        """Records a sample's transition in ledger, state clock and trace."""
        if KNOWN and any(KNOWN.within(str(value)) for value in (transition.reason, *transition.info.values())):
            info = KNOWN.cleared(transition.info)
            transition = replace(transition, reason=KNOWN.redact(transition.reason), info=info)
        self.ledger.append(transition)
        self.clock.append(transition)
        if self._trace is not None:
            self._trace.append(transition)
        now = time.monotonic()
        if now - self._shown_s >= _SHOW_S:
            self._shown_s = now
            self.reporter.sample_states(replace(self.clock.table(), **self.age))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the block as a span of the controller, for the trace and the estimate of the remaining time."""
        started = time.time()
        try:
            yield
        finally:
            self._took_s[name] = time.time() - started
            if self._trace is not None:
                self._trace.span(name, "controller", started, time.time())

    def begin(self) -> None:
        """Starts a new run: records left by a process that died before its first checkpoint are rolled back or
        deleted."""
        self.clock = StateClock()
        self.ledger.roll_back(0, 0)
        self._metrics.truncate_after(-1)
        drop_samples_after(self.folder, -1)
        self._history.add("began", 0)

    def resume(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Resumes from a checkpoint: rolls back later transitions in the ledger and deletes later metrics and samples.
        Returns the saved state. Refuses samples files that differ from what was written."""
        check_samples(self.folder, checkpoint.step)
        self.clock = StateClock()
        state = dict(checkpoint.state)
        self._took_s = {**state.pop("took_s", {}), **self._took_s}
        position, mark, _ = state.pop("ledger_position"), state.pop("ledger_mark", None), state.pop(SCORE, None)
        self.ledger.roll_back(position, checkpoint.step, mark)
        self._metrics.truncate_after(checkpoint.step)
        drop_samples_after(self.folder, checkpoint.step)
        self._history.add("resumed", checkpoint.step)
        return state

    def change(self, step: int, changes: Sequence[Change], config: Config) -> None:
        """Records changed settings of a resumed run in the history, reports them, and writes config.yaml again."""
        for change in changes:
            self._history.add("changed", step, key=change.key, before=change.before, after=change.after)
            self.reporter.warned(f"from step {step} on {change}")
        if changes:
            self.folder.write_config(dump_config(config))

    def change_code(self, step: int, code: Recording, config: Config) -> None:
        """Records that the resumed run uses other code; the former code is kept next to it."""
        code.replace(self.folder.path, step)
        self.folder.write_config(dump_config(config))
        self._history.add("changed", step, key="code", before=f"code/before_step_{step}", after="code")

    def evaluated(self, step: int, values: Mapping[str, float], result: HeldOutResult) -> None:
        self._metrics.log(step, values)
        self._score = step, -result.value if result.measure.endswith("loss") else result.value
        self.reporter.evaluated(step, result)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a finished step to disk. Raises the error of a failed background checkpoint: the run does
        not continue to the next one without it."""
        if self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            saving.result()
        self.steps += 1
        self.ledger.flush()
        if self._trace is not None:
            for name, value in values.items():
                if name.startswith("queue/") or name == "rollout/grader_backpressure_s":
                    self._trace.counter(name, time.time(), value)
            self._trace.flush()
        self._metrics.log(step, values)

    def report(
        self,
        step: int,
        measure: str,
        value: float,
        facts: Sequence[tuple[str, str]],
        metrics: Mapping[str, float],
        *,
        worked_s: float,
    ) -> None:
        """Reports a step that is on disk; `worked_s` is the expected duration of a step like it."""
        if keep := self._config.run.keep.samples:
            drop_samples_before(self.folder, step - keep + 1)
        self._recent.append(worked_s)
        config, steps = self._config, self._config.train.steps
        left_s = seconds_left(
            step,
            steps,
            step_s=sum(self._recent) / len(self._recent),
            evaluation_s=self._took_s.get("evaluate", 0.0),
            evaluate_every=config.eval.every,
            checkpoint_s=self._took_s.get("checkpoint", 0.0),
            checkpoint_every=config.run.checkpoint_every,
        )
        seconds = metrics["time/step_s"]
        self.reporter.stepped(StepReport(step, steps, seconds, left_s, measure, value, tuple(facts), metrics))

    async def save(
        self,
        state: State,
        write: Callable[[Path], Awaitable[None]],
        written: Callable[[], Awaitable[dict[str, str]]] | None = None,
    ) -> None:
        """Saves a checkpoint of the run as described by `state`, with the files that `write` puts into its folder. Later
        transitions do not belong to it.

        With `written`, the state is captured when this returns, but the checkpoint is complete later: once `written` has
        returned the digests of the files that background writers wrote. The previous save ends first; its error is raised
        here.
        """
        await self.settle()
        latest = self._checkpoints.latest()
        if latest is not None and latest.step == state.step:
            return
        self.reporter.phase("saving a checkpoint")
        mark = self.ledger.mark()
        self._metrics.settle()
        state.seconds += self.lap()
        ledger_state = {"ledger_position": self.ledger.position, "ledger_mark": mark}
        saved = {**state.to_dict(), **ledger_state, "took_s": self._took_s}
        if self._score is not None and self._score[0] == state.step:
            saved[SCORE] = self._score[1]
        saving = self._checkpoints.begin(state.step, saved)
        with saving.dropped_on_error():
            await write(saving.folder)
        self._saving = asyncio.create_task(self._finish(saving, written), name=f"checkpoint of step {state.step}")
        if written is None:
            await self.settle()

    async def _finish(self, saving: Saving, written: Callable[[], Awaitable[dict[str, str]]] | None) -> None:
        with saving.dropped_on_error():
            # waits: the workers' calls have deadlines
            digests = {} if written is None else await written()
            await asyncio.to_thread(saving.finish, digests)
        self._history.add("saved", saving.step)

    async def settle(self) -> None:
        """Waits until no checkpoint is being written; raises the error of a failed one."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            # waits: for calls with deadlines, and a thread that writes small files
            await saving

    async def cancel_save(self) -> None:
        """Drops a checkpoint that is being written: it is either complete when this returns, or never."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.cancel()
            # waits: it is cancelled
            await asyncio.wait([saving])
            if not saving.cancelled():
                saving.exception()

    def finish(self, state: State, panels: Sequence[Panel]) -> dict[str, Any]:
        """Writes the summary and plots the curve; returns the summary."""
        state.seconds += self.lap()
        if self._config.run.curve:
            plot_curve(Metrics.read(self.folder.metrics_path), self.folder.curve_path, self._config.model.path, panels)
        summary: dict[str, Any] = {
            "run": str(self.folder.path),
            "pipeline": self._config.pipeline,
            "model": self._config.model.path,
            "seed": self._config.seed,
            "reward": reward_of(self._config, RunCode.open(self.folder.path)),
            "steps": state.step,
            "steps_planned": self._config.train.steps,
            "stopped": self.stop_requested and state.step < self._config.train.steps,
            "stopped_by": self.stop_signal.name if self.stop_signal is not None else None,
            **state.summary(),
            "curve": str(self.folder.curve_path) if self._config.run.curve else None,
        }
        self.folder.write_summary(summary)
        return summary

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        seconds, self._clock = now - self._clock, now
        return seconds


def _trackers(config: Config, folder: RunFolder, warn: Callable[[str], None]) -> Trackers:
    return Trackers(folder, find_trackers(config.run, config.root), config.model_dump(mode="json"), warn)


def _open_trace(config: Config, folder: RunFolder) -> Trace:
    return Trace.open(folder, _trace_bytes(config), config.run.keep.trace_mb << 20)


def _trace_bytes(config: Config) -> int:
    """Size at which a trace file ends, so that several files fit into the configured limit."""
    return min(MAX_BYTES, max((config.run.keep.trace_mb << 20) // 4, 1 << 16)) if config.run.keep.trace_mb else MAX_BYTES


def update_metrics(stats: UpdateStats) -> dict[str, float]:
    values = {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/lr": stats.lr,
        "train/tokens": stats.tokens,
        "train/packed_tokens": stats.rows,
        "train/updates": stats.updates,
        "train/skipped": stats.skipped,
        "train/micro_batch_tokens": stats.micro_batch_tokens,
        "train/oom_retries": stats.oom_retries,
    }
    return values | {f"train/{name}": value for name, value in stats.metrics.items()}
