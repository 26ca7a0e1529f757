"""The pages on algorithms: their tables are the recipes, configurations load, refusals are refused, and code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from roll.algorithm import Algorithm, LossInputs, make_algorithm
from roll.algorithm.correction import Mismatch
from roll.algorithm.losses import resolve_loss
from roll.config import UserError, load_config
from roll.config.algorithm import RATIO_LOSSES, RECIPES, AlgorithmConfig
from roll.config.user_code import load_user_code
from roll.config.yaml_document import parse
from roll.data import Batch

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guides" / "algorithms.md").read_text(encoding="utf-8")
COMPARED = (DOCS / "reference" / "algorithm_defaults.md").read_text(encoding="utf-8")
CONFIGS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES = dict(re.findall(r"^<!-- cpu file=(\S+) -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
UNUSED = "–"


def rows(*header: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the table with such a header."""
    body = page.partition(f"| {' | '.join(header)} |\n")[2].partition("\n\n")[0]
    assert body, f"the page has no table {header}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body.splitlines()[1:]]


TABLE = {
    re.findall(r"`(\w+)`", name)[0]: pieces
    for name, *pieces in rows(
        *("algorithm", "baseline", "scale", "credit", "loss", "ratio", "aggregation"),
        *("KL", "clip low / high", "also"),
    )
}
REFUSED = [written.strip("`") for written, _ in rows("written", "why")]


DEFAULTS = [
    (re.findall(r"`(\w+)`", recipe) or ["grpo"], setting.strip("`"), here)
    for recipe, setting, here, *_ in rows("recipe", "setting", "here", "paper", "TRL", "verl", "why", page=COMPARED)
    if setting.startswith("`")
]


def settings_of(pieces: list[str]) -> dict[str, Any]:
    """What a row of the table says, as settings."""
    baseline, scale, credit, loss, ratio, aggregation, kl, clip, also = pieces
    said: dict[str, Any] = {"baseline": baseline, "scale": scale, "credit": credit, "loss": loss}
    said |= {"aggregation": aggregation, "kl_coef": 0.0}
    if ratio != UNUSED:
        said["ratio"] = ratio
    if clip != UNUSED:
        said["clip_low"], said["clip_high"] = map(float, clip.split(" / "))
    if kl != UNUSED:
        coef, said["kl_estimator"], _, said["kl_in"] = kl.split()
        said["kl_coef"] = float(coef)
    for setting in re.findall(r"`(.*?)`", also):
        said |= yaml.safe_load(setting)
    return said


def test_the_table_has_every_algorithm() -> None:
    assert list(TABLE) == list(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_says_what_a_recipe_is(name: str) -> None:
    config, said = AlgorithmConfig(name=name), settings_of(TABLE[name])
    assert {key: getattr(config, key) for key in said} == said
    assert set(RECIPES[name]) <= set(said), "the row leaves out a setting of the recipe"
    assert ("ratio" in said) == (config.loss in RATIO_LOSSES)
    assert ("clip_low" in said) == (config.loss in ("clipped", "cispo"))


@pytest.mark.parametrize(("recipes", "setting", "here"), DEFAULTS, ids=lambda value: str(value))
def test_the_defaults_that_are_compared_with_others_are_ours(recipes: list[str], setting: str, here: str) -> None:
    tiny = str(Path(__file__).parents[2] / "examples" / "tiny.yaml")
    section, field = setting.split(".")
    for recipe in recipes:
        if section == "algorithm":
            found = getattr(AlgorithmConfig(name=recipe), field)
        else:
            found = type(getattr(load_config(tiny, []), section)).model_fields[field].default
        assert found == yaml.safe_load(here), recipe


def test_every_recipe_is_compared_with_others() -> None:
    said = {recipe for recipes, _, _ in DEFAULTS for recipe in recipes}
    assert said == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_each_algorithm_has_its_formula_paper_and_configuration(name: str) -> None:
    section = PAGE.partition(f"### `{name}`\n")[2].partition("\n### ")[0]
    assert "```text\n" in section
    assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}|the same paper", section)
    config = section.partition("```yaml\n")[2].partition("```")[0]
    assert load_config(parse(config).data).algorithm.name == name


