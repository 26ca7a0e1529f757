"""Turns a row of a table into a task, using the columns that the table's options name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, TypeAlias

from roll.config.errors import UserError
from roll.config.suggest import did_you_mean
from roll.data.boxed import last_boxed
from roll.data.choices import AnswerIs, Choices
from roll.data.file_layout import ROW_MB
from roll.data.rows import TableRow, lookup, shortlist
from roll.data.task import Message, Task

HeldOut: TypeAlias = float | int | str
"""A share of the rows, a number of them, or another table: a file, or a split of the same dataset."""
_Part: TypeAlias = tuple[str, str | None]
"""A literal text of a template, and the column after it."""


@dataclass(frozen=True)
class TableOptions:
    """How the rows of a table are read. A column is named as in the table; `question.stem` is the key `stem` of the
    object in the column `question`; a column with `?` after its name may be missing or null."""

    format: str = ""
    """A published dataset's name (`roll/data/formats.py`), which sets defaults for the other options."""
    question: str = "question"
    """Column with the question: a text, or a list of messages."""
    answer: str = "answer"
    """Column with the answer; empty for tasks without one."""
    answer_pattern: str = ""
    """Regular expression: the answer is its last match, or the first group of that."""
    answer_boxed: bool = False
    """Whether the answer is the content of the last `\\boxed{}` in its column."""
    answer_also: str = ""
    """Regular expression: its match in the answer is another right answer."""
    choices: str | Sequence[str] = ""
    """Column with the choices, or one column per choice."""
    answer_is: AnswerIs = ""
    """How the answer names a choice: `label`, `index` (from 0), `number` (from 1), `text`, or `key` (label or index);
    empty: the first that fits."""
    shuffle_choices: bool = False
    """Whether choices are shuffled, always in the same order for a row."""
    id: str = ""
    """Column with ids; without it, a task's id is its row number."""
    domain: str = ""
    """Column with domains."""
    info: Sequence[str] | None = None
    """Columns that rewards see besides the answer; by default all others."""
    prompt: str = ""
    """The prompt, with `{question}`, `{choices}` and other columns in braces."""
    system: str = ""
    """System message before the prompt."""
    skip: Mapping[str, str] = field(default_factory=dict)
    """Rows to leave out: per column, a regular expression that is searched in it."""
    held_out: HeldOut = 0.1
    """A share or a number of rows, evenly spaced, or another table: a file, or a split of the same dataset."""
    limit: int = 0
    """Maximum number of rows to read, from the first; 0 for all."""
    subset: str = ""
    """A dataset's configuration."""
    part: str = ""
    """The dataset's split to train on."""
    columns: Sequence[str] = ()
    """Column names of a CSV file without a header."""
    rows: str = ""
    """The key of the rows in a JSON file."""
    delimiter: str = ""
    """The delimiter of a CSV file."""
    quotes: bool = True
    """Whether fields of a CSV file may be in double quotes."""
    row_mb: int = ROW_MB
    """Maximum MiB of a row of a file."""


