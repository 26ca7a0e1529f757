"""`reasoning_gym`: that package's verifiers, for the tasks of its source."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from roll.data.reasoning_gym import make_puzzles
from roll.data.task import Response, Task
from roll.reward.extract import extract
from roll.reward.time_limit import with_time_limit

_MAX_CHARS = 1 << 16
"""Maximum characters of an answer."""
_EXPONENT = re.compile(r"[\d.][eE][+-]?[\d_]{5,}")
"""A numeral such as 1e999999999: a verifier that writes it out takes minutes that no timer interrupts."""


@dataclass(frozen=True)
class ReasoningGym:
    """The score of the puzzle's own verifier for the answer that the text states, or for the text if it states none; for
    a final statement, the better of statement and whole text. An answer that the verifier cannot parse is worth 0."""

    wrong: float = 0.01
    """Scores up to this count as 0: many families give a small score for any answer."""
    partial: bool = True
    """Whether a partly right answer is worth something; otherwise every score below 1 counts as 0."""
    deterministic = True

    def __call__(self, task: Task, response: Response) -> float:
        arguments = _generation_arguments(task)
        puzzles, entry = _puzzles(*arguments[:-1]), _entry(*arguments)
        answers = [answer for each in extract(response.text, "stated") if (answer := each.strip())]
        score = max((_score(puzzles, entry, answer) for answer in answers), default=0.0)
        return score if score > self.wrong and (self.partial or score >= 1) else 0.0

    def check_answer(self, task: Task) -> bool:
        """Checks that the task says how its puzzle is generated. The verifier itself handles the puzzle's answer."""
        return bool(_generation_arguments(task))

    def warm_up(self) -> None:
        """Imports the package, which takes a second or more."""
        make_puzzles("chain_sum", {}, 0, 1)


def _score(puzzles: Any, entry: Any, answer: str) -> float:
    """The verifier's score; 0 if the verifier fails on the answer or takes too long: verifiers parse, and some compute,
    answers unchecked."""
    if len(answer) > _MAX_CHARS or _EXPONENT.search(answer):
        return 0.0
    try:
        return with_time_limit(lambda: float(puzzles.score_answer(answer, entry)), 0.0)
    except Exception:
        return 0.0


def _generation_arguments(task: Task) -> tuple[str, str, int, int, int]:
    """How a task's puzzle is generated."""
    try:
        info = task.info
        return info["family"], json.dumps(info["parameters"]), info["seed"], info["size"], info["index"]
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
    """Cached: some puzzles take long to generate, and siblings are judged one after the other."""
    return _puzzles(family, parameters, seed, size)[index]