@pytest.mark.parametrize("text", CONFIGS)
def test_configurations_load(text: str) -> None:
    load_config(parse(text).data)


@pytest.mark.parametrize("written", REFUSED)
def test_what_is_refused(written: str) -> None:
    with pytest.raises(UserError):
        load_config({}, written.split())


@pytest.mark.parametrize("setting", AlgorithmConfig.model_fields)
def test_every_setting_is_on_the_page(setting: str) -> None:
    assert re.search(rf"`[^`\n]*\b{setting}\b[^`\n]*`|^\s+{setting}:", PAGE, re.MULTILINE)


def test_every_metric_of_the_mismatch_is_on_the_page() -> None:
    metrics = [cell.strip("`") for cell, *_ in rows("metric", "what it is", "when they agree")]
    assert metrics == [f"train/{name}" for name in Mismatch().metrics()]


def test_every_metric_of_the_penalty_is_on_the_page() -> None:
    metrics = [cell.strip("`") for cell, *_ in rows("metric", "what it is")]
    algorithm = make_algorithm(load_config({"algorithm": {"kl_coef": 0.5}}))
    assert metrics == ["train/kl", *(f"train/{name}" for name in algorithm.metrics())]


def test_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files in the current folder."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def own_algorithm(mentioned: str) -> Algorithm:
    """The algorithm of the configuration that names such code."""
    return make_algorithm(load_config(parse(next(text for text in CONFIGS if mentioned in text)).data))


@pytest.mark.usefixtures("saved")
def test_a_loss_of_your_own() -> None:
    assert load_user_code("my_loss.py:penalised", what="algorithm.loss").__name__ == "penalised"
    current = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    inputs = LossInputs(
        current=current,
        proximal=torch.tensor([-1.0, -1.5, -0.5]),
        behaviour=torch.tensor([-1.0, -1.5, -0.5]),
        advantage=torch.tensor([1.0, -2.0, 0.5]),
        sample=torch.tensor([0, 0, 1]),
        turn=torch.tensor([0, 0, 1]),
    )
    spec = own_algorithm("my_loss.py").loss
    assert spec.params == {"penalty": 0.5}
    token_loss = resolve_loss(spec)(inputs)
    ratio = np.exp([0.0, -0.5, 0.0])
    expected = -ratio * [1.0, -2.0, 0.5] + 0.5 * np.array([0.0, -0.5, 0.0]) ** 2 / 2
    np.testing.assert_allclose(token_loss.values.detach(), expected, rtol=1e-6)
    assert token_loss.metrics["moved"].tolist() == [0.0, 0.5, 0.0]
    token_loss.values.sum().backward()
    np.testing.assert_allclose(current.grad, -ratio * [1.0, -2.0, 0.5] + [0.0, -0.25, 0.0], rtol=1e-6)


@pytest.mark.usefixtures("saved")
def test_an_algorithm_of_your_own() -> None:
    algorithm = own_algorithm("mine.py")
    batch = Batch(np.arange(6), {}).with_columns(
        reward=np.array([0.0, 0.0, 1.0, 0.2, 0.6]), group=np.array([0, 0, 0, 1, 1])
    )
    np.testing.assert_allclose(algorithm.credit(batch)["advantage"], [0.0, 0.0, 1.0, -0.2, 0.2], atol=1e-7)
    assert algorithm.loss.params["clip_high"] == 0.28
    assert (algorithm.config.baseline, algorithm.config.scale) == ("group", "group"), "it starts from grpo's settings"


def test_all_code_of_the_page_is_tried() -> None:
    assert set(FILES) == {"my_loss.py", "mine.py"}
    assert len(FILES) == PAGE.count("```python")
