"""Control groups, by which the kernel accounts the memory of a program: version 1 or 2, created as root or where
delegated.

A group accounts memory that is not attributed to a process: unmapped pages, buffers of sockets and pipes, page tables,
inodes. Creating and removing one is expensive for the kernel, so an idle group is kept for the process's next program.

Invariant: a group that is in use or kept is locked by the process that created it, and the kernel releases the lock when
that process ends, however it ends. So a group that can be locked belongs to a dead process, and `sweep` removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from roll.sandbox.program import Limits

_NAME = "roll-sandbox-"
_KERNEL_BYTES = 16 << 20
"""Kernel memory for a program within its limits: stacks, page tables, pipes."""
_IDLE_SHARE = 8
"""A group that still holds more than this fraction of the limit after its program is not reused."""
_MAX_ATTEMPTS = 4
_END_S = 5.0
_TICK_S = 0.01


@dataclass(frozen=True)
class Cgroups:
    """Folders in which this process can create groups."""

    version: Literal[1, 2]
    memory: str
    pids: str = ""
    """The same folder in version 2. Empty if processes are not counted."""

    @property
    def folders(self) -> tuple[str, ...]:
        """One per hierarchy, memory first."""
        return (self.memory, self.pids) if self.pids not in ("", self.memory) else (self.memory,)

    @property
    def label(self) -> str:
        return f"cgroup v{self.version}, {self.memory}"


@dataclass(frozen=True)
class NoCgroups:
    """Why no control groups can be used."""

    why: str


@dataclass(frozen=True)
class _Mount:
    version: Literal[1, 2]
    controllers: frozenset[str]
    root: str
    folder: str


def find(mounts: str = "", membership: str = "") -> Cgroups | NoCgroups:
    """Where this process can create groups that account memory, found by creating one. The arguments default to the
    contents of `/proc/self/mountinfo` and `/proc/self/cgroup`."""
    try:
        mounts = mounts or _read("/proc/self/mountinfo")
        membership = membership or _read("/proc/self/cgroup")
    except OSError:
        return NoCgroups("this system has no control groups")
    known = list(_mounts(mounts))
    why = ""
    for mount in sorted(known, key=lambda mount: mount.version):  # a controller is in one version only
        if mount.version == 1 and "memory" not in mount.controllers:
            continue
        for folder in _upwards(mount, _own_group(mount, membership)):
            refusal = _refusal(mount, folder)
            if not refusal:
                return Cgroups(mount.version, folder, _pids_folder(mount, folder, known, membership))
            why = why or refusal
    return NoCgroups(why or "no control group hierarchy is mounted")


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        root, folder = (path.replace("\\040", " ") for path in fields[3:5])
        version: Literal[1, 2] = 1 if kind[0] == "cgroup" else 2
        yield _Mount(version, frozenset(kind[2].split(",")), root, folder)


def _own_group(mount: _Mount, membership: str) -> str:
    """This process's group in a hierarchy, as a folder; the mount point if the group is not below it."""
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if mount.controllers & set(controllers.split(",")) if mount.version == 1 else number == "0":
            below = os.path.relpath(path, mount.root)
            return mount.folder if below.startswith("..") else os.path.normpath(os.path.join(mount.folder, below))
    return mount.folder


def _upwards(mount: _Mount, folder: str) -> Iterator[str]:
    while True:
        yield folder
        if folder == mount.folder or len(folder) <= len(mount.folder):
            return
        folder = os.path.dirname(folder)


def _pids_folder(mount: _Mount, memory: str, known: Sequence[_Mount], membership: str) -> str:
    if mount.version == 2:
        return memory if "pids" in _words(f"{memory}/cgroup.subtree_control") else ""
    for other in known:
        if other.version == 1 and "pids" in other.controllers:
            for folder in _upwards(other, _own_group(other, membership)):
                if not _refusal(other, folder):
                    return folder
    return ""


