"""The command line: `roll train`, `roll eval`, `roll rollout` and the others, and what they print."""

from roll.cli.commands import main

__all__ = ["main"]
