"""The checkable instructions: which texts follow them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data import Response, Task
from roll.reward.instructions import CONSTRAINTS, Instructions, loose_variants
from roll.reward.instructions.constraints import follows
from roll.reward.instructions.counting import sentences

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("punctuation:no_comma", {}, ["No commas here.", "1.5"], ["One, two", "1,5"]),
    ("change_case:english_lowercase", {}, ["all small.", "é 1"], ["One capital", "123"]),
    ("change_case:english_capital", {}, ["ALL CAPITALS 1!"], ["ALMOST ALL CAPITALs", "42"]),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        ["THIS is LOUD", "I saw NASA"],
        ["THIS is not", "This Is Title"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "less than", "capital_frequency": 2},
        ["only ONE", "none"],
        ["TWO WORDS"],
    ),
    ("keywords:existence", {"keywords": ["Mom", "tea"]}, ["My mom drinks TEA."], ["My mom drinks.", "tea"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["A rocket rises."], ["They Rock!", "rock, paper"]),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": "at least"},
        ["War and war.", "war, peace, WAR"],
        ["War and peace."],
    ),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, ["War.", "x"], ["war war"]),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 2, "let_relation": "at least"},
        ["Hi! Ho!"],
        ["Hi!"],
    ),
    ("keywords:letter_frequency", {"letter": "T", "let_frequency": 2, "let_relation": "less than"}, ["tea"], ["tTa"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "Dr. No came. He left?"],
        ["Dr. No came.", "See e.g. this one."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Just one.", "no end"],
        ["One. Two."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "one\n\n***\n\ntwo\n***"],
        ["one", "one\n\ntwo", "one\n***\n***\ntwo"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "President"},
        ["One.\n\nPresident X.", 'One.\n \n"president," he said.'],
        ["One.\n\nThe president.", "President.\n\nOne.", "One.\n\nTwo.\n\nPresident.", "President"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [my address]"], ["[name]", "[] []"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Hi\nP.S. x", "Hi\n**p. s.** x"],
        ["Hi P.S. x", "Hi"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Hi\nP.P.S. x", "Hi\nP.P.S x"], ["Hi\nP.S. x"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* one\n* two", "Here:\n - one\n - two"],
        ["* one", "* one\n* two\n* three", "**bold**\n**more**", "--\n--"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "My answer is MAYBE."],
        ["Yes", "My answer is"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** *two*"],
        ["*one*", "* one\n* two", "** ** *x*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\nx\nSection 2\ny"],
        ["Section 1\nx", "Section one Section two"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```'], ["a: 1", '{"a": 1} done']),
    ("detectable_format:title", {}, ["<<My title>>\ntext"], ["<My title>", "<<>>", "<< >>"]),
    ("combination:two_responses", {}, ["one\n******\ntwo"], ["one", "one******one", "one******", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["Say hi.\nHi!", " say HI. Hi"], ["Hi! Say hi."]),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions?"},
        ["So. any questions?", '"Any questions?"'],
        ["Any questions? No"],
    ),
    ("startend:quotation", {}, ['"All of it."', ' "x"\n'], ["All of it", '"half', '"']),
    ("language:response_language", {"language": "ko"}, ["안녕하세요 OK"], ["Hello there", "안 is one letter", "1 2 3"]),
    ("language:response_language", {"language": "hi"}, ["नमस्ते दुनिया"], ["привет", "hello"]),
    ("language:response_language", {"language": "ru"}, ["Привет, мир"], ["Hello"]),
    ("language:response_language", {"language": "ja"}, ["これは日本語です"], ["中文而已"]),
    ("language:response_language", {"language": "fa"}, ["سلام دنیا"], ["hello"]),
]


@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"), CASES, ids=[f"{case[0]} {i}" for i, case in enumerate(CASES)]
)
def test_instructions(name: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not follows(text, name, arguments)] == []
    assert [text for text in [*bad, "", "  \n"] if follows(text, name, arguments)] == []


def test_every_instruction_has_cases() -> None:
    assert {case[0] for case in CASES} == set(CONSTRAINTS)
    assert len(CONSTRAINTS) >= 20


@pytest.mark.parametrize(("name", "arguments"), [(case[0], case[1]) for case in CASES])
@given(text=st.text())
def test_no_text_breaks_an_instruction(name: str, arguments: dict[str, Any], text: str) -> None:
    assert follows(text, name, arguments) in (True, False)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        (
            "punctuation:no_coma",
            {},
            "'punctuation:no_coma' is not known; did you mean 'punctuation:no_comma'",
        ),
        ("punctuation:no_comma", {"x": 1}, "unexpected keyword argument 'x'"),
        ("length_constraints:number_words", {"num_words": 3}, "missing a required argument: 'relation'"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "exactly"}, "relation 'exactly' is not known"),
        ("language:response_language", {"language": "de"}, "language 'de' cannot be recognised by its script"),
    ],
)
def test_what_cannot_be_checked_is_refused_by_name(name: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        follows("text", name, arguments)


def task(*names: str, kwargs: Any = None) -> Task:
    return Task.ask("t", "?", instruction_id_list=list(names), **({} if kwargs is None else {"kwargs": kwargs}))


def judged(asked: Task, text: str, **options: Any) -> dict[str, float]:
    return Instructions(**options)(asked, Response(text, 1, "stop"))


def test_the_share_of_instructions_or_all_of_them() -> None:
    two = task("punctuation:no_comma", "keywords:existence", kwargs=[{"x": None}, {"keywords": ["tea"]}])
    assert judged(two, "tea") == {"reward": 1, "share": 1, "all": 1}
    assert judged(two, "tea, please") == {"reward": 0.5, "share": 0.5, "all": 0}
    assert judged(two, "tea, please", score="all") == {"reward": 0, "share": 0.5, "all": 0}
    assert judged(task("punctuation:no_comma"), "tea")["reward"] == 1


def test_loose_forgives_a_first_line_a_last_line_and_asterisks() -> None:
    ends = task("startend:end_checker", kwargs=[{"end_phrase": "Bye."}])
    for text in ("Bye.\nHope that helps!", "**Bye.**", "Sure:\nBye.\nx"):
        assert judged(ends, text)["reward"] == 0
        assert judged(ends, text, mode="loose")["reward"] == 1
    assert judged(ends, "Bye.\nx\ny", mode="loose")["reward"] == 0


@given(st.text("ab,*\n"))
def test_what_is_followed_strictly_is_followed_loosely(text: str) -> None:
    assert text in loose_variants(text)
    asked = task("punctuation:no_comma")
    assert judged(asked, text)["reward"] <= judged(asked, text, mode="loose")["reward"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Task.ask("t", "?"), "task 't' has no instruction_id_list"),
        (task(), "has no instruction_id_list"),
        (task("punctuation:no_comma", kwargs=[{}, {}]), "1 instructions, but arguments for 2"),
    ],
)
def test_a_task_without_instructions_is_refused(asked: Task, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        judged(asked, "text")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two. Three.", 3),
        ("It costs 3.50 euros. Fine.", 2),
        ("Mr. and Mrs. Smith met J. S. Bach. They sang.", 2),
        ("Wait... what?! Yes.", 3),
        ('He said "Go." Then he left.', 2),
        ("1. First thing.\n2. Second thing.", 2),
        ("It was 5 p.m. and late.", 1),
        ("你好。再见。", 2),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert len(sentences(text)) == count