class RowReader:
    """Turns rows into tasks."""

    def __init__(self, options: TableOptions) -> None:
        self.options = options
        self._choices = () if isinstance(options.choices, str) else tuple(options.choices)
        self._choices_column = options.choices if isinstance(options.choices, str) else ""
        self._parts = _parts(options.prompt)
        self._pattern = pattern(options.answer_pattern, "answer_pattern")
        self._also_pattern = pattern(options.answer_also, "answer_also")
        if options.shuffle_choices and not options.choices:
            raise UserError("tasks.options.shuffle_choices is true, but no column has choices: write choices=COLUMN")
        if options.answer_is and not options.choices:
            raise UserError(
                f"tasks.options.answer_is is {options.answer_is!r}, but no column has choices: write choices=COLUMN"
            )

    @property
    def required_columns(self) -> list[str]:
        """The columns that a row must have."""
        options = self.options
        columns = [
            options.question,
            options.answer,
            options.id,
            options.domain,
            *(options.info or ()),
            self._choices_column,
        ]
        prompted = [name for _, name in self._parts if name not in (None, "question", "choices")]
        unique = dict.fromkeys(name for name in (*columns, *self._choices) if name)
        return [name for name in (*unique, *(n for n in prompted if n and n not in unique)) if not name.endswith("?")]

    def fits(self, row: TableRow) -> bool:
        return all(has(row, column) for column in self.required_columns)

    def task(self, row: TableRow, prefix: str = "") -> Task:
        """The task of a row. `prefix` distinguishes rows of one table from those of another."""
        options = self.options
        self._check(row)
        choices = self._choices_of(row)
        answer = self._answer_of(row, choices) if options.answer else None
        if choices is not None and options.shuffle_choices:
            position = None if answer is None else choices.letters.index(answer)
            choices, order = choices.shuffled(search_text(get(row, options.question)))
            answer = None if position is None else choices.letters[order.index(position)]
        name = get(row, options.id) if options.id else None
        domain = get(row, options.domain) if options.domain else None
        system = [Message(role="system", content=options.system)] if options.system else []
        info, implied = self._info(row, choices)
        if choices is None and implied is not None:
            answer = _as_letter(answer, implied)
        return Task(
            id=f"{prefix}{row.name}" if name is None else name_in(row.location, options.id, name),
            messages=(*system, *self._messages(row, choices or implied)),
            answer=answer,
            domain="default" if domain is None else name_in(row.location, options.domain, domain),
            info=info,
        )

    def _check(self, row: TableRow) -> None:
        options = self.options
        columns = (
            options.question,
            options.answer,
            options.id,
            options.domain,
            *(options.info or ()),
            self._choices_column,
        )
        for column in filter(None, (*columns, *self._choices)):
            if not column.endswith("?") and not has(row, column):
                present = shortlist(row.values)
                advice = did_you_mean(column, row.values) + self._named_by(column)
                raise UserError(f"{row.location}: there is no column {column!r}; the line has {present}{advice}")
        for column in filter(None, (options.question, options.id, options.domain)):
            if not column.endswith("?") and get(row, column) is None:
                raise UserError(f"{row.location}: {column!r} is null: write something there, or remove the row")

    def _named_by(self, column: str) -> str:
        """The option that names the column, for a message."""
        match column:
            case self.options.question:
                return " (the option `question` names the column)"
            case self.options.answer:
                return " (the option `answer` names the column; '' for tasks without answers)"
            case _:
                return ""

    def _info(self, row: TableRow, choices: Choices | None) -> tuple[dict[str, Any], Choices | None]:
        """The info that rewards see, and choices in it that no option names: those of a column `choices`."""
        options, values = self.options, row.values
        if options.info is None:
            info = {name: value for name, value in values.items() if name not in (options.question, options.answer)}
        else:
            names = [name if has(row, name) else name.removesuffix("?") for name in options.info]
            info = {name: get(row, name) for name in names if has(row, name)}
        implied = None
        if choices is None and "choices" not in (options.question, options.answer) and values.get("choices"):
            try:
                implied = Choices.of(values["choices"])
            except ValueError:
                implied = None
        if choices is not None:
            info["choices"] = choices.by_letter
        elif implied is not None and "choices" in info:
            info["choices"] = implied.by_letter
        return info, implied

    def _choices_of(self, row: TableRow) -> Choices | None:
        try:
            if self._choices_column:
                return Choices.of(get(row, self._choices_column))
            if self._choices:
                return Choices.labelled_by({name: get(row, name) for name in self._choices})
        except ValueError as error:
            raise UserError(f"{row.location}: the choices cannot be read: {error}") from error
        return None

    def _messages(self, row: TableRow, choices: Choices | None) -> Sequence[Message]:
        options = self.options
        question = get(row, options.question)
        prompt = self._parts
        if isinstance(question, list):
            if not question or not all(map(_is_message, question)):
                problem = next(
                    (
                        f": {options.question}[{n}] {_message_problem(m)}"
                        for n, m in enumerate(question)
                        if not _is_message(m)
                    ),
                    "",
                )
                raise UserError(
                    f"{row.location}: {options.question!r} is a list, but not one of messages with role and content, "
                    f"which are texts{problem}"
                )
            if options.prompt:
                raise UserError(
                    f"{row.location}: {options.question!r} is a list of messages, for which there can be no prompt"
                )
            return question
        if not isinstance(question, str):
            raise UserError(
                f"{row.location}: {options.question!r} is {kind_of(question)}, {short_text(question)}, but a question is "
                "a text or a list of messages: write it as one, or name another column in the option question"
            )
        if not prompt and options.choices:
            prompt = _parts("{question}\n{choices}")
        text = self._fill(row, question, prompt, choices) if prompt else question
        return (Message(role="user", content=text),)

    def _fill(self, row: TableRow, question: str, parts: Sequence[_Part], choices: Choices | None) -> str:
        options = self.options
        values: dict[str, Any] = {**row.values, "question": question}
        if choices is not None:
            values |= {"choices": str(choices)} | ({self._choices_column: str(choices)} if self._choices_column else {})
        if options.answer and options.answer != "question":
            values.pop(options.answer, None)

        def text_of(column: str) -> str:
            optional = column.endswith("?") and column not in values
            name = column[:-1] if optional else column
            try:
                value = lookup(values, name) if name != options.answer or name == "question" else values[name]
            except KeyError:
                if optional and name != options.answer:
                    return ""
                why = "is the answer" if name == options.answer else "is no column of it"
                raise UserError(
                    f"{row.location}: the prompt asks for {{{name}}}, which {why}: write "
                    f"{shortlist(f'{{{known}}}' for known in values)}, or {{{{{name}}}}} for braces"
                ) from None
            if value is None and not optional:
                raise UserError(f"{row.location}: the prompt asks for {{{name}}}, which is null there: write a text")
            if not _is_shown(value):
                raise UserError(
                    f"{row.location}: the prompt asks for {{{name}}}, which is {kind_of(value)} there, "
                    f"{short_text(value)}: write a text, a number or a list of these"
                )
            return "" if value is None else _text(value)

        return "".join(text + ("" if column is None else text_of(column)) for text, column in parts)

    def _answer_of(self, row: TableRow, choices: Choices | None) -> Any:
        options = self.options
        answer = get(row, options.answer)
        if isinstance(answer, bytes) or (isinstance(answer, float) and not math.isfinite(answer)):
            raise UserError(
                f"{row.location}: {options.answer!r} is {kind_of(answer)}, {short_text(answer)}, which is no answer: "
                "write a number or a text, or remove the row"
            )
        if choices is not None:
            return choices.letters[self._choice_position(row, answer, choices)]
        if answer is None and (options.answer_boxed or self._pattern is not None):
            raise UserError(f"{row.location}: {options.answer!r} is null: write an answer there, or remove the row")
        if options.answer_boxed:
            found = last_boxed(str(answer))
            if found is None:
                raise UserError(f"{row.location}: there is no \\boxed{{}} in the answer {str(answer)[-60:]!r}")
            answer = found
        if self._pattern is not None:
            answer = self._match_answer(row, answer)
        if self._also_pattern is not None and (also := self._also_pattern.search(str(answer))):
            return [answer, also[1] if self._also_pattern.groups else also[0]]
        return answer

    def _choice_position(self, row: TableRow, answer: Any, choices: Choices) -> int:
        """The position of the right choice: that of the answer's column, or the one that the answer names."""
        options = self.options
        if options.answer in self._choices:
            present = [name for name in self._choices if get(row, name) is not None]
            if options.answer not in present:
                raise UserError(f"{row.location}: {options.answer!r} is null: write something there, or remove the row")
            return present.index(options.answer)
        if self._pattern is not None:
            answer = self._match_answer(row, answer)
        try:
            return choices.position(answer, options.answer_is)
        except ValueError as error:
            raise UserError(f"{row.location}: {error}") from error

    def _match_answer(self, row: TableRow, answer: Any) -> str:
        assert self._pattern is not None
        found = list(self._pattern.finditer(str(answer)))
        if not found:
            raise UserError(
                f"{row.location}: answer_pattern {self._pattern.pattern!r} is nowhere in the answer {str(answer)[-60:]!r}"
            )
        last = found[-1]
        return (last[1] if self._pattern.groups else last[0]).strip()