def _refusal(mount: _Mount, folder: str) -> str:
    """Why no group can be created in a folder; empty if one was created, and removed again."""
    if mount.version == 2 and (why := _delegate_memory(folder)):
        return why
    trial = os.path.join(folder, f"{_NAME}{secrets.token_hex(8)}")
    try:
        os.mkdir(trial, 0o755)
    except OSError as error:
        return f"no control group can be created in {folder}: {error.strerror}"
    os.rmdir(trial)
    return ""


def _delegate_memory(folder: str) -> str:
    """Makes version 2 account memory in the folder's groups. Returns why it does not, or ""."""
    if "memory" in _words(f"{folder}/cgroup.subtree_control"):
        return ""
    available = _words(f"{folder}/cgroup.controllers")
    if "memory" not in available:
        return f"memory is not counted in {folder}"
    text = " ".join(f"+{name}" for name in ("memory", "pids") if name in available)
    try:
        _write(f"{folder}/cgroup.subtree_control", text)
    except OSError as error:
        # in version 2, a group has either processes or child groups with controllers
        return f"the groups of {folder} cannot count memory: {error.strerror}"
    return ""


class Cgroup:
    """A group for one program at a time."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._version = cgroups.version
        self._name = f"{_NAME}{secrets.token_hex(8)}"
        self.folders = [os.path.join(folder, self._name) for folder in cgroups.folders]
        """Its folder in each hierarchy, memory first."""
        self._values: dict[str, int] = {}
        self._counts_pids = bool(cgroups.pids)
        self._closing = contextlib.ExitStack()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        os.mkdir(self.folders[0], 0o755)
        lock = os.open(self.folders[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._closing.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in self.folders[1:]:
            os.mkdir(folder, 0o755)
        # Version 1 can move a single thread, which the program is at first, without blocking every other fork.
        name = "tasks" if self._version == 1 else "cgroup.procs"
        self.join_fds = tuple(self._open(f"{folder}/{name}") for folder in self.folders)
        """Descriptors by which a process joins: it writes `0` to each."""
        if self._version == 2:
            with contextlib.suppress(OSError):
                _write(f"{self.folders[0]}/memory.oom.group", "1")
        self._seen_oom_kills = self._oom_kills()

    def _open(self, path: str) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._closing.callback(os.close, fd)
        return fd

    def limit(self, limits: Limits) -> None:
        """Sets the limits of all its processes together."""
        self._limit_bytes = (limits.memory_mb << 20) + limits.scratch_bytes + _KERNEL_BYTES
        memory, pids = self.folders[0], self.folders[-1]
        if self._version == 1:
            self._limit_memory_v1(memory)
        else:
            self._set_value(f"{memory}/memory.max", self._limit_bytes)
            with contextlib.suppress(OSError):  # without swap there is no such file
                self._set_value(f"{memory}/memory.swap.max", 0)
        if self._counts_pids:
            self._set_value(f"{pids}/pids.max", limits.processes)

    def _limit_memory_v1(self, folder: str) -> None:
        """Sets both limits in the order in which the one with swap is never the lower one."""
        paths = [f"{folder}/memory.limit_in_bytes", f"{folder}/memory.memsw.limit_in_bytes"]
        if not os.path.exists(paths[1]):
            paths = paths[:1]
        if self._values.get(paths[0], 1 << 62) < self._limit_bytes:
            paths.reverse()
        for path in paths:
            self._set_value(path, self._limit_bytes)

    def _set_value(self, path: str, value: int) -> None:
        if self._values.get(path) != value:
            _write(path, str(value))
            self._values[path] = value

    def ran_out(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the program began."""
        return self._oom_kills() > self._seen_oom_kills

    def empty(self) -> bool:
        """Kills its remaining processes and prepares it for the next program; False if it should not be reused."""
        until_s = time.monotonic() + _END_S
        while pids := self._pids():
            if time.monotonic() > until_s:
                return False
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_TICK_S)
        name = "memory.usage_in_bytes" if self._version == 1 else "memory.current"
        usage = int(_read(f"{self.folders[0]}/{name}"))
        ran_out, self._seen_oom_kills = self.ran_out(), self._oom_kills()
        return not ran_out and usage * _IDLE_SHARE < self._limit_bytes

    def _pids(self) -> list[int]:
        return [int(pid) for pid in _words(f"{self.folders[0]}/cgroup.procs") if int(pid) > 0]

    def _oom_kills(self) -> int:
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        lines = (line.split() for line in _read(f"{self.folders[0]}/{name}").splitlines())
        return next((int(line[1]) for line in lines if line[0] == "oom_kill"), 0)

    def remove(self) -> None:
        """Removes the group. One that still has processes is left for a later sweep."""
        for folder in reversed(self.folders):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        self._closing.close()


