"""How much memory there is: on a GPU, on this machine, and in the containers of this process."""

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
    """The memory limit of a control group this process is in, and the bytes its processes use, without file cache that
    the kernel would drop."""

    limit: int
    used: int


@dataclass(frozen=True)
class _Names:
    """File names of a control group."""

    limit: str
    used: str
    files: str
    """The line of `memory.stat` that counts file cache that was not used recently."""


_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Names("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device. For a CPU it is the machine's, within the limits of the
    containers."""
    if device.type == "cuda":
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, min([free_of_machine(), *(each.limit - each.used for each in containers())]))


def machine_bytes() -> int:
    """Memory of this machine, or the limit of the smallest container of this process if that is lower."""
    return min([_all_of_machine(), *(each.limit for each in containers())])


def _all_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_of_machine(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Available memory of the machine; all of it if the system does not report that."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]  # in KiB
    return found[0] if found else _all_of_machine()


def containers(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[Container]:
    """The control groups of this process that limit memory, innermost first. Inside a container, maybe only the root of
    its own groups is visible; its limit is used then."""
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
        # "max", or a number at least as large as the machine's memory
        if not limit.isdigit() or int(limit) >= _all_of_machine():
            return None
        used = int((group / names.used).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return Container(int(limit), used - int(stat.get(names.files, 0)))
