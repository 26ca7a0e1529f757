"""What a program uses that the kernel does not limit: memory of all its processes together."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def holds_more(pid: int, limit_bytes: int) -> bool:
    """Whether a process and all that come from it hold more memory than that. What they share counts once, if the kernel
    tells: it takes longer to find out, so it is asked only where it matters."""
    pids = [pid, *children(pid)]
    if sum(map(_resident_bytes, pids)) <= limit_bytes:
        return False
    return sum(map(_proportional_bytes, pids)) > limit_bytes


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as sizes:
        return int(sizes.read().split()[1]) * _PAGE_BYTES
    return 0


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as sizes:
        found = re.search(r"^Pss: +([0-9]+) kB$", sizes.read(), re.MULTILINE)
        if found is not None:
            return int(found[1]) << 10
    return _resident_bytes(pid)


def children(pid: int) -> Iterator[int]:
    """All processes that come from this one."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as numbers:
                found = [int(number) for number in numbers.read().split()]
            for child in found:
                yield child
                yield from children(child)
