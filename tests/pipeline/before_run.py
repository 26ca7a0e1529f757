"""What a process of `start_roll` does before it runs the command."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import roll.pipeline.entrypoints as launch
import roll.pipeline.roles as roles
import roll.run.folder as folder


def lose_readers() -> None:
    """What is printed from now on nobody reads: standard output is a pipe that has lost its reader."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def strike(where: str, number: signal.Signals) -> None:
    """The next run of this process gets the signal when it comes to `where`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    match where:
        case "the config":
            folder.atomic_write = _struck(folder.atomic_write, number)  # type: ignore[assignment]
        case "the folder":
            launch.Recording.write = _struck(launch.Recording.write, number)  # type: ignore[method-assign]
        case "a worker":
            roles.RolloutWorker.__init__ = _struck(roles.RolloutWorker.__init__, number)  # type: ignore[method-assign]
        case "the graders":
            roles.RewardWorker.start = _struck_after(roles.RewardWorker.start, number)  # type: ignore[method-assign]
        case _:
            raise ValueError(where)


def _struck(function: Callable[..., Any], number: signal.Signals) -> Callable[..., Any]:
    @functools.wraps(function)
    def struck(*arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), number)
        return function(*arguments, **named)

    return struck


def _struck_after(function: Callable[..., Any], number: signal.Signals) -> Callable[..., Any]:
    @functools.wraps(function)
    async def struck(*arguments: Any, **named: Any) -> Any:
        result = await function(*arguments, **named)
        os.kill(os.getpid(), number)
        return result

    return struck
