"""The verifiers of `reasoning-gym`, for the tasks of that source."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from roll.data.reasoning_gym import make_puzzles
from roll.data.task import Response, Task

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
WRONG = 0.01
"""What many families give an answer that is wrong, for being one."""


def reasoning_gym(task: Task, response: Response) -> float:
    """What the puzzle's own verifier gives the answer, partial credit included; what it gives a wrong one, 0.01 and less,
    is 0, and so is an answer that it cannot read. The answer is in the last `<answer>` of the text; without one it is
    the text."""
    entry = _entry(*_made_by(task))
    tagged = _TAGGED.findall(response.text)
    answer = (tagged[-1] if tagged else response.text).strip()
    if not answer:
        return 0.0
    puzzles = _puzzles(*_made_by(task)[:-1])
    try:
        score = float(puzzles.score_answer(answer, entry))
    except Exception:  # verifiers parse answers as they come; what breaks one is no solution
        return 0.0
    return score if score > WRONG else 0.0


def _made_by(task: Task) -> tuple[str, str, int, int, int]:
    """How a task's puzzle is made."""
    try:
        made = task.info
        return made["family"], json.dumps(made["parameters"]), made["seed"], made["size"], made["index"]
    except KeyError as error:
        raise ValueError(
            f"task {task.id!r} does not say how its puzzle is made (no {error}): the reward reasoning_gym judges tasks "
            "of the source reasoning_gym"
        ) from None


@lru_cache(maxsize=64)
def _puzzles(family: str, parameters: str, seed: int, size: int) -> Any:
    return make_puzzles(family, json.loads(parameters), seed, size)


@lru_cache(maxsize=256)
def _entry(family: str, parameters: str, seed: int, size: int, index: int) -> Any:
    """Some puzzles take long to make, and siblings are judged one after the other."""
    return _puzzles(family, parameters, seed, size)[index]


def warm_up() -> None:
    """Importing the package takes a second or more."""
    import reasoning_gym  # noqa: F401
