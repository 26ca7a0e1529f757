"""`instructions`: whether a response follows constraints that a program can check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roll.data.task import Response, Task
from roll.reward.extract import strip_thinking
from roll.reward.instructions.constraints import CONSTRAINTS, follows

__all__ = ["CONSTRAINTS", "Instructions", "loosened"]


@dataclass(frozen=True)
class Instructions:
    """The share of a task's instructions that the text, without its thinking, follows, or 1 if it follows all, else 0.

    A task's info has `instruction_id_list`, names such as `punctuation:no_comma`, and `kwargs`, the arguments of each:
    the form of the IFEval data set. Both readings, share and all, are parts of the verdict.
    """

    mode: Literal["strict", "loose"] = "strict"
    """`loose`: an instruction also counts as followed if it is without the text's first line, last line or asterisks."""
    score: Literal["share", "all"] = "share"
    """`share` of the instructions followed, or `all` or nothing."""
    deterministic = True

    def __call__(self, task: Task, response: Response) -> dict[str, float]:
        text = strip_thinking(response.text) or ""
        followed = [self._follows(text, name, arguments) for name, arguments in instructions_of(task)]
        values = {"share": sum(followed) / len(followed), "all": float(all(followed))}
        return {"reward": values[self.score], **values}

    def check_answer(self, task: Task) -> bool:
        """Always checks: raises `ValueError` if the task has no instructions, or a different number of arguments."""
        return bool(instructions_of(task))

    def _follows(self, text: str, name: str, arguments: Mapping[str, Any]) -> bool:
        texts = loose_variants(text) if self.mode == "loose" else [text]
        return any(follows(variant, name, arguments) for variant in texts)


def instructions_of(task: Task) -> list[tuple[str, Mapping[str, Any]]]:
    """The names of a task's instructions and their arguments, without null values."""
    names = task.info.get("instruction_id_list")
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise ValueError(f"task {task.id!r} has no instruction_id_list in its info")
    arguments = task.info.get("kwargs") or [{}] * len(names)
    if len(arguments) != len(names):
        raise ValueError(f"task {task.id!r} has {len(names)} instructions, but arguments for {len(arguments)}")
    given = [{key: value for key, value in (each or {}).items() if value is not None} for each in arguments]
    return list(zip(names, given, strict=True))


def loose_variants(text: str) -> list[str]:
    """The text; without its first line, its last, both; and all of these without asterisks."""
    lines = text.split("\n")
    cuts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(cut).strip() for cut in cuts]
    return [text, *texts, *(cut.replace("*", "") for cut in texts)]
