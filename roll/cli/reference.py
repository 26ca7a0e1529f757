"""Writes the page of all commands from the commands: `python -m roll.cli.reference > docs/reference/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from roll.cli.commands import app

_INTRODUCTION = """\
# Command line

`roll COMMAND --help` prints what this page says. `roll --version` prints the version. Where `roll` is not on the path,
`python -m roll.cli` is the same program.

A `CONFIG` is a YAML file ([all settings](config.md)); a `RUN` is the folder that a run wrote
([its files](../guides/runs.md)). `KEY=VALUE` replaces a setting of the file: `train.lr=1e-6`. Options may stand before or
after the arguments.
"""

_STATUSES = """\
## Exit status

| status | meaning |
| --- | --- |
| 0 | The command has done what it was asked for. |
| 1 | The run failed after it had started. `roll doctor`: something is missing. `roll repair`: the run cannot continue. |
| 2 | The user's error: one message says what to write instead. Nothing was created. |
| 128 + n | The command was stopped by signal n: 130 after Ctrl-C (SIGINT), 143 after SIGTERM, 129 after SIGHUP. |

A training run that a signal stopped has saved a checkpoint, unless a second signal came before the step ended.
`summary.json` then has `"stopped": true`, and the signal's name as `stopped_by`.
"""


def render_commands() -> str:
    """The whole page, as Markdown."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # the app is a group
    return "\n".join([_INTRODUCTION, *(_command(name, command) for name, command in commands.items()), _STATUSES])


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join(["roll", name, *(each.metavar for each in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## `roll {name}`", "", "```text", usage, "```", "", *_paragraphs(command.help)]
    rows = [*((_code(each.metavar), each.help) for each in arguments), *((_option(each), each.help) for each in options)]
    if rows:
        lines += ["| argument or option | meaning |", "| --- | --- |"]
        lines += [f"| {written} | {meaning} |" for written, meaning in rows]
        lines.append("")
    return "\n".join(lines)


def _option(option: Any) -> str:
    default = "" if option.default in (None, False) else f" (default `{option.default}`)"
    return _code(f"{option.opts[-1]} {option.metavar or ''}".strip()) + default


def _code(text: str) -> str:
    """Code in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`"


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield " ".join(paragraph.split())
        yield ""


if __name__ == "__main__":
    print(render_commands(), end="")
