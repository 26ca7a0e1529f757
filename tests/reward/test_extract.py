"""Where a text's answer stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.reward.extract import Stated, extract, first_sentence, last_box, last_tag, stated_answer, strip_thinking


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a", "a"),
        (" a\n", " a\n"),
        ("<think>x</think>a", "a"),
        ("<think>x</think>\n\na\n", "a"),
        ("x</think>a", "a"),
        ("a<think>x", None),
        ("<think>", None),
        ("<think></think>", ""),
        ("<think>x<think>y</think>z</think>a", "a"),
        ("a<think>x</think>b", "a\nb"),
        ("<think>x</reasoning>y</think>a", "a"),
        ("<thinking>x</thinking>a", "a"),
        ("<reasoning>x</reasoning>a", "a"),
        ("<thought>x</thought>a", "a"),
        ("[THINK]x[/THINK]a", "a"),
        ("<Think>x</THINK>a", "a"),
        ("x</think>y</think>a", "a"),
        ("<thinker>x</thinker>a", "<thinker>x</thinker>a"),
    ],
)
def test_thinking_is_removed(text: str, shown: str | None) -> None:
    assert strip_thinking(text) == shown


@given(st.text(), st.text())
def test_what_follows_thinking_is_all_that_is_shown(thought: str, answer: str) -> None:
    if "<" in answer + thought or "[" in answer + thought:
        return
    assert (
        strip_thinking(f"<think>{thought}</think>{answer}")
        == strip_thinking(f"{thought}</think>{answer}")
        == answer.strip()
    )
    assert strip_thinking(f"{answer}<think>{thought}") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>1</answer> <Answer>2</ANSWER>", Stated("2", "tag")),
        (r"<answer>x = \boxed{2}</answer>", Stated("2", "tag")),
        ("<answer>a</answer><answer>b", Stated("a", "tag")),
        ("<answer></answer>", Stated("", "tag")),
        (r"\boxed{1} \boxed{2", Stated("1", "box")),
        ("a\n#### 18", Stated("18", "hashes")),
        ("a #### 18\nb", Stated("18", "hashes")),
        ("#### Step one\nAnswer: 7", Stated("7", "statement")),
        ("### Final Answer\n\n5\nbye", Stated("5", "statement")),
        ("**Final Answer**\n5", Stated("5", "statement")),
        ("The answer is $5$.", Stated("$5$", "statement")),
        ("The answer is\n\\[\n 5 \n\\]", Stated("5", "statement")),
        ("The answer (in metres): 5", Stated("5", "statement")),
        ("The answers are 5 and 7.", Stated("5 and 7", "statement")),
        ("I have no answer", None),
        ("It is 5", None),
        ("", None),
    ],
)
def test_the_answer_that_a_text_states(text: str, found: Stated | None) -> None:
    assert stated_answer(text) == found


@pytest.mark.parametrize(
    ("text", "first"),
    [("5. I hope so", "5"), ("5.5", "5.5"), ("5.5. And", "5.5"), ("Rome", "Rome"), ("**5**. Then", "5"), ("5! Yes", "5")],
)
def test_the_first_sentence(text: str, first: str) -> None:
    assert first_sentence(text) == first


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
        (r"\boxed{" * 100_000, None),
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


def test_the_last_closed_tag() -> None:
    assert last_tag("<a>1</a><a>2</a><a>3", "a") == "2"
    assert last_tag("<a>1<a>2</a>", "a") == "2"
    assert last_tag("</a><a>", "a") is None


def test_a_statement_may_be_the_whole_answer() -> None:
    assert extract("The answer is 5", "stated") == ["5", "The answer is 5"]
    assert extract("<answer>5</answer>", "stated") == ["5"]
    assert extract("<think>", "stated") == extract("no", "boxed") == []
