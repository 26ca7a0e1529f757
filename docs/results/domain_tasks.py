"""Tasks of two domains that a small model can learn: short functions to write, and instructions to follow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from roll import Task

LISTS = ([3, 1, 2], [10, -4, 7, 7], [5])
WORDS = ("lake", "Sokoban", "a longer text")
NUMBERS = (0, 3, -8, 21)

Make = Callable[[int], Callable[[Any], Any]]
FUNCTIONS: dict[str, tuple[tuple[Any, ...], Make]] = {
    "a number x, returns x plus {k}": (NUMBERS, lambda k: lambda x: x + k),
    "a number x, returns x minus {k}": (NUMBERS, lambda k: lambda x: x - k),
    "a number x, returns x times {k}": (NUMBERS, lambda k: lambda x: x * k),
    "a number x, returns the remainder of x divided by {k}": (NUMBERS, lambda k: lambda x: x % k),
    "a number x, returns True if x is greater than {k}, else False": (NUMBERS, lambda k: lambda x: x > k),
    "a list x, returns its sum plus {k}": (LISTS, lambda k: lambda x: sum(x) + k),
    "a list x, returns its length times {k}": (LISTS, lambda k: lambda x: len(x) * k),
    "a list x, returns its largest number minus {k}": (LISTS, lambda k: lambda x: max(x) - k),
    "a list x, returns a list with {k} added to each number": (LISTS, lambda k: lambda x: [y + k for y in x]),
    "a string x, returns x repeated {k} times": (WORDS, lambda k: lambda x: x * k),
    "a string x, returns its first {k} characters": (WORDS, lambda k: lambda x: x[:k]),
    "a string x, returns the length of x plus {k}": (WORDS, lambda k: lambda x: len(x) + k),
}


def code(split: str, largest: int = 60) -> Iterator[Task]:
    """Functions of one argument and a number; those whose number is 3 more than a multiple of 5 are held out."""
    for k in range(2, largest + 1):
        if (k % 5 == 3) != (split == "held_out"):
            continue
        for number, (what, (inputs, make)) in enumerate(FUNCTIONS.items()):
            question = f"Write a Python function f(x) that, given {what.format(k=k)}. Write only the code."
            function = make(k)
            tests = [{"call": "f", "args": [given], "result": function(given)} for given in inputs]
            yield Task.ask(f"code-{number}-{k}", question, tests=tests)


TOPICS = (
    "the sea", "a dog", "winter", "bread", "the moon", "music", "a long journey", "rain", "an old house", "football",
    "a garden", "the city at night", "cats", "coffee", "a river", "mountains", "friendship", "a train",
    "the desert", "birds",
)  # fmt: skip
KEYWORDS = ("blue", "quiet", "forever", "stone", "window", "silver", "morning", "seven")
ENDS = ("That is all.", "Thank you for reading.", "The end.", "What do you think?")

Instruction = tuple[str, str, dict[str, Any]]


def _instruction(draw: random.Random) -> Instruction:
    """What is asked, its name in IFEval, and its arguments."""
    keyword, end, few, many = draw.choice(KEYWORDS), draw.choice(ENDS), draw.randint(2, 4), draw.randint(15, 40)
    letter = draw.choice("bkmpw")
    less = {"num_words": many, "relation": "less than"}
    often = {"letter": letter, "let_frequency": few, "let_relation": "at least"}
    bullets = f"Write a list of exactly {few} bullet points, each beginning with *."
    without = f"Do not use the word {keyword} or the word the."
    return draw.choice(
        [
            ("Do not use any commas.", "punctuation:no_comma", {}),
            ("Write everything in capital letters.", "change_case:english_capital", {}),
            ("Write everything in lowercase letters.", "change_case:english_lowercase", {}),
            ("Put the whole answer in double quotation marks.", "startend:quotation", {}),
            (f"End with the exact words: {end}", "startend:end_checker", {"end_phrase": end}),
            (f"Use the word {keyword}.", "keywords:existence", {"keywords": [keyword]}),
            (without, "keywords:forbidden_words", {"forbidden_words": [keyword, "the"]}),
            (f"Use less than {many} words.", "length_constraints:number_words", less),
            (bullets, "detectable_format:number_bullet_lists", {"num_bullets": few}),
            (f"Use the letter {letter} at least {few} times.", "keywords:letter_frequency", often),
            ("Give the answer a title in double angular brackets: <<title>>.", "detectable_format:title", {}),
        ]
    )


def instructions(split: str, count: int = 3000, held_out: int = 256) -> Iterator[Task]:
    """A topic and two instructions that do not name the same thing."""
    measured = split == "held_out"
    seen = set() if measured else {task.question for task in instructions("held_out", held_out=held_out)}
    draw, made = random.Random(split), 0
    while made < (held_out if measured else count):
        topic, chosen = draw.choice(TOPICS), [_instruction(draw), _instruction(draw)]
        families = {name.partition(":")[0] for _, name, _ in chosen}
        question = " ".join([f"Write two sentences about {topic}.", *(asked for asked, _, _ in chosen)])
        if len(families) < 2 or question in seen:
            continue
        seen.add(question)
        made += 1
        names, arguments = [name for _, name, _ in chosen], [given for _, _, given in chosen]
        yield Task.ask(f"instructions-{made}", question, instruction_id_list=names, kwargs=arguments)
