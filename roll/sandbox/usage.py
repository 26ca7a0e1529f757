"""What a program uses that the kernel does not limit: memory of all its processes together."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

_SOCKET_BYTES = 256 << 10
"""What the kernel keeps for a socket at most: its buffer, which programs cannot enlarge, and what it overshoots by."""
_SIZE = re.compile(r"^(Vm[A-Za-z]+):\s+([0-9]+) kB$", re.MULTILINE)
_FEW_FILES = 16
"""A process that has no more open is not looked at further: it costs time."""


def holds_more(pid: int, limit_bytes: int) -> bool:
    """Whether a process and all that come from it hold more memory than that. What they share counts once, if the kernel
    tells: it takes longer to find out, so it is asked only where it matters."""
    pids = [pid, *children(pid)]
    buffers_bytes = len(set().union(*map(_sockets, pids))) * _SOCKET_BYTES
    sizes = [_sizes(pid) for pid in pids]
    kernel_bytes = buffers_bytes + sum(size.get("VmPTE", 0) for size in sizes)
    if sum(size.get("VmRSS", 0) for size in sizes) + kernel_bytes <= limit_bytes:
        return False
    return sum(map(_proportional_bytes, pids)) + kernel_bytes > limit_bytes


def _sizes(pid: int) -> dict[str, int]:
    """Bytes by the kernel's names for them: VmRSS for what is resident, VmPTE for page tables, and others."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        return {name: int(size) << 10 for name, size in _SIZE.findall(status.read())}
    return {}


def _sockets(pid: int) -> set[str]:
    """The sockets that a process has open. Of the sandbox's own processes, which are hidden, none."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        numbers = os.listdir(f"/proc/{pid}/fd")
        for number in numbers if len(numbers) > _FEW_FILES else ():
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {name for name in found if name.startswith("socket:")}


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as sizes:
        found = re.search(r"^Pss: +([0-9]+) kB$", sizes.read(), re.MULTILINE)
        if found is not None:
            return int(found[1]) << 10
    return _sizes(pid).get("VmRSS", 0)


def children(pid: int) -> Iterator[int]:
    """All processes that come from this one."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as numbers:
                found = [int(number) for number in numbers.read().split()]
            for child in found:
                yield child
                yield from children(child)


def has_room(pid: int, folder: str, most_files: int) -> bool:
    """Whether a file system that only a process and its children see has no more files than that."""
    for each in reversed([*children(pid)]):  # the last are surely inside
        with contextlib.suppress(OSError):  # the sandbox's own processes are hidden
            usage = os.statvfs(f"/proc/{each}/root{folder}")
            if usage.f_files and os.path.ismount(f"/proc/{each}/root{folder}"):
                return usage.f_files - usage.f_ffree <= most_files
    return True
