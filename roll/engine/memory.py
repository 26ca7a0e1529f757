"""How much memory there is: of a GPU, and of this machine and the containers this process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Container:
    """A limit that a control group puts on this process and others, and what they hold of it, files aside that the
    kernel would drop. In bytes."""

    limit: int
    held: int


@dataclass(frozen=True)
class _Names:
    """Of a control group's files."""

    limit: str
    held: str
    files: str
    """The line of `memory.stat` that counts what is read from files and was not used of late."""


_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Names("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """What can still be taken on a device: a CPU's is the machine's, as far as containers let this process have it."""
    if device.type == "cuda":
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, min([free_of_machine(), *(each.limit - each.held for each in containers())]))


def machine_bytes() -> int:
    """Memory of this machine, or of the smallest container this process is in if that has less."""
    return min([_all_of_machine(), *(each.limit for each in containers())])


def _all_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_of_machine(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What its programs could still take; where the system does not say, all there is."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]  # it counts in KiB
    return found[0] if found else _all_of_machine()


def containers(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[Container]:
    """Those of this process that limit memory, the innermost first. From within a container it may be that only the root
    of its own groups can be seen: that one is then its limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, names = (groups / "memory", _FIRST) if controllers else (groups, _SECOND)
            inner = root / path.lstrip("/")
            for group in (inner, *inner.parents):
                if (found := _container(group, names)) is not None:
                    yield found
                if group == root:
                    break


def _container(group: Path, names: _Names) -> Container | None:
    try:
        limit = (group / names.limit).read_text().strip()
        if not limit.isdigit() or int(limit) >= _all_of_machine():  # "max", or a number as large as there are
            return None
        held = int((group / names.held).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return Container(int(limit), held - int(stat.get(names.files, 0)))
