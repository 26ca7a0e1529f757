"""What a run tells while it goes: events for a display, a log, or nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from roll.run.stages import StageTable


@dataclass(frozen=True)
class StepReport:
    """One finished training step."""

    step: int
    steps: int
    seconds: float
    seconds_left: float
    measure: str
    """What says how well it learns: `reward`, `loss`."""
    value: float
    facts: tuple[tuple[str, str], ...] = ()
    """What else is worth a look: names and values in words."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All numbers of the step, as in metrics.jsonl."""


@dataclass(frozen=True)
class Measured:
    """What was measured on held-out data."""

    measure: str
    value: float
    detail: str = ""


class Reporter(Protocol):
    def started(self, run: Path, steps: int, first_step: int) -> None: ...

    def phase(self, text: str) -> None:
        """What the run is doing now."""
        ...

    def evaluated(self, step: int, measured: Measured) -> None: ...

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

    def evaluated(self, step: int, measured: Measured) -> None:
        detail = f", {measured.detail}" if measured.detail else ""
        self._say(f"step {step}: {measured.measure} {measured.value:.3f}{detail}")

    def stepped(self, report: StepReport) -> None:
        facts = "".join(f"  {name} {value}" for name, value in report.facts)
        self._say(
            f"step {report.step}/{report.steps}  {report.measure} {report.value:.3f}{facts}  "
            f"{report.seconds:.1f} s  left {report.seconds_left:.0f} s"
        )

    def stages(self, table: StageTable) -> None:
        """Nothing: the lines are for steps."""

    def warned(self, text: str) -> None:
        self._say(f"warning: {text}")

    def finished(self, summary: dict[str, Any]) -> None:
        changes = "".join(f": {name.strip()} {before:.3f} -> {after:.3f}" for name, before, after in changes_in(summary))
        self._say(f"finished {summary['steps']} steps in {summary['seconds']:.0f} s{changes}")

    def _say(self, text: str) -> None:
        print(text, flush=True)


class SilentReporter(PlainReporter):
    def _say(self, text: str) -> None:
        pass


def changes_in(summary: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """What was measured on held-out data before and after: names and both values."""
    episodes = "turns" in summary.get("parts_after", {})
    pairs = []
    for measure in MEASURES:
        name = "held-out reward" if episodes else f"held-out {measure}"
        pairs.append((name, summary.get(f"{measure}_before"), summary.get(f"{measure}_after")))
    for each in ("domains", "parts") if episodes else ("domains",):
        before = summary.get(f"{each}_before", {})
        pairs += [(f"  {name}", before.get(name), after) for name, after in summary.get(f"{each}_after", {}).items()]
    return [(name, before, after) for name, before, after in pairs if before is not None and after is not None]


MEASURES = ("accuracy", "loss")
