"""The built-in rewards: which texts they call right."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data import Response, Task
from roll.reward.maths import Math, last_box
from roll.reward.numbers import _NUMBER, Number, last_number

math, number = Math(), Number()
decimals = st.decimals(-(10**12), 10**12, places=3) | st.integers(-(10**30), 10**30).map(Decimal)


def judged(reward: Any, answer: Any, text: str) -> float:
    result = reward(Task.ask("t", "?", answer), Response(text, 1, "stop"))
    assert isinstance(result, float)
    return result


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("5", "5"),
        ("It is 5.", "5"),
        ("It is 5.0.", "5"),
        ("2 + 3 = 5", "5"),
        ("first 3, then 5, last 7!", "7"),
        ("3-5", "5"),
        ("3 - 5 = -2", "-2"),
        ("-5", "-5"),
        ("x=-5", "-5"),
        ("(-5)", "-5"),
        ("**-5**", "-5"),
        ("−5", "-5"),
        ("minus - 5", "5"),
        ("GPT-4", "4"),
        ("on 2024-01-15", "15"),
        ("f(2)-5", "5"),
        ("--5", "5"),
        ("3–5", "5"),
        ("+5", "5"),
        ("1,234", "1234"),
        ("-1,234,567.89", "-1234567.89"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("1234,567", "567"),
        ("12,345,67", "67"),
        ("$1,234.50", "1234.5"),
        ("-$5", "-5"),
        ("$-5$", "-5"),
        (r"-\$5", "-5"),
        ("50%", "50"),
        ("5€", "5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("wait...5", "5"),
        ("end.5", "5"),
        ("1.2.3", "3"),
        ("007", "7"),
        (r"\boxed{42}", "42"),
        ("5th", "5"),
        ("5\n", "5"),
        ("3.14.", "3.14"),
    ],
)
def test_the_last_number_of_a_text(text: str, last: str) -> None:
    assert last_number(text) == Decimal(last)
    assert judged(number, last, text) == 1.0


@given(st.text(" \n\t\u20035 17.,-−$)(x\\%٣", max_size=30))
def test_words_are_searched_one_by_one_as_all_at_once(text: str) -> None:
    found = [match["digits"] for match in _NUMBER.finditer(text)]
    last = last_number(text)
    assert (last is None) == (not found)
    assert last is None or abs(last) == Decimal(found[-1].replace(",", ""))


@pytest.mark.parametrize("text", ["", "none", ".", "-", "$,", "٣", "½"])
def test_a_text_without_a_number_is_wrong(text: str) -> None:
    assert last_number(text) is None
    assert judged(number, 0, text) == 0.0


@given(decimals, st.sampled_from(["", "so ", "a = ", "1 + 2 = ", "(", "x: $"]), st.sampled_from(["", ".", "!", ")", "%"]))
def test_a_number_is_found_however_it_is_written(value: Decimal, before: str, after: str) -> None:
    for written in (f"{value:f}", f"{value:,f}"):
        assert last_number(f"{before}{written}{after}") == value


@given(decimals, decimals)
def test_right_means_numerically_equal(answer: Decimal, attempt: Decimal) -> None:
    assert judged(number, f"{answer:f}", f"{attempt:f}") == float(answer == attempt)


@settings(max_examples=50)
@given(st.text())
def test_no_text_breaks_the_search(text: str) -> None:
    last_number(text)
    last_box(text)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (5, "5"),
        (5.0, "5"),
        (0.1, "0.1"),
        ("1,234", "1234"),
        ("#### 72", "72"),
        (1e-7, "0.0000001"),
        ("-3 apples", "-3"),
    ],
)
def test_answers_of_many_types(answer: Any, text: str) -> None:
    assert judged(number, answer, text) == 1.0
    assert judged(number, answer, "99") == 0.0


@pytest.mark.parametrize("answer", [None, True, "", "many", float("nan"), "Infinity", [5]])
def test_an_answer_that_is_no_number_is_the_tasks_fault(answer: Any) -> None:
    with pytest.raises(ValueError, match="answer of task 't'"):
        judged(number, answer, "5")


def test_long_texts_are_searched_in_linear_time() -> None:
    assert last_number("1,234," * 100_000 + "5") == 5
    assert last_number("9" * 200_000) == Decimal("9" * 200_000)
    assert last_box(r"\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{x=\boxed{5}}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"} {a} \boxed {3}", "3"),
        (r"\fbox{7}", "7"),
        (r"\boxed{}", ""),
        ("none", None),
        (r"\boxed{2", None),
    ],
)
def test_the_last_box_of_a_text(text: str, box: str | None) -> None:
    assert last_box(text) == box


inside = st.recursive(
    st.text("ab1 ", max_size=3) | st.sampled_from([r"\{", r"\}", r"\frac", r"\\"]),
    lambda inner: inner.map(lambda text: f"{{{text}}}") | st.tuples(inner, inner).map("".join),
    max_leaves=5,
)


@given(st.lists(st.tuples(inside, inside), min_size=1, max_size=4), st.sampled_from(["", r"\boxed{", r"\boxed{1"]))
def test_of_all_closed_boxes_the_last_counts(pieces: list[tuple[str, str]], cut_off: str) -> None:
    text = "".join(rf"{before}\boxed{{{box}}}" for before, box in pieces)
    assert last_box(text + cut_off) == pieces[-1][1]
    assert last_box(rf"\boxed{{{text}}}") == pieces[-1][1]


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("5", r"So \boxed{5}.", 1),
        (5, r"So \boxed{5.0}.", 1),
        ("5", "The answer is 5", 1),
        ("5", r"\boxed{5} or rather \boxed{6}", 0),
        ("6", r"\boxed{5} or rather \boxed{6}", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        ("1/2", r"\boxed{\dfrac{2}{4}}", 1),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        ("x^2+2x+1", r"\boxed{(x+2)^2}", 0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        ("(1,2)", r"\boxed{(1,2)}", 1),
        ("(1,2)", r"\boxed{(2,1)}", 0),
        ("1,234", r"\boxed{1234}", 1),
        (r"50\%", r"\boxed{0.5}", 1),
        ("x=5", r"\boxed{5}", 1),
        (r"Long solution, \boxed{-3}", r"\boxed{-3}", 1),
        ("5", "", 0),
        ("5", r"\boxed{}", 0),
        ("5", "no idea", 0),
    ],
)
def test_math_pairs(answer: Any, text: str, reward: float) -> None:
    assert judged(math, answer, text) == reward


def test_mathematics_that_cannot_be_computed_is_a_wrong_answer() -> None:
    assert judged(Math(step_s=1), "5", r"\boxed{9^{9^{9^9}}}") == 0.0


def test_math_refuses_a_task_without_an_answer() -> None:
    for answer in (None, ""):
        with pytest.raises(ValueError, match="task 't'"):
            judged(math, answer, r"\boxed{5}")
