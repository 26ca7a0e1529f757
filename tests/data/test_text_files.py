"""Tables in CSV, TSV and JSON files as people have them: headers or none, quotes, marks, keys, many files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import UserError
from roll.config.schema import DataConfig, TasksConfig
from roll.data.chat_sources import load_chats
from roll.data.sources import TaskSet, load_tasks


def load(path: Path, **options: Any) -> TaskSet:
    return load_tasks(TasksConfig(source=str(path), options={"held_out": 0, **options}))


def written(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        load(path, **options)
    return str(refused.value)


def asked(tasks: TaskSet) -> list[tuple[str, str, Any]]:
    return [(task.id, task.question, task.answer) for task in tasks.train]


def test_a_header_names_the_columns_and_a_row_is_named_by_its_line(tmp_path: Path) -> None:
    text = 'question,answer,level\n"one, two\nthree ""four""",5,\n\nnext, six ,hard\n'
    tasks = load(written(tmp_path / "a.csv", text))
    assert asked(tasks) == [("line-2", 'one, two\nthree "four"', "5"), ("line-5", "next", " six ")]
    assert [dict(task.info) for task in tasks.train] == [{"level": None}, {"level": "hard"}]


def test_without_a_header_the_columns_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "What is cold?,ice,fire,A\nWhat is hot?,ice,fire,B\n")
    tasks = load(path, columns=["question", "A", "B", "answer"], choices=["A", "B"])
    assert asked(tasks)[1] == ("line-2", "What is hot?\nA. ice\nB. fire", "B")
    assert len(tasks.train) == 2


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("a.tsv", "question\tanswer\na, b\t1\n", {}),
        ("a.csv", "question;answer\na, b;1\n", {"delimiter": ";"}),
        ("a.csv", "question|answer\na, b|1\n", {"delimiter": "|"}),
        ("a.csv", '\ufeffquestion,answer\n"a, b",1\n', {}),
        ("a.csv", 'question,answer\r\n"a, b",1\r\n', {}),
        ("a.csv", 'question,answer\r"a, b",1\r', {}),
        ("a.csv", ' question , answer \n"a, b",1', {}),
        ("a.csv", 'question,answer\n"a, b",1\n'.encode("utf-16"), {}),
        ("a.tsv", "question\tanswer\na, b\t1\n", {"quotes": False}),
    ],
)
def test_files_of_other_programs(tmp_path: Path, name: str, text: str | bytes, options: dict[str, Any]) -> None:
    assert asked(load(written(tmp_path / name, text), **options)) == [("line-2", "a, b", "1")]


def test_quotes_may_mean_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", 'question\tanswer\n"Hi" he said\t1\n"\t2\n')
    assert [question for _, question, _ in asked(load(path, quotes=False))] == ['"Hi" he said', '"']
    assert "a.tsv:2: this row cannot be read" in refusal(path)
    assert "quotes: false" in refusal(path)


def test_a_field_may_be_huge(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    huge = "x" * 300_000
    assert asked(load(written(tmp_path / "a.csv", f"question,answer\n{huge},1\n")))[0][1] == huge
    assert csv.field_size_limit() == before


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1).filter(str.strip)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5), kind=st.sampled_from(["csv", "tsv"]))
def test_what_was_written_is_read(rows: list[tuple[str, str]], kind: str, tmp_path_factory: Any) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t" if kind == "tsv" else ",")
    writer.writerow(["question", "answer"])
    writer.writerows(rows)
    path = written(tmp_path_factory.mktemp("csv") / f"a.{kind}", text.getvalue())
    assert [(question, answer) for _, question, answer in asked(load(path))] == rows


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (
            "question,answer\na,1\nb,2,3\n",
            {},
            "a.csv:3: the row has 3 fields, but there are 2 columns (question",
        ),
        ('question,answer\n"a\nb",1\nc\n', {}, "a.csv:4: the row has 1 fields"),
        ('question,answer\na,1\n"b,2\n', {}, "a.csv:3: this row cannot be read: unexpected end of data"),
        ('question,answer\n"a"b,1\n', {}, "a.csv:2: this row cannot be read"),
        ("question,answer\n,1\n", {}, "a.csv:2: 'question' is null"),
        ("question,question\na,1\n", {}, "a.csv:1: the header names the column 'question' twice"),
        ("ask,answer\na,1\n", {}, "a.csv:2: there is no column 'question'; the line has ask, answer"),
        ("a,1\n", {"columns": ["question", "hint", "answer"]}, "a.csv:1: the row has 2 fields, but there are 3 columns"),
        ("question,answer\na,1\n", {"delimiter": "::"}, "delimiter is '::', but takes one character"),
        (b"question,answer\na,1\n\xe9t\xe9,2\n", {}, "a.csv:3: not UTF-8 text"),
        ("", {}, "has no tasks to train on"),
        ("question,answer\n", {}, "has no tasks to train on"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, text: str | bytes, options: dict[str, Any], says: str
) -> None:
    assert says in refusal(written(tmp_path / "a.csv", text), **options)


ROWS = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]


@pytest.mark.parametrize(
    ("held", "options"),
    [
        (ROWS, {}),
        ({"examples": ROWS}, {}),
        ({"canary": "x", "size": 2, "tags": ["a"], "data": ROWS}, {}),
        ({"data": ROWS, "more": [{"x": 1}]}, {"rows": "data"}),
        ({"data": {"train": ROWS, "test": ROWS[:1]}}, {"rows": "data.train"}),
    ],
)
def test_rows_under_a_key(tmp_path: Path, held: Any, options: dict[str, Any]) -> None:
    tasks = load(written(tmp_path / "a.json", json.dumps(held)), **options)
    assert asked(tasks) == [("row-1", "a", 1), ("row-2", "b", 2)]


