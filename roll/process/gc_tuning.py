"""Garbage collector settings for long-running processes."""

from __future__ import annotations

import gc

_YOUNG_THRESHOLD = 20_000
"""Allocations between two collections of the youngest generation. A step of RL allocates a hundred thousand objects that
live as long as their samples: with Python's default of 700, most would be traversed several times before they die."""


def freeze_gc() -> None:
    """Freezes all existing objects, so that the garbage collector only traverses later ones. Libraries alone allocate a
    million objects, and traversing them takes a fifth of a second every few steps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD)
