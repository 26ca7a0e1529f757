"""The command line: `roll train`, `roll eval`, `roll rollout` and the others, and their output."""

from __future__ import annotations

from typing import Any

from roll.process.gc_tuning import gc_paused

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> Any:
    """The entry point; the exit status. In a source tree whose packages are not installed it says what is missing."""
    with gc_paused():  # until a run has started
        try:
            from roll.cli.commands import main as run
        except ModuleNotFoundError as error:
            if not error.name or error.name.partition(".")[0] == "roll":
                raise
            from roll.cli.doctor import print_missing

            return print_missing(error.name, arguments)
        return run(arguments)
