"""The levels that this machine has, for tests of each."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from roll.sandbox import LEVELS, Level, MissingLevel, Sandbox, try_level
from roll.sandbox.isolation import Guard

BARE = "plain, limits only"
"""The plain level as it is where the kernel has neither Landlock nor seccomp."""
NAMES = (*LEVELS, BARE)


@cache
def tried(level: Level) -> Sandbox | MissingLevel:
    return try_level(level)


def box(name: str) -> Sandbox:
    """The level of that name; skips the test where the machine has not got it. The plain one is always there."""
    found = tried("plain" if name == BARE else name)  # type: ignore[arg-type]
    if isinstance(found, MissingLevel):
        assert found.level != "plain", found.why
        pytest.skip(f"no {name} here: {found.why}")
    if name == BARE:
        return dataclasses.replace(found, guards=found.guards & {"user"})
    return found


def needs(sandbox: Sandbox, guard: Guard) -> None:
    """Skips the test of what a level does not promise."""
    if guard not in sandbox.guards:
        pytest.skip(f"{sandbox.isolated_by}: nothing guards {guard}")


def alive(mark: str) -> list[int]:
    """Processes on this machine with that mark on their command line."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if mark.encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
    return found
