"""The twelve published formats from a file to a verdict: each is named in a config, and its right answers are right.

The rows are made up, in the columns that the datasets are published with.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roll.config import UserError, load_config
from roll.data import Response, Task
from roll.data.formats import FORMATS
from roll.pipeline.prepare import check

Write = Callable[[Path], str]
"""Writes files into a folder, and gives the source's name."""


def lines(*rows: dict[str, Any]) -> Write:
    def write(folder: Path) -> str:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(folder / "rows.jsonl")

    return write


def document(held: Any) -> Write:
    def write(folder: Path) -> str:
        (folder / "rows.json").write_text(json.dumps(held), encoding="utf-8")
        return str(folder / "rows.json")

    return write


def table(*rows: Sequence[str]) -> Write:
    def write(folder: Path) -> str:
        with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        return str(folder / "rows.csv")

    return write


def folders(**files: Any) -> Write:
    def write(folder: Path) -> str:
        for name, held in files.items():
            (folder / name).mkdir()
            (folder / name / "1.json").write_text(json.dumps(held), encoding="utf-8")
        return str(folder / "*" / "*.json")

    return write


def arrow(*rows: dict[str, Any]) -> Write:
    def write(folder: Path) -> str:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(list(rows)), folder / "rows.parquet")
        return str(folder / "rows.parquet")

    return write


