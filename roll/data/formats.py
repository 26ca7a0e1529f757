"""Published datasets by name: `format: arc` determines the columns, the prompt and the right answer.

A format is only a set of table options (`roll/data/row_task.py`); an option in the config overrides it. A dataset that is
published in several ways has several variants, and each row is read by the first variant whose columns it has. A column
whose name ends in `?` may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from roll.config.errors import UserError
from roll.config.suggest import did_you_mean


@dataclass(frozen=True)
class DatasetFormat:
    """The format of a published dataset."""

    rewards: tuple[str, ...]
    """The built-in rewards that can judge its tasks; the first is the usual one."""
    variants: tuple[Mapping[str, Any], ...]
    """Table options for each way in which it is published."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of all variants."""
    headerless: tuple[str, ...] = ()
    """The columns of its CSV files, if they are published without a header."""


_TEXT = ("exact", "fuzzy")
_WORKED = "Think step by step, and put the final answer in \\boxed{{}}."
_LETTER = 'Think step by step, then end with "The answer is (X).", where X is the letter of the right choice.'
_BLOCK = "in one ```python block"

FORMATS: Mapping[str, DatasetFormat] = MappingProxyType(
    {
        "gsm8k": DatasetFormat(
            rewards=("number", "math", *_TEXT),
            variants=({"question": "question", "answer": "answer"},),
            options={"answer_pattern": r"####\s*(.+)", "prompt": f"{{question}}\n{_WORKED}"},
        ),
        "math": DatasetFormat(
            rewards=("math", *_TEXT),
            variants=(
                {"question": "problem", "answer": "solution", "answer_boxed": True},
                {"question": "problem", "answer": "answer"},
            ),
            options={"id": "unique_id?", "prompt": f"{{question}}\n{_WORKED}"},
        ),
        "svamp": DatasetFormat(
            rewards=("number", "math", *_TEXT),
            variants=({"question": "Question", "answer": "Answer", "prompt": f"{{Body}} {{question}}\n{_WORKED}"},),
            options={"id": "ID?"},
        ),
        "asdiv": DatasetFormat(
            rewards=("math", "number", *_TEXT),
            variants=(
                {"question": "question", "answer": "answer", "prompt": f"{{body}} {{question}}\n{_WORKED}"},
                {"question": "Question", "answer": "Answer", "prompt": f"{{Body}} {{question}}\n{_WORKED}"},
            ),
            # takes the 9 from "9 (apples)"; some rows have several answers: "3 (hours); 20 (minutes)"
            options={
                "id": "ID?",
                "answer_pattern": r"(?s)\A\s*(.+?)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*\Z",
                "skip": {"answer?": r";|\)\s*,", "Answer?": r";|\)\s*,"},
            },
        ),
        "mmlu": DatasetFormat(
            rewards=("choice", *_TEXT),
            variants=(
                {"question": "question", "choices": "choices", "answer": "answer"},
                {"question": "question", "choices": ("A", "B", "C", "D"), "answer": "answer"},
            ),
            options={"answer_is": "key", "prompt": f"{{question}}\n{{choices}}\n{_LETTER}"},
            headerless=("question", "A", "B", "C", "D", "answer"),
        ),
        "arc": DatasetFormat(
            rewards=("choice", *_TEXT),
            variants=(
                {"question": "question.stem", "choices": "question.choices", "answer": "answerKey"},
                {"question": "question", "choices": "choices", "answer": "answerKey"},
            ),
            options={"id": "id?", "prompt": f"{{question}}\n{{choices}}\n{_LETTER}"},
        ),
        "bbh": DatasetFormat(
            rewards=("exact", "fuzzy", "choice", "number", "math"),
            variants=({"question": "input", "answer": "target"},),
            options={
                "answer_also": r"\A\((\w)\)\Z",
                "prompt": "{question}\nThink step by step, then write the answer alone in <answer></answer>.",
            },
        ),
        "gpqa": DatasetFormat(
            rewards=("choice", *_TEXT),
            variants=(
                {
                    "question": "Question",
                    "choices": ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
                    "answer": "Correct Answer",
                    "shuffle_choices": True,
                },
            ),
            options={
                "id": "Record ID?",
                "info": ("High-level domain?", "Subdomain?"),
                "prompt": f"{{question}}\n{{choices}}\n{_LETTER}",
            },
        ),
        "humaneval": DatasetFormat(
            rewards=("code",),
            variants=({"question": "prompt", "answer": ""},),
            options={
                "id": "task_id?",
                "info": ("prompt", "test", "entry_point"),
                "prompt": f"Complete this Python function. Write all of it {_BLOCK}.\n\n```python\n{{question}}\n```",
            },
        ),
        "mbpp": DatasetFormat(
            rewards=("code",),
            variants=({"question": "text", "answer": "code"}, {"question": "prompt", "answer": "code"}),
            options={
                "id": "task_id?",
                "info": ("test_list", "test_setup_code?", "test_imports?"),
                "prompt": f"{{question}}\nIt has to pass these tests:\n{{test_list}}\nWrite the Python code {_BLOCK}.",
            },
        ),
        "apps": DatasetFormat(
            rewards=("code",),
            variants=({"question": "question", "answer": ""},),
            options={
                "id": "problem_id?",
                "info": ("input_output", "difficulty?"),
                # some problems have no tests
                "skip": {"input_output": r'\A\s*(\{\s*\}|null)?\s*\Z|"inputs":\s*\[\s*\]'},
                "prompt": "{question}\n{starter_code?}\nIf there is starter code above, complete it; if not, write a "
                f"program that reads standard input and writes standard output. Write the Python code {_BLOCK}.",
            },
        ),
        "ifeval": DatasetFormat(
            rewards=("instructions",),
            variants=({"question": "prompt", "answer": ""},),
            options={
                "id": "key?",
                "info": ("instruction_id_list", "kwargs"),
                # the reward recognises languages by their script
                "skip": {"kwargs": r'"language": "(de|fi|it|pt|sw|vi)"'},
            },
        ),
    }
)


def find_format(name: str) -> DatasetFormat:
    """The format of that name."""
    found = FORMATS.get(name)
    if found is None:
        raise UserError(
            f"tasks.options.format is {name!r}, but takes one of {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}"
        )
    return found
