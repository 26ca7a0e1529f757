"""The system calls that seccomp refuses inside the sandbox, as a table, and the kernel filter made from it.

The filter depends on the machine and on the other guards. A test can check the filter of each machine on any other: it is
a short program for a small virtual machine (classic BPF).
"""

from __future__ import annotations

import functools
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from roll.sandbox.inside.kernel import CLONE_NEW, OWN_PID

Machine: TypeAlias = Literal["x86_64", "aarch64"]

ARCHITECTURES: Mapping[Machine, int] = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})
"""The kernel's identifier of each system call numbering (AUDIT_ARCH_…)."""
UNKNOWN = 471
"""From this number on a kernel may have calls that no rule below names, and x86_64 has its second numbering (x32)."""

ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38
"""The actions for a call: allow it, fail with EPERM, or fail with ENOSYS."""


@dataclass(frozen=True)
class FilteredCall:
    """A system call and its number on each machine; None if the machine does not have it."""

    name: str
    x86_64: int | None
    aarch64: int | None

    def on(self, machine: Machine) -> int | None:
        """Its number on a machine."""
        return self.x86_64 if machine == "x86_64" else self.aarch64


@dataclass(frozen=True)
class Only:
    """A call that is allowed only if each named argument has one of the values."""

    call: FilteredCall
    allowed: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Never:
    """A call that is refused if the argument has one of the values."""

    call: FilteredCall
    argument: int
    refused: tuple[int, ...]


@dataclass(frozen=True)
class Null:
    """A call that is allowed only if the argument is a null pointer."""

    call: FilteredCall
    argument: int


@dataclass(frozen=True)
class NeverBits:
    """A call that is refused if the argument has all bits of one of the sets."""

    call: FilteredCall
    argument: int
    refused: tuple[tuple[int, ...], ...]


def _same(name: str, number: int) -> FilteredCall:
    return FilteredCall(name, number, number)  # numbers above 423 are the same on every machine


REFUSED: Mapping[str, tuple[FilteredCall, ...]] = MappingProxyType(
    {
        "sockets, and descriptors that travel through them unseen": (
            FilteredCall("socket", 41, 198),
            FilteredCall("connect", 42, 203),  # a pair of datagram sockets can be connected again
            FilteredCall("bind", 49, 200),
            FilteredCall("listen", 50, 201),
            FilteredCall("accept", 43, 202),
            FilteredCall("accept4", 288, 242),
            FilteredCall("sendmsg", 46, 211),
            FilteredCall("sendmmsg", 307, 269),
            FilteredCall("setsockopt", 54, 208),
        ),
        "looking into and changing other processes": (
            FilteredCall("ptrace", 101, 117),
            FilteredCall("process_vm_readv", 310, 270),
            FilteredCall("process_vm_writev", 311, 271),
            FilteredCall("kcmp", 312, 272),
            FilteredCall("move_pages", 279, 239),
            FilteredCall("migrate_pages", 256, 238),
            _same("pidfd_getfd", 438),
            _same("process_madvise", 440),
            _same("process_mrelease", 448),
        ),
        "namespaces and mounts": (
            FilteredCall("unshare", 272, 97),
            FilteredCall("setns", 308, 268),
            FilteredCall("mount", 165, 40),
            FilteredCall("umount2", 166, 39),
            FilteredCall("pivot_root", 155, 41),
            FilteredCall("chroot", 161, 51),
            _same("open_tree", 428),
            _same("move_mount", 429),
            _same("fsopen", 430),
            _same("fsconfig", 431),
            _same("fsmount", 432),
            _same("fspick", 433),
            _same("mount_setattr", 442),
            _same("open_tree_attr", 467),
        ),
        "parts of the kernel with a history of bugs": (
            FilteredCall("bpf", 321, 280),
            FilteredCall("perf_event_open", 298, 241),
            FilteredCall("userfaultfd", 323, 282),
            FilteredCall("modify_ldt", 154, None),
            FilteredCall("syslog", 103, 116),
            FilteredCall("open_by_handle_at", 304, 265),
            FilteredCall("io_setup", 206, 0),
            _same("io_uring_setup", 425),
            _same("io_uring_enter", 426),
            _same("io_uring_register", 427),
        ),
        "keys, messages and semaphores, which outlive the program and belong to its user": (
            FilteredCall("add_key", 248, 217),
            FilteredCall("request_key", 249, 218),
            FilteredCall("keyctl", 250, 219),
            FilteredCall("shmget", 29, 194),
            FilteredCall("shmat", 30, 196),
            FilteredCall("shmctl", 31, 195),
            FilteredCall("msgget", 68, 186),
            FilteredCall("msgsnd", 69, 189),
            FilteredCall("msgrcv", 70, 188),
            FilteredCall("msgctl", 71, 187),
            FilteredCall("semget", 64, 190),
            FilteredCall("semop", 65, 193),
            FilteredCall("semtimedop", 220, 192),
            FilteredCall("semctl", 66, 191),
            FilteredCall("mq_open", 240, 180),
            FilteredCall("mq_unlink", 241, 181),
        ),
        "memory that no limit counts": (
            FilteredCall("memfd_create", 319, 279),
            _same("memfd_secret", 447),
            FilteredCall("vmsplice", 278, 75),
            FilteredCall("splice", 275, 76),
            FilteredCall("tee", 276, 77),
            _same("landlock_create_ruleset", 444),
            _same("landlock_add_rule", 445),
            _same("landlock_restrict_self", 446),
        ),
        "watching files: the number of watches is the user's": (
            FilteredCall("inotify_init", 253, None),
            FilteredCall("inotify_init1", 294, 26),
            FilteredCall("fanotify_init", 300, 262),
        ),
        "attributes of files, which no limit counts": (
            FilteredCall("setxattr", 188, 5),
            FilteredCall("lsetxattr", 189, 6),
            FilteredCall("fsetxattr", 190, 7),
            _same("setxattrat", 463),
            _same("file_setattr", 469),
        ),
    }
)
"""Calls that no honest program needs, by what they would be used for."""

