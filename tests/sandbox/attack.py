"""What an attack is, how it is tried on a level, and when it has failed.

A probe is a few lines that try things and report each that works; all probes of a table run in one program, each in a
process of its own. A bomb is a whole program, which must end in a certain way.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from processes import eventually

from roll.sandbox import Limits, Program, ProgramResult, Sandbox, run_blocking
from roll.sandbox.isolation import Guard
from roll.sandbox.seccomp_filter import (
    CLONE,
    CLONE3,
    HIDING,
    INDIRECT,
    NO_ADDRESS,
    ON_ITSELF_ONLY,
    REFUSED,
    SIGNALS,
    Machine,
)

Kind: TypeAlias = Literal["processes", "kernel", "limits", "files", "network", "scratch", "time and output", "memory"]

PATIENT = Limits(wall_s=20, cpu_s=20)
"""For attacks that must fail by themselves, on a machine that is busy."""
SCRATCH = Limits(wall_s=20, cpu_s=20, scratch_bytes=4 << 20)


@dataclass(frozen=True)
class Attack:
    """A hostile program, and what becomes of it."""

    name: str
    kind: Kind
    source: str
    held_by: frozenset[Guard] = frozenset()
    """Guards of which one is enough; where a level has none of them, it is a gap. Empty: every level stops it."""
    machines: tuple[Machine, ...] = ("x86_64", "aarch64")
    """Where it can be tried at all."""
    ends: frozenset[str] = frozenset()
    """How a bomb ends; empty for a probe."""
    limits: Limits = PATIENT
    slow: bool = False
    counted: bool = False
    """Only where the kernel counts what a program takes is it stopped."""

    def gap(self, sandbox: Sandbox) -> bool:
        """Whether a level does not promise to stop it."""
        if self.counted and sandbox.cgroups is None:
            return True
        return bool(self.held_by) and not self.held_by & sandbox.guards

    @property
    def here(self) -> bool:
        """Whether this machine is of a kind on which it can be tried."""
        return os.uname().machine in self.machines


@dataclass(frozen=True)
class Target:
    """What programs try to reach: things of a run that, without the sandbox, any user of the machine could reach."""

    run: int = field(default_factory=os.getpid)
    parent: int = field(default_factory=os.getppid)
    victim: int = 0
    """A process of the run's user that ends when it is sent SIGURG, which others ignore."""
    public: str = ""
    """A folder with a file `secret` and a file `checkpoint`, which everyone may read and write."""
    port: int = 0
    abstract: str = ""
    unix: str = ""
    datagram: str = ""


_VICTIM = (
    "import signal, time\nsignal.signal(signal.SIGURG, lambda *_: exit(7))\nprint('here', flush=True)\ntime.sleep(3600)"
)


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """A run to attack. At the end it must be as it was."""
    with contextlib.ExitStack() as closing:
        public = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="run-")))
        public.chmod(0o777)
        for name, text in (("secret", "the answer"), ("checkpoint", "weights")):
            (public / name).write_text(text)
            (public / name).chmod(0o666)
        tcp = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        name, path = f"run-{secrets.token_hex(8)}", str(public / "socket")
        for address in (f"\0{name}", path):
            unix = closing.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(address)
            unix.listen()
        datagram = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagram.bind(f"{path}-datagram")
        for each in (path, f"{path}-datagram"):
            os.chmod(each, 0o777)
        victim = closing.enter_context(subprocess.Popen([sys.executable, "-c", _VICTIM], stdout=subprocess.PIPE))
        closing.callback(victim.kill)
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"here\n"
        before = _state(victim.pid)
        yield Target(
            os.getpid(), os.getppid(), victim.pid, str(public), tcp.getsockname()[1], name, path, f"{path}-datagram"
        )
        assert victim.poll() is None
        assert _state(victim.pid) == before
        assert {file.name for file in public.iterdir()} == {"secret", "checkpoint", "socket", "socket-datagram"}
        assert (public / "checkpoint").read_text() == "weights"


