"""The levels of the sandbox, from the strongest, and what each of them holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from roll.sandbox.cgroups import Cgroups

Level: TypeAlias = Literal["bubblewrap", "namespaces", "plain"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces", "plain")

Guard: TypeAlias = Literal["user", "files", "network", "signals", "calls"]

NOBODY = 65534
FIRST_USER = 2_000_000_000
"""Plus the number of a process, it is a user that no account and no container manager has."""

LANDLOCK_SIGNALS = 6
"""The version of Landlock from which it keeps signals from processes outside."""

MISSING: Mapping[Guard, str] = MappingProxyType(
    {
        "user": "programs run as the run's own user",
        "files": "programs can read, and perhaps change, files of the run",
        "network": "programs can open connections",
        "signals": "programs can send signals to the run",
        "calls": "programs can make any system call, and take memory that no limit counts",
    }
)
"""What it means that a level lacks a guard."""


@dataclass(frozen=True)
class Python:
    """An interpreter for use inside."""

    path: str
    version: str
    readable: tuple[str, ...]
    """Folders and files that it needs, and that programs may therefore read."""


@dataclass(frozen=True)
class Sandbox:
    """A level that works on this machine.

    Time, memory, processes, output and scratch space are limited on every level, no environment variable gets in, and all
    that a program started ends with it. The guards are what differs.
    """

    level: Level
    python: Python
    guards: frozenset[Guard]
    tool: str = ""
    """Where bubblewrap is, on its level."""
    cgroups: Cgroups | None = None
    """Where the kernel counts what programs take. Without, they are watched, and take memory that is not seen."""
    uncounted: str = ""
    """Why the kernel does not count."""

    @property
    def missing(self) -> list[str]:
        """What programs could do that they should not."""
        return [MISSING[guard] for guard in MISSING if guard not in self.guards]

    @property
    def memory(self) -> str:
        """One line: how the memory of programs is held, and what is left."""
        if self.cgroups is not None:
            leave = "" if self.guards & {"user", "files"} else "; programs could leave the group"
            return f"counted by the kernel ({self.cgroups.label}){leave}"
        left = "pipes up to 100 MB, and file locks" if "calls" in self.guards else "kernel buffers and shared memory"
        return f"watched 20 times a second; not counted: {left}"

    @property
    def held_by(self) -> str:
        """One line: what shuts programs in."""
        if self.level != "plain":
            return self.level
        kinds = {"user": "a user of its own", "files": "Landlock", "calls": "seccomp"}
        held = [text for guard, text in kinds.items() if guard in self.guards]
        return f"plain process with limits{', ' if held else ''}{', '.join(held)}"
