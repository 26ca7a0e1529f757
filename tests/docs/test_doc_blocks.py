"""Every code block of the documentation is marked, parses, and runs if its mark says `cpu`."""

from __future__ import annotations

import ast
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import thorough
import typer
import yaml
from doc_blocks import CODE, OUTPUT, PAGES, PLACES, ROOT, Block, blocks_of, parse_blocks
from doc_runs import prepare, run, run_page

from roll.cli.commands import app
from roll.config import load_config
from roll.config.yaml_document import parse

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
MARKED = [block for block in BLOCKS if block.place]
WORDS = {"excerpt", "continues"}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
QUICK = {"docs/reference/config.md"}
PROGRAMS = ("bash", "sh", "python")
RUNNABLE = sorted(
    {
        block.page
        for block in MARKED
        if block.place == "cpu" and block.language in PROGRAMS and not block.has("excerpt") and not block.value("file")
    }
)


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in MARKED if block.language in languages]


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_is_marked(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in CODE | OUTPUT, f"{block}: {block.language} is neither code nor output"
        if block.language in CODE:
            assert block.place, f"{block}: write <!-- cpu -->, <!-- slow --> or <!-- gpu --> in the line before"


@pytest.mark.parametrize("page", PAGES)
def test_marks_have_words_that_mean_something(page: str) -> None:
    for block in blocks_of(page):
        for word in block.words[1:]:
            assert word in WORDS or word.startswith(("file=", "status=")), f"{block}: {word}"
    text = (ROOT / page).read_text(encoding="utf-8")
    marks = sum(line.startswith(tuple(f"<!-- {place}" for place in PLACES)) for line in text.splitlines())
    assert marks == sum(bool(block.words) for block in blocks_of(page)), "a mark is not in the line before a block"


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_configuration(block: Block) -> None:
    if block.has("excerpt"):
        yaml.safe_load(block.text)
    else:
        load_config(parse(block.text).data)


@pytest.mark.parametrize("block", of("toml"))
def test_toml_parses(block: Block) -> None:
    tomllib.loads(block.text)


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", of("bash", "sh"))
def test_commands_name_options_settings_and_files_that_exist(block: Block) -> None:
    saved = {name for other in blocks_of(block.page) if (name := other.value("file"))}
    for words in commands_of(block):
        if words[0] != "roll" or len(words) < 2 or words[1] == "--version":
            continue
        check_command(words[1:], saved, load=not block.has("excerpt") and block.value("status") is None)


def commands_of(block: Block) -> list[list[str]]:
    """The words of each line, without assignments before it and the folder of `roll`."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:
            words.pop(0)
        if words:
            found.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return found


def check_command(words: list[str], saved: set[str], load: bool) -> None:
    assert words[0] in COMMANDS, f"roll has no command {words[0]}"
    options = {option: each for each in COMMANDS[words[0]].params for option in each.opts}
    positional, rest = [], iter(words[1:])
    for word in rest:
        if word in ("|", ">", "2>", "&&", ";", "&"):
            break
        if not word.startswith("--"):
            positional.append(word)
            continue
        assert word in options or word == "--help", f"roll {words[0]} has no option {word}"
        if word in options and options[word].metavar:
            next(rest)
    if load and words[0] in ("train", "eval", "plan", "rollout") and positional and positional[0].endswith(".yaml"):
        name, *overrides = positional
        if name not in saved:
            assert (ROOT / name).is_file(), f"{name} is neither in the repository nor saved by the page"
            load_config(ROOT / name, overrides)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout's."""
    folder = tmp_path_factory.mktemp("checkout")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def with_run(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the run that pages share."""
    folder = tmp_path_factory.mktemp("run") / "checkout"
    shutil.copytree(checkout, folder, symlinks=True)
    run(folder, ["roll", "train", "examples/tiny.yaml", "--plain"], "the run that pages share")
    return folder


@pytest.mark.parametrize("page", thorough.but(QUICK, RUNNABLE))
def test_cpu_blocks_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shared = "with_run" if "runs/tiny" in "".join(block.text for block in blocks_of(page)) else "checkout"
    shutil.copytree(request.getfixturevalue(shared), tmp_path / "checkout", symlinks=True)
    assert run_page(page, tmp_path / "checkout") > 0


@pytest.mark.slow
@pytest.mark.parametrize("block", [each for each in of("python") if each.values[0].place == "slow"])
def test_slow_python_runs(block: Block, checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(checkout, tmp_path / "checkout", symlinks=True)
    (tmp_path / "checkout" / "pasted.py").write_text(block.text)
    run(tmp_path / "checkout", [sys.executable, "pasted.py"], str(block))


def test_blocks_are_found_with_their_marks() -> None:
    text = "a\n<!-- cpu file=a.py -->\n```python\nx = 1\n```\n\n    <!-- cpu -->\n    ```bash\n    ```\n\n```text\n```\n"
    first, second = parse_blocks(text, "page.md")
    assert (first.line, first.language, first.place, first.value("file")) == (3, "python", "cpu", "a.py")
    assert (first.text, second.place, second.text) == ("x = 1\n", None, "\n")
