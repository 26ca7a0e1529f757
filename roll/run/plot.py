"""The plot of a run: what it learned on the left, another metric on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.atomic_files import atomic_open

_BLUE, _ORANGE, _GREEN, _INK = "#2f6fde", "#e8710a", "#2a9d74", "#3c4043"
_DOTS = (_ORANGE, "#8e44ad", "#c0392b", "#16808a", "#7f6000", "#5f6368")


@dataclass(frozen=True)
class Panel:
    """One metric with a value per step as a line, and metrics that are measured less often as dots. Both are optional."""

    title: str
    line: str = ""
    line_label: str = ""
    dots: Mapping[str, str] = field(default_factory=dict)
    """Labels by metric name."""


def plot_curve(metrics: list[dict[str, Any]], path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Plots two panels over steps as a PNG; metrics without values are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.04)
    figure = Figure(figsize=(9, 3.6), dpi=150, layout=layout)
    figure.suptitle(title, fontsize=11, fontweight="bold", color=_INK)
    for panel, axes, color in zip(panels, figure.subplots(1, 2, width_ratios=(3, 2)), (_BLUE, _GREEN), strict=True):
        _plot_steps(axes, *series(metrics, panel.line), color=color, label=panel.line_label)
        for number, (name, label) in enumerate(panel.dots.items()):
            _plot_dots(axes, *series(metrics, name), color=_DOTS[number % len(_DOTS)], label=label)
        _finish(axes, panel.title, legend=bool(panel.line_label))
    with atomic_open(path) as file:
        FigureCanvasAgg(figure).print_png(file)


def series(metrics: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it has a value."""
    rows = [row for row in metrics if row.get(name) is not None]
    return [row["step"] for row in rows], [row[name] for row in rows]


def smooth(values: list[float], window: int) -> list[float]:
    """Mean over the values up to half a window before and after each one."""
    reach = window // 2
    around = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(near) / len(near) for near in around]


def _plot_steps(axes: Any, steps: list[int], values: list[float], *, color: str, label: str) -> None:
    """A value per step: the values themselves, and above them a smoothed line if there are at least 10."""
    if not steps:
        return
    if len(steps) < 10:
        axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
        return
    axes.plot(steps, values, color=color, linewidth=1, alpha=0.3)
    axes.plot(steps, smooth(values, max(5, len(values) // 12)), color=color, linewidth=2, label=label)


def _plot_dots(axes: Any, steps: list[int], values: list[float], *, color: str, label: str) -> None:
    """A metric that has a value in some steps only."""
    if steps:
        axes.plot(
            steps, values, color=color, linewidth=1.2, linestyle=(0, (4, 2)), marker="o", markersize=5.5,
            markeredgecolor="white", markeredgewidth=0.8, label=label, zorder=3,
        )  # fmt: skip


def _finish(axes: Any, quantity: str, *, legend: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(quantity, fontsize=9.5, color=_INK, loc="left")
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.tick_params(labelsize=8, colors=_INK, length=0)
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c4c7cc")
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", va="center", color="#9aa0a6")
        axes.set(xticks=[], yticks=[])
        return
    low, _ = axes.get_ylim()
    if low > 0:
        axes.set_ylim(bottom=0)
    if legend:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="best")
