"""Files that no dataset should be: too long, of other types, half written, no files at all."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config import UserError
from roll.config.schema import DataConfig, TasksConfig
from roll.data import Task
from roll.data.chat_sources import load_chats
from roll.data.sources import load_tasks

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def tasks_of(path: Path, **options: Any) -> tuple[Task, ...]:
    return load_tasks(TasksConfig(source=str(path), options={"held_out": 0, **options})).train


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        tasks_of(path, **options)
    return str(caught.value)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def line(**row: Any) -> str:
    return json.dumps(row) + "\n"


GOOD = line(question="q", answer=1)


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv", ".json"])
def test_a_gigabyte_in_one_line_is_refused_before_it_is_read(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"big{ending}"
    with path.open("wb") as file:
        file.write(b"question,answer\n" if ending != ".jsonl" else GOOD.encode())
        file.write(b'{"question": "')
        file.truncate(1 << 30)  # the rest takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = refusal(path)
    assert f"{path}" in said
    assert "MiB" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "kilobytes of memory"


def test_longer_rows_can_be_allowed(tmp_path: Path) -> None:
    path = written(tmp_path, "x.jsonl", GOOD + line(question="x" * (2 << 20), answer=1))
    assert f"{path}:2: the line is longer than 1 MiB" in refusal(path, row_mb=1)
    assert len(tasks_of(path, row_mb=3)) == len(tasks_of(path)) == 2
    assert "row_mb is 0" in refusal(path, row_mb=0)


def test_a_quote_that_is_never_closed_ends(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", 'question,answer\n"a,1\n' + "b,2\n" * 500_000)
    assert f"{path}:2: a field of this row is longer than 1 MiB" in refusal(path, row_mb=1)


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"question": {"a": 1}}, "'question' is an object, {'a': 1}, but a question is a text"),
        ({"question": 5}, "'question' is a number, 5"),
        ({"question": 1.5}, "'question' is a number"),
        ({"question": True}, "'question' is true or false"),
        ({"question": None}, "'question' is null"),
        ({"question": ["a"]}, "question[0] is a text"),
        ({"question": []}, "'question' is a list"),
        ({"question": [[]]}, "question[0] is a list"),
        ({"question": [{"role": "user"}]}, "question[0] has no content"),
        ({"question": [{"role": "user", "content": None}]}, "question[0] has a content that is nothing"),
        (
            {"question": [{"role": "user", "content": "x"}, {"role": 1, "content": "x"}]},
            "question[1] has a role that is a",
        ),
        ({"question": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "content that is a list"),
        ({"question": "q", "id": {"a": 1}}, "'id' is an object"),
        ({"question": "q", "id": [1]}, "'id' is a list"),
        ({"question": "q", "id": True}, "'id' is true or false"),
        ({"question": "q", "domain": 1.5}, "'domain' is a number"),
        ({"question": "q", "answer": float("nan")}, "'answer' is a number, nan, which is no answer"),
        ({"question": "q", "answer": float("-inf")}, "which is no answer"),
        ({"question": "\ud800"}, "'question' has half of a character"),
        ({"question": "q", "other": [{"a": "\udfff"}]}, "'other' has half of a character"),
    ],
)
def test_values_of_other_types_are_refused_with_their_location(row: dict[str, Any], part: str, tmp_path: Path) -> None:
    whole = {"answer": 1, "id": 1, "domain": "d", **row}
    path = written(tmp_path, "x.jsonl", line(question="q", answer=1, id=0, domain="d") + line(**whole))
    said = refusal(path, id="id", domain="domain")
    assert part in said
    assert f"{path}:2: " in said


def test_objects_in_prompts_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "x.jsonl", line(question="q", answer=1, more={"a": 1}, some=[1, "b"], year=2))
    assert "the prompt asks for {more}, which is an object there, {'a': 1}" in refusal(path, prompt="{question} {more}")
    assert tasks_of(path, prompt="{question} {some} {year}")[0].question == "q 1\nb 2"


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("x.jsonl", '{"question": "a", "question": "b", "answer": 1}', "the key 'question' is written twice"),
        ("x.jsonl", GOOD + '{"question": ' + "[" * 50_000, ":2: not JSON: nested too deeply"),
        ("x.json", "[" * 50_000, "nested too deeply"),
        ("x.jsonl", GOOD + f'{{"question": "q", "answer": {"9" * 5000}}}', ":2: not JSON"),
        ("x.jsonl", GOOD.encode() + b'{"question": "\xff"}', ":2: not UTF-8"),
        ("x.jsonl", GOOD.encode("utf-16-le"), ":1: a byte of it is 0"),
        ("x.csv", b"question,answer\na\0b,1\n", ":2: a byte of it is 0"),
        ("x.csv", b"question,answer\n\xff,1\n", ":2: not UTF-8"),
        ("x.jsonl", b"\xff\xfe" + GOOD.encode("utf-16-le") + b"\x00", "not UTF-16"),
        ("x.jsonl", "", "no tasks to train on"),
        ("x.csv", "", "no tasks to train on"),
        ("x.json", "", "not JSON"),
        ("x.json", "[]", "no tasks to train on"),
        ("x.parquet", "", "not a Parquet file"),
        ("x.parquet", b"PAR1" + b"\0" * 64 + b"PAR1", "not a Parquet file"),
        ("x.jsonl", b"\x1f\x8b\x08\x00", "x.jsonl:1"),
    ],
)
def test_damaged_files_are_refused_with_location(name: str, content: str | bytes, part: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    assert part in refusal(written(tmp_path, name, content))


def test_marks_of_encodings_are_read(tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16"):
        for name, text in (("x.jsonl", line(question="é", answer=1)), ("x.csv", "question,answer\r\né,1\r\n")):
            text = text if name == "x.csv" else '{"question": "é", "answer": 1}\n'
            assert tasks_of(written(tmp_path, name, text.encode(encoding)))[0].question == "é"


def test_pipes_folders_and_loops_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    (tmp_path / "l.jsonl").symlink_to("l.jsonl")
    assert "is no file" in refusal(tmp_path / "f.jsonl")
    assert "is no file" in refusal(tmp_path / "d.jsonl")
    assert "there is no file" in refusal(tmp_path / "l.jsonl")
    (tmp_path / "tree").mkdir()
    written(tmp_path / "tree", "x.jsonl", GOOD)
    assert len(tasks_of(tmp_path / "tree/**/*.jsonl")) == 1
    for name in "ab":  # 2 to the power of 40 paths to the same file
        (tmp_path / "tree" / name).symlink_to(".")
    assert "is a link to a folder that it is in" in refusal(tmp_path / "tree/**/*.jsonl")


def test_a_damaged_parquet_page_is_refused_by_its_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    rows = {"question": [os.urandom(20).hex() for _ in range(500)], "answer": list(range(500))}
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    assert len(tasks_of(path)) == 500
    data = bytearray(path.read_bytes())
    data[10:4000] = b"\xff" * 3990
    path.write_bytes(bytes(data))
    assert str(path) in refusal(path)


def test_sources_that_give_other_things_than_texts_are_refused() -> None:
    for task in (
        Task.ask("a", {"x": 1}),
        Task.ask(5, "q"),
        Task("a", ("q",)),
        Task("a", ({"role": "user", "content": None},)),
    ):
        with pytest.raises(UserError, match=r"write a text|ids are text"):
            load_tasks(TasksConfig(source="x"), lambda split, task=task: [task])


CELLS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["question", "answer", "messages", "prompt", "response", "choices"]), CELLS, max_size=5
    ),
    max_size=3,
)
OPTIONS = st.sampled_from(
    [{}, {"prompt": "{question} {answer?}"}, {"prompt": "{question} {prompt}"}, {"choices": "choices"}]
)
FUZZ = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_sane(tasks: tuple[Task, ...]) -> None:
    """All that was accepted can be shown to a model, and is none of Python's own texts."""
    for task in tasks:
        assert isinstance(task.id, str)
        for message in task.messages:
            assert isinstance(message["role"], str)
            message["content"].encode()
            assert not message["content"].startswith(("{'", "[{'"))


