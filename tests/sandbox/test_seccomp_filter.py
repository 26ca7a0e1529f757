"""The filter of system calls of every machine, checked on any: the kernel's virtual machine is interpreted here."""

from __future__ import annotations

import struct
from typing import get_args

import pytest

from roll.sandbox.inside.kernel import OWN_PID, for_process
from roll.sandbox.seccomp_filter import (
    ABSENT,
    ALLOW,
    ARCHITECTURES,
    BY_PATH,
    CLONE,
    CLONE3,
    HIDING,
    INDIRECT,
    NO_ADDRESS,
    ON_ITSELF_ONLY,
    REFUSE,
    REFUSED,
    SHARED_MEMORY,
    SIGNALS,
    FilteredCall,
    Machine,
    Only,
    call_filter,
)

MACHINES: tuple[Machine, ...] = get_args(Machine)
OWN = 4711
I386, ARM = 0x40000003, 0x40000028
X32 = 0x40000000


def verdict(filter: bytes, number: int, *arguments: int, architecture: int) -> int:
    """What the kernel would do with a call, by the same rules."""
    call = struct.pack("=IIQ6Q", number, architecture, 0, *(*arguments, *(0,) * (6 - len(arguments))))
    lines = list(struct.iter_unpack("HBBI", filter))
    at, held = 0, 0
    while True:
        code, if_so, if_not, value = lines[at]
        at += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            held = struct.unpack_from("=I", call, value)[0]
        elif code == 0x05:
            at += value
        else:
            held_so = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += if_so if held_so else if_not


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.param  # type: ignore[no-any-return]


def ask(machine: Machine, call: FilteredCall, *arguments: int, **kinds: bool) -> int:
    number = call.on(machine)
    assert number is not None
    made = for_process(call_filter(machine, **kinds), OWN)
    return verdict(made, number, *arguments, architecture=ARCHITECTURES[machine])


def test_calls_that_no_honest_program_needs_are_refused(machine: Machine) -> None:
    calls = [call for group in REFUSED.values() for call in group if call.on(machine) is not None]
    assert len(calls) >= 60
    assert {call.name for call in calls if ask(machine, call) != REFUSE} == set()


@pytest.mark.parametrize("rule", [*ON_ITSELF_ONLY, *SIGNALS], ids=lambda rule: rule.call.name)
def test_what_concerns_one_process_concerns_only_the_program(machine: Machine, rule: Only) -> None:
    call, allowed = rule.call, rule.allowed
    place = max(allowed)  # the last argument is the process
    which = [allowed[n][0] for n in range(place)]
    for other in (1, OWN - 1, OWN + 1, 0xFFFFFFFF, 1 << 31, OWN_PID):
        assert ask(machine, call, *which, other, signals=True) == REFUSE, other
    for itself in allowed[place]:
        own = OWN if itself == OWN_PID else itself
        assert ask(machine, call, *which, own, signals=True) == ALLOW, own
        assert ask(machine, call, *which, own | 0x5 << 32, signals=True) == ALLOW  # the kernel takes the lower half too


@pytest.mark.parametrize(("name", "kinds"), [("setpriority", (1, 2, 3)), ("ioprio_set", (0, 2, 3))])
def test_priorities_of_groups_and_users_stay(machine: Machine, name: str, kinds: tuple[int, ...]) -> None:
    call = next(rule.call for rule in ON_ITSELF_ONLY if rule.call.name == name)
    assert {ask(machine, call, kind, 0) for kind in kinds} == {REFUSE}


def test_signals_are_free_where_something_else_holds_them(machine: Machine) -> None:
    for rule in SIGNALS:
        assert ask(machine, rule.call, 1) == ALLOW
        assert ask(machine, rule.call, 1, signals=True) == REFUSE


def test_roundabout_ways_are_refused_and_their_calls_are_not(machine: Machine) -> None:
    for rule in INDIRECT:
        assert {ask(machine, rule.call, 3, value) for value in rule.refused} == {REFUSE}
        assert ask(machine, rule.call, 3, 1) == ALLOW
    assert ask(machine, HIDING.call, HIDING.refused[0], 0, watched=True) == REFUSE
    assert ask(machine, HIDING.call, HIDING.refused[0], 0) == ALLOW
    assert ask(machine, HIDING.call, 15, 0, watched=True) == ALLOW


def test_shared_memory_is_refused_where_the_kernel_does_not_count_it(machine: Machine) -> None:
    shared, validated, private, of_a_file = 0x21, 0x23, 0x22, 0x01
    for flags, verdict in ((shared, REFUSE), (validated, REFUSE), (private, ALLOW), (of_a_file, ALLOW)):
        assert ask(machine, SHARED_MEMORY.call, 0, 4096, 3, flags, counted=False) == verdict
        assert ask(machine, SHARED_MEMORY.call, 0, 4096, 3, flags) == ALLOW
        for counted in (True, False):
            assert ask(machine, SHARED_MEMORY.call, 0, 4096, 3, flags | 0x40000, counted=counted) == REFUSE  # huge pages


def test_files_of_the_same_user_keep_their_permissions(machine: Machine) -> None:
    for rule in BY_PATH:
        if rule.call.on(machine) is not None:
            assert ask(machine, rule.call, 3, 4096, own_user=False) == REFUSE
            assert ask(machine, rule.call, 3, 4096) == ALLOW
    assert ask(machine, BY_PATH[-1].call, 3, 0, own_user=False) == ALLOW


def test_sockets_send_to_their_other_end_alone(machine: Machine) -> None:
    assert ask(machine, NO_ADDRESS.call, 3, 4096, 1, 0, 0, 0) == ALLOW
    for address in (1, 0x7FFF0000, 1 << 32, 0x7FFF_0000_0000, 0xFFFFFFFF):
        assert ask(machine, NO_ADDRESS.call, 3, 4096, 1, 0, address, 16) == REFUSE


def test_processes_and_threads_can_be_made_but_no_namespaces(machine: Machine) -> None:
    fork, thread = 17, 0x3D0F00  # SIGCHLD, and what the C library asks for
    assert ask(machine, CLONE, fork) == ask(machine, CLONE, thread) == ALLOW
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(machine, CLONE, fork | bit) == REFUSE
    assert ask(machine, CLONE3) == ABSENT


def test_calls_by_another_numbering_and_unknown_ones_are_not_made(machine: Machine) -> None:
    filter, own = call_filter(machine), ARCHITECTURES[machine]
    others = {I386, ARM, *ARCHITECTURES.values()} - {own}
    for number in (0, 1, 39, 63, 172, 221):
        assert {verdict(filter, number, architecture=other) for other in others} == {REFUSE}
        assert verdict(filter, number | X32, architecture=own) == ABSENT
    for number in (471, 512, 521, 540, 547, X32 | 521, 0xFFFFFFFF):  # among them x32's own numbers, without its mark
        assert verdict(filter, number, architecture=own) == ABSENT


def test_everyday_calls_are_made(machine: Machine) -> None:
    everyday = {
        "x86_64": (0, 1, 3, 9, 12, 39, 53, 59, 60, 202, 257, 318, 334),
        "aarch64": (56, 57, 63, 64, 93, 98, 199, 221, 222),
    }
    filter = call_filter(machine, watched=True, signals=True)
    assert {verdict(filter, n, architecture=ARCHITECTURES[machine]) for n in everyday[machine]} == {ALLOW}


def test_a_filter_fits_the_kernel(machine: Machine) -> None:
    assert len(call_filter(machine, watched=True, signals=True)) // 8 < 4096
