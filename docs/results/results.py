"""The numbers and curves of the results.

`python docs/results/results.py gather NAME RUN [RUN …]` puts what is shown of a result's runs into NAME.csv;
`python docs/results/results.py draw` makes NAME.png of every NAME.csv, and prints a table.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Result:
    title: str
    measured: str
    """What the vertical axis shows."""
    training: str
    held_out: str
    """Names of the metrics."""
    parts: tuple[str, ...] = ()
    """More metrics of the table."""
    highest: float | None = 1.0
    """Of the vertical axis; None for as high as it goes."""


LOSS = ("loss of the demonstrations' answers", "train/loss", "eval/loss", (), None)
RESULTS = {
    "frozen_lake": Result("FrozenLake 4 × 4", "success", "reward/success", "eval/reward/success"),
    "sokoban": Result("Sokoban 6 × 6, one box", "success", "reward/success", "eval/reward/success"),
    "sokoban_demonstrations": Result("Sokoban: imitation", *LOSS),
    "webshop": Result("WebShop, generated catalogue", "score", "reward/score", "eval/reward/score"),
    "webshop_demonstrations": Result("WebShop: imitation", *LOSS),
    "domains": Result(
        "Four domains at once",
        "accuracy, mean of the domains",
        "reward/mean",
        "eval/reward",
        tuple(f"eval/{name}/reward" for name in ("maths", "code", "instructions", "puzzles")),
    ),
}


def gather(name: str, runs: list[Path]) -> None:
    result = RESULTS[name]
    shown = [result.training, result.held_out, *result.parts]
    with (HERE / f"{name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["run", "step", "seconds", *shown])
        for run in runs:
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            began = rows[0]["time_s"]
            for row in rows:
                if values := [row.get(metric, "") for metric in shown]:
                    cells = [f"{value:.4f}" if value != "" else "" for value in values]
                    table.writerow([run.name, row["step"], f"{row['time_s'] - began:.1f}", *cells])


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    print("| result | run | steps | minutes | before | after |\n| --- | --- | --- | --- | --- | --- |")
    for name, result in RESULTS.items():
        path = HERE / f"{name}.csv"
        if not path.exists():
            continue
        runs = _read(path)
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for number, (run, rows) in enumerate(runs.items()):
            control = "shuffled" in run
            colour = "0.6" if control else f"C{number}"
            training = [(float(r["step"]), float(r[result.training])) for r in rows if r[result.training]]
            measured = [(float(r["step"]), float(r[result.held_out])) for r in rows if r[result.held_out]]
            axes.plot(*zip(*training, strict=True), color=colour, alpha=0.3, linewidth=0.8)
            axes.plot(*zip(*measured, strict=True), color=colour, marker="o", markersize=3, label=run)
            values = [value for _, value in measured]
            minutes = float(rows[-1]["seconds"]) / 60
            print(f"| {result.title} | {run} | {int(training[-1][0])} | {minutes:.1f} | {_course(values)} |")
            for part in result.parts:
                print(f"| | {part} | | | {_course([float(row[part]) for row in rows if row[part]])} |")
        axes.set(title=result.title, xlabel="step", ylabel=f"{result.measured} (held out: dots)")
        axes.set_ylim(0, result.highest)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(HERE / f"{name}.png", dpi=110)
        pyplot.close(figure)
        own = [rows for run, rows in runs.items() if "shuffled" not in run]
        ends = [[float(row[result.held_out]) for row in rows if row[result.held_out]] for rows in own]
        mean = _course([fmean(values[0] for values in ends), fmean(values[-1] for values in ends)])
        print(f"| {result.title} | mean of {len(ends)} | | | {mean} |")


def _course(values: list[float]) -> str:
    return f"{values[0]:.3f} | {values[-1]:.3f}"


def _read(path: Path) -> dict[str, list[dict[str, str]]]:
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            runs[row["run"]].append(row)
    return runs


if __name__ == "__main__":
    if sys.argv[1:2] == ["gather"] and len(sys.argv) > 3 and sys.argv[2] in RESULTS:
        gather(sys.argv[2], [Path(run) for run in sys.argv[3:]])
    elif sys.argv[1:] == ["draw"]:
        draw()
    else:
        sys.exit(__doc__)
