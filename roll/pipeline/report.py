"""The events that a run reports while it runs: for a display, a log, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from roll.config.evaluation import HELD_OUT
from roll.pipeline.output import print_line
from roll.run.state_latency import StateTable


@dataclass(frozen=True)
class StepReport:
    """One finished training step."""

    step: int
    steps: int
    seconds: float
    seconds_left: float
    measure: str
    """The name of the learning measure: `reward` or `loss`."""
    value: float
    facts: tuple[tuple[str, str], ...] = ()
    """Further facts to show, as pairs of name and text."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics of the step, as in metrics.jsonl."""


@dataclass(frozen=True)
class HeldOutResult:
    """The result of an evaluation on held-out data."""

    measure: str
    value: float
    detail: str = ""


class Reporter(Protocol):
    def started(self, run: Path, steps: int, first_step: int) -> None: ...

    def phase(self, text: str) -> None:
        """What the run is doing now."""
        ...

    def evaluated(self, step: int, result: HeldOutResult) -> None: ...

    def stepped(self, report: StepReport) -> None: ...

    def sample_states(self, table: StateTable) -> None:
        """The samples' current states; may be called at any time and any number of times."""
        ...

    def warned(self, text: str) -> None: ...

    def finished(self, summary: dict[str, Any]) -> None: ...


class PlainReporter:
    """Prints one line per event: for logs, pipes and scripts."""

    def started(self, run: Path, steps: int, first_step: int) -> None:
        begin = f"from step {first_step} " if first_step else ""
        self._print(f"run {run}: {steps} steps {begin}")

    def phase(self, text: str) -> None:
        self._print(text)

    def evaluated(self, step: int, result: HeldOutResult) -> None:
        detail = f", {result.detail}" if result.detail else ""
        self._print(f"step {step}: {result.measure} {result.value:.3f}{detail}")

    def stepped(self, report: StepReport) -> None:
        facts = "".join(f"  {name} {value}" for name, value in report.facts)
        self._print(
            f"step {report.step}/{report.steps}  {report.measure} {report.value:.3f}{facts}  "
            f"{report.seconds:.1f} s  left {report.seconds_left:.0f} s"
        )

    def sample_states(self, table: StateTable) -> None:
        """Prints nothing: the lines are for steps."""

    def warned(self, text: str) -> None:
        self._print(f"warning: {text}")

    def finished(self, summary: dict[str, Any]) -> None:
        how = (
            f"stopped after step {summary['steps']} of {summary['steps_planned']}"
            if summary.get("stopped")
            else (f"finished {summary['steps']} steps")
        )
        lines = "".join(f": {line.strip()}" for line in held_out_lines(summary, "->"))
        self._print(f"{how} in {summary['seconds']:.0f} s{lines}")

    def _print(self, text: str) -> None:
        print_line(text)


class SilentReporter(PlainReporter):
    def _print(self, text: str) -> None:
        pass


def held_out_lines(summary: Mapping[str, Any], arrow: str = "→") -> list[str]:
    """One line per held-out measure: before and after training, or, if there was no evaluation after the last step, the
    latest one and its step."""
    lines = []
    for measure in MEASURES:
        before, after = summary.get(f"{measure}_before"), summary.get(f"{measure}_after")
        name = f"held-out {summary.get('measure', measure) if measure == 'reward' else measure}"
        if before is None:
            continue
        if after is None:
            last, step = summary[f"{measure}_last"], summary[f"{measure}_last_step"]
            since = "" if step == summary[f"{measure}_before_step"] else f"{before:.3f} {arrow} "
            lines.append(f"{name} {since}{last:.3f} at step {step}, not measured after step {summary['steps']}")
        elif measure == "reward" and _sets_changed(summary):
            lines.append(f"{name} {after:.3f}; before training other sets were evaluated")
        else:
            lines.append(f"{name} {before:.3f} {arrow} {after:.3f}")
    episodes = "turns" in summary.get("parts_after", {})
    lines += _set_lines(summary, arrow)
    for each in ("domains", "parts") if episodes else ("domains",):
        was = summary.get(f"{each}_before", {})
        both = {name: (was[name], now) for name, now in summary.get(f"{each}_after", {}).items() if name in was}
        lines += [f"  {name} {before:.3f} {arrow} {after:.3f}" for name, (before, after) in both.items()]
    return lines


def _sets_changed(summary: Mapping[str, Any]) -> bool:
    before, after = (set(summary.get(f"sets_{when}", ())) for when in ("before", "after"))
    return before != after


def _set_lines(summary: Mapping[str, Any], arrow: str) -> list[str]:
    """Each set's results before and after training; for the run's own held-out tasks only those not printed elsewhere."""
    lines = []
    for name, after in summary.get("sets_after", {}).items():
        before, own = summary["sets_before"].get(name, {}), name == HELD_OUT
        named = {"reward": summary["measures"][name]}
        changes = [
            f"{named.get(of, of)} {before[of]:.3f} {arrow} {now:.3f}"
            for of, now in after.items()
            if of in before and not of.endswith(("_low", "_high")) and not (own and of == "reward")
        ]
        if changes:
            lines.append(f"  {'' if own else f'{name}: '}{', '.join(changes)}")
    return lines


MEASURES = ("reward", "loss")
"""The held-out measures in a summary: `reward_before`, `reward_after` …"""
