"""How many examples property tests draw: all of them where `ROLL_TESTS=all` is set, as `.ci/run` does, else a fifth."""

from __future__ import annotations

import os

ALL = os.environ.get("ROLL_TESTS") == "all"
_SHARE, _FEWEST = 5, 8


def examples(count: int) -> int:
    """The number of examples of a test that draws `count` where all tests run."""
    return count if ALL else max(count // _SHARE, min(count, _FEWEST))
