"""Measures the memory of all processes of a program together, which the kernel does not limit."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator

from roll.sandbox.program import OPEN_FILES

_SOCKET_BYTES = 256 << 10
"""Maximum kernel memory per socket: its buffer, which programs cannot enlarge, and its overshoot."""
_SIZE = re.compile(r"^(Vm[A-Za-z]+):\s+([0-9]+) kB$", re.MULTILINE)
_FEW_FILES = 16
"""A process with at most this many open files is not inspected further, to save time."""
_SHARED_S = 1.0
"""Time limit for finding out what processes share: many changing mappings make that slow."""
_PF_EXITING = 4


def exceeds_memory(pid: int, limit_bytes: int, sandbox_pids: Collection[int] = ()) -> bool:
    """Whether a process and its descendants hold more memory than the limit. Shared memory counts once, if the kernel
    reports it in time: that is slow, so it is read only if it matters. `sandbox_pids` are the sandbox's own processes."""
    pids = [pid, *descendant_pids(pid)]
    sizes = [_sizes(pid) for pid in pids]
    kernel_bytes = _buffers_bytes(pids, sandbox_pids) + sum(size.get("VmPTE", 0) for size in sizes)
    if sum(size.get("VmRSS", 0) for size in sizes) + kernel_bytes <= limit_bytes:
        return False
    until_s, held_bytes = time.monotonic() + _SHARED_S, kernel_bytes
    for each, size in zip(pids, sizes, strict=True):
        held_bytes += _proportional_bytes(each) if time.monotonic() < until_s else size.get("VmRSS", 0)
    return held_bytes > limit_bytes


def _buffers_bytes(pids: Collection[int], sandbox_pids: Collection[int]) -> int:
    """Memory of the processes' sockets. A process that hides its open files (it runs an unreadable program) is assumed to
    have only sockets."""
    sockets: set[str] = set()
    hidden = 0
    for pid in pids:
        try:
            sockets |= _sockets(pid)
        except PermissionError:  # root sees all or nothing, so for root this means nothing
            hidden += os.geteuid() != 0 and pid not in sandbox_pids and not has_ended(f"/proc/{pid}")
        except OSError:  # it has just ended
            continue
    return (len(sockets) + hidden * OPEN_FILES) * _SOCKET_BYTES


def _sizes(pid: int) -> dict[str, int]:
    """Bytes by the kernel's names: VmRSS for resident memory, VmPTE for page tables, and others."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        return {name: int(size) << 10 for name, size in _SIZE.findall(status.read())}
    return {}


def _sockets(pid: int) -> set[str]:
    """The sockets that a process has open."""
    found: set[str] = set()
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


def has_ended(proc_path: str) -> bool:
    """Whether a process or thread is ending, or has ended but was not reaped: it holds no memory."""
    try:
        with open(f"{proc_path}/stat", "rb") as file:
            state, *numbers = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in (b"Z", b"X") or bool(int(numbers[5]) & _PF_EXITING)


def descendant_pids(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    for child in child_pids(pid):
        yield child
        yield from descendant_pids(child)


def child_pids(pid: int) -> list[int]:
    """The direct children of a process, started or adopted."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as numbers:
                found += [int(number) for number in numbers.read().split()]
    return found


def has_free_files(pid: int, folder: str, most_files: int) -> bool:
    """Whether a file system that only a process and its descendants see has at most `most_files` files."""
    for each in reversed([*descendant_pids(pid)]):  # the last ones are certainly inside
        with contextlib.suppress(OSError):  # the sandbox's own processes are hidden
            usage = os.statvfs(f"/proc/{each}/root{folder}")
            if usage.f_files and os.path.ismount(f"/proc/{each}/root{folder}"):
                return usage.f_files - usage.f_ffree <= most_files
    return True