CLONE, CLONE3 = FilteredCall("clone", 56, 220), _same("clone3", 435)
"""clone is refused with namespace flags; the flags of clone3 cannot be inspected, so it is reported as absent."""

ON_ITSELF_ONLY = (
    Only(FilteredCall("prlimit64", 302, 261), {0: (0, OWN_PID)}),
    Only(FilteredCall("sched_setaffinity", 203, 122), {0: (0, OWN_PID)}),
    Only(FilteredCall("sched_setscheduler", 144, 119), {0: (0, OWN_PID)}),
    Only(FilteredCall("sched_setparam", 142, 118), {0: (0, OWN_PID)}),
    Only(FilteredCall("sched_setattr", 314, 274), {0: (0, OWN_PID)}),
    # PRIO_PROCESS, not that of a group or a user
    Only(FilteredCall("setpriority", 141, 140), {0: (0,), 1: (0, OWN_PID)}),
    Only(FilteredCall("ioprio_set", 251, 30), {0: (1,), 1: (0, OWN_PID)}),  # IOPRIO_WHO_PROCESS
)
"""What a program may change of itself, but not of other processes of the same user."""

SIGNALS = (
    Only(FilteredCall("kill", 62, 129), {0: (0, OWN_PID)}),  # 0: its process group, which is its own
    Only(FilteredCall("tkill", 200, 130), {0: (OWN_PID,)}),
    Only(FilteredCall("tgkill", 234, 131), {0: (OWN_PID,)}),
    Only(FilteredCall("rt_sigqueueinfo", 129, 138), {0: (OWN_PID,)}),
    Only(FilteredCall("rt_tgsigqueueinfo", 297, 240), {0: (OWN_PID,)}),
    Only(_same("pidfd_send_signal", 424), {0: ()}),
)
"""Signals, if no other guard blocks signals to the run. Then a program cannot signal its own children either."""

_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 10, 15, 1024, 1026
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902

INDIRECT = (
    Never(FilteredCall("fcntl", 72, 25), 1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY)),
    Never(FilteredCall("ioctl", 16, 29), 1, (_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP)),
)
"""Ways to make the kernel send signals, type into a terminal or block others that open a file."""

NO_ADDRESS = Null(FilteredCall("sendto", 44, 206), 4)
"""A socket may send only to its connected peer."""

BY_PATH = (
    Only(FilteredCall("chmod", 90, None), {0: ()}),
    Only(FilteredCall("fchmodat", 268, 53), {0: ()}),
    Only(_same("fchmodat2", 452), {0: ()}),
    Only(FilteredCall("chown", 92, None), {0: ()}),
    Only(FilteredCall("lchown", 94, None), {0: ()}),
    Only(FilteredCall("fchownat", 260, 54), {0: ()}),
    Only(FilteredCall("utime", 132, None), {0: ()}),
    Only(FilteredCall("utimes", 235, None), {0: ()}),
    Only(FilteredCall("futimesat", 261, None), {0: ()}),
    Null(FilteredCall("utimensat", 280, 88), 1),  # of an open file
)
"""Permissions, owners and times of files by name, which Landlock does not guard: only if the program has the run's user.
It may change those of a file that it has opened."""

_PR_SET_DUMPABLE = 4
HIDING = Never(FilteredCall("prctl", 157, 167), 0, (_PR_SET_DUMPABLE,))
"""A process that cannot be inspected: its open files could not be counted. Only if they are counted by inspection."""


_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 1, 0x20, 0x40000
HUGE_PAGES = NeverBits(FilteredCall("mmap", 9, 222), 3, ((_MAP_HUGETLB,),))
"""Memory that the machine has reserved for others: the kernel does not account it to a program."""
SHARED_MEMORY = NeverBits(FilteredCall("mmap", 9, 222), 3, ((_MAP_HUGETLB,), (_MAP_SHARED, _MAP_ANONYMOUS)))
"""The same, and shared memory, whose pages remain after a partial unmap and are attributed to no process. Only if the
kernel does not account them."""


