"""What docs/guides/tasks.md shows can be pasted."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from roll.config import Config, load_config
from roll.config.yaml_document import parse
from roll.data.domains import domains_of, load_domains
from roll.data.formats import FORMATS
from roll.data.row_task import TableOptions
from roll.data.sources import load_tasks
from roll.reward import RewardSpec

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data"
TASKS = (ROOT / "docs" / "guides" / "tasks.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


EXAMPLES = blocks(TASKS, "yaml")


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.splitlines()[0][:40])
def test_every_example_is_a_configuration_with_rewards_that_are_there(text: str) -> None:
    config = load_config(parse(text).data)
    RewardSpec.of_config(config.reward).check()
    RewardSpec.of_domains({name: domain.reward for name, domain in config.domains.items()}).check()


def test_the_function_of_the_page_is_a_source() -> None:
    names: dict[str, object] = {}
    (text,) = blocks(TASKS, "python")
    exec(text, names)
    tasks = load_tasks(load_config({"tasks": {"options": {"high": 20}}}).tasks, names["doubling"])  # type: ignore[arg-type]
    assert [task.id for task in tasks.held_out] == ["double-7", "double-17"]
    assert (len(tasks.train), tasks.train[0].answer) == (18, 2)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not here")
@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.splitlines()[0][:40])
def test_the_examples_hold_on_the_real_files(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(parse(text).data)
    monkeypatch.chdir(REAL)
    if config.domains:
        tasks = load_domains(config.domains)
        assert domains_of(tasks.train) == domains_of(tasks.held_out) == sorted(config.domains)
    elif (REAL / config.tasks.source).is_file():
        tasks = load_tasks(config.tasks)
        assert tasks.train
        assert tasks.held_out


def test_every_option_of_a_table_and_every_format_is_on_the_page() -> None:
    options = TASKS.partition("| option |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| `(.*?)` \|", options, re.MULTILINE)
    assert {name for cell in cells for name in cell.split("`, `")} == {field.name for field in fields(TableOptions)}
    formats = TASKS.partition("| `format` | columns")[2].partition("\n\n")[0]
    usual = dict(re.findall(r"^\| `(\w+)` \|.*\| \[?`(\w+)`[^|]*\|$", formats, re.MULTILINE))
    assert usual == {name: format.rewards[0] for name, format in FORMATS.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_configuration_with_its_reward(name: str) -> None:
    (config,) = [config for config in map(load_text, EXAMPLES) if config.tasks.options.get("format") == name]
    assert config.reward.name == FORMATS[name].rewards[0]


def load_text(text: str) -> Config:
    return load_config(parse(text).data)