def test_lines_may_be_in_a_json_file_and_an_object_may_be_a_row(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    assert asked(load(written(tmp_path / "a.json", lines))) == [("line-1", "a", 1), ("line-2", "b", 2)]
    assert asked(load(written(tmp_path / "b.json", json.dumps(ROWS[0], indent=1)))) == [("row-1", "a", 1)]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (json.dumps({"a": ROWS, "b": ROWS}), {}, "several lists of rows, a, b: name one with the option rows: a"),
        (
            json.dumps({"a": ROWS}),
            {"rows": "b"},
            "there is no list of that name; the file has the keys a",
        ),
        (json.dumps(ROWS), {"rows": "b"}, "a list at its top"),
        (json.dumps({"examples": [*ROWS, {"question": "c"}]}), {}, "a.json, row 3: there is no column 'answer'"),
        (json.dumps({"examples": [*ROWS, 5]}), {}, "a.json, row 3: not an object with columns"),
        (json.dumps({f"q{n}": ROWS[0] for n in range(99)}), {}, "q18, q19 and 79 more"),
        ("5", {}, "takes a list of objects"),
        ("", {}, "a.json: not JSON"),
        ("{", {}, "a.json: not JSON"),
        ('{"question": "a", "answer": 1}\n{"question": \n', {}, "a.json:2: not JSON"),
    ],
)
def test_a_json_file_without_rows_is_refused(tmp_path: Path, text: str, options: dict[str, Any], says: str) -> None:
    assert says in refusal(written(tmp_path / "a.json", text), **options)


def test_many_files_are_one_table(tmp_path: Path) -> None:
    for name in ("logic/b", "algebra/2", "algebra/1"):
        written(tmp_path / "MATH" / f"{name}.json", json.dumps({"question": name, "answer": 0}))
    tasks = load(tmp_path / "MATH" / "*" / "*.json")
    assert [task.id for task in tasks.train] == ["algebra/1/row-1", "algebra/2/row-1", "logic/b/row-1"]
    assert [task.question for task in load(tmp_path / "MATH" / "**" / "*.json").train] == [
        "algebra/1",
        "algebra/2",
        "logic/b",
    ]
    assert "no file matches" in refusal(tmp_path / "MATH" / "*.csv")
    one = tmp_path / "MATH" / "algebra" / "1.json"
    (held_out,) = load(tmp_path / "MATH" / "algebra" / "*.json", held_out=str(tmp_path / "MATH/logic/*.json")).held_out
    assert (held_out.id, held_out.question) == ("logic/b/row-1", "logic/b")
    assert asked(load(one))[0][0] == "row-1"


def test_a_file_whose_name_has_a_bracket_is_that_file(tmp_path: Path) -> None:
    assert len(load(written(tmp_path / "a[1].csv", "question,answer\na,1\n")).train) == 1


def test_rows_may_be_skipped_and_are_counted(tmp_path: Path) -> None:
    rows = [{"question": str(n), "answer": n, "level": f"Level {n}", "tests": None if n == 3 else [n]} for n in range(6)]
    path = written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    tasks = load(path, skip={"level": "[45]$", "tests": r"\A\Z"}, held_out=1)
    assert [task.answer for task in (*tasks.train, *tasks.held_out)] == [0, 1, 2]
    assert [place.rpartition(":")[2] for place in tasks.skipped] == ["4", "5", "6"]
    assert "tasks.options.skip.level: '(' is no regular expression" in refusal(path, skip={"level": "("})


def test_a_column_may_be_missing_where_a_question_mark_says_so(tmp_path: Path) -> None:
    rows = [{"question": "a", "hint": "h", "key": "k"}, {"question": "b", "hint": None}, {"question": "c"}]
    path = written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    tasks = load(path, answer="", prompt="{question}{hint?}", id="key?", info=["hint?"])
    assert [(task.id, task.question) for task in tasks.train] == [("k", "ah"), ("line-2", "b"), ("line-3", "c")]
    assert [dict(task.info) for task in tasks.train] == [{"hint": "h"}, {"hint": None}, {}]
    assert "a.jsonl:2: the prompt asks for {hint}, which is null" in refusal(path, answer="", prompt="{question}{hint}")
    assert "a.jsonl:2: the prompt asks for {key}, which is no column" in refusal(path, answer="", prompt="{key}")


def test_an_option_that_a_table_does_not_have(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "question,answer\na,1\n")
    assert "tasks.options.colums is not an option of a table; did you mean 'columns'?" in refusal(path, colums=["a"])
    assert 'columns is "a", but takes a list of text: write [a]' in refusal(path, columns="a")


def test_conversations_come_from_csv_too(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "prompt,response\n2+2?,4\n")
    (chat,) = load_chats(DataConfig(source=str(path), options={"held_out": 0})).train
    assert [message["content"] for message in chat.messages] == ["2+2?", "4"]
    path = written(tmp_path / "b.csv", "2+2?;4\n")
    options = {"held_out": 0, "columns": ["prompt", "response"], "delimiter": ";"}
    (chat,) = load_chats(DataConfig(source=str(path), options=options)).train
    assert [message["content"] for message in chat.messages] == ["2+2?", "4"]
