"""Numerals and final statements are what their plain definition finds, in every text."""

from __future__ import annotations

import itertools

import plain_reading
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from verdict_table import GROUPS

from roll.reward.extract import final_statement
from roll.reward.numerals import last_two_numerals, numerals, plain_numerals, tail_with_digits

WORDS = [
    "a", "A", "x", "X", " x ", "e", "E", "d ", "word", "two words here", "km", "m^2", "GPT-4", "x_1", "5x", "7x", "3k",
    "and", "or", " vs ", "maybe", "So we add 5 to 6. ", "The sum of 12 and 30 is ", "I hope this helps.", " is ",
    "hundred", "million", " thousand", "Million",
]  # fmt: skip
NUMBERS = [
    "1", "2", "5", "7", "10", "12", "345", "00", "1,234", "1 234", "1'234", "1.234", "1.234,5", "12,34,567", "3.5",
    ".5", "1/2", "2 1/2", "1/0", "3:30", "2024-01-15", "5e3", "5 * 10^3", "x 10 ^3", "* 10 ^ 3", "1234567890", "1. ",
    "2) ",
]  # fmt: skip
SIGNS = [
    " ", " ", "\n", "\n", "\t", "\r", "\x0b", "\u2028", "%", " %", "^", "^2", "^{2}", "**", "*", "/", " / ", "-", "- ",
    "+", "=", "= ", "(", "f(", "-(", ")", "{", "}", "[", "]", "<", ">", "!", "?", ".", ",", ";", ":", "'", "`", "$",
    "$5", "€", "~", "_", "__", "_{", "\\", "->", "=> ",
]  # fmt: skip
CUES = [
    " not ", " isn't ", " is not 5", " is wrong", ", not ", "rather than ", "instead of ", "less than ", "up to ",
    "at least ", "at most ", "never be ", "nor ", "neither ", "not equal to ", "minus ", "negative ", "Minus ", "NOT ",
    "<=", ">=", "!=", "≠", "±", "\\le ", "\\geq", "\\ne ", "\\lt", "\\not=", "\\not =", "\\pm ",
]  # fmt: skip
LATEX = [
    "\\frac{1}{2}", "\\frac12", "\\sqrt{2}", "\\sqrt", "\\pi", "\\times ", "\\cdot", "\\div ", "\\text{", "\\boxed{",
    "\\left(", "\\circ", "^\\circ", "\\,", "{,}", "\\ ", "\\$", "\\(", "\\]", "\\to ", "\\quad", "\\begin{a}",
    "\\hspace{2}",
]  # fmt: skip
FOREIGN = [
    "½", "²", "¹⁰", "１２", "−", "×", "–", "°", "\xa0", "\u200b", "é", "ß", "ſ", "minuſ ", "mınus ", "K", "İ", "٣", "→",
]  # fmt: skip
STATEMENTS = [
    "answer", "answers", "The answer is ", "Answer: ", "answer: ", "\nFinal Answer\n", "anſwer is ", "**Answer:**",
    "ANSWER =",
]  # fmt: skip

PIECES = [*WORDS, *NUMBERS, *SIGNS, *CUES, *LATEX, *FOREIGN, *STATEMENTS]
pieces = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
"""Texts of the grammar's pieces, in any order."""
characters = st.text("0123456789  .,:/^'-+*xXeE \\{}()$%<>=!?and\n½²_`~")
table = st.sampled_from([text for group in GROUPS for _, text, _ in group.rows])
cues = [plain_reading.NEGATED, plain_reading.CONTRASTED, plain_reading.SIGNED]
with_cues = st.tuples(pieces, st.sampled_from(cues).flatmap(st.from_regex), st.sampled_from(NUMBERS)).map("".join)
"""A number after something that may deny it, or give it a sign."""

DENIALS = [
    "not", "cannot", "isn't", "never", "not be", "not equal", "never equal to", "up to", "less than", "at least",
    "at most", "neither", "nor", "≠", "!=", "≤", "≥", "<=", ">=", "<", ">", "a>", "±", "\\le", "\\leq", "\\nle",
    "\\nleq", "\\ge", "\\geq", "\\nge", "\\ngeq", "\\ne", "\\neq", "\\lt", "\\gt", "\\not", "\\not=", "\\not =",
    "\\not\t=", "\\pm", ", not", "(not", "; not", "rather than", "instead of", "minus", "minuſ", "mınus", "negative",
    "9 minus", "9 negative", "-(", "- ((", "-{", "9 -(", "f(", "= -", "(-", "= - ", "9 -", "9-",
]  # fmt: skip


@pytest.mark.parametrize("denial", DENIALS)
def test_what_denies_a_number_is_seen(denial: str) -> None:
    for before, cue in itertools.product(("", "x = 3, "), (denial, denial.upper())):
        for space, number in itertools.product(("", " ", "   ", "\n", "\u2028"), ("5", "-5", "3:30")):
            text = f"{before}{cue}{space}{number} or so"
            assert list(map(tuple, numerals(text))) == plain_reading.tuples(text)


@settings(max_examples=examples(1000), deadline=None)
@given(pieces | characters | table | with_cues)
@example("rather than 3:30")
@example("5 million %2")
@example("minuſ 5")
def test_numerals_are_those_of_the_plain_definition(text: str) -> None:
    assert tail_with_digits(text) == plain_reading.tail_with_digits(text)
    plain = plain_reading.plain_numerals(text)
    assert plain_numerals(text) == plain
    expected = plain_reading.tuples(plain)
    assert list(map(tuple, numerals(plain))) == expected
    before, last = last_two_numerals(plain)
    assert [before, last] == [None, None, *expected][-2:]


@settings(max_examples=examples(500), deadline=None)
@given(pieces | table)
@example("My answer? 3\nThe anſwer is 5")
def test_final_statements_are_those_of_the_plain_definition(text: str) -> None:
    found = final_statement(text)
    assert (None if found is None else found.text) == plain_reading.final_statement(text)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.from_regex(plain_reading.STATEMENT) | pieces, max_size=5).map("\n".join))
def test_the_last_introduction_of_several_counts(text: str) -> None:
    found = final_statement(text)
    assert (None if found is None else found.text) == plain_reading.final_statement(text)
