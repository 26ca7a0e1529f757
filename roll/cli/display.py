"""The terminal output: the live display of a run, and its summary."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roll.config.evaluation import HELD_OUT
from roll.pipeline.report import HeldOutResult, StepReport, held_out_lines
from roll.pipeline.sft_eval import SFTEval
from roll.run.folder import RunFolder
from roll.run.state_latency import StateTable
from roll.scheduler.evaluate import Evaluation

_BARS = "▁▂▃▄▅▆▇█"


class LiveReporter:
    """A panel that is redrawn while the run continues. It appears with the first event, so a refused run shows none."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run = Path()
        self._steps = 0
        self._phase = "starting"
        self._report: StepReport | None = None
        self._values: list[float] = []
        self._measured: list[tuple[int, HeldOutResult]] = []
        self._states = StateTable()
        # Last, because it draws at once.
        self._live = Live(console=console, refresh_per_second=4, transient=False, get_renderable=self._draw)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._phase = "stopped"
        self._live.stop()

    def started(self, run: Path, steps: int, first_step: int) -> None:
        self._run, self._steps = run, steps
        if first_step:
            self._phase = f"resuming after step {first_step}"

    def phase(self, text: str) -> None:
        self._phase = text
        self._live.start()

    def evaluated(self, step: int, result: HeldOutResult) -> None:
        self._measured.append((step, result))
        self._phase = "training"

    def stepped(self, report: StepReport) -> None:
        self._report = report
        self._values.append(report.value)
        self._phase = "training"

    def sample_states(self, table: StateTable) -> None:
        self._states = table

    def warned(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def finished(self, summary: dict[str, Any]) -> None:
        self._phase = "stopped" if summary["stopped"] else "done"

    def _draw(self) -> Panel:
        report = self._report
        done = report.step if report else 0
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        table.add_row("step", f"{done} of {self._steps}" if self._steps else "")
        if report:
            table.add_row(report.measure, f"{report.value:.3f}  {spark(self._values)}")
        if self._measured:
            step, latest = self._measured[-1]
            values = [measured.value for _, measured in self._measured]
            table.add_row(latest.measure, f"{latest.value:.3f}  {spark(values)}  (step {step})")
        if report:
            for fact in report.facts:
                table.add_row(*fact)
            table.add_row("time", f"{report.seconds:.1f} s per step, {clock(report.seconds_left)} left")
        if shares := share_texts(self._states):
            table.add_row("rollout", ", ".join(shares))
        table.add_row("now", self._phase)
        bar = ProgressBar(total=max(self._steps, 1), completed=done, width=60)
        parts: list[RenderableType] = [Padding(bar, (0, 0, 1, 0)), table]
        if self._states.rows:
            parts.append(Padding(state_grid(self._states), (1, 0, 0, 0)))
        return Panel(
            Group(*parts),
            title=f"roll · {escape(str(self._run))}",
            title_align="left",
            width=88,
        )


def state_grid(states: StateTable) -> Table:
    """One column per state: the samples in it, and how long samples that left it had stayed."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for _ in states.rows:
        grid.add_column(justify="right")
    grid.add_row("stage", *(Text(row.state, style="dim") for row in states.rows))
    grid.add_row("samples", *(str(row.now) for row in states.rows))
    grid.add_row("mean s", *(short(row.mean_s) for row in states.rows))
    grid.add_row("p99 s", *(short(row.p99_s) for row in states.rows))
    return grid


def share_texts(states: StateTable) -> list[str]:
    """Short texts about discarded tokens and staleness, as far as they are known."""
    texts = []
    if states.waste_share is not None:
        texts.append(f"{states.waste_share:.1%} of generated tokens discarded")
    if states.staleness_mean is not None:
        most = "" if states.staleness_max is None else f" (max {states.staleness_max:g})"
        texts.append(f"staleness {states.staleness_mean:.2f}{most}")
    return texts


def short(seconds: float | None) -> str:
    """Seconds in at most five characters if below 100000; a dot for None."""
    if seconds is None:
        return "·"
    if seconds < 0.005:
        return "0"
    return f"{seconds:.{2 if seconds < 9.995 else 1 if seconds < 999.5 else 0}f}"


def spark(values: list[float], width: int = 40) -> str:
    """The last values as a row of bars, from 0 to their maximum (at least 1)."""
    top = max(1.0, *values) if values else 1.0
    return "".join(_BARS[min(int(max(v, 0.0) / top * len(_BARS)), len(_BARS) - 1)] for v in values[-width:])


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Prints held-out results before and after, the path of the curve, and commands to try next."""
    console.print(f"{summary['steps']} steps in {clock(summary['seconds'])} (minutes:seconds)")
    for line in held_out_lines(summary):
        console.print(line, style="bold", markup=False, highlight=False)
    pairs = zip(summary.get("answers_before", ()), summary.get("answers_after", ()), strict=False)
    shown = [(first, last) for first, last in pairs if _asked(first) == _asked(last)]
    if shown:
        sets = len(summary.get("measures", ())) > 1
        columns = [*(["set"] if sets else []), "question", "before", "after"]
        table = Table(*columns, title="Held-out questions, sampled", title_justify="left")
        for first, last in shown:
            measure = summary["measures"][last["set"]] if sets else summary["measure"]
            cells = [Text(last["set"])] if sets else []
            table.add_row(*cells, Text(first["question"]), *(_marked(answer, measure) for answer in (first, last)))
        console.print(table)
    run = shlex.quote(summary["run"])
    if summary["curve"] is not None:
        console.print(f"learning curve: {summary['curve']}", markup=False, soft_wrap=True)
    console.print("next:", style="bold")
    commands = [
        (f"roll eval {run}", "measure the trained model again"),
        (f"roll export {run} my-model", "a folder that transformers loads"),
        (f"roll train CONFIG model={run} run.dir=OTHER", "a new run that begins where this one ended"),
    ]
    events = RunFolder(Path(summary["run"])).tensorboard_dir
    if events.is_dir():
        commands.insert(2, (f"tensorboard --logdir {shlex.quote(str(events))}", "every metric of every step"))
    for command, why in commands:
        console.print(f"  {escape(command)}   [dim]# {why}[/dim]", soft_wrap=True, highlight=False)


def print_evaluation(console: Console, result: Evaluation | SFTEval) -> None:
    """Prints the result of `roll eval`: some answers, and all numbers; with several sets, in a table."""
    if not isinstance(result, Evaluation):
        console.print(str(result), markup=False, highlight=False, soft_wrap=True)
        return
    sets = len(result.sets) > 1
    if result.answers:
        table = Table(*(["set"] if sets else []), "question", "answer", "reward")
        for answer in result.answers:
            cells = [Text(answer.question), Text(answer.answer.strip()), Text(f"{answer.reward:g}")]
            table.add_row(*([Text(answer.set)] if sets else []), *cells)
        console.print(table)
    if sets:
        console.print(set_table(result))
        for name, found in result.sets.items():
            for line in found.details():
                console.print(f"{name}: {line.strip()}", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(str(result), markup=False, highlight=False, soft_wrap=True)


def set_table(evaluation: Evaluation) -> Table:
    """One row per estimate and set."""
    table = Table()
    for name in ("set", "measure", "value", "95 % interval", "tasks", "answers", "failed"):
        table.add_column(name, no_wrap=True)
    for found in evaluation.sets.values():
        own, *rest = found.name, str(found.samples), str(found.failed)
        for name, estimate in found.estimates.items():
            interval = "" if estimate.low is None else f"{estimate.low:.3f} to {estimate.high:.3f}"
            measure = found.measure if name == "reward" else name
            table.add_row(own, measure, f"{estimate.value:.3f}", interval, str(estimate.tasks), *rest)
            own, rest = "", []
    return table


def _asked(answer: dict[str, Any]) -> tuple[str, str]:
    """The set and the question of an answer."""
    return answer.get("set", HELD_OUT), answer["question"]


def _marked(answer: dict[str, Any], measure: str) -> Text:
    """An answer with a mark if rewards mean right or wrong, otherwise with its reward."""
    reward, text = answer["reward"], answer["answer"].strip()
    if measure != "accuracy":
        return Text(f"[{reward:g}] {text}")
    return Text(f"✓ {text}", style="green") if reward == 1 else Text(f"✗ {text}", style="red")
