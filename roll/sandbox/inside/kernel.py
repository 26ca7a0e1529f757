"""Linux isolation without any tool: namespaces, mounts, Landlock, seccomp."""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False  # without importing typing, which is slow
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

CLONE_NEW = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""NS, CGROUP, UTS, IPC, USER, PID, NET."""
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 3, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
"""Numbers of system calls; those above 423 are the same on every machine."""

OWN_PID = 0x7FFFFFF1
"""In a system call filter, the process that the filter is for. No process can have that number."""

_OWN = struct.pack("I", OWN_PID)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}

_libc = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, what: str) -> int:
    """Raises `OSError` if a call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def machine() -> str:
    return os.uname().machine


def prctl(option: int, value: int) -> None:
    check_result(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent(signal: int) -> None:
    prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process instead of the machine's init process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become_for_files(user: int, group: int) -> None:
    """Makes this thread alone access files, and inspect processes, as another user."""
    for call, number in ((_libc.setfsgid, group), (_libc.setfsuid, user)):
        call(number)
        if call(-1) != number:
            raise OSError(f"this process cannot act as the user {user}")


def is_dumpable() -> int:
    return check_result(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0), "prctl")


def set_dumpable(value: int) -> None:
    """Whether processes of the same user may trace this one, and read and write its memory: 1 or 0."""
    prctl(_PR_SET_DUMPABLE, value)


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def enter_namespaces() -> None:
    """Enters new user, mount, network and other namespaces; the PID namespace begins with the next fork. The user id
    stays the same."""
    uid, gid = os.getuid(), os.getgid()
    check_result(_libc.unshare(CLONE_NEW), "user namespaces are not allowed here: unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)


def enter_new_root(readable: Sequence[str], devices: Sequence[str], scratch: str, scratch_bytes: int) -> None:
    """Enters a file tree that has only the readable folders, some devices and an empty scratch folder."""
    root = "/tmp"  # any existing folder works: it is covered for this process alone
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
    folder_fds = {path: os.open(path, os.O_PATH) for path in readable}
    device_fds = {path: os.open(path, os.O_PATH) for path in devices}
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path, opened in folder_fds.items():
        _bind_read_only(opened, path, root)
    for path, opened in device_fds.items():
        _make_mount_point(root + path, is_folder=False)
        _mount(f"/proc/self/fd/{opened}", root + path, None, _MS_BIND, None)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    for opened in (*folder_fds.values(), *device_fds.values()):
        os.close(opened)
    for link in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink("/" + link) and not os.path.lexists(root + "/" + link):
            os.symlink(os.readlink("/" + link), root + "/" + link)
    os.mkdir(root + "/proc")
    try:
        _mount("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV, None)
    except OSError:  # if the machine's own is partly covered; programs can do without
        pass
    os.mkdir(root + scratch)
    _mount("tmpfs", root + scratch, "tmpfs", _MS_NOSUID | _MS_NODEV, _scratch_options(scratch_bytes))
    os.chdir(root)
    if machine() not in _PIVOT_ROOT:
        raise OSError(f"the numbers of system calls on {machine()} are not known here")
    check_result(_libc.syscall(_PIVOT_ROOT[machine()], b".", b"."), "pivot_root")
    check_result(_libc.umount2(b".", _MNT_DETACH), "umount")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)
    os.chdir(scratch)


def mount_scratch(folder: str, size_bytes: int) -> bool:
    """Mounts a file system of that size over a folder, visible only to this process and its children. False if that is
    not allowed."""
    try:
        check_result(_libc.unshare(_CLONE_NEWNS), "unshare")
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, _scratch_options(size_bytes))
    except OSError:
        return False
    return True


def unmount(folder: str) -> None:
    check_result(_libc.umount2(folder.encode(), _MNT_DETACH), "umount")


def drop_capabilities() -> None:
    """Drops all capabilities, also those in its own namespaces."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    no_new_privileges()
    header = struct.pack("Ii", 0x20080522, 0)
    check_result(_libc.syscall(_CAPSET[machine()], header, bytes(24)), "capset")


def landlock_version() -> int:
    """0 if the kernel has no Landlock."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def restrict_files(readable: Sequence[str], devices: Sequence[str], scratch: str) -> None:
    """Landlock: only the readable files, some devices and the scratch folder can be opened. No other file may be
    truncated, no TCP connection made and, from version 6 on, no process outside be signalled. Needs no privilege."""
    version = landlock_version()
    execute, write, read, folder = 1, 2, 4, 8
    every = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    network, scope = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    ruleset = struct.pack("QQQ", every, network, scope)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = check_result(_libc.syscall(_LANDLOCK_CREATE, ruleset, len(ruleset), 0), "landlock")
    allowed = [(path, execute | read | folder) for path in readable]
    allowed += [(path, read | write) for path in devices]
    for path, access in [*allowed, (scratch, every)]:
        access &= every if os.path.isdir(path) else execute | write | read
        opened = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", access, opened)
        check_result(_libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), "landlock " + path)
        os.close(opened)
    no_new_privileges()
    check_result(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def filter_calls(filter: bytes) -> None:
    """Applies a seccomp filter to this process and all its descendants. Needs no privilege."""
    filter = for_process(filter, os.getpid())
    text = ctypes.create_string_buffer(filter)
    head = struct.pack("HxxxxxxP", len(filter) // 8, ctypes.addressof(text))
    no_new_privileges()
    check_result(_libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), head, 0, 0), "seccomp")


def for_process(filter: bytes, pid: int) -> bytes:
    """The filter for a process with that number."""
    lines = [filter[at : at + 8] for at in range(0, len(filter), 8)]
    return b"".join(line[:4] + struct.pack("I", pid) if line[4:] == _OWN else line for line in lines)


def descendants(pid: int) -> list[int]:
    """All descendants of a process, children before grandchildren. Linux only: elsewhere the list is empty."""
    parents: Any = {}
    if not os.path.isdir("/proc"):
        return []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it has just ended
                continue
            parents.setdefault(parent, []).append(int(name))
    found = list(parents.get(pid, []))
    for each in found:  # the list grows meanwhile
        found += parents.get(each, [])
    return found


def threads_of_user(uid: int) -> int:
    """Number of threads of all processes of a user."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat("/proc/" + name).st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def _mount(source: str, target: str, kind: Any, flags: int, data: Any) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3])
    check_result(result, "mount " + target)


def _scratch_options(size_bytes: int) -> str:
    return f"size={size_bytes},nr_inodes={max(256, size_bytes >> 12)},mode=700"


def _bind_read_only(opened: int, path: str, root: str) -> None:
    """Binds a folder or file, and everything mounted below it, at the same path under the new root, read-only."""
    source = f"/proc/self/fd/{opened}"
    _make_mount_point(root + path, is_folder=os.path.isdir(source))
    _mount(source, root + path, None, _MS_BIND | _MS_REC, None)
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    target = (root + path).encode()
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, target, _AT_RECURSIVE, attributes, len(attributes))
    check_result(result, "read-only " + path)


def _make_mount_point(path: str, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
