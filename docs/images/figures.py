"""Draws the figures of the documentation: `python docs/images/figures.py` writes architecture, weight_sync and phases.

A text that does not fit into its box is an error here. Fonts are wide ones (DejaVu Sans), so that narrower ones fit too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

import matplotlib
from PIL import ImageFont

FOLDER = Path(__file__).parent
HEAD, TEXT = 21, 18
"""Sizes of text: readable when the figure is shown at half its size."""
MARGIN = 10
INK, GREY, BYTES = "#1e293b", "#475569", "#b45309"
CONTROLLER, TRAINER, ENGINE, ROLLOUT, REWARD, FILES = "#e0e7ff", "#fee2e2", "#dcfce7", "#ede9fe", "#ffedd5", "#f1f5f9"


@cache
def _font(bold: bool, size: int) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


def width_of(text: str, size: int, bold: bool = False) -> float:
    return float(_font(bold, size).getlength(text))


@dataclass
class Figure:
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: int, y: int, width: int, height: int, fill: str, head: str = "", *lines: str, dashed: bool = False
    ) -> None:
        """A box with a heading and lines of text, centred."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{GREY}"{dash}/>'
        )
        texts = ([(head, HEAD, True)] if head else []) + [(line, TEXT, False) for line in lines]
        step = 27
        top = y + height / 2 - step * (len(texts) - 1) / 2 + 7
        for number, (text, size, bold) in enumerate(texts):
            assert width_of(text, size, bold) <= width - 2 * MARGIN, f"{self.title}: {text!r} does not fit its box"
            self.text(x + width / 2, top + number * step, text, size=size, bold=bold, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = TEXT,
        bold: bool = False,
        anchor: str = "start",
        fill: str = INK,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{anchor}" fill="{fill}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[int, int], heavy: bool = False) -> None:
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        colour, width, marker = (BYTES, 4, "bytes") if heavy else (GREY, 2, "line")
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" marker-end="url(#{marker})"/>'
        )

    def svg(self) -> str:
        markers = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" markerHeight="{size}" '
            f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
            for name, size, colour in (("line", 7, GREY), ("bytes", 4, BYTES))
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
                'font-family="DejaVu Sans, Verdana, Helvetica, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{markers}</defs>",
                f'<rect width="{self.width}" height="{self.height}" fill="white"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def architecture() -> Figure:
    figure = Figure(1000, 620, "The controller's loop, the roles it calls, and the run folder")
    figure.box(15, 15, 970, 165, CONTROLLER)
    figure.text(30, 47, "controller: one program, one loop, columns per sample", size=HEAD, bold=True)
    steps = [
        ("roll out", "scheduler"),
        ("credit", "algorithm"),
        ("update", "trainer"),
        ("publish", "verified"),
        ("record", "run folder"),
    ]
    for number, (head, line) in enumerate(steps):
        x = 30 + 193 * number
        figure.box(x, 70, 165, 90, "white", head, line)
        if number:
            figure.arrow((x - 28, 115), (x - 2, 115))
    figure.box(15, 270, 300, 120, TRAINER, "actor_train", "single or sharded;", "so are reference, critic")
    figure.box(400, 270, 250, 120, ROLLOUT, "rollout", "a coroutine per sample", "tokens stay here")
    figure.box(735, 270, 200, 120, REWARD, "reward, env", "child processes", "with deadlines")
    figure.box(170, 480, 380, 120, ENGINE, "actor_infer", "engine: native or vLLM", "requests enter and leave singly")
    figure.box(620, 480, 365, 120, FILES, "runs/NAME", "ledger, metrics, samples, trace", "checkpoints: whole or absent")
    figure.arrow((130, 180), (130, 267))
    figure.text(142, 230, "batch, loss")
    figure.arrow((480, 180), (480, 267))
    figure.text(468, 230, "leases", anchor="end")
    figure.arrow((570, 270), (570, 183))
    figure.text(582, 230, "outcomes")
    figure.arrow((960, 180), (960, 477))
    figure.arrow((650, 310), (732, 310))
    figure.text(692, 300, "text", anchor="middle")
    figure.arrow((735, 350), (653, 350))
    figure.text(692, 375, "reward", anchor="middle")
    figure.arrow((400, 330), (320, 330), heavy=True)
    figure.text(358, 316, "tokens", anchor="middle", fill=BYTES)
    figure.arrow((240, 390), (240, 475), heavy=True)
    figure.text(228, 440, "weights, verified", anchor="end", fill=BYTES)
    figure.arrow((440, 390), (440, 477))
    figure.text(428, 440, "requests", anchor="end")
    figure.arrow((500, 480), (500, 393))
    figure.text(512, 440, "tokens")
    return figure


