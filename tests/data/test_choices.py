"""Choices in every published form, and which one an answer names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.errors import UserError
from roll.config.schema import TasksConfig
from roll.data import Response, Task
from roll.data.choices import ALPHABET, Choices
from roll.data.sources import load_tasks
from roll.reward.choice import Choice

SKY = ["ice", "fog", "rain", "snow"]
FORMS: dict[str, Any] = {
    "list": SKY,
    "tuple": tuple(SKY),
    "lists of texts and labels": {"text": SKY, "label": ["A", "B", "C", "D"]},
    "digits": {"text": SKY, "label": ["1", "2", "3", "4"]},
    "whole numbers": {"text": SKY, "label": [1, 2, 3, 4]},
    "objects": [{"label": label, "text": text} for label, text in zip("ABCD", SKY, strict=True)],
    "objects the other way round": [{"text": text, "label": label} for label, text in zip("1234", SKY, strict=True)],
    "objects without labels": [{"text": text} for text in SKY],
    "letters": dict(zip("ABCD", SKY, strict=True)),
    "small letters": dict(zip("abcd", SKY, strict=True)),
    "brackets": dict(zip(["(A)", "(B)", "(C)", "(D)"], SKY, strict=True)),
    "words": dict(zip(["opt1", "opt2", "opt3", "opt4"], SKY, strict=True)),
    "JSON": json.dumps(SKY),
    "JSON of lists": json.dumps({"text": SKY, "label": ["1", "2", "3", "4"]}),
    "Python": str(SKY),
    "a label without a text": {**dict(zip("ABCD", SKY, strict=True)), "E": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_choices(form: str) -> None:
    choices = Choices.of(FORMS[form])
    assert choices.by_letter == dict(zip("ABCD", SKY, strict=True))
    assert str(choices) == "A. ice\nB. fog\nC. rain\nD. snow"


def score_of(answer: Any, text: str, choices: Any) -> float:
    return Choice()(Task.ask("t", "?", answer, choices=choices), Response(text, 1, "stop"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("answer", ["C", "(c)", "rain"])
def test_the_reward_reads_every_form(form: str, answer: Any) -> None:
    for text in ("C", "The answer is (C).", "It is rain."):
        assert score_of(answer, text, FORMS[form]) == 1.0
    for text in ("D", "The answer is (B).", "It is snow."):
        assert score_of(answer, text, FORMS[form]) == 0.0


@pytest.mark.parametrize(
    ("published", "answer", "position"),
    [
        (SKY, 3, 3),
        (SKY, 3.0, 3),
        (SKY, "3", 3),
        (SKY, 0, 0),
        (FORMS["digits"], "3", 2),
        (FORMS["digits"], 3, 2),
        (FORMS["digits"], 4, 3),
        (FORMS["whole numbers"], "3", 2),
        (FORMS["words"], "opt3", 2),
        (["4", "2", "0", "1"], "2", 1),  # a text that is a choice's is that choice
        (["4", "2", "0", "1"], 2, 2),  # and a number is a position
        (["4", "2", "0", "1"], "B", 1),
        (["C", "D", "A", "B"], "B", 1),  # a letter is a label, not a text
        ({"A": "C", "B": "A"}, "A", 0),
        ({"A": "x", "C": "y", "E": "z"}, "E", 2),
        ([" ice ", "fog\n"], "ice", 0),
        ([True, False], "True", 0),
        ([1.5, 2.5], 2.5, 1),
    ],
)
def test_an_answer_is_a_label_first(published: Any, answer: Any, position: int) -> None:
    assert Choices.of(published).position(answer) == position


@pytest.mark.parametrize(
    ("by", "answer", "position"),
    [("index", "2", 2), ("number", "2", 1), ("text", "2", 0), ("label", "b", 1), ("key", "2", 2)],
)
def test_how_an_answer_is_read_can_be_set(by: Any, answer: str, position: int) -> None:
    assert Choices.of(["2", "5", "7"]).position(answer, by) == position


@pytest.mark.parametrize("answer", [4, -1, "E", "", "hail", None, [], True, 1.5, "1.5"])
def test_an_answer_that_names_none_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"names none of the choices: A \('ice'\)|is null|is not the text of a choice"):
        Choices.of(SKY).position(answer)


@pytest.mark.parametrize(
    ("published", "says"),
    [
        ([], "there are no choices"),
        ({}, "there are no choices"),
        ({"text": SKY, "label": ["A"]}, "there are 4 choices, but 1 labels"),
        ({"text": SKY, "label": ["A", "B", "B", "C"]}, "two choices have the same label"),
        ({"A": "x", "a": "y"}, "two choices have the same label"),
        (["x"] * 27, "there are 27 choices"),
        ([["x"], ["y"]], "is not the text of a choice"),
        ([None, "x"], "is not the text of a choice"),
        ([{"name": "x"}], "is not a list of texts"),
        ("ice, fog", "is not a list of texts"),
        ("['ice' 'fog']", "is not a list of texts"),  # as NumPy prints it: Python would join the two
        (5, "is not a list of texts"),
    ],
)
def test_what_are_no_choices_is_reported(published: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Choices.of(published)


TEXTS = st.lists(st.text(min_size=1).map(str.strip).filter(bool), min_size=1, max_size=26, unique=True)


@given(texts=TEXTS, data=st.data())
def test_every_choice_is_named_by_its_label_in_every_form(texts: list[str], data: st.DataObject) -> None:
    size = len(texts)
    labels = data.draw(st.sampled_from([list(ALPHABET[:size]), [str(n) for n in range(1, size + 1)]]))
    forms = [
        {"text": texts, "label": labels},
        [{"label": label, "text": text} for label, text in zip(labels, texts, strict=True)],
        dict(zip(labels, texts, strict=True)),
    ]
    for form in (*forms, *map(json.dumps, forms)):
        choices = Choices.of(form)
        assert choices.texts == tuple(texts)
        assert [choices.position(label) for label in labels] == list(range(size))
        assert Choices.of(choices.by_letter).texts == choices.texts


@given(texts=TEXTS, seed=st.text())
def test_a_shuffle_keeps_every_choice_and_repeats(texts: list[str], seed: str) -> None:
    shuffled, order = Choices.unlabelled(texts).shuffled(seed)
    assert sorted(order) == list(range(len(texts)))
    assert [texts[position] for position in order] == list(shuffled.texts)
    assert Choices.unlabelled(list(reversed(texts))).shuffled(seed)[0] == shuffled


def test_digits_are_accepted_where_they_are_the_labels() -> None:
    """Of a task that a user wrote: its prompt may show the digits."""
    digits = FORMS["digits"]
    assert (
        score_of("3", "3", digits)
        == score_of("3", "The answer is 3.", digits)
        == score_of("3", r"\boxed{3}", digits)
        == 1.0
    )
    assert score_of("3", "2 things are white. The answer is C.", digits) == 1.0
    assert score_of("3", "4", digits) == score_of("3", "The answer is (2).", digits) == 0.0
    assert score_of("C", "3", SKY) == 0.0


def rows(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> list[Task]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return list(load_tasks(TasksConfig(source=str(path), options={"held_out": 0, **options})).train)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("named", [{}, {"choices": "choices"}])
def test_a_tables_choices_are_printed_with_letters_and_judged_by_them(tmp_path: Path, form: str, named: Any) -> None:
    published = FORMS[form]
    label = Choices.of(published).labels[2]
    prompt = {"prompt": "{question}\n{choices}"}
    (task,) = rows(tmp_path, {"question": "q", "choices": published, "answer": label}, **prompt, **named)
    assert task.question == "q\nA. ice\nB. fog\nC. rain\nD. snow"
    assert task.info["choices"] == dict(zip("ABCD", SKY, strict=True))
    reward = Choice()
    assert [reward(task, Response(letter, 1, "stop")) for letter in "ABCD"] == [0, 0, 1, 0]


def test_choices_may_have_a_column_each(tmp_path: Path) -> None:
    row = {"question": "q", "A": "x", "B": "y", "C": "z", "D": None, "answer": "B"}
    (task,) = rows(tmp_path, row, choices=["A", "B", "C", "D"])
    assert (task.question, task.answer) == ("q\nA. x\nB. y\nC. z", "B")
    row = {"question": "q", "right": "x", "wrong": "y", "worse": "z"}
    for extra in ({}, {"shuffle_choices": True}):
        (task,) = rows(tmp_path, row, choices=["wrong", "right", "worse"], answer="right", **extra)
        assert task.info["choices"][task.answer] == "x"
    row = {"question": "_ is cold", "option1": "ice", "option2": "fire", "answer": "1"}
    (task,) = rows(tmp_path, row, choices=["option1", "option2"], answer_is="number")
    assert task.answer == "A"


def test_a_shuffle_puts_the_right_one_everywhere(tmp_path: Path) -> None:
    many = [{"question": f"q{n}", "right": "r", "w1": "a", "w2": "b"} for n in range(60)]
    options = {"choices": ["right", "w1", "w2"], "answer": "right", "shuffle_choices": True}
    tasks = rows(tmp_path, *many, **options)
    assert {task.answer for task in tasks} == {"A", "B", "C"}
    assert rows(tmp_path, *many[7:], **options)[0].messages == tasks[7].messages


def test_choices_that_no_option_names_leave_the_answer_alone(tmp_path: Path) -> None:
    for choices, answer, kept in ((SKY, "rain", "rain"), (SKY, 2, 2), (SKY, None, None), ("free text", "x", "x")):
        (task,) = rows(tmp_path, {"question": "q", "choices": choices, "answer": answer})
        assert task.answer == kept
    (task,) = rows(tmp_path, {"question": "q", "choices": FORMS["digits"], "answer": "3"})
    assert task.answer == "C", "3 would be the fourth of the letters"


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"choices": SKY, "answer": "hail"}, {"choices": "choices"}, "rows.jsonl:2: the answer 'hail' names none of"),
        ({"choices": SKY, "answer": None}, {"choices": "choices"}, "rows.jsonl:2: the answer is null"),
        ({"choices": "?", "answer": "A"}, {"choices": "choices"}, "rows.jsonl:2: the choices cannot be read: '?' is not"),
        ({"answer": "A"}, {"choices": "choices"}, "rows.jsonl:2: there is no column 'choices'"),
        ({"A": "x", "answer": "A"}, {"choices": ["A", "B"]}, "there is no column"),
        ({"answer": "A"}, {"shuffle_choices": True}, "shuffle_choices is true, but no column has choices"),
        ({"answer": "A"}, {"answer_is": "index"}, "answer_is is 'index', but no column has choices"),
        ({"answer": "A"}, {"answer_is": "indx"}, "did you mean `index`?"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], options: dict[str, Any], says: str) -> None:
    good = {"question": "q", "choices": SKY, "answer": "A"}
    with pytest.raises(UserError) as refused:
        rows(tmp_path, good, {"question": "q", **row}, **options)
    assert says in str(refused.value)
