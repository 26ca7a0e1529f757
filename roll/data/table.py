"""Tasks from a table: which column is the question, which the answer, and what the model is asked.

Example: with `prompt: "{question} Answer with a number."` and `answer_pattern: "#### (.*)"`, the row `{"question": "2 and
2?", "answer": "2 + 2 = 4\\n#### 4"}` is the task that asks `2 and 2? Answer with a number.`, whose answer is `4`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any, Literal, TypeAlias

from roll.config.errors import UserError
from roll.config.names import did_you_mean
from roll.data.rows import HUB, Row, is_saved, is_table, read_rows
from roll.data.task import Message, Task

HeldOut: TypeAlias = float | int | str
"""A share of the rows, a number of them, or another table: a file, or a split of the same dataset."""


def table(
    split: Literal["train", "held_out"],
    path: str,
    question: str = "question",
    answer: str = "answer",
    id: str = "",
    domain: str = "",
    info: Sequence[str] | None = None,
    prompt: str = "",
    system: str = "",
    answer_pattern: str = "",
    held_out: HeldOut = 0.1,
    limit: int = 0,
    subset: str = "",
    part: str = "",
    root: str = "",
) -> Iterable[Task]:
    """A task a row. `question`, `answer`, `id` and `domain` name columns; a question may also be a list of messages;
    without a column of ids a task's id is its row's number. `answer` may be empty, for tasks without. `info` names the
    columns that graders see beside the answer; by default they see all others.

    `prompt` is what the model is asked, with `{question}` and other columns in braces; `system` goes before it. Of an
    answer, `answer_pattern` takes what its first group matches, or all that it matches, the last time it does.

    `held_out` is a share or a number of rows, at even distances, or another table: a file, or the name of a split of the
    same dataset. `limit` leaves out all rows after the first so many. `subset` and `part` are a dataset's configuration
    and the split to train on."""
    if limit < 0:
        raise UserError(f"tasks.options: limit is {limit}: write how many rows, or 0 for all")
    columns = _Columns(question, answer, id, domain, info, prompt, system, answer_pattern)
    elsewhere = held_out if isinstance(held_out, str) else ""
    if split == "held_out" and elsewhere:
        source, part = _other_table(path, elsewhere, root)
        rows = list(
            read_rows(source, "tasks.options.held_out", subset=subset if source == path else "", part=part, root=root)
        )
        prefix = f"{part or Path(source.removeprefix(HUB)).stem}/"
        return [columns.task(row, prefix) for row in rows]
    rows = list(islice(read_rows(path, "tasks.source", subset=subset, part=part, root=root), limit or None))
    if not elsewhere:
        assert not isinstance(held_out, str)
        chosen = _held_out_rows(len(rows), held_out)
        rows = [row for position, row in enumerate(rows) if (position in chosen) == (split == "held_out")]
    return [columns.task(row) for row in rows]


def _other_table(path: str, held_out: str, root: str) -> tuple[str, str]:
    """The table that is held out and, in a dataset, its split."""
    if is_table(held_out, root):
        return held_out, ""
    if path.startswith(HUB) or is_saved(path, root):
        return path, held_out
    raise UserError(
        f"tasks.options: held_out is {held_out!r}: write a share below 1, a number of rows, or another table: a .jsonl, "
        ".json or .parquet file, or a dataset"
    )


def _held_out_rows(count: int, held_out: float | int) -> set[int]:
    """Positions at even distances: of 10 rows, 2 are the fifth and the last."""
    if isinstance(held_out, bool) or held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise UserError(f"tasks.options: held_out is {held_out}: write a share below 1, or a whole number of rows")
    many = held_out if isinstance(held_out, int) else round(count * held_out)
    if many > count:
        raise UserError(f"tasks.options: held_out is {held_out}, but there are {count} rows")
    return {position for position in range(count) if (position + 1) * many // count > position * many // count}


class _Columns:
    """How a row becomes a task."""

    def __init__(
        self,
        question: str,
        answer: str,
        id: str,
        domain: str,
        info: Sequence[str] | None,
        prompt: str,
        system: str,
        answer_pattern: str,
    ) -> None:
        self._question, self._answer, self._id, self._domain = question, answer, id, domain
        self._info = info
        self._prompt, self._system = prompt, system
        self._parts = _parts(prompt)
        self._pattern = _pattern(answer_pattern)

    def task(self, row: Row, prefix: str = "") -> Task:
        """`prefix` tells rows of one table from those of another."""
        values = row.values
        needed = [self._question, self._answer, self._id, self._domain, *(self._info or ())]
        for column in filter(None, needed):
            if column not in values:
                have = ", ".join(values)
                raise UserError(
                    f"{row.place}: there is no column {column!r}; the line has {have}{did_you_mean(column, values)}"
                )
        for column in filter(None, (self._question, self._id, self._domain)):
            if values[column] is None:
                raise UserError(f"{row.place}: {column!r} is null: write something there, or remove the row")
        asked = self._messages(row)
        system = [Message(role="system", content=self._system)] if self._system else []
        shown = [key for key in values if key not in (self._question, self._answer)] if self._info is None else self._info
        return Task(
            id=str(values[self._id]) if self._id else f"{prefix}{row.name}",
            messages=(*system, *asked),
            answer=self._answer_of(row) if self._answer else None,
            domain=str(values[self._domain]) if self._domain else "default",
            info={column: values[column] for column in shown},
        )

    def _messages(self, row: Row) -> Sequence[Message]:
        asked = row.values[self._question]
        if isinstance(asked, list):
            if not asked or not all(map(_is_message, asked)):
                raise UserError(
                    f"{row.place}: {self._question!r} is a list, but not one of messages with role and content"
                )
            if self._prompt:
                raise UserError(
                    f"{row.place}: {self._question!r} is a list of messages, for which there can be no prompt"
                )
            return asked
        text = self._filled(row, str(asked)) if self._prompt else str(asked)
        return (Message(role="user", content=text),)

    def _filled(self, row: Row, question: str) -> str:
        values = {key: value for key, value in row.values.items() if key != self._answer}
        values["question"] = question
        for _, field in self._parts:
            if field is not None and field not in values:
                why = "is the answer" if field == self._answer else "is no column of it"
                raise UserError(
                    f"{row.place}: the prompt asks for {{{field}}}, which {why}: write "
                    f"{', '.join(f'{{{name}}}' for name in values)}, or {{{{{field}}}}} for braces"
                )
            if field is not None and values[field] is None:
                raise UserError(f"{row.place}: the prompt asks for {{{field}}}, which is null there: write a text")
        return "".join(text + ("" if field is None else _text(values[field])) for text, field in self._parts)

    def _answer_of(self, row: Row) -> Any:
        answer = row.values[self._answer]
        if self._pattern is None:
            return answer
        found = list(self._pattern.finditer(str(answer)))
        if not found:
            raise UserError(
                f"{row.place}: answer_pattern {self._pattern.pattern!r} is nowhere in the answer {str(answer)[-60:]!r}"
            )
        last = found[-1]
        return (last[1] if self._pattern.groups else last[0]).strip()


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") is not None and value.get("content") is not None


def _text(value: Any) -> str:
    """A column in a prompt: a list is a line each."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _parts(prompt: str) -> list[tuple[str, str | None]]:
    """A template as texts, each with the column that comes after it; the last may have none."""
    try:
        parts = list(Formatter().parse(prompt))
    except ValueError as error:
        raise UserError(f"tasks.options.prompt: {error}: write {{{{ and }}}} for braces that are meant") from error
    for _, field, form, conversion in parts:
        if field == "" or form or conversion:
            written = f"{{{field}:{form}}}" if form else f"{{{field}}}"
            raise UserError(
                f"tasks.options.prompt: {written} is no column: write {{question}}, or {{{{ and }}}} for braces"
            )
    return [(text, field) for text, field, _, _ in parts]


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise UserError(f"tasks.options.answer_pattern: {text!r} is no regular expression: {error}") from error
