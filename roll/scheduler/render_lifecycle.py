"""Renders the diagram of a sample's life cycle as SVG from the table of transitions.

`python -m roll.scheduler.render_lifecycle > docs/images/lifecycle.svg` writes it (`make docs`).

The diagram has exactly the transitions of the table; a test compares the file with it.
"""

from __future__ import annotations

from roll.rollout.lifecycle import MOVES

_POSITIONS = {
    "new": (60, 170),
    "queued": (190, 170),
    "generating": (370, 170),
    "acting": (370, 50),
    "paused": (370, 290),
    "scoring": (560, 170),
    "scored": (700, 170),
    "kept": (830, 170),
    "trained": (960, 170),
    "failed": (560, 390),
    "dropped": (830, 390),
}
_WIDTH, _HEIGHT = 1030, 440
_HALF_W, _HALF_H = 48, 17
_COLOURS = {"queued": "#b7791f", "failed": "#c53030", "dropped": "#718096"}
_FORWARD = "#2b6cb0"
_ENDS = {"trained": "#c6f6d5", "dropped": "#edf2f7", "failed": "#fed7d7"}


def render_lifecycle() -> str:
    """The diagram as SVG."""
    moves = [(start, end) for start, ends in MOVES.items() for end in sorted(ends)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *(_marker(colour) for colour in dict.fromkeys([_FORWARD, *_COLOURS.values()])),
        *(_arrow(start, end) for start, end in moves),
        *(_box(state) for state in MOVES),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _colour(start: str, end: str) -> str:
    return _FORWARD if start == "new" else _COLOURS.get(end, _FORWARD)


def _marker(colour: str) -> str:
    return (
        f'<marker id="{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
    )


def _arrow(start: str, end: str) -> str:
    """A curve from box to box; the reverse transition is drawn on the other side."""
    colour = _colour(start, end)
    (x0, y0), (x1, y1) = _edge(start, end), _edge(end, start)
    bend = 0.18 if end in _COLOURS or start in MOVES[end] else 0.0
    cx, cy = (x0 + x1) / 2 - (y1 - y0) * bend, (y0 + y1) / 2 + (x1 - x0) * bend
    dash = ' stroke-dasharray="5 4"' if end in _COLOURS and start != "new" else ""
    return (
        f'<path d="M{x0:.0f} {y0:.0f} Q{cx:.0f} {cy:.0f} {x1:.0f} {y1:.0f}" fill="none" stroke="{colour}"'
        f' stroke-width="1.4"{dash} marker-end="url(#{colour[1:]})"><title>{start} → {end}</title></path>'
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
    return (
        f'<rect x="{x - _HALF_W}" y="{y - _HALF_H}" width="{2 * _HALF_W}" height="{2 * _HALF_H}" rx="8" fill="{fill}"'
        f' stroke="#2d3748"/><text x="{x}" y="{y + 5}" text-anchor="middle">{state}</text>'
    )


def _legend() -> list[str]:
    labels = [
        (_FORWARD, "continues"),
        (_COLOURS["queued"], "requeued: lost its engine or worker"),
        (_COLOURS["failed"], "cannot be generated or judged"),
        (_COLOURS["dropped"], "filtered out, or too late"),
    ]
    return [
        f'<text x="{20 + 230 * number}" y="428" fill="{colour}" font-size="13">— {text}</text>'
        for number, (colour, text) in enumerate(labels)
    ]


if __name__ == "__main__":
    print(render_lifecycle(), end="")
