"""The isolation levels of the sandbox, strongest first, and what each of them guarantees."""

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
"""Plus a process id, this is a user id that no account and no container manager uses."""

LANDLOCK_SIGNALS = 6
"""The Landlock version that blocks signals to processes outside."""

MISSING: Mapping[Guard, str] = MappingProxyType(
    {
        "user": "programs run as the run's own user",
        "files": "programs can read, and perhaps change, files of the run",
        "network": "programs can open connections",
        "signals": "programs can send signals to the run",
        "calls": "programs can make any system call, and take memory that no limit counts",
    }
)
"""The consequence of a missing guard."""


@dataclass(frozen=True)
class Python:
    """An interpreter to use inside the sandbox."""

    path: str
    version: str
    readable: tuple[str, ...]
    """Folders and files that it needs, and that programs may therefore read."""


@dataclass(frozen=True)
class Sandbox:
    """A level that works on this machine.

    Time, memory, processes, output and scratch space are limited on every level, no environment variable is passed on,
    and all processes of a program end with it. The levels differ in their guards.
    """

    level: Level
    python: Python
    guards: frozenset[Guard]
    tool: str = ""
    """The path of bubblewrap, on its level."""
    cgroups: Cgroups | None = None
    """Where the kernel accounts the memory of programs. Without it, they are watched, and some memory is not seen."""
    uncounted: str = ""
    """Why the kernel does not account memory."""

    @property
    def missing(self) -> list[str]:
        """What programs could do that they should not."""
        return [MISSING[guard] for guard in MISSING if guard not in self.guards]

    @property
    def memory(self) -> str:
        """One line: how the memory of programs is limited, and what is not accounted."""
        if self.cgroups is not None:
            escape = "" if self.guards & {"user", "files"} else "; programs could leave the group"
            return f"counted by the kernel ({self.cgroups.label}){escape}"
        unaccounted = (
            "pipes up to 100 MB, and file locks" if "calls" in self.guards else "kernel buffers and shared memory"
        )
        return f"watched 20 times a second; not counted: {unaccounted}"

    @property
    def isolated_by(self) -> str:
        """One line: what isolates programs."""
        if self.level != "plain":
            return self.level
        kinds = {"user": "a user of its own", "files": "Landlock", "calls": "seccomp"}
        active = [text for guard, text in kinds.items() if guard in self.guards]
        return f"plain process with limits{', ' if active else ''}{', '.join(active)}"
