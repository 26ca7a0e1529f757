"""What runs in the sandbox, what it may use, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from roll.config.errors import RunError

Kind: TypeAlias = Literal["ok", "failed", "timeout", "memory", "output", "disk", "killed"]
"""It ended with status 0; with another, or by an error of its own; took too long; too much memory; wrote too much; filled
its scratch folder; or something ended it from outside."""


OPEN_FILES = 256
"""How many files each process of a program may have open."""


class SandboxError(RunError):
    """The sandbox itself did not start: no fault of the program."""


@dataclass(frozen=True)
class Program:
    """A Python program: its text, what it reads, and files that lie in its scratch folder when it begins."""

    source: str
    stdin: bytes = b""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by name. Names have no folders."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Texts of modules that it can import, in an order in which they can import each other."""

    def __post_init__(self) -> None:
        for name in self.files:
            if not name or "/" in name or "\0" in name or name in (".", ".."):
                raise ValueError(f"a file of a program is named {name!r}: names have no folders")


@dataclass(frozen=True)
class Limits:
    """What a program may use. All its processes count, but for `cpu_s`, which each has to itself."""

    wall_s: float = 5.0
    """Seconds from its first line to its end."""
    cpu_s: int = 5
    """Seconds of computing."""
    memory_mb: int = 512
    """Memory, of all its processes together."""
    processes: int = 16
    """Processes and threads at a time."""
    output_bytes: int = 1 << 20
    """Standard output and standard error together."""
    scratch_bytes: int = 16 << 20
    """Files in its scratch folder, the only one that can be written."""

    @property
    def scratch_files(self) -> int:
        """How many files, folders and links the scratch folder may have."""
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
    """Its exit status, 128 and more for a signal's; None where it was ended because of a limit."""
    stdout: str
    stderr: str
    """What it wrote, as far as the limit allows. What is not UTF-8 is replaced."""
    seconds: float
    """From its first line to its end."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.kind == "ok"
