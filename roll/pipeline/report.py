"""What a run tells while it goes: events for a display, a log, or nobody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.rollout.evaluate import Evaluation
from roll.run.stages import StageTable


@dataclass(frozen=True)
class StepReport:
    """One finished training step."""

    step: int
    steps: int
    reward: float
    accuracy: float | None
    """Of the newest evaluation."""
    response_tokens: float
    tokens_per_s: float
    """Generated while generating."""
    seconds: float
    seconds_left: float
    groups_kept: int
    groups: int


class Reporter(Protocol):
    def started(self, run: Path, steps: int, first_step: int) -> None: ...

    def phase(self, text: str) -> None:
        """What the run is doing now."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...

    def stepped(self, report: StepReport) -> None: ...

    def stages(self, table: StageTable) -> None:
        """How the samples stand now; may be told at any time, as often as wanted."""
        ...

    def warned(self, text: str) -> None: ...

    def finished(self, summary: dict[str, Any]) -> None: ...


class PlainReporter:
    """One line an event: for logs, pipes and scripts."""

    def started(self, run: Path, steps: int, first_step: int) -> None:
        begin = f"from step {first_step} " if first_step else ""
        self._say(f"run {run}: {steps} steps {begin}")

    def phase(self, text: str) -> None:
        self._say(text)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._say(
            f"step {step}: held-out accuracy {evaluation.accuracy:.3f}, {evaluation.tokens_mean:.1f} tokens a response"
        )

    def stepped(self, report: StepReport) -> None:
        accuracy = "" if report.accuracy is None else f"  held-out {report.accuracy:.3f}"
        self._say(
            f"step {report.step}/{report.steps}  reward {report.reward:.3f}{accuracy}  "
            f"{report.response_tokens:.1f} tokens a response  {report.tokens_per_s:.0f} tok/s  "
            f"{report.groups_kept}/{report.groups} groups kept  {report.seconds:.1f} s  left {report.seconds_left:.0f} s"
        )

    def stages(self, table: StageTable) -> None:
        """Nothing: the lines are for steps."""

    def warned(self, text: str) -> None:
        self._say(f"warning: {text}")

    def finished(self, summary: dict[str, Any]) -> None:
        before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
        change = "" if before is None else f": held-out accuracy {before:.3f} -> {after:.3f}"
        self._say(f"finished {summary['steps']} steps in {summary['seconds']:.0f} s{change}")

    def _say(self, text: str) -> None:
        print(text, flush=True)


class SilentReporter(PlainReporter):
    def _say(self, text: str) -> None:
        pass
