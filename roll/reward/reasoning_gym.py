"""`reasoning_gym`: the verifiers of that package, for the tasks of its source."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from roll.data.reasoning_gym import make_puzzles
from roll.data.task import Response, Task

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class ReasoningGym:
    """What the puzzle's own verifier gives the answer: the last `<answer>…</answer>` of the text, or the text. An answer
    that the verifier cannot read is worth 0."""

    wrong: float = 0.01
    """Scores up to this are 0: what many families give an answer for being one."""
    partial: bool = True
    """Whether an answer that is partly right is worth something; else all but a score of 1 is 0."""
    deterministic = True

    def __call__(self, task: Task, response: Response) -> float:
        made_by = _made_by(task)
        tagged = _TAGGED.findall(response.text)
        answer = (tagged[-1] if tagged else response.text).strip()
        puzzles, entry = _puzzles(*made_by[:-1]), _entry(*made_by)
        if not answer:
            return 0.0
        try:
            score = float(puzzles.score_answer(answer, entry))
        except Exception:  # verifiers parse answers as they come; what breaks one is no solution
            return 0.0
        return score if score > self.wrong and (self.partial or score >= 1) else 0.0

    def warm_up(self) -> None:
        """Loads the package, which takes a second or more."""
        make_puzzles("chain_sum", {}, 0, 1)


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
