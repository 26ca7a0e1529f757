"""Numbers and mathematics: what holds for all texts, beyond the rows of the table."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from thorough import but

from roll.data import Response, Task
from roll.reward.math_text import equation_sides, expression_in, lists_several, tidy, without_unit
from roll.reward.maths import Math, attempt_in
from roll.reward.numbers import Number, given_number, last_number
from roll.reward.numerals import VULGAR, numerals, plain_numerals, read_number

math, number = Math(), Number()
decimals = st.decimals(-(10**12), 10**12, places=3) | st.integers(-(10**30), 10**30).map(Decimal)
wholes = st.integers(-(10**9), 10**9)


def judged(reward: Any, answer: Any, text: str) -> float:
    result = reward(Task.ask("t", "?", answer), Response(text, 1, "stop"))
    assert isinstance(result, float)
    return result


BEFORE = ["", "so ", "a = ", "1 + 2 = ", "(", "x: $", "The answer is ", "**", "答案是", "the total is €"]
AFTER = ["", ".", "!", ")", "%", " apples", " km/h", "\n", "**", " m^2", "。"]


@given(decimals, st.sampled_from(BEFORE), st.sampled_from(AFTER))
def test_a_number_is_found_however_it_is_written_and_whatever_surrounds_it(
    value: Decimal, before: str, after: str
) -> None:
    plain, grouped = f"{value:f}", f"{value:,f}"
    for written in (plain, grouped, grouped.replace(",", "\u202f"), grouped.replace(",", r"\,"), plain.replace("-", "−")):
        assert last_number(f"{before}{written}{after}") == Fraction(value)


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.booleans())
def test_fractions_are_exact_in_all_forms(over: int, under: int, negative: bool) -> None:
    sign, value = ("-", -1) if negative else ("", 1)
    for written in (
        f"{over}/{under}",
        f"{over} / {under}",
        rf"\frac{{{over}}}{{{under}}}",
        rf"$\dfrac{{{over}}}{{{under}}}$",
    ):
        assert last_number(f"It is {sign}{written}.") == value * Fraction(over, under)


@given(st.integers(1, 999), st.integers(1, 99), st.integers(2, 100))
def test_mixed_numbers(whole: int, over: int, under: int) -> None:
    if over >= under:
        return
    value = whole + Fraction(over, under)
    for written in (
        f"{whole} {over}/{under}",
        rf"{whole}\frac{{{over}}}{{{under}}}",
        rf"{whole} \tfrac{{{over}}}{{{under}}}",
    ):
        assert last_number(written) == value
        assert last_number(f"-{written}") == -value


@pytest.mark.parametrize(("character", "written"), VULGAR.items())
def test_every_fraction_that_is_one_character(character: str, written: str) -> None:
    over, under = map(int, written.split("/"))
    assert last_number(character) == Fraction(over, under)
    assert last_number(f"-{character}") == -Fraction(over, under)
    if over:
        assert last_number(f"3{character}") == last_number(f"3 {character}") == 3 + Fraction(over, under)


@given(st.decimals(-999, 999, places=2), st.integers(-30, 30))
def test_scientific_notation(mantissa: Decimal, exponent: int) -> None:
    value = Fraction(mantissa) * Fraction(10) ** exponent
    written = [f"{mantissa:f}e{exponent}", f"{mantissa:f} × 10^{exponent}", rf"{mantissa:f}\times 10^{{{exponent}}}"]
    raised = str(exponent).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
    for each in (*written, f"{mantissa:f}·10{raised}"):
        assert last_number(each) == value
        assert number_of_gold(each) == value


def number_of_gold(text: str) -> Fraction | None:
    found = read_number(text)
    return None if found is None else found.value


@given(decimals, decimals)
def test_right_means_numerically_equal(answer: Decimal, attempt: Decimal) -> None:
    assert judged(number, f"{answer:f}", f"{attempt:f}") == float(answer == attempt)


PLACES = ["<answer>{}</answer>", r"\boxed{{{}}}", "#### {}", "The answer is {}.", "Answer: {}", "{}"]
NOISE = st.text("0123456789 .,-x=<>/\n$", max_size=20)


@given(wholes, wholes, st.sampled_from(PLACES), NOISE)
def test_thinking_never_changes_a_verdict(right: int, other: int, place: str, noise: str) -> None:
    answer = place.format(right)
    for place_in_thinking in PLACES:
        thought = noise + place_in_thinking.format(other)
        for text in (
            f"<think>{thought}</think>\n{answer}",
            f"{thought}</think>\n{answer}",
            f"[THINK]{thought}[/THINK]{answer}",
        ):
            assert given_number(text) == right
            assert attempt_in(text) == attempt_in(answer)
        assert given_number(f"{answer}<think>{thought}") is None
        assert attempt_in(f"{answer}<think>{thought}") is None


@given(wholes, wholes, st.sampled_from(range(len(PLACES))), st.sampled_from(range(len(PLACES))))
def test_an_earlier_kind_of_answer_decides(first: int, second: int, a: int, b: int) -> None:
    kind = [0, 1, 2, 3, 3, 4]
    text = f"{PLACES[a].format(first)}\n{PLACES[b].format(second)}"
    assert given_number(text) == (first if kind[a] < kind[b] else second)


@given(wholes, wholes)
def test_a_final_statement_of_another_number_makes_a_right_answer_wrong(right: int, other: int) -> None:
    text = f"We get {right}."
    assert judged(number, right, text) == 1
    assert judged(number, right, f"{text} The answer is {other}.") == float(right == other)


@given(st.lists(wholes, min_size=2, max_size=4, unique=True), st.sampled_from([", ", " or ", " and ", "; ", " to "]))
def test_a_list_of_numbers_gives_none_of_them(values: list[int], separator: str) -> None:
    listed = separator.join(map(str, values))
    for text in (listed, f"<answer>{listed}</answer>", rf"\boxed{{{listed}}}", f"The answer is {listed}."):
        assert given_number(text) is None
        assert judged(math, values[-1], text) == judged(math, values[0], text) == 0.0


@settings(max_examples=examples(200))
@given(st.text() | st.text("0123456789.,:/^'-+*xe \\{}()$%<>=!?and\n½²"))
def test_no_text_breaks_the_search(text: str) -> None:
    given_number(text)
    attempt_in(text)
    equation_sides(tidy(text))
    without_unit(tidy(text))
    plain = plain_numerals(text)
    ends = [(numeral.start, numeral.end) for numeral in numerals(plain)]
    assert all(start < end for start, end in ends)
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


HOSTILE = [
    "1,234,", "9", "1 ", "-", "answer ", "answer is ", r"\boxed{", "1/2 ", r"\frac", "*", "x^", "not ", "1 234", "####",
    "<think>", r"\text{", "1.234", "1e5", "a-", r"\a{", "<answer>", "(", " ", "\n", "1\n", "$", "$1", "1'", "^{", "B or ",
    ".", ". ", "\\boxed ", "a", "1 a ", "# ", "**", "\\(", "\\[", "5 cm ",
]  # fmt: skip


@pytest.mark.parametrize("piece", but(HOSTILE[::4], HOSTILE))
def test_long_texts_are_searched_in_linear_time(piece: str) -> None:
    """Forty thousand characters of anything: what grows with their square would take minutes."""
    for text in (piece * (40_000 // len(piece)), "The answer is " + piece * (40_000 // len(piece)) + "5"):
        given_number(text)
        list(numerals(plain_numerals(text)))
        attempt_in(text)
        attempt_in(f"<answer>{text}</answer>")


@given(st.integers(1, 10**300), st.sampled_from(["", "x ", "so 1 2 3, "]), st.integers(0, 400))
def test_long_texts_are_read_from_the_last_number(value: int, piece: str, times: int) -> None:
    for written in (str(value), f"{value:,}"):
        if len(written) <= 400:
            assert last_number(f"{piece * times}it is {written} {'y ' * times}") == value
    assert last_number("9" * 100_000) is None


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *((5, "5"), (5.0, "5"), (0.1, "0.1"), ("1,234", "1234"), ("#### 72", "72"), (1e-7, "0.0000001"), ("$5", "5")),
        *(("1/2", "0.5"), ("2 1/2", "2.5"), ("1.2e3", "1200"), (r"\frac{1}{2}", "0.5"), ("½", "0.5"), ("−5", "-5")),
        *(("50%", "50"), (r"\boxed{7}", "7"), ("so\n#### -1,234.5", "-1234.5"), (Fraction(1, 3), "1/3"), ("(5)", "5")),
    ],
)
def test_golds_that_are_numbers(answer: Any, text: str) -> None:
    assert number.check_answer(Task.ask("t", "?", answer))
    assert judged(number, answer, text) == 1.0
    assert judged(number, answer, "99") == 0.0


NOT_NUMBERS = [None, True, "", "many", float("nan"), "Infinity", [5], "[0,1)", "3:30", "x^2+2x+1", "1/2/3", "2024-01-15"]


@pytest.mark.parametrize(
    "answer", [*NOT_NUMBERS, "-3 apples", "6, 7", "6 or 7", "3-5", "1/0", "7x", r"3\sqrt{2}", "12!", "2 + 3"]
)
def test_a_gold_that_is_no_number_is_the_tasks_fault(answer: Any) -> None:
    task = Task.ask("q7", "?", answer)
    for look in (lambda: number(task, Response("5", 1, "stop")), lambda: number.check_answer(task)):
        with pytest.raises(ValueError, match=r"the answer of task 'q7'.*is not a number: write"):
            look()


@pytest.mark.parametrize(
    "answer", [None, "", "  ", r"\boxed{}", "9 (apples)", "The sum of 3 and 4", "5 of 7 apples", True]
)
def test_a_gold_that_no_mathematics_equals_is_the_tasks_fault(answer: Any) -> None:
    task = Task.ask("q7", "?", answer)
    with pytest.raises(ValueError, match="task 'q7'"):
        math(task, Response(r"\boxed{9}", 1, "stop"))
    with pytest.raises(ValueError, match="task 'q7'"):
        math.check_answer(task)


@pytest.mark.parametrize(
    ("answer", "is_checked"),
    [("12", True), ("-1,234.5", True), ("5 apples", True), (r"\text{Monday}", True), ("Monday", True), ("x^2", False)],
)
def test_numbers_and_words_are_checked_without_math_verify(answer: str, is_checked: bool) -> None:
    assert math.check_answer(Task.ask("t", "?", answer)) == is_checked


def test_mathematics_that_cannot_be_computed_is_a_wrong_answer() -> None:
    assert judged(Math(step_s=1), "5", r"\boxed{9^{9^{9^9}}}") == 0.0


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("$x$", "x"),
        (r"\(x^2\)", "x^2"),
        ("**5**", "5"),
        ("2**3", "2^3"),
        ("(-5)", "-5"),
        ("(1, 2)", "(1, 2)"),
        ("(1,234)", "(1,234)"),
        ("1,234", "1234"),
        (r"1\,234", "1234"),
        ("x²", "x^{2}"),
        ("½", r"\frac{1}{2}"),
        ("−5", "-5"),
        ("5.", "5"),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
    ],
)
def test_tidy(text: str, clean: str) -> None:
    assert tidy(text) == clean
    assert tidy(clean) == clean


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 5", ["5"]),
        ("5 = x", ["5"]),
        ("f(x) = 2x", ["2x"]),
        ("x = 3 + 4 = 7", ["3 + 4", "7"]),
        ("8=7", ["8", "7"]),
        ("x = 1, y = 2", ["x = 1, y = 2"]),
        (r"x \le 5", [r"x \le 5"]),
        ("= 5", ["5"]),
    ],
)
def test_sides(text: str, parts: list[str]) -> None:
    assert equation_sides(text) == parts


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("6, 7", True),
        ("6 or 7", True),
        (r"6 \text{ or } 7", True),
        ("7 8", True),
        ("(6, 7)", False),
        (r"\{6, 7\}", False),
    ],
)
def test_is_listed(text: str, listed: bool) -> None:
    assert lists_several(text) == listed


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("She has 5 apples.", "5"),
        ("So $x+1$ is it", "x+1"),
        ("$5$ or $7$", "5 or 7"),
        ("We need $5$ or $7$ there", None),
        ("It is not $7$", None),
        ("It costs $5 and $7 more", None),
        ("Monday", "Monday"),
    ],
)
def test_the_expression_in_a_sentence(text: str, expression: str | None) -> None:
    assert expression_in(text) == expression


@given(st.recursive(wholes, lambda inner: st.lists(inner, max_size=2), max_leaves=3).map(json.dumps))
def test_math_reads_numbers_as_number_does(text: str) -> None:
    found = read_number(text)
    if found is not None and found.value is not None:
        assert judged(math, text, rf"\boxed{{{text}}}") == judged(number, text, rf"\boxed{{{text}}}") == 1.0