@dataclass(frozen=True)
class Case:
    name: str
    write: Write
    right: Sequence[str]
    """A right response to each task."""
    wrong: Sequence[str]
    asks: Sequence[str]
    """What stands in the prompt of the first task."""
    reward: Any = None
    answers: Sequence[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0


BRIEF = {"name": "length", "options": {"budget": 9}}
BBH = {"name": "exact", "options": {"find": "answer", "ignore_case": True}}
ARC = {"question": "What falls in winter?", "choices": {"text": ["ash", "rain", "snow"], "label": ["A", "B", "C"]}}
ARC_DIGITS = {
    "question": "What is 2 + 2?",
    "choices": {"text": ["2", "3", "4", "5"], "label": ["1", "2", "3", "4"]},
    "answerKey": "3",
}
GPQA = ["Subdomain", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
HUMANEVAL = {
    "task_id": "Test/0",
    "prompt": 'from typing import List\n\n\ndef biggest(of: List[int]) -> int:\n    """ The largest.\n    """\n',
    "entry_point": "biggest",
    "canonical_solution": "    return max(of)\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 3, 2]) == 3\n\n",
}
MBPP = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n  return 2 * x",
    "task_id": 7,
    "test_setup_code": "",
    "test_list": ["assert double(2) == 4", "assert double(-1) == -2"],
    "challenge_test_list": [],
}
MBPP_SANITIZED = {
    "source_file": "x",
    "task_id": 8,
    "prompt": "Write a function to find the area of a circle.",
    "code": "import math\ndef area(r): return math.pi * r * r",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(area(2), 4 * math.pi)"],
}
APPS = {
    "problem_id": 3,
    "question": "Two numbers are on a line. Print their sum.",
    "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
    "input_output": json.dumps({"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6\n"]}),
    "difficulty": "introductory",
    "url": "x",
    "starter_code": "",
}
APPS_CALL = {
    **APPS,
    "problem_id": 4,
    "question": "Give a text backwards.",
    "input_output": json.dumps({"fn_name": "back", "inputs": [["abc"], ["x"]], "outputs": [["cba"], ["x"]]}),
    "starter_code": "class Solution:\n    def back(self, text):\n",
}
ADDING = "a, b = map(int, input().split())\nprint(a + b)"
BACKWARDS = "class Solution:\n    def back(self, text):\n        return text[::-1]"
APPS_WITHOUT_TESTS = [
    {**APPS, "problem_id": number, "input_output": given}
    for number, given in enumerate(["", "{}", None, json.dumps({"inputs": [], "outputs": []})], 5)
]
IFEVAL = {
    "key": 12,
    "prompt": "Write about rain. Use no commas.",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{"num_words": None, "language": None}],
}
IN_GERMAN = {**IFEVAL, "key": 13, "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}


def code(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```"


CASES = [
    Case(
        "gsm8k",
        lines(
            {"question": "6 and 12?", "answer": "6 + 12 = <<6+12=18>>18\n#### 18"},
            {"question": "big", "answer": "#### 1,800"},
        ),
        [r"It is \boxed{18}.", r"\boxed{1800}"],
        [r"It is \boxed{19}.", r"\boxed{18}"],
        ["6 and 12?", r"\boxed{}"],
        answers=["18", "1,800"],
    ),
    Case(
        "math",
        lines(
            {"problem": "Half?", "level": "Level 1", "solution": r"Not \boxed{3}, but $\boxed{\frac{1}{2}}$."},
            {"problem": "Set?", "level": "Level 2", "solution": r"So $\boxed{\sqrt{\frac{3}{4}}}$."},
        ),
        [r"\boxed{0.5}", r"\boxed{\frac{\sqrt{3}}{2}}"],
        [r"\boxed{2}", r"\boxed{3}"],
        ["Half?", r"\boxed{}"],
        answers=[r"\frac{1}{2}", r"\sqrt{\frac{3}{4}}"],
    ),
    Case(
        "math",
        folders(
            algebra={"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed 2$."},
            geometry={"problem": "2+2?", "level": "Level 1", "type": "Geometry", "solution": r"It is \fbox{4}."},
        ),
        [r"\boxed{2}", r"\boxed{4}"],
        [r"\boxed{1}", r"\boxed{2}"],
        ["1+1?"],
        answers=["2", "4"],
    ),
    Case("math", lines({"problem": "1+1?", "answer": "2"}), [r"\boxed{2}"], [r"\boxed{1}"], ["1+1?"], answers=["2"]),
    Case(
        "svamp",
        document(
            [
                {
                    "ID": "chal-1",
                    "Body": "Ann has 5 pens and buys 3.",
                    "Question": "How many?",
                    "Equation": "( 5.0 + 3.0 )",
                    "Answer": 8.0,
                    "Type": "Addition",
                },
                {
                    "ID": "chal-2",
                    "Body": "Bob had 0.5.",
                    "Question": "How many?",
                    "Equation": "x",
                    "Answer": "0.50",
                    "Type": "Addition",
                },
            ]
        ),
        [r"\boxed{8}", r"\boxed{0.5}"],
        [r"\boxed{80}", r"\boxed{5}"],
        ["Ann has 5 pens and buys 3. How many?"],
    ),
    Case(
        "asdiv",
        lines(
            {
                "body": "Seven red apples and two green ones.",
                "question": "How many?",
                "solution_type": "Addition",
                "answer": "9 (apples)",
                "formula": "7+2=9",
            },
            {"body": "b", "question": "q", "answer": "1/2 (of the cake)", "formula": ""},
            {"body": "b", "question": "q", "answer": "12", "formula": ""},
            {"body": "b", "question": "q", "answer": "1.5 (hours (h))", "formula": ""},
            {"body": "b", "question": "q", "answer": "3 (hours); 20 (minutes)", "formula": ""},
            {"body": "b", "question": "q", "answer": "3 (red), 4 (blue)", "formula": ""},
        ),
        [r"\boxed{9}", r"\boxed{0.5}", r"\boxed{12}", r"\boxed{1.5}"],
        [r"\boxed{7}", r"\boxed{2}", r"\boxed{1}", r"\boxed{5}"],
        ["Seven red apples and two green ones. How many?"],
        answers=["9", "1/2", "12", "1.5"],
        skipped=2,
    ),
    Case(
        "mmlu",
        arrow(
            {"question": "Coldest?", "subject": "sky", "choices": ["ice", "fog", "rain", "sun"], "answer": 0},
            {"question": "Hottest?", "subject": "sky", "choices": ["ice", "fog", "rain", "sun"], "answer": 3},
        ),
        ["The answer is (A).", "D"],
        ["The answer is (B).", "C"],
        ["Coldest?\nA. ice\nB. fog\nC. rain\nD. sun\n"],
        answers=["A", "D"],
    ),
    Case(
        "mmlu",
        table(["Coldest, of these?", "ice", "fog", "2", "sun", "A"], ["Which is two?", "1", "0", "3", "2", "D"]),
        ["The answer is (A).", "The answer is D."],
        ["The answer is (B).", "The answer is C."],
        ["Coldest, of these?\nA. ice\nB. fog\nC. 2\nD. sun\n"],
        answers=["A", "D"],
    ),
    Case(
        "mmlu",
        table(["question", "A", "B", "C", "D", "answer"], ["Coldest?", "ice", "fog", "rain", "sun", "A"]),
        ["A"],
        ["B"],
        ["Coldest?\nA. ice"],
        answers=["A"],
    ),
    Case(
        "mmlu",
        table(["question", "subject", "choices", "answer"], ["Two?", "s", '["1", "0", "2", "3"]', "2"]),
        ["C"],
        ["A"],
        ["Two?\nA. 1\nB. 0\nC. 2\nD. 3"],
        answers=["C"],
    ),
    Case(
        "mmlu",
        table(["question", "subject", "choices", "answer"], ["Two?", "s", '["2", "0", "1", "3"]', "0"]),
        ["A"],
        ["B"],
        ["Two?\nA. 2\nB. 0"],
        answers=["A"],
    ),
    Case(
        "arc",
        lines({"id": "x1", **ARC, "answerKey": "C"}, {"id": "x2", **ARC_DIGITS}),
        ["The answer is (C).", "The answer is (C)."],
        ["The answer is (A).", "The answer is (D)."],
        ["What falls in winter?\nA. ash\nB. rain\nC. snow\n"],
        answers=["C", "C"],
    ),
    Case(
        "arc",
        lines(
            {
                "id": "x1",
                "question": {
                    "stem": "What falls in winter?",
                    "choices": [{"text": "ash", "label": "A"}, {"text": "snow", "label": "B"}],
                },
                "answerKey": "B",
            }
        ),
        ["B"],
        ["A"],
        ["What falls in winter?\nA. ash\nB. snow\n"],
        answers=["B"],
    ),
    Case(
        "bbh",
        document(
            {
                "canary": "x",
                "examples": [
                    {"input": "Which?\nOptions:\n(A) ice\n(B) fog", "target": "(B)"},
                    {"input": "not True is", "target": "False"},
                    {"input": "Complete: ( [", "target": "] )"},
                    {"input": "Sort: b a", "target": "a b"},
                    {"input": "2 * 21 =", "target": "42"},
                    {"input": "Is ice cold?", "target": "yes"},
                ],
            }
        ),
        [f"Hm.\n<answer>{x}</answer>" for x in ("(B)", "False", "] )", "a b", "42", "Yes")],
        [f"Hm.\n<answer>{x}</answer>" for x in ("(A)", "True", ") ]", "b a", "24", "no")],
        ["Which?\nOptions:", "<answer></answer>"],
        reward=BBH,
    ),
    Case("bbh", lines({"input": "?", "target": "(B)"}), ["<answer>B</answer>"], ["<answer>A</answer>"], ["?"], BBH),
    Case(
        "humaneval",
        lines(HUMANEVAL),
        [code(HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"])],
        [code("def biggest(of):\n    return min(of)")],
        ["def biggest(of: List[int]) -> int:"],
    ),
    Case("humaneval", lines(HUMANEVAL), ["    return max(of)\n"], ["    return of[0]\n"], ["biggest"]),
    Case(
        "mbpp",
        lines(MBPP),
        [code(MBPP["code"])],
        [code("def double(x):\n  return x * x")],
        ["Write a function to double a number.\nIt has to pass these tests:\nassert double(2) == 4\n"],
    ),
    Case(
        "mbpp",
        document([MBPP_SANITIZED]),
        [code(MBPP_SANITIZED["code"])],
        [code("def area(r): return 3 * r * r")],
        ["area of a circle"],
    ),
    Case(
        "apps",
        lines(APPS, APPS_CALL, *APPS_WITHOUT_TESTS),
        [code(ADDING), code(BACKWARDS)],
        [code("print(5)"), code("def back(text):\n    return text")],
        ["Two numbers are on a line.", "standard input"],
        skipped=4,
    ),
    Case("ifeval", lines(IFEVAL, IN_GERMAN), ["Rain falls."], ["Rain, it falls."], ["Use no commas."], skipped=1),
]
IDS = [f"{case.name}-{number}" for number, case in enumerate(CASES)]


def checked(case: Case, folder: Path, **settings: Any) -> tuple[list[Task], Any, int]:
    options = {"format": case.name, "held_out": 0, **case.options}
    reward = case.reward or FORMATS[case.name].rewards[0]
    config = {"model": "tiny", "tasks": {"source": case.write(folder), "options": options}, "reward": reward, **settings}
    tasks, judge = check(load_config(config))
    verifier = judge.load()
    if hasattr(verifier, "warm_up"):  # as graders do, before they judge within a limit of time
        verifier.warm_up()
    return list(tasks.train), verifier, len(tasks.skipped)


def worth(reward: Any, task: Task, text: str) -> float:
    value = reward(task, Response(text, 1, "stop"))
    return float(value["reward"] if isinstance(value, dict) else value)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_published_format_goes_from_its_file_to_a_verdict(case: Case, tmp_path: Path) -> None:
    tasks, reward, skipped = checked(case, tmp_path)
    assert len(tasks) == len(case.right) == len(case.wrong)
    assert skipped == case.skipped
    assert [text for text in case.asks if text not in tasks[0].question] == []
    if case.answers is not None:
        assert [task.answer for task in tasks] == case.answers
    assert [worth(reward, task, text) for task, text in zip(tasks, case.right, strict=True)] == [1.0] * len(tasks)
    assert [worth(reward, task, text) for task, text in zip(tasks, case.wrong, strict=True)] == [0.0] * len(tasks)


def test_every_format_is_tried() -> None:
    assert {case.name for case in CASES} | {"gpqa"} == set(FORMATS)


def test_gpqa_shuffles_its_choices_and_knows_the_right_one(tmp_path: Path) -> None:
    rows = [["sky", f"What is {n}?", f"right {n}\n", "wrong a", "wrong, b", 'wrong "c"'] for n in range(24)]
    case = Case("gpqa", table(GPQA, *rows), [], [], [])
    tasks, reward, _ = checked(case, tmp_path)
    assert {task.answer for task in tasks} == set("ABCD")
    for number, task in enumerate(tasks):
        assert task.info["choices"][task.answer] == f"right {number}"
        assert f"{task.answer}. right {number}\n" in task.question
        wrong = next(letter for letter in "ABCD" if letter != task.answer)
        assert worth(reward, task, f"The answer is ({task.answer}).") == 1.0
        assert worth(reward, task, f"The answer is ({wrong}).") == 0.0
    again, _, _ = checked(case, tmp_path)
    assert again == tasks


@pytest.mark.parametrize(
    ("name", "reward", "says"),
    [
        ("arc", "number", "format is 'arc', but reward is 'number', which cannot judge its tasks: write reward: choice"),
        ("humaneval", "math", "write reward: code"),
        ("ifeval", "exact", "write reward: instructions"),
        ("bbh", "code", "write reward: exact"),
        ("gsm8k", {"parts": {"right": "choice", "brief": BRIEF}}, "write reward: number"),
    ],
)
def test_a_reward_that_cannot_judge_a_format_is_refused(name: str, reward: Any, says: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(UserError) as refused:
        checked(case, tmp_path, reward=reward)
    assert says in str(refused.value)


def test_parts_beside_the_right_one_and_rewards_of_ones_own_are_not_refused(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "arc")
    form = {"name": "format", "weight": 0.1, "options": {"tags": ["answer"]}}
    assert checked(case, tmp_path, reward={"parts": {"right": "choice", "form": form}})[0]


def test_a_wrong_format_is_said(tmp_path: Path) -> None:
    source = lines({"question": "q", "answer": "1"})(tmp_path)

    def refusal(**options: Any) -> str:
        with pytest.raises(UserError) as refused:
            check(load_config({"model": "tiny", "tasks": {"source": source, "options": options}}))
        return str(refused.value)

    assert "tasks.options.format is 'gsm9k', but takes one of gsm8k, math, " in refusal(format="gsm9k")
    assert "did you mean 'gsm8k'?" in refusal(format="gsm9k")
    assert "rows.jsonl:1: answer_pattern" in refusal(format="gsm8k")
    assert "rows.jsonl:1: format 'math' has the columns problem, solution or problem, answer" in refusal(format="math")
    assert "rows.jsonl:1: there is no column 'Question'; the line has question, answer" in refusal(format="svamp")
    assert "there is no column 'problem'" not in refusal(format="math", question="question")


def test_what_is_written_beside_a_format_holds_instead(tmp_path: Path) -> None:
    source = lines({"q": "1+1?", "answer": "so #### 2"})(tmp_path)
    options = {"format": "gsm8k", "question": "q", "prompt": "{q} Be brief.", "held_out": 0}
    tasks, _ = check(load_config({"model": "tiny", "tasks": {"source": source, "options": options}}))
    assert (tasks.train[0].question, tasks.train[0].answer) == ("1+1? Be brief.", "2")
