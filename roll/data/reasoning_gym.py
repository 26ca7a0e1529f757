"""Tasks of the package `reasoning-gym`: families of generated puzzles, each with a verifier of its own.

Invariants: a task stores only how its puzzle is generated (family, parameters, seed, size, index), so that a grader can
generate it again and nothing large is sent; no held-out question is trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from roll.config.errors import UserError
from roll.config.suggest import did_you_mean
from roll.data.task import Message, Task

PREFIX = "reasoning_gym:"
"""The prefix of a family's name: `reasoning_gym:letter_counting`."""


def reasoning_gym(
    split: Literal["train", "held_out"],
    families: str | Mapping[str, Any],
    count: int = 1000,
    held_out: int = 100,
    seed: int = 0,
    system: str = "",
    **parameters: Any,
) -> Iterable[Task]:
    """Puzzles of a family, or of several by weight: `{letter_counting: 2, spell_backward: {weight: 1, max_word_len: 5}}`.
    `count` of them train and `held_out` others are held out; a training puzzle that equals a held-out one is left out.
    All other options are the family's own. A task's domain is its family."""
    if not isinstance(count, int) or not isinstance(held_out, int) or count < 1 or held_out < 0:
        raise UserError(f"tasks.options: count={count}, held_out={held_out}: write a count above 0, held_out not below")
    chosen_families = _families(families, parameters)
    weights = [Fraction(str(weight)) for weight, _ in chosen_families.values()]
    train_counts, held_out_counts = _shares(count, weights), _shares(held_out, weights)
    for (family, (_, family_parameters)), train_count, held_out_count in zip(
        chosen_families.items(), train_counts, held_out_counts, strict=True
    ):
        puzzles = make_puzzles(family, family_parameters, seed, train_count + held_out_count)
        held_out_questions = [_question(puzzles, index) for index in range(held_out_count)]
        if split == "held_out":
            questions = list(enumerate(held_out_questions))
        else:
            unseen, train_indices = set(held_out_questions), range(held_out_count, train_count + held_out_count)
            questions = [(index, text) for index in train_indices if (text := _question(puzzles, index)) not in unseen]
        for index, question in questions:
            yield Task(
                id=f"{family}#{index}",
                messages=_messages(system, question),
                answer=puzzles[index]["answer"],
                domain=family,
                info={
                    "family": family,
                    "parameters": family_parameters,
                    "seed": seed,
                    "size": train_count + held_out_count,
                    "index": index,
                },
            )


def make_puzzles(family: str, parameters: Mapping[str, Any], seed: int, size: int) -> Any:
    """The dataset of `reasoning_gym`. The same arguments give the same puzzles everywhere."""
    package = _package()
    known = package.factory.DATASETS
    if family not in known:
        raise UserError(f"reasoning-gym has no family {family!r}{did_you_mean(family, known)}")
    reserved = {"seed", "size"} & parameters.keys()
    if reserved:
        raise UserError(f"tasks.options: {family!r} is given {', '.join(sorted(reserved))}: write seed and count instead")
    try:
        return package.create_dataset(family, seed=seed, size=size, **parameters)
    except Exception as error:
        raise UserError(f"tasks.options: reasoning-gym refused {family!r}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=1)
def _package() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise UserError(
            f"puzzles need the package reasoning-gym ({error}): run `pip install reasoning-gym`, or "
            "`pip install -e '.[tasks]'` in ROLL's folder"
        ) from error
    return reasoning_gym


def _families(families: str | Mapping[str, Any], parameters: dict[str, Any]) -> dict[str, tuple[float, dict[str, Any]]]:
    """Weight and parameters of each family."""
    if isinstance(families, str):
        return {families: (1, parameters)}
    if not isinstance(families, Mapping) or not families:
        raise UserError(f"tasks.options: families is {families!r}: write a family's name, or names and weights")
    found: dict[str, tuple[float, dict[str, Any]]] = {}
    for name, given in families.items():
        settings = dict(given) if isinstance(given, Mapping) else {"weight": given}
        weight = settings.pop("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise UserError(f"tasks.options: the weight of family {name!r} is {weight!r}: write a number above 0")
        found[name] = (weight, {**parameters, **settings})
    return found


def _shares(count: int, weights: list[Fraction]) -> list[int]:
    """Divides a number by weights: each part is its share, rounded down or up, and the parts sum to the number."""
    ends, cumulative = [0], Fraction(0)
    for weight in weights:
        cumulative += weight
        ends.append(round(count * cumulative / sum(weights)))
    return [end - begin for begin, end in pairwise(ends)]


def _question(puzzles: Any, index: int) -> str:
    return str(puzzles[index]["question"])


def _messages(system: str, question: str) -> tuple[Message, ...]:
    message = Message(role="user", content=question)
    return (Message(role="system", content=system), message) if system else (message,)