@given(rows=ROWS, options=OPTIONS)
@FUZZ
def test_any_rows_are_tasks_or_refused_in_words(
    rows: list[dict[str, Any]], options: dict[str, Any], tmp_path: Path
) -> None:
    for name, text in (("x.jsonl", "".join(map(json.dumps, rows))), ("x.json", json.dumps(rows))):
        lines = "\n".join(map(json.dumps, rows)) if name == "x.jsonl" else text
        try:
            check_sane(tasks_of(written(tmp_path, name, lines), **options))
        except UserError as error:
            assert str(error)  # noqa: PT017
        try:
            load_chats(DataConfig(source=str(tmp_path / name)))
        except UserError as error:
            assert str(error)  # noqa: PT017


@given(data=st.binary(max_size=60), at=st.integers(0, 200), ending=st.sampled_from(ENDINGS))
@FUZZ
@example(data=b"\xff\xfe", at=0, ending=".jsonl")
@example(data=b"\xef\xbb\xbf", at=0, ending=".csv")
def test_any_bytes_are_tasks_or_refused_in_words(data: bytes, at: int, ending: str, tmp_path: Path) -> None:
    whole = (GOOD * 3 if ending.startswith(".json") else "question,answer\na,1\nb,2\n").encode()
    path = written(tmp_path, f"x{ending}", whole[:at] + data + whole[at:])
    try:
        check_sane(tasks_of(path))
    except UserError as error:
        assert str(error)  # noqa: PT017


def test_sums_of_more_numbers_than_fit_in_memory_are_refused() -> None:
    with pytest.raises(UserError, match=r"low is 1 and high is 1000000000: write numbers at most 3000 apart"):
        load_tasks(TasksConfig(source="addition", options={"high": 10**9}))
