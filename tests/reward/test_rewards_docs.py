"""The page on rewards: its tables are the rewards' options, its configurations load, and its code runs."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config import UserError, load_config
from roll.config.schema import RewardPart
from roll.config.yaml_document import parse
from roll.data import Response, Task
from roll.reward import RewardSpec, Verdict
from roll.reward.base import is_deterministic, normalise
from roll.reward.builtin import BUILTINS
from roll.reward.instructions import CONSTRAINTS

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")
CONFIGS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES = dict(re.findall(r"^<!-- cpu file=(\S+) -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE))
ELSEWHERE = {"code", "reasoning_gym"}
"""Rewards on other pages: the sandbox's, and that of tasks."""


def table(text: str) -> dict[str, str]:
    """The first two cells of each row that begins with a name."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))


def as_written(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return f"`{default}`" if isinstance(default, str) and default else f"`{yaml.safe_dump(default).splitlines()[0]}`"


def test_every_built_in_has_a_section() -> None:
    assert set(SECTIONS) == set(BUILTINS) - ELSEWHERE


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_the_options_of_a_built_in_are_those_on_the_page(name: str) -> None:
    module, _, attribute = BUILTINS[name].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    expected = {}
    for option, parameter in inspect.signature(factory).parameters.items():
        default = parameter.default
        if repr(default) == "<factory>":
            default = factory.__dataclass_fields__[option].default_factory()
        expected[option] = as_written(default).replace("''", '""')
    if name == "judge":
        expected["rubric"] = "ROLL's own"
    assert table(SECTIONS[name]) == expected


def test_the_settings_of_a_part_are_those_on_the_page() -> None:
    written = table(PAGE.partition("## Parts")[2].partition("\n## ")[0])
    fields = RewardPart.model_fields
    defaults = {
        name: "required" if info.is_required() else as_written(info.get_default(call_default_factory=True))
        for name, info in fields.items()
    }
    assert written == defaults


def test_every_instruction_is_on_the_page() -> None:
    assert set(re.findall(r"`([a-z_]+:[a-z_]+)`", SECTIONS["instructions"])) == set(CONSTRAINTS)


@pytest.mark.parametrize("text", CONFIGS)
def test_the_configurations_of_the_page_work(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, code in FILES.items():
        (tmp_path / file).write_text(code)
    RewardSpec.of_config(load_config(parse(text).data).reward).check()


def test_the_refusal_on_the_page_is_the_one_given() -> None:
    said = re.search(r"`(reward\.parts\.form\.options\.tag is .*?\?)`", PAGE)
    assert said is not None
    part = {"name": "format", "options": {"tag": ["a"]}}
    with pytest.raises(UserError) as caught:
        RewardSpec.of_config(load_config({"reward": {"parts": {"form": part}}}).reward).check()
    assert str(caught.value) == said[1]


def test_the_reward_of_the_page_judges_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = FILES["my_rewards.py"]
    assert len(code.partition("polite.deterministic")[0].strip().splitlines()) <= 10
    (tmp_path / "my_rewards.py").write_text(code)
    config = next(text for text in CONFIGS if "my_rewards.py" in text)
    reward = RewardSpec.of_config(load_config(parse(config).data).reward).load()
    task = Task.ask("t", "Capital of Italy?", "Rome")
    assert is_deterministic(reward, task)

    def judged(text: str) -> Verdict:
        return normalise(reward(task, Response(text, 1, "stop")))

    assert judged("I think, if you please, Rome.") == Verdict(1.0, {"right": 1, "polite": 0})
    assert judged("please wait: Rome!") == Verdict(1.2, {"right": 1, "polite": 0.2})
    assert judged("") == Verdict(0.0, {"right": 0, "polite": 0})


def test_the_gates_of_the_page_are_worth_what_it_says() -> None:
    text = next(text for text in CONFIGS if "gate_value" in text)
    reward = RewardSpec.of_config(load_config(parse(text).data).reward).load()
    task = Task.ask("t", "?", "5")

    def worth(answer: str) -> float:
        return normalise(reward(task, Response(answer, 1, "stop"))).reward

    assert worth(r"\boxed{5}") == -0.5
    assert worth(r"<think>x</think><answer>\boxed{5}</answer>") == 1
    assert worth(r"<think>x</think><answer>\boxed{6}</answer>") == 0
    assert worth(rf"<think>{'a b c d ' * 50}</think><answer>\boxed{{5}}</answer>") == pytest.approx(0.72, abs=0.03)
