"""Garbage collector settings for long-running processes: no collection while they start, few afterwards.

A process that starts allocates a million objects that live until it ends: modules, classes, functions. The collector
would traverse them again and again, for a fifth of the time that imports take, and find next to nothing.

    with gc_paused():        # nothing is collected
        import torch
        freeze_libraries()   # what exists now is never traversed
        model = ...
        freeze_gc()          # the garbage of the line above is deleted; from here on garbage is collected
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_THRESHOLD = 20_000
"""Allocations between two collections of the youngest generation. A step of RL allocates a hundred thousand objects that
live as long as their samples: with Python's default of 700, most would be traversed several times before they die."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Within the block nothing is collected until `freeze_gc`."""
    thresholds = gc.get_threshold()
    pause_gc()
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*thresholds)


def pause_gc() -> None:
    """Collects nothing until `freeze_gc`."""
    gc.set_threshold(0)


def freeze_libraries() -> None:
    """Freezes all existing objects without looking for garbage among them: imports leave a few megabytes of it, and no
    tensors."""
    gc.freeze()


def freeze_gc() -> None:
    """Deletes garbage, then freezes all existing objects, so that the garbage collector only traverses later ones.
    Libraries alone allocate a million objects, and traversing them takes a fifth of a second every few steps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD)
