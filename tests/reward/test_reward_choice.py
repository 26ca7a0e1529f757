"""Which letter a text chooses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data import Response, Task
from roll.reward.choice import Choice, chosen_letter


def judged(answer: Any, text: str, choices: list[str] | None = None, **options: Any) -> float:
    task = Task.ask("t", "?", answer, **({"choices": choices} if choices else {}))
    return Choice(**options)(task, Response(text, 1, "stop"))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("(b) Paris, because A is in Spain.", "B"),
        ("B: Paris", "B"),
        ("The answer is (B).", "B"),
        ("The answer is B.", "B"),
        ("The answer is b.", "B"),
        ("The correct answer is B because it rains.", "B"),
        ("The answer is: **B**", "B"),
        ("Answer: B", "B"),
        ("answer - (c)", "C"),
        ("Final answer: $B$", "B"),
        ("The answer is option D.", "D"),
        ("I would choose option (C), not (A).", "C"),
        ("The correct option is C", "C"),
        ("A is wrong. B is wrong. So the answer must be C.", "C"),
        ("The answer is A. Wait, no: the answer is C.", "C"),
        ("The answer is B, not C.", "B"),
        ("The answer is not B. The answer is D.", "D"),
        (r"So \boxed{B}.", "B"),
        (r"So \boxed{\text{C}}.", "C"),
        (r"\boxed{A} or rather \boxed{B}", "B"),
        (r"The answer is $\boxed{\textbf{(D)}}$", "D"),
        ("<think>A or B?</think><answer>B</answer>", "B"),
        ("<answer> (c) Rome </answer>", "C"),
        ("Let me think.\n\nB", "B"),
        ("A cat has four legs.\n\n(D)", "D"),
        ("It rains in Spain, so (A) fails and (C) holds.", "C"),
        ("Clearly B", "B"),
        ("The answer is (A) because option B is wrong.", "A"),
        ("Option C is correct.", "C"),
        ("**Answer:** C", "C"),
        ("the correct choice is (E): a goat", "E"),
        ("Answer\n\nB", "B"),
        ("pick a card", None),
        ("I think it is a dog", None),
        ("A dog barked.", None),
        ("I'm not sure", None),
        ("The answer is a dog.", None),
        ("The answer is I don't know", None),
        ("", None),
        ("Vitamin K", None),
        ("The answer is Einstein", None),
    ],
)
def test_the_letter_a_text_chooses(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "ABCDEFGHIJ") == letter


WAYS = [
    "{}",
    "({})",
    "{}.",
    "**{}**",
    "The answer is {}.",
    "Answer: ({})",
    "x\n{}\n",
    r"\boxed{{{}}}",
    "<answer>{}</answer>",
]


@given(st.sampled_from("ABCDEFGHIJ"), st.sampled_from(WAYS))
def test_every_letter_is_found_in_every_way_of_saying_it(letter: str, way: str) -> None:
    for said in (letter, letter.lower()):
        assert chosen_letter(way.format(said)) == letter
        assert judged(letter, way.format(said)) == 1.0


@given(st.lists(st.sampled_from("ABCD"), min_size=1))
def test_the_last_stated_answer_counts(letters: list[str]) -> None:
    said = " ".join(f"The answer is ({letter})." for letter in letters)
    assert chosen_letter(said) == letters[-1]


@given(st.text())
def test_no_text_breaks_the_search(text: str) -> None:
    assert chosen_letter(text) in {None, *"ABCDEFGHIJ"}
    assert judged("A", text, ["x", "y"]) in (0.0, 1.0)


def test_long_texts_are_searched_in_bounded_time() -> None:
    opened = ["answer" + " " * 50_000, "answer is" + "(" * 50_000, "answer:" + "\n" * 50_000, "( " * 50_000]
    for text in (*opened, "answer is " * 20_000, "A" * 100_000, "\\text" * 20_000, "*" * 100_000 + "B"):
        chosen_letter(text)


CITIES = ["Rome", "Paris", "New York"]


@pytest.mark.parametrize("answer", ["B", "(b)", "B.", "Paris", 1])
def test_answers_are_letters_numbers_or_texts(answer: Any) -> None:
    assert judged(answer, "The answer is B.", CITIES) == 1.0
    assert judged(answer, "It is Paris, of course", CITIES) == 1.0
    assert judged(answer, "It is Paris, of course", CITIES, texts=False) == 0.0
    assert judged(answer, "Paris or Rome", CITIES) == 0.0
    assert judged(answer, "The answer is D.", CITIES) == 0.0


@pytest.mark.parametrize("answer", [None, "D", 3, -1, True, "Berlin", ""])
def test_an_answer_that_is_none_of_the_choices_is_the_tasks_fault(answer: Any) -> None:
    with pytest.raises(ValueError, match="the answer of task 't'"):
        judged(answer, "B", CITIES)


def test_letters_may_be_named() -> None:
    assert judged("Y", "The answer is Y", letters="XY") == 1.0
    assert chosen_letter("The answer is B", "XY") is None
    for letters in ("AA", "A B", "a1"):
        with pytest.raises(ValueError, match="letters is"):
            Choice(letters=letters)
