"""Rewards for whole runs: one whose groups always have signal, and some that misbehave. Graders load them from here."""

from __future__ import annotations

import os
import signal
import time

from roll import Response, Task


def letters(task: Task, response: Response) -> float:
    """The share of lower-case letters, which differs from answer to answer from the first step on."""
    return sum(character.islower() for character in response.text) / 4


def raises(task: Task, response: Response) -> float:
    raise LookupError("the grader's book is missing")


def raises_for_some(task: Task, response: Response) -> float:
    if int(task.answer) % 2:
        raise LookupError(f"no page for {task.answer}")
    return letters(task, response)


def hangs_for_some(task: Task, response: Response) -> float:
    if int(task.answer) % 2:
        time.sleep(60)
    return letters(task, response)


def dies_for_some(task: Task, response: Response) -> float:
    if int(task.answer) % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(task, response)
