"""Every algorithm on its example under `examples/algorithms/`: what it reaches, and how long that takes.

All of them train the same model from scratch, at about the same learning rate; StarPO and GiGPO play episodes of three
turns, the others give single answers. `reward` is the mean of the last three steps, `held_out` that of held-out tasks at
the end, `half_at` the first step whose mean reward was a half or more, `seconds` the whole run.

The task is a toy: it shows that each of them learns, not which of them is best.
`--svg docs/images/algorithms.svg` also draws the curves.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll import load_config, train
from roll.config.algorithm import RECIPES
from roll.pipeline.report import SilentReporter
from roll.run import Metrics, RunFolder

EXAMPLES = Path(__file__).parents[1] / "examples" / "algorithms"
COLUMNS = 4
PANEL_W, PANEL_H, PLOT_W, PLOT_H = 220, 130, 170, 80
LEFT, TOP = 40, 30
INK, FAINT, LINE = "#2d3748", "#cbd5e0", "#2b6cb0"


@dataclass(frozen=True)
class Outcome:
    name: str
    rewards: list[float]
    """Mean reward of each step."""
    held_out: float
    seconds: float

    @property
    def reward(self) -> float:
        return fmean(self.rewards[-3:])

    @property
    def half_at(self) -> int | None:
        return next((step for step, reward in enumerate(self.rewards, 1) if reward >= 0.5), None)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="NAME")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--svg", type=Path, help="draw the curves there")
    args = options.parse_args()
    print(f"{'':24}{'reward':>8}{'held out':>10}{'half at':>9}{'seconds':>9}")
    outcomes = []
    for name in args.only:
        outcomes.append(made := outcome(name, args.seed, args.threads))
        half = "-" if made.half_at is None else f"step {made.half_at}"
        print(f"{name:24}{made.reward:8.2f}{made.held_out:10.2f}{half:>9}{made.seconds:9.1f}", flush=True)
    if args.svg is not None:
        args.svg.write_text(draw(outcomes))
    found = {f"{o.name}_{what}": getattr(o, what) for o in outcomes for what in ("reward", "held_out", "seconds")}
    if args.json:
        report({**found, "least_reward": min(o.reward for o in outcomes)}, as_json=True)


def outcome(name: str, seed: int, threads: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}/run", f"seed={seed}", f"threads={threads}", "run.tensorboard=false"]
        began_s = time.perf_counter()
        summary = train(load_config(EXAMPLES / f"{name}.yaml", settings), reporter=SilentReporter())
        seconds = time.perf_counter() - began_s
        rows = Metrics.read(RunFolder.open(Path(folder) / "run").metrics_path)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return Outcome(name, rewards, summary["reward_after"], seconds)


def draw(outcomes: Sequence[Outcome]) -> str:
    """A panel for each curve, with those of all behind it, as SVG."""
    width = LEFT + COLUMNS * PANEL_W
    height = TOP + -(-len(outcomes) // COLUMNS) * PANEL_H
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<defs><g id="all">',
        *(_curve(each, FAINT, 0.7) for each in outcomes),
        "</g></defs>",
    ]
    for number, own in enumerate(outcomes):
        x, y = LEFT + number % COLUMNS * PANEL_W, TOP + number // COLUMNS * PANEL_H
        panel = [*_axes(own), '<use href="#all"/>', _curve(own, LINE, 2.0)]
        lines += [f'<g transform="translate({x} {y})">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axes(own: Outcome) -> list[str]:
    return [
        f'<text x="0" y="-8" fill="{INK}" font-weight="bold">{own.name}</text>',
        f'<path d="M0 0 V{PLOT_H} H{PLOT_W}" fill="none" stroke="{INK}" stroke-width="0.8"/>',
        f'<text x="-6" y="4" fill="{INK}" text-anchor="end" font-size="10">1</text>',
        f'<text x="-6" y="{PLOT_H + 4}" fill="{INK}" text-anchor="end" font-size="10">0</text>',
        f'<text x="{PLOT_W}" y="{PLOT_H + 14}" fill="{INK}" text-anchor="end" font-size="10">'
        f"{len(own.rewards)} steps</text>",
    ]


def _curve(of: Outcome, colour: str, width: float) -> str:
    """Its rewards over its steps, the last at the right edge."""
    across = PLOT_W / max(len(of.rewards) - 1, 1)
    points = " ".join(f"{step * across:.1f},{PLOT_H * (1 - reward):.1f}" for step, reward in enumerate(of.rewards))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


if __name__ == "__main__":
    main()