class CgroupPool:
    """The groups of one process, created on demand and kept while idle."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._idle: list[Cgroup] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def group(self, limits: Limits) -> Iterator[Cgroup]:
        """A group with these limits for one program. Processes that are left in it at the end are killed."""
        group = self._acquire(limits)
        is_usable = False
        try:
            yield group
            with contextlib.suppress(OSError):  # it no longer exists
                is_usable = group.empty()
        finally:
            if is_usable:
                with self._lock:
                    self._idle.append(group)
            else:
                group.remove()

    def _acquire(self, limits: Limits) -> Cgroup:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            with contextlib.suppress(OSError):  # it holds more than the new limit, or no longer exists
                idle.limit(limits)
                return idle
            idle.remove()
        group = self._new()
        try:
            group.limit(limits)
        except BaseException:
            group.remove()
            raise
        return group

    def _new(self) -> Cgroup:
        for _ in range(_MAX_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                return Cgroup(self._cgroups)  # another process removed it as a dead one's before it was locked
        return Cgroup(self._cgroups)

    def close(self) -> None:
        """Removes the idle groups."""
        with self._lock:
            idle, self._idle = self._idle, []
        for group in idle:
            group.remove()


@functools.cache
def _groups(cgroups: Cgroups, pid: int) -> CgroupPool:
    import atexit

    sweep()
    groups = CgroupPool(cgroups)
    atexit.register(lambda: groups.close() if os.getpid() == pid else None)
    return groups


def groups_of(cgroups: Cgroups) -> CgroupPool:
    """This process's groups: a fork has its own. The first call removes those of dead processes."""
    return _groups(cgroups, os.getpid())


def sweep(mounts: str = "") -> int:
    """Removes the groups of dead processes on this machine and returns their number. The argument defaults to the content
    of `/proc/self/mountinfo`."""
    try:
        all_mounts = list(_mounts(mounts or _read("/proc/self/mountinfo")))
    except OSError:
        return 0
    memory_folders = [mount.folder for mount in all_mounts if mount.version == 2 or "memory" in mount.controllers]
    pids_folders = [
        mount.folder for mount in all_mounts if "pids" in mount.controllers and mount.folder not in memory_folders
    ]
    pids_groups = [
        path for folder in pids_folders for path in _groups_below(folder)
    ]  # before the memory groups, which have the same names
    count = sum(_remove_if_dead(path) for folder in memory_folders for path in _groups_below(folder))
    alive = {os.path.basename(path) for folder in memory_folders for path in _groups_below(folder)}
    for path in pids_groups:
        if os.path.basename(path) not in alive:
            with contextlib.suppress(OSError):
                os.rmdir(path)
    return count


def _remove_if_dead(path: str) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for pid in _words(f"{path}/cgroup.procs"):
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        os.rmdir(path)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _groups_below(top: str) -> list[str]:
    """All groups of this module below a folder."""
    return [os.path.join(folder, name) for folder, names, _ in os.walk(top) for name in names if name.startswith(_NAME)]


def _words(path: str) -> list[str]:
    try:
        return _read(path).split()
    except OSError:
        return []


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
