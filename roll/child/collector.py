"""The garbage collector of a process that will work for a long time."""

from __future__ import annotations

import gc


def spare_collector() -> None:
    """What exists now is here to stay: the collector looks only at what comes after. Libraries alone make a million
    objects, and looking through them takes a fifth of a second every few steps."""
    gc.collect()
    gc.freeze()
