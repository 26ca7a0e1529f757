"""The command line: `roll train`, `roll eval`, `roll rollout` and the others, and their output."""

from roll.cli.commands import main

__all__ = ["main"]
