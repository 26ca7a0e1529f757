"""Names that people mistype, and what they may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def near(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that `name` may be a slip of, the likeliest first."""
    wanted = spelling(name)
    likeness = {other: difflib.SequenceMatcher(None, spelling(other), wanted).ratio() for other in known}
    cutoff = max(0.5 if len(wanted) <= 3 else 0.6, max(likeness.values(), default=0) - 0.1)
    return sorted((other for other in likeness if likeness[other] >= cutoff), key=lambda other: -likeness[other])[:3]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: `; did you mean 'a' or 'b'?`, or nothing if no known name is near."""
    found = near(name, known)
    return f"; did you mean {either([repr(other) for other in found])}?" if found else ""


def either(options: Sequence[str]) -> str:
    """`a`, `b` or `c`."""
    return " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)


def spelling(name: str) -> str:
    """What is the same in `Group-Size` and `group_size`."""
    return name.lower().replace("-", "_")