def _state(pid: int) -> tuple[Any, ...]:
    limits = Path(f"/proc/{pid}/limits").read_text()
    adjusted = Path(f"/proc/{pid}/oom_score_adj").read_text()
    return os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid), limits, adjusted


_PRELUDE = """
import ctypes, fcntl, json, mmap, os, resource, signal, socket, stat, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
escapes = []
ABOVE = tuple({1, os.getppid()})
OTHERS = tuple({RUN, PARENT, VICTIM, *ABOVE})
def escaped(what):
    escapes.append(str(what))
def tried(what, act, *arguments):
    "Whether something worked is what this is about: an error is good, and so is -1."
    try:
        if act(*arguments) not in (-1, False): escaped(what)
    except (OSError, ValueError, AttributeError, OverflowError, MemoryError): pass
def call(name, *arguments):
    return libc.syscall(NR[name], *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
def opened(path, flags):
    os.close(os.open(path, flags))
"""

_BATCH = """
def one(name, source):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(15)
        try: exec(compile(source, name, "exec"), globals())
        except Exception as error: escapes.append(f"{type(error).__name__}: {error}")
        os.write(write, json.dumps(escapes).encode())
        os._exit(0)
    os.close(write)
    told = b""
    while data := os.read(read, 65536): told += data
    os.close(read)
    _, status = os.waitpid(child, 0)
    return json.loads(told) if told else [f"ended with status {status}"]
for name, source in PROBES:
    print(json.dumps([name, one(name, source)]), flush=True)
"""


def _begin(given: Target) -> str:
    names = {name.upper(): value for name, value in asdict(given).items()}
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + f"NR = {_numbers()!r}\n" + _PRELUDE


def _numbers() -> Mapping[str, int]:
    """The system calls that rules are about, by name."""
    rules = (*ON_ITSELF_ONLY, *SIGNALS, *INDIRECT, HIDING, NO_ADDRESS)
    calls = [*(call for group in REFUSED.values() for call in group), *(rule.call for rule in rules), CLONE, CLONE3]
    machine = cast(Machine, os.uname().machine)
    return {call.name: number for call in calls if (number := call.on(machine)) is not None}


def probe_all(sandbox: Sandbox, probes: Sequence[Attack]) -> dict[str, list[str]]:
    """What each of the probes got away with, tried in one program."""
    with target() as given:
        listed = [(probe.name, probe.source) for probe in probes]
        outcome = run_blocking(
            Program(f"{_begin(given)}PROBES = {listed!r}\n{_BATCH}"), Limits(wall_s=60, cpu_s=60), sandbox
        )
    results = dict(json.loads(line) for line in outcome.stdout.splitlines())
    missing = [f"not tried: {outcome.kind} {outcome.stderr[-300:]}"]
    return {probe.name: results.get(probe.name, missing) for probe in probes}


def set_off(sandbox: Sandbox, bomb: Attack) -> tuple[ProgramResult, str]:
    """How a bomb ended, and what was wrong with that, or nothing."""
    before = _left(sandbox)
    with target() as given:
        outcome = run_blocking(Program(_begin(given) + bomb.source), bomb.limits, sandbox)
    if outcome.kind not in bomb.ends:
        return outcome, f"ended as {outcome.kind}: {outcome.stdout[-100:]} {outcome.stderr[-300:]}"
    if "escaped" in outcome.stdout:
        return outcome, outcome.stdout[-300:]
    if not eventually(lambda: _left(sandbox) <= before):
        return outcome, f"left behind: {_left(sandbox) - before}"
    return outcome, ""


def _left(sandbox: Sandbox) -> set[str]:
    """Scratch folders of this user that lie around."""
    if sandbox.level != "plain":
        return set()
    found = Path(tempfile.gettempdir()).glob("roll-scratch-*")
    return {folder.name for folder in found if folder.exists() and folder.stat().st_uid == os.geteuid()}
