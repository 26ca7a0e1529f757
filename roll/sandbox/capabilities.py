"""Detects which isolation levels work on this machine, by trying them."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from roll.sandbox.cgroups import NoCgroups, find
from roll.sandbox.execution import execute
from roll.sandbox.inside import kernel
from roll.sandbox.isolation import LANDLOCK_SIGNALS, LEVELS, NOBODY, Guard, Level, Python, Sandbox
from roll.sandbox.program import Limits, Program, SandboxError
from roll.sandbox.seccomp_filter import can_filter_calls

_log = logging.getLogger(__name__)

_TRY_S = 20.0
_VERSION_PROGRAM = "import sys, os, ctypes, json, resource; print(sys.version.split()[0], sys.base_prefix, sep='\\n')"
_OLDEST = (3, 8)


@dataclass(frozen=True)
class MissingLevel:
    """A level that does not work on this machine, and why."""

    level: Level
    why: str


def best(weakest: Level = "plain", memory_counted: bool = False) -> Sandbox:
    """The strongest level that works on this machine, tried once per process; a weak one is logged as a warning. Raises
    `SandboxError` if it is weaker than `weakest`, or, with `memory_counted`, if the kernel does not account the memory of
    programs."""
    sandbox, why = _best()
    if LEVELS.index(sandbox.level) > LEVELS.index(weakest):
        raise SandboxError(
            f"the sandbox of this machine is {sandbox.level}, but the setting is sandbox={weakest} ({why}): `roll "
            f"doctor` says what to fix, or set sandbox={sandbox.level}"
        )
    if memory_counted and sandbox.cgroups is None:
        raise SandboxError(
            f"the kernel does not count the memory of programs on this machine ({sandbox.uncounted}), but "
            f"the setting is memory_counted=true: docs/guides/sandbox.md says what it takes, or set memory_counted=false"
        )
    return sandbox


@functools.cache
def _best() -> tuple[Sandbox, str]:
    """The strongest level, and why stronger ones do not work."""
    why: list[str] = []
    for level in LEVELS:
        found = try_level(level)
        if isinstance(found, MissingLevel):
            why.append(f"no {level}: {found.why}")
            continue
        if found.missing:
            _log.warning("the sandbox is a %s: %s (`roll doctor` says more)", found.isolated_by, "; ".join(found.missing))
        return found, "; ".join(why)
    raise SandboxError(f"no sandbox works on this machine: {'; '.join(why)}")


def survey() -> list[Sandbox | MissingLevel]:
    """Every level, strongest first."""
    return [try_level(level) for level in LEVELS]


def try_level(level: Level) -> Sandbox | MissingLevel:
    """A level that has just run a program, or why it could not."""
    try:
        sandbox = _describe_level(level)
        groups = find()
        if isinstance(groups, NoCgroups):
            return _try(replace(sandbox, uncounted=groups.why))
        counted = _try(replace(sandbox, cgroups=groups))
        # where groups can be created but not joined
        return counted if isinstance(counted, Sandbox) else _try(replace(sandbox, uncounted=counted.why))
    except (SandboxError, OSError) as error:
        return MissingLevel(level, str(error))


def _try(sandbox: Sandbox) -> Sandbox | MissingLevel:
    try:
        outcome = execute(sandbox, Program("print('here')"), Limits(), tidy=True)
    except (SandboxError, OSError) as error:
        return MissingLevel(sandbox.level, str(error))
    if outcome.stdout != "here\n":
        return MissingLevel(sandbox.level, f"a program ended as {outcome.kind}: {outcome.stderr.strip()[-200:]}")
    return sandbox


def _describe_level(level: Level) -> Sandbox:
    as_nobody = os.geteuid() == 0
    if level == "plain":
        return Sandbox(level, python(as_nobody), frozenset(_plain_guards()))
    if sys.platform != "linux":
        raise SandboxError("only Linux has it")
    guards: frozenset[Guard] = frozenset({"user", "files", "network", "signals"})
    if can_filter_calls():
        guards |= {"calls"}
    if level == "namespaces":
        return Sandbox(level, python(as_nobody), guards)
    tool = shutil.which("bwrap", path=os.environ.get("PATH", "") + ":/usr/bin:/bin")
    if tool is None:
        raise SandboxError("bwrap is not installed: `apt install bubblewrap`, or your system's package of that name")
    return Sandbox(level, python(as_nobody), guards, tool)


def _plain_guards() -> Iterator[Guard]:
    if sys.platform != "linux":
        return
    own_user = os.geteuid() == 0
    landlock = kernel.landlock_version()
    if own_user:
        yield "user"
    if landlock >= 3:  # older versions do not prevent truncating files
        yield "files"
    if can_filter_calls():
        yield "calls"
        yield "network"
    if own_user or landlock >= LANDLOCK_SIGNALS or can_filter_calls():
        yield "signals"


@functools.cache
def python(as_nobody: bool) -> Python:
    """The interpreter to use inside: the system's, or the one that runs ROLL if it is readable inside."""
    as_user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_nobody else {}
    here = [getattr(sys, "_base_executable", None) or sys.executable]
    for path in ["/usr/bin/python3", "/usr/local/bin/python3", *here]:
        real = os.path.realpath(path)
        try:
            done = subprocess.run(
                [real, "-I", "-c", _VERSION_PROGRAM],
                capture_output=True,
                text=True,
                timeout=_TRY_S,
                env={},
                cwd="/",
                **as_user,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            version, prefix = done.stdout.splitlines()[:2]
            if tuple(int(part) for part in version.split(".")[:2]) >= _OLDEST:
                return Python(real, version, _readable(real, prefix))
    who = "the user nobody" if as_nobody else "this user"
    raise SandboxError(f"no Python 3 that {who} can run: install the system's (`apt install python3`)")


def _readable(interpreter: str, prefix: str) -> tuple[str, ...]:
    """Paths that must be visible inside: the system's programs and libraries, and the interpreter's own if elsewhere."""
    system = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc/ld.so.cache")
    paths = [path for path in system if os.path.exists(path) and not os.path.islink(path)]
    for path in (os.path.realpath(prefix), os.path.dirname(interpreter)):
        if not any(path == shown or path.startswith(shown + "/") for shown in paths):
            paths.append(path)
    return tuple(paths)