def _as_letter(answer: Any, choices: Choices) -> Any:
    """The answer unchanged, unless it would name another choice by letter: published labels may be digits."""
    try:
        position = choices.position(answer)
    except ValueError:
        return answer
    try:
        is_unchanged = Choices.of(choices.by_letter).position(answer) == position
    except ValueError:
        is_unchanged = False
    return answer if is_unchanged else choices.letters[position]


def has(row: TableRow, column: str) -> bool:
    try:
        lookup(row.values, column)
    except KeyError:
        return False
    return True


def get(row: TableRow, column: str) -> Any:
    """The value of a column; None if it is optional and missing."""
    if has(row, column):
        return lookup(row.values, column)
    return lookup(row.values, column[:-1]) if column.endswith("?") and has(row, column[:-1]) else None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _message_problem(message: Any) -> str:
    """What is wrong with something that should be a message."""
    if not isinstance(message, dict):
        return f"is {kind_of(message)}"
    return next(
        f"has a {key} that is {kind_of(message[key])}" if key in message else f"has no {key}"
        for key in ("role", "content")
        if not isinstance(message.get(key), str)
    )


def _is_shown(value: Any) -> bool:
    """Whether a value of a column can be put into a prompt."""
    if isinstance(value, list | tuple):
        return all(item is None or isinstance(item, str | int | float) for item in value)
    return value is None or isinstance(value, str | int | float)