def weight_sync() -> Figure:
    figure = Figure(1000, 560, "How new weights reach an engine and are verified")
    figure.box(15, 15, 290, 370, TRAINER)
    figure.text(160, 50, "actor_train", size=HEAD, bold=True, anchor="middle")
    figure.box(35, 75, 250, 80, "white", "", "cast to the", "serving precision")
    figure.box(35, 180, 250, 80, "white", "", "digest per tensor")
    figure.box(35, 285, 250, 80, "white", "", "log-probs of", "a probe prompt")
    figure.box(695, 15, 290, 370, ENGINE)
    figure.text(840, 50, "actor_infer", size=HEAD, bold=True, anchor="middle")
    figure.box(715, 75, 250, 80, "white", "", "load the tensors")
    figure.box(715, 180, 250, 80, "white", "", "digest per tensor,", "of its own copy")
    figure.box(715, 285, 250, 80, "white", "", "log-probs of", "the same prompt")
    figure.box(400, 62, 90, 60, "#fde68a", "", "bucket")
    figure.box(510, 62, 90, 60, "#fde68a", "", "bucket")
    figure.arrow((288, 92), (395, 92), heavy=True)
    figure.arrow((600, 92), (710, 92), heavy=True)
    figure.text(500, 148, "CUDA IPC, shared memory", anchor="middle", fill=BYTES)
    figure.text(500, 174, "or broadcast", anchor="middle", fill=BYTES)
    figure.arrow((288, 220), (712, 220))
    figure.text(500, 211, "manifest: version, digests", anchor="middle")
    figure.arrow((288, 325), (712, 325))
    figure.text(500, 316, "expected values", anchor="middle")
    figure.arrow((840, 385), (840, 437))
    figure.box(695, 440, 290, 100, "#bbf7d0", "all equal", "serve the version")
    figure.box(355, 440, 290, 100, "#fecaca", "a digest differs", "send once more,", "then stop the run")
    figure.arrow((760, 385), (760, 412), (500, 412), (500, 437))
    figure.text(160, 478, "Where both are one process,", anchor="middle")
    figure.text(160, 504, "the engine uses the trainer's", anchor="middle")
    figure.text(160, 530, "tensors: no copy.", anchor="middle")
    return figure


def phases() -> Figure:
    figure = Figure(1000, 600, "Roles on devices over the phases of a step")
    left, right, height = 185, 985, 62
    columns = [("generate", 0.45), ("train", 0.38), ("publish", 0.17)]
    edges, at = [left], float(left)
    for _, part in columns:
        at += part * (right - left)
        edges.append(round(at))

    def row(y: int, label: str, bars: list[tuple[int, int, str, str]]) -> None:
        figure.text(15, y + height / 2 + 7, label)
        for start, end, fill, text in bars:
            figure.box(start + 3, y, end - start - 6, height, fill, "", text, dashed=fill == "white")

    figure.text(15, 40, "Same devices: roles take turns", size=HEAD, bold=True)
    for number, (name, _) in enumerate(columns):
        figure.text((edges[number] + edges[number + 1]) / 2, 75, name, anchor="middle", fill=GREY)
    a, b, c, d = edges
    row(
        90,
        "actor_infer",
        [(a, b, ENGINE, "weights and KV cache"), (b, c, "white", "in host memory"), (c, d, ENGINE, "weights")],
    )
    row(
        165,
        "actor_train",
        [(a, b, "white", "in host memory"), (b, c, TRAINER, "weights, optimizer"), (c, d, TRAINER, "weights")],
    )
    figure.text(15, 255, "GPUs 0-7", bold=True)
    figure.text(left, 255, "Dashed: offloaded, so that the other role has the memory.", fill=GREY)

    figure.text(15, 340, "Different devices: roles overlap, with rollout.max_staleness: 1", size=HEAD, bold=True)
    thirds = [left + (right - left) * number // 3 for number in range(4)]
    row(
        370,
        "GPUs 4-7",
        [(s, e, ENGINE, f"generate step {n}") for n, (s, e) in enumerate(pairwise(thirds), 2)],
    )
    row(
        470,
        "GPUs 0-3",
        [(s, e, TRAINER, f"train step {n}") for n, (s, e) in enumerate(pairwise(thirds), 1)],
    )
    for number, x in enumerate(thirds[1:3], 1):
        figure.arrow((x, 501), (x, 435), heavy=True)
        figure.text(x + 12, 458, f"publish version {number}", fill=BYTES)
    figure.text(left, 570, "Engines pause for a publish and continue their samples.", fill=GREY)
    return figure


if __name__ == "__main__":
    for draw in (architecture, weight_sync, phases):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")
