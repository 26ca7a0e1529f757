"""Task sources for the examples: word problems, short functions and instructions for a model of 135M parameters.

Each is a function of the split (`train` or `held_out`) that yields tasks, as `tasks: {source: small_tasks.py:NAME}` asks
for. No question of one split is in the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from roll import Task

NAMES = ("Anna", "Ben", "Chloe", "David", "Ella", "Farid", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "stamps", "tickets")
STORIES: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", lambda a, b: a + b),
    ("{name} had {a} {things} and gave {b} of them away. How many {things} are left?", lambda a, b: a - b),
    ("{name} fills {b} bags with {a} {things} each. How many {things} is that?", lambda a, b: a * b),
    ("There are {a} {things} on the table and {b} in the box. How many {things} are there?", lambda a, b: a + b),
)


def word_problems(split: str, count: int = 1000, held_out: int = 200) -> Iterator[Task]:
    """Problems of one step with numbers from 2 to 12, like the easiest of GSM8K."""
    for number, problem in enumerate(_of_split(_word_problem, split, count, held_out)):
        question, answer = problem
        yield Task.ask(f"problem-{number}", f"{question} Answer with just the number.", answer, domain="maths")


def _word_problem(rng: random.Random) -> tuple[str, int]:
    small, large = sorted((rng.randint(2, 12), rng.randint(2, 12)))
    story, solve = rng.choice(STORIES)
    return story.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=large, b=small), solve(large, small)


FUNCTIONS: tuple[tuple[str, Callable[[int], Callable[[Any], Any]], tuple[Any, ...]], ...] = (
    ("a number x, returns x plus {k}", lambda k: lambda x: x + k, (0, 3, -8)),
    ("a number x, returns x times {k}", lambda k: lambda x: x * k, (0, 3, -8)),
    ("a number x, returns True if x is greater than {k}, else False", lambda k: lambda x: x > k, (0, 21, 99)),
    ("a list x, returns its sum plus {k}", lambda k: lambda x: sum(x) + k, ([3, 1, 2], [5])),
    ("a list x, returns its largest number minus {k}", lambda k: lambda x: max(x) - k, ([3, 1, 2], [5])),
    ("a text x, returns x repeated {k} times", lambda k: lambda x: x * k, ("lake", "a b")),
)


def functions(split: str, largest: int = 40) -> Iterator[Task]:
    """Functions of one argument, with the tests that the reward `code` runs in the sandbox. Each uses a number k; every
    fifth k is held out."""
    for k in range(2, largest + 1):
        if (k % 5 == 0) != (split == "held_out"):
            continue
        for kind, (what, make, inputs) in enumerate(FUNCTIONS):
            question = f"Write a Python function f(x) that, given {what.format(k=k)}. Write only the code."
            tests = [{"call": "f", "args": [given], "result": make(k)(given)} for given in inputs]
            yield Task.ask(f"function-{kind}-{k}", question, domain="code", tests=tests)


TOPICS = ("the sea", "a dog", "winter", "bread", "the moon", "music", "rain", "an old house", "a garden", "coffee")
KEYWORDS = ("blue", "quiet", "stone", "window", "silver", "morning", "seven", "river")


def instructions(split: str, count: int = 400, held_out: int = 100) -> Iterator[Task]:
    """A sentence about a topic that must also follow an instruction, under the instruction's name in IFEval."""
    for number, (question, name, arguments) in enumerate(_of_split(_instruction, split, count, held_out)):
        asked = {"instruction_id_list": [name], "kwargs": [arguments]}
        yield Task.ask(f"instruction-{number}", question, domain="instructions", **asked)


def _instruction(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    word, other = rng.sample(KEYWORDS, 2)
    instruction, name, arguments = rng.choice(
        (
            (f"Use the word {word}.", "keywords:existence", {"keywords": [word]}),
            (f"Use the words {word} and {other}.", "keywords:existence", {"keywords": [word, other]}),
            (f"Mention {word}, and write everything in capital letters.", "change_case:english_capital", {}),
            (f"Mention {word}, and put the sentence in double quotation marks.", "startend:quotation", {}),
            (f"End with the exact words: The {word} end.", "startend:end_checker", {"end_phrase": f"The {word} end."}),
        )
    )
    return f"Write one sentence about {rng.choice(TOPICS)}. {instruction}", name, arguments


def _of_split(make: Callable[[random.Random], Any], split: str, count: int, held_out: int) -> list[Any]:
    """The first `count` different questions are those of `train`, the next `held_out` the others."""
    rng, made = random.Random(f"examples/{make.__name__}"), {}
    while len(made) < count + held_out:
        question, *rest = make(rng)
        made.setdefault(question, (question, *rest))
    problems = list(made.values())
    return problems[:count] if split == "train" else problems[count:]
