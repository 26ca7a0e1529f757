"""The page of commands is the one that the commands give."""

from __future__ import annotations

from pathlib import Path

import typer

from roll.cli.commands import app
from roll.cli.reference import render_commands

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_docs_are_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_commands(), "python -m roll.cli.reference > docs/reference/cli.md"


def test_every_command_and_option_is_on_the_page_with_its_meaning() -> None:
    page = render_commands()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        section = page.partition(f"## `roll {name}`\n")[2].partition("\n## ")[0]
        assert section
        for each in command.params:
            assert each.help
            assert each.help in section
            assert (each.opts[-1] if each.param_type_name == "option" else each.metavar.replace("|", "\\|")) in section
