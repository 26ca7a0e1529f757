"""Renders the diagram of a sample's life cycle as SVG from the table of transitions.

`python -m roll.scheduler.render_lifecycle > docs/images/lifecycle.svg` writes it (`make docs`).

The diagram has exactly the transitions of the table; a test compares the file with it. Transitions of a sample that makes
progress are arrows. Those to `queued`, `failed` and `dropped` are marks in the box of the state they begin in, because as
arrows they would cover the others.
"""

from __future__ import annotations

from roll.rollout.lifecycle import MOVES

_POSITIONS = {
    "new": (80, 45),
    "queued": (80, 155),
    "acting": (265, 45),
    "generating": (265, 155),
    "paused": (265, 265),
    "scoring": (480, 155),
    "scored": (630, 155),
    "kept": (780, 155),
    "trained": (925, 155),
    "failed": (80, 415),
    "dropped": (80, 490),
}
_WIDTH, _HEIGHT = 1000, 535
_HALF_W, _HALF_H = 62, 31
_FORWARD = "#2b6cb0"
_MARKS = {"queued": ("#b7791f", -24), "failed": ("#c53030", 0), "dropped": ("#4a5568", 24)}
"""The colour of a mark, and where it is in a box, from the middle."""
_ENDS = {"trained": "#c6f6d5", "dropped": "#edf2f7", "failed": "#fed7d7"}
_LEGEND = {
    "queued": "back to queued: its engine or worker died, or an attempt is left",
    "failed": "cannot be generated or judged",
    "dropped": "filtered out, or too late",
}
_FONT = "DejaVu Sans, Verdana, Helvetica, sans-serif"


def render_lifecycle() -> str:
    """The diagram as SVG."""
    moves = [(start, end) for start, ends in MOVES.items() for end in sorted(ends)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="{_FONT}" font-size="18">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        '<marker id="forward" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_FORWARD}"/></marker>',
        *(_arrow(start, end) for start, end in moves if not _is_mark(start, end)),
        *(_box(state) for state in MOVES),
        *(_mark(start, end) for start, end in moves if _is_mark(start, end)),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _is_mark(start: str, end: str) -> bool:
    return end in _MARKS and start != "new"


def _arrow(start: str, end: str) -> str:
    """A line from box to box; of two that lead both ways, and of one that would cross a box, a curve."""
    (x0, y0), (x1, y1) = _edge(start, end), _edge(end, start)
    bend = 0.25 if start in MOVES[end] and not _is_mark(end, start) else 0.0
    if abs(_POSITIONS[start][1] - _POSITIONS[end][1]) > 200:  # past the box between them, on its right side
        x0 = x1 = _POSITIONS[start][0] + _HALF_W
        y0, y1 = _POSITIONS[start][1], _POSITIONS[end][1]
        bend = 0.28
    cx, cy = (x0 + x1) / 2 - (y1 - y0) * bend, (y0 + y1) / 2 + (x1 - x0) * bend
    return (
        f'<path d="M{x0:.0f} {y0:.0f} Q{cx:.0f} {cy:.0f} {x1:.0f} {y1:.0f}" fill="none" stroke="{_FORWARD}"'
        f' stroke-width="2" marker-end="url(#forward)"><title>{start} → {end}</title></path>'
    )


def _edge(state: str, towards: str) -> tuple[float, float]:
    """The point where a line from the centre of a box to another one crosses its border."""
    (x, y), (tx, ty) = _POSITIONS[state], _POSITIONS[towards]
    dx, dy = tx - x, ty - y
    scale = min(_HALF_W / abs(dx) if dx else 9.0, _HALF_H / abs(dy) if dy else 9.0)
    return x + dx * scale, y + dy * scale


def _box(state: str) -> str:
    x, y = _POSITIONS[state]
    fill = _ENDS.get(state, "#ebf8ff")
    baseline = y - 3 if any(_is_mark(state, end) for end in MOVES[state]) else y + 6
    return (
        f'<rect x="{x - _HALF_W}" y="{y - _HALF_H}" width="{2 * _HALF_W}" height="{2 * _HALF_H}" rx="8" fill="{fill}"'
        f' stroke="#2d3748"/><text x="{x}" y="{baseline}" text-anchor="middle">{state}</text>'
    )


def _mark(start: str, end: str) -> str:
    x, y = _POSITIONS[start]
    return _shape(end, x + _MARKS[end][1], y + 16, f"<title>{start} → {end}</title>")


def _shape(end: str, x: float, y: float, title: str = "") -> str:
    """A circle, a diamond or a square: colours alone do not tell them apart for everybody."""
    colour = _MARKS[end][0]
    if end == "queued":
        return f'<circle cx="{x}" cy="{y}" r="8" fill="{colour}">{title}</circle>'
    turned = f' transform="rotate(45 {x} {y})"' if end == "failed" else ""
    return f'<rect x="{x - 7}" y="{y - 7}" width="14" height="14" fill="{colour}"{turned}>{title}</rect>'


def _legend() -> list[str]:
    found = []
    for number, (end, text) in enumerate(_LEGEND.items()):
        y = 340 + 75 * number
        found += [_shape(end, 170, y), f'<text x="192" y="{y + 6}">{text}</text>']
    return found


if __name__ == "__main__":
    print(render_lifecycle(), end="")