def can_filter_calls() -> bool:
    """Whether this machine's system call numbers are known."""
    return sys.platform == "linux" and os.uname().machine in ARCHITECTURES


@functools.cache
def call_filter(
    machine: Machine, *, watched: bool = False, signals: bool = False, counted: bool = True, own_user: bool = True
) -> bytes:
    """The filter of a machine, for `kernel.filter_calls`.

    `watched`: the program's open files are counted by inspecting it. `signals`: only this filter blocks the program's
    signals to the run. `counted`: the kernel accounts the program's memory.
    `own_user`: no file of the run belongs to the program's user.
    """
    rules: list[Rule] = [*ON_ITSELF_ONLY, *(SIGNALS if signals else ()), *INDIRECT, NO_ADDRESS]
    rules += [*((HIDING,) if watched else ()), HUGE_PAGES if counted else SHARED_MEMORY]
    rules += [*(BY_PATH if not own_user else ())]
    lines = [*_head(machine), *_clones(machine)]
    for rule in rules:
        lines += _block(rule, machine)
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (_GIVE, 0, 0, ALLOW)])


Rule: TypeAlias = Only | Never | NeverBits | Null

_Line: TypeAlias = tuple[int, int, int, int]
"""The instruction, how many lines to skip if it matches and if not, and its value."""
_LOAD, _SKIP, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


def _argument_at(index: int) -> int:
    return _ARGUMENTS_AT + 8 * index  # its lower half: every argument that a rule inspects is an int


def _head(machine: Machine) -> list[_Line]:
    """Refuses other numberings and all calls that are always refused. Afterwards the call's number is loaded."""
    numbers = [call.on(machine) for calls in REFUSED.values() for call in calls]
    known = [number for number in numbers if number is not None]
    refuse, absent = 5 + len(known), 6 + len(known)  # their line numbers; jumps count from the line after their own
    assert absent < 256, "a jump is at most 255 lines long"
    lines = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 0, refuse - 2, ARCHITECTURES[machine])]
    lines += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, absent - 4, 0, UNKNOWN)]
    lines += [(_EQUAL, refuse - 5 - n, 0, number) for n, number in enumerate(known)]
    return [*lines, (_SKIP, 0, 0, 2), (_GIVE, 0, 0, REFUSE), (_GIVE, 0, 0, ABSENT)]


def _clones(machine: Machine) -> list[_Line]:
    clone, clone3 = CLONE.on(machine), CLONE3.on(machine)
    assert clone is not None
    assert clone3 is not None
    return [
        (_EQUAL, 0, 1, clone3),
        (_GIVE, 0, 0, ABSENT),
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _argument_at(0)),
        (_ANY_BIT, 0, 1, CLONE_NEW),
        (_GIVE, 0, 0, REFUSE),
        (_GIVE, 0, 0, ALLOW),
    ]


def _block(rule: Rule, machine: Machine) -> list[_Line]:
    """The lines of one rule: other calls skip them; a matching call always ends in them."""
    number = rule.call.on(machine)
    if number is None:
        return []
    if isinstance(rule, NeverBits):
        body = list(_never_bits(rule))
    elif isinstance(rule, Null):
        body = list(_null(rule))
    else:
        body = list(_only(rule) if isinstance(rule, Only) else _never(rule))
    return [(_EQUAL, 0, len(body), number), *body]


def _only(rule: Only) -> Iterator[_Line]:
    for index, values in rule.allowed.items():
        yield _LOAD, 0, 0, _argument_at(index)
        for n, value in enumerate(values):
            yield _EQUAL, len(values) - n, 0, value  # past the refusal
        yield _GIVE, 0, 0, REFUSE
    yield _GIVE, 0, 0, ALLOW


def _never(rule: Never) -> Iterator[_Line]:
    yield _LOAD, 0, 0, _argument_at(rule.argument)
    for n, value in enumerate(rule.refused):
        yield _EQUAL, len(rule.refused) - n, 0, value  # past the permission
    yield _GIVE, 0, 0, ALLOW
    yield _GIVE, 0, 0, REFUSE


def _never_bits(rule: NeverBits) -> Iterator[_Line]:
    yield _LOAD, 0, 0, _argument_at(rule.argument)
    for bits in rule.refused:
        for n, bit in enumerate(bits):
            yield _ANY_BIT, 0, len(bits) - n, bit  # past the refusal
        yield _GIVE, 0, 0, REFUSE
    yield _GIVE, 0, 0, ALLOW


def _null(rule: Null) -> Iterator[_Line]:
    yield _LOAD, 0, 0, _argument_at(rule.argument)
    yield _EQUAL, 0, 3, 0
    yield _LOAD, 0, 0, _argument_at(rule.argument) + 4  # an address has two halves
    yield _EQUAL, 0, 1, 0
    yield _GIVE, 0, 0, ALLOW
    yield _GIVE, 0, 0, REFUSE
