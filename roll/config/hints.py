"""How a message says what to write: as on the command line, or as in Python.

A message such as "there is a run already: write --resume" is for the command line; to a program it says `resume=True`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_on_command_line: ContextVar[bool] = ContextVar("on_command_line")


@contextmanager
def command_line() -> Iterator[None]:
    """While the block runs, messages are for a user of the command line; otherwise they are for one of Python."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def option(name: str, value: str = "") -> str:
    """An option of a command or of the function of the same name: `--resume` or `resume=True`, and with a value
    `--code run` or `code="run"`."""
    if _on_command_line.get(False):
        return f"--{name.replace('_', '-')} {value}".rstrip()
    return f'{name}="{value}"' if value else f"{name}=True"


def resume_command(config: str | Path) -> str:
    """What continues the run of a config file."""
    command = f"roll train {shlex.quote(str(config))} --resume"
    return command if _on_command_line.get(False) else f'roll.train("{config}", resume=True)'
