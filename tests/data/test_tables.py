"""Tasks from tables: the same rows in any kind of file give the same tasks, by the columns that the options name."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
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

REAL = Path(__file__).parents[3] / "shared" / "data"
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


def load(source: object, **options: Any) -> TaskSet:
    return load_tasks(TasksConfig(source=str(source), options=options))


def refusal(source: object, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        load(source, **options)
    return str(refused.value)


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write(kind: str, folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table of a kind; its name as a source."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        return str(jsonl(path, rows))
    if kind == "json":
        path.write_text(json.dumps(list(rows)), encoding="utf-8")
        return str(path)
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
        return str(path)
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(path))
    return f"hf:{path}" if kind == "hf" else str(path)


ROWS = [{"ask": f"q{i}", "gold": f"so {i} #### {i}", "key": f"k{i}", "kind": "ab"[i % 2], "level": i} for i in range(10)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "hf", "folder"])
def test_every_kind_of_table_gives_the_same_tasks(tmp_path: Path, kind: str) -> None:
    tasks = load(
        write(kind, tmp_path, ROWS),
        question="ask",
        answer="gold",
        id="key",
        domain="kind",
        info=["level"],
        prompt="{question}, level {level}? {{think}}",
        system="Be brief.",
        answer_pattern=r"#### (\d+)",
        held_out=3,
    )
    assert [task.id for task in tasks.held_out] == ["k3", "k6", "k9"]
    assert [task.id for task in tasks.train] == ["k0", "k1", "k2", "k4", "k5", "k7", "k8"]
    task = tasks.train[4]
    assert task.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q5, level 5? {think}"},
    )
    assert (task.answer, task.domain, dict(task.info)) == ("5", "b", {"level": 5})


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_columns_may_have_any_name_and_hold_anything(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Whatever the columns are called, each arrives where its option says, and no other column is lost."""
    names = data.draw(st.lists(TEXT.filter(bool), min_size=4, max_size=7, unique=True))
    question, answer, id, domain, *others = names
    values = st.integers(-9, 9) | TEXT | st.lists(st.integers(), max_size=3)
    size = data.draw(st.integers(1, 6))
    rows = [
        {question: data.draw(TEXT), answer: data.draw(values), id: n, domain: data.draw(TEXT)}
        | {name: data.draw(values) for name in others}
        for n in range(size)
    ]
    order = data.draw(st.permutations(names))
    rows = [{name: row[name] for name in order} for row in rows]
    path = jsonl(tmp_path_factory.mktemp("columns") / "a.jsonl", rows)
    tasks = load(path, question=question, answer=answer, id=id, domain=domain, held_out=0)
    assert not tasks.held_out
    for row, task in zip(rows, tasks.train, strict=True):
        assert (task.question, task.answer) == (row[question], row[answer])
        assert (task.id, task.domain) == (str(row[id]), row[domain])
        assert task.info == {name: row[name] for name in names if name not in (question, answer)}


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(size=st.integers(1, 40), share=st.floats(0, 0.95), by=st.sampled_from([int, float]))
def test_a_split_is_exact_even_and_complete(size: int, share: float, by: type, tmp_path_factory: Any) -> None:
    rows = [{"question": str(n), "answer": n} for n in range(size)]
    path = jsonl(tmp_path_factory.mktemp("split") / "a.jsonl", rows)
    wanted = round(size * share)
    if wanted == size:
        return
    tasks = load(path, held_out=wanted if by is int else share)
    train, held_out = ({task.answer for task in part} for part in (tasks.train, tasks.held_out))
    assert train | held_out == set(range(size))
    assert not train & held_out
    assert len(held_out) == wanted
    if wanted:
        gaps = [b - a for a, b in zip([-1, *sorted(held_out)], sorted(held_out), strict=False)]
        assert max(gaps) - min(gaps) <= 1