def name_in(location: str, column: str, value: Any) -> str:
    """An id or a domain: a text, or a whole number as text."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise UserError(
            f"{location}: {column!r} is {kind_of(value)}, {short_text(value)}, but names are text or whole numbers"
        )
    return str(value)


def kind_of(value: Any) -> str:
    """The kind of a value, in the terms of JSON."""
    for kinds, name in _KINDS:
        if isinstance(value, kinds):
            return name
    return "nothing" if value is None else f"a {type(value).__name__}"


_KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "a text"),
    (bytes, "bytes"),
    (Mapping, "an object"),
    ((list, tuple), "a list"),
)


def short_text(value: Any) -> str:
    return f"{value!r:.60}"


def _text(value: Any) -> str:
    """A column's text in a prompt: a list has one line per item."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def search_text(value: Any) -> str:
    """A column's text for a search: null is empty, lists and objects are JSON."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)


def _parts(prompt: str) -> list[_Part]:
    """A template as literal texts, each with the column after it; the last may have none."""
    try:
        parts = list(Formatter().parse(prompt))
    except ValueError as error:
        raise UserError(f"tasks.options.prompt: {error}: write {{{{ and }}}} for braces that are meant") from error
    for _, column, form, conversion in parts:
        if column == "" or form or conversion:
            written = f"{{{column}:{form}}}" if form else f"{{{column}}}"
            raise UserError(
                f"tasks.options.prompt: {written} is no column: write {{question}}, or {{{{ and }}}} for braces"
            )
    return [(text, column) for text, column, _, _ in parts]


def pattern(text: str, option: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise UserError(f"tasks.options.{option}: {text!r} is no regular expression: {error}") from error
