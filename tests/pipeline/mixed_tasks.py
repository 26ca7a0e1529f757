"""Tasks of two kinds: half of them are judged by a grader, half are played in an environment."""

from __future__ import annotations

from collections.abc import Iterable

from roll.data.task import EnvSpec, Task


def mixed(split: str) -> Iterable[Task]:
    for number in range(10):
        yield Task.ask(f"digit {number}", str(number), str(number), domain="grader")
        yield Task(f"turns {number}", (), domain="environment", environment=EnvSpec("echo_turns", number, {"turns": 2}))