def test_another_file_may_be_held_out_and_its_ids_are_its_own(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}])
    test = jsonl(tmp_path / "test.jsonl", [{"question": "c", "answer": 3}])
    tasks = load(train, held_out=str(test))
    assert [task.id for task in tasks.train] == ["line-1", "line-2"]
    assert [(task.id, task.question) for task in tasks.held_out] == [("test/line-1", "c")]
    assert load(train, held_out=str(test), limit=1).train == tasks.train[:1]


def test_splits_of_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_list([{"question": name, "answer": 1}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    tasks = load(tmp_path / "both", held_out="test")
    assert [(t.id, t.question) for t in (*tasks.train, *tasks.held_out)] == [("row-1", "train"), ("test/row-1", "test")]
    assert load(f"hf:{tmp_path / 'both'}", part="test", held_out=0).train[0].question == "test"
    assert "has no split 'tset', but 'train', 'test'; did you mean 'test'?" in refusal(tmp_path / "both", held_out="tset")
    assert "is a folder of one dataset" in refusal(tmp_path / "both", subset="main")
    datasets.DatasetDict({"a": parts["train"], "b": parts["test"]}).save_to_disk(str(tmp_path / "others"))
    assert "write part=… to name one" in refusal(tmp_path / "others")
    parts["train"].save_to_disk(str(tmp_path / "one"))
    assert "has no splits, so none called 'train'" in refusal(tmp_path / "one", part="train")


def test_conversations_come_from_datasets_too(tmp_path: Path) -> None:
    source = write("hf", tmp_path, [{"prompt": "2+2?", "response": "4"}])
    (chat,) = load_chats(DataConfig(source=source, options={"held_out": 0})).train
    assert [message["content"] for message in chat.messages] == ["2+2?", "4"]


def test_an_unknown_dataset_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "the dataset 'empty' (a folder) could not be loaded" in refusal("hf:empty")


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow.parquet"), ("hf", "datasets")])
def test_a_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str) -> None:
    source = write(kind, tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, package, None)
    said = refusal(source)
    assert f"needs the package {package.partition('.')[0]}: " in said
    assert "pip install -e '.[tasks]'" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"held_out": 1.5}, "held_out is 1.5: write a share below 1, or a whole number"),
        ({"held_out": -1}, "held_out is -1: "),
        ({"held_out": True}, "held_out is true, but takes a number or a whole number or text"),
        ({"held_out": 11}, "held_out is 11, but there are 10 rows"),
        ({"held_out": "test"}, "held_out is 'test': write a share below 1, a number of rows, or another table"),
        ({"held_out": "gone.jsonl"}, "tasks.options.held_out: there is no file 'gone.jsonl'"),
        ({"question": "aks"}, "there is no column 'aks'; the line has ask, gold, key, kind, level; did you mean 'ask'?"),
        ({"info": ["tests"]}, "there is no column 'tests'"),
        ({"info": "level"}, 'tasks.options.info is "level", but takes a list of text or `null`: write [level]'),
        ({"limit": -5}, "tasks.options: limit is -5: write how many rows, or 0 for all"),
        ({"limit": "5"}, 'tasks.options.limit is "5", but takes a whole number'),
        (
            {"prompt": {"question": None}},
            'but takes text: put a text that begins with a brace in quotes, as in "{question}"',
        ),
        ({"prompt": "{question} {levle}"}, "the prompt asks for {levle}, which is no column of it: write {ask}, {key}"),
        ({"prompt": "{gold}"}, "the prompt asks for {gold}, which is the answer"),
        ({"prompt": "put it in \\boxed{}"}, "tasks.options.prompt: {} is no column: write {question}, or {{ and }}"),
        ({"prompt": "{level:02}"}, "tasks.options.prompt: {level:02} is no column"),
        ({"prompt": "a { b"}, "tasks.options.prompt: "),
        ({"answer_pattern": "("}, "tasks.options.answer_pattern: '(' is no regular expression"),
        ({"answer_pattern": "x(.)"}, "rows.jsonl:1: answer_pattern 'x(.)' is nowhere in the answer 'so 0 #### 0'"),
        ({"part": "train"}, "is a file, which has no part 'train': leave it out"),
    ],
)
def test_what_cannot_work_is_reported(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    assert says in refusal(write("jsonl", tmp_path, ROWS), **{"question": "ask", "answer": "gold", **options})


def test_the_last_match_is_the_answer_and_lists_are_lines_in_a_prompt(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "#### 1 or #### 1,024 ", "tests": ["a", "b"]}
    (task,) = load(
        jsonl(tmp_path / "a.jsonl", [row]),
        answer_pattern="#### *(.*?)(?: or|$)",
        prompt="{question}\n{tests}",
        held_out=0,
    ).train
    assert (task.answer, task.question) == ("1,024", "q\na\nb")
    (task,) = load(jsonl(tmp_path / "b.jsonl", [row]), answer_pattern="1,?0", held_out=0).train
    assert task.answer == "1,0"


def test_days_and_decimals_are_text_as_everywhere_else(tmp_path: Path) -> None:
    row = {"question": date(2020, 1, 2), "answer": Decimal("1.50"), "at": [{"time": datetime(2020, 1, 2, 3, 4)}]}
    (task,) = load(write("parquet", tmp_path, [row]), held_out=0).train
    assert (task.question, task.answer, task.info) == ("2020-01-02", "1.50", {"at": [{"time": "2020-01-02T03:04:00"}]})


def test_tasks_without_answers_and_questions_in_messages(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    path = jsonl(tmp_path / "a.jsonl", [{"question": talk}])
    (task,) = load(path, answer="", system="s", held_out=0).train
    assert (task.answer, [m["role"] for m in task.messages]) == (None, ["system", "user"])
    assert "is a list of messages, for which there can be no prompt" in refusal(path, answer="", prompt="{question}")


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"question": None}, {}, "'question' is null: write something there, or remove the row"),
        ({"question": "q", "key": None}, {"id": "key"}, "'key' is null"),
        ({"question": "q", "kind": None}, {"domain": "kind"}, "'kind' is null"),
        ({"question": "q", "hint": None}, {"prompt": "{question} {hint}"}, "asks for {hint}, which is null there"),
        ({"question": [{"role": "user", "content": None}]}, {}, "not one of messages with role and content"),
        ({"answer": None}, {"answer_pattern": "(.*)"}, "'answer' is null: write an answer there"),
    ],
)
def test_nothing_is_never_asked_as_a_word(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    whole = {"question": "q", "answer": 1, "key": "k", "kind": "a", "hint": "h"}
    for kind, place in (("jsonl", "rows.jsonl:2: "), ("json", "rows.json, row 2: ")):
        said = refusal(write(kind, tmp_path, [whole, {**whole, **row}]), **options)
        assert place in said
        assert says in said


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, kind: str) -> None:
    path = Path(write(kind, tmp_path, [{"question": "q", "answer": 1}]))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (task,) = load(path, held_out=0).train
    assert (task.question, task.answer) == ("q", 1)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not here")
@pytest.mark.parametrize(
    ("file", "options", "sizes"),
    [
        ("gsm8k_train", {"answer_pattern": r"####\s*(.+)", "held_out": str(REAL / "gsm8k_test.jsonl")}, (7473, 1319)),
        ("mbpp", {"question": "text", "answer": "code", "id": "task_id", "prompt": "{text}\n{test_list}"}, (877, 97)),
        ("ifeval", {"question": "prompt", "answer": "", "id": "key", "held_out": 100}, (441, 100)),
        ("HumanEval", {"question": "prompt", "answer": "", "id": "task_id", "info": ["test", "entry_point"]}, (148, 16)),
    ],
)
def test_real_files(file: str, options: dict[str, Any], sizes: tuple[int, int]) -> None:
    tasks = load(REAL / f"{file}.jsonl", **options)
    assert (len(tasks.train), len(tasks.held_out)) == sizes
    if file == "gsm8k_train":
        assert all(float(task.answer.replace(",", "")) is not None for task in tasks.train)
