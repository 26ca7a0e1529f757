"""The sandbox: runs untrusted Python programs without access to the run.

    outcome = await run(Program("print(6 * 7)"))
    outcome.kind, outcome.stdout        # "ok", "42\\n"

A program has no network, no environment variables, no files except the system's libraries to read and a small scratch
folder to write, and limits on time, memory, processes and output. It is ended with all its processes. The level of
isolation that the machine offers is found by trying (`survey`); docs/guides/sandbox.md describes what each level
guarantees.
"""

from __future__ import annotations

from roll.sandbox.capabilities import MissingLevel, best, survey, try_level
from roll.sandbox.execution import execute, execute_async
from roll.sandbox.isolation import LEVELS, Level, Sandbox
from roll.sandbox.program import Limits, Program, ProgramResult, SandboxError

__all__ = [
    "LEVELS",
    "Level",
    "Limits",
    "MissingLevel",
    "Program",
    "ProgramResult",
    "Sandbox",
    "SandboxError",
    "best",
    "run",
    "run_blocking",
    "survey",
    "try_level",
]


async def run(program: Program, limits: Limits | None = None, sandbox: Sandbox | None = None) -> ProgramResult:
    """Runs a program on the given level, or on the best available one. If cancelled, it kills the program."""
    return await execute_async(sandbox or best(), program, limits or Limits())


def run_blocking(program: Program, limits: Limits | None = None, sandbox: Sandbox | None = None) -> ProgramResult:
    """The same for synchronous code, such as rewards in grader processes."""
    return execute(sandbox or best(), program, limits or Limits())
