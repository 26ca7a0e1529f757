"""A program to run in the sandbox, its limits, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from roll.config.errors import RunError

Kind: TypeAlias = Literal["ok", "failed", "timeout", "memory", "output", "disk", "killed"]
"""`ok`: it ended with status 0. `failed`: with another status, or by an error of its own. `timeout`: it took too long.
`memory`: it took too much memory. `output`: it wrote too much. `disk`: it filled its scratch folder. `killed`: something
outside ended it."""


OPEN_FILES = 256
"""Maximum number of open files per process of a program."""


class SandboxError(RunError):
    """The sandbox itself did not start; the program is not at fault."""


@dataclass(frozen=True)
class Program:
    """A Python program: its source, its standard input, and files in its scratch folder at the start."""

    source: str
    stdin: bytes = b""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by name. Names have no folders."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Sources of modules that it can import, ordered so that each imports only earlier ones."""

    def __post_init__(self) -> None:
        for name in self.files:
            if not name or "/" in name or "\0" in name or name in (".", ".."):
                raise ValueError(f"a file of a program is named {name!r}: names have no folders")


@dataclass(frozen=True)
class Limits:
    """The limits of a program. They apply to all its processes together, except `cpu_s`, which applies to each."""

    wall_s: float = 5.0
    """Wall time in seconds from its first line to its end."""
    cpu_s: int = 5
    """CPU time in seconds."""
    memory_mb: int = 512
    """Memory of all its processes together."""
    processes: int = 16
    """Concurrent processes and threads."""
    output_bytes: int = 1 << 20
    """Standard output and standard error together."""
    scratch_bytes: int = 16 << 20
    """Files in its scratch folder, the only writable one."""

    @property
    def scratch_files(self) -> int:
        """Maximum number of files, folders and links in the scratch folder."""
        return max(256, self.scratch_bytes >> 12)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"a program's limit {name} is {value}: it must be above 0")


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended."""

    kind: Kind
    status: int | None
    """Its exit status, 128 plus the number of a signal; None if it was ended because of a limit."""
    stdout: str
    stderr: str
    """Its output up to the limit. Bytes that are not UTF-8 are replaced."""
    seconds: float
    """Seconds from its first line to its end."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.kind == "ok"
