"""The garbage collector of a process that will work for a long time."""

from __future__ import annotations

import gc

_YOUNG = 20_000
"""Objects made between two looks at the young ones. A step of RL makes a hundred thousand that live as long as their
samples: looked at every 700, as is usual, most would be looked at several times before they die."""


def spare_collector() -> None:
    """What exists now is here to stay: the collector looks only at what comes after. Libraries alone make a million
    objects, and looking through them takes a fifth of a second every few steps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
