"""Whole runs with domains: each domain's samples are drawn, judged, filtered and measured as that domain has it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import EXAMPLES, SMALL, Remains

from roll import Config, UserError, load_config
from roll.pipeline.entrypoints import evaluate, train
from roll.pipeline.prepare import check
from roll.pipeline.report import SilentReporter

REWARDS = """
def digits(task, response):
    assert task.domain == "digits" and task.answer.isdigit()
    return {"reward": 10.0 + 0.5 * (response.tokens % 2), "a_digit": 1.0}

def letters(task, response):
    assert task.domain == "letters" and task.answer.isalpha()
    return float(len(set(response.text)) % 2)
"""

STEPS = 3


def settings(folder: Path) -> Config:
    (folder / "my_rewards.py").write_text(REWARDS)
    own = [setting for setting in SMALL if not setting.startswith("reward=")]
    domains = {
        "digits": {
            "tasks": {"source": "echo", "options": {"symbols": "0123"}},
            "reward": f"{folder / 'my_rewards.py'}:digits",
            "weight": 2,
            "filter": "none",
            "max_new_tokens": 1,
        },
        "letters": {
            "tasks": {"source": "echo", "options": {"symbols": "abc"}},
            "reward": f"{folder / 'my_rewards.py'}:letters",
            "max_new_tokens": 6,
            "temperature": 1.5,
        },
        "sums": {"tasks": {"source": "addition", "options": {"low": 1, "high": 3}}, "weight": 0, "max_new_tokens": 2},
    }
    base = {"model": "tiny", "algorithm": {"name": "lite_ppo", "per_domain": True}, "domains": domains}
    config = load_config(base, [*own, f"train.steps={STEPS}", "rollout.groups_per_step=6", "eval.samples=9"])
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder / "run")})})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Remains, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("domains")
    summary = train(settings(folder), reporter=SilentReporter())
    return Remains(folder / "run"), summary


def samples(remains: Remains) -> list[dict[str, Any]]:
    return [row for rows in remains.samples().values() for row in rows]


def domain_of(row: dict[str, Any]) -> str:
    assert row["task"].startswith(f"{row['domain']}/")
    return str(row["domain"])


def test_nothing_failed_so_every_task_met_its_own_reward(finished: tuple[Remains, dict[str, Any]]) -> None:
    rows = samples(finished[0])
    assert {domain_of(row) for row in rows} == {"digits", "letters"}
    assert all(row["state"] != "failed" for row in rows)
    for row in rows:
        assert (row["reward"] >= 10) == (domain_of(row) == "digits")
        assert ("a_digit" in row["parts"]) == (domain_of(row) == "digits")


def test_responses_are_as_long_as_their_domain_lets_them_be(finished: tuple[Remains, dict[str, Any]]) -> None:
    longest = Counter[str]()
    for row in samples(finished[0]):
        longest[domain_of(row)] = max(longest[domain_of(row)], sum(row["loss_mask"]))
    assert longest["digits"] == 1
    assert 1 < longest["letters"] <= 6


def test_groups_are_issued_in_the_mix(finished: tuple[Remains, dict[str, Any]]) -> None:
    groups = {int(sample.partition(".")[0]): moves[0].info["domain"] for sample, moves in finished[0].histories().items()}
    drawn = Counter[str]()
    for number, index in enumerate(sorted(groups), 1):
        drawn[groups[index]] += 1
        assert abs(drawn["digits"] - number * 2 / 3) < 1


def test_each_domain_has_its_own_metrics(finished: tuple[Remains, dict[str, Any]]) -> None:
    remains, summary = finished
    steps = [row for row in remains.metrics() if "reward/mean" in row]
    assert len(steps) == STEPS
    for row in steps:
        digits, letters = (
            {k.split("/", 2)[2]: v for k, v in row.items() if k.startswith(f"domain/{d}/")} for d in DOMAINS
        )
        assert digits["reward"] >= 10 > letters["reward"]
        assert digits["tokens_mean"] == 1.0 < letters["tokens_mean"]
        assert digits["reward/a_digit"] == row["reward/a_digit"] == 1.0
        assert digits["groups_issued"] == digits["groups_kept"]
        dropped = sum(value for key, value in letters.items() if key.startswith("dropped/"))
        assert letters["groups_issued"] == letters["groups_kept"] + dropped
        assert digits["groups_issued"] + letters["groups_issued"] == row["groups/issued"]
        assert not any(key.startswith("dropped/") for key in digits)
        assert not any(key.startswith("domain/sums/") for key in row)
    evaluations = [row for row in remains.metrics() if "eval/reward" in row]
    assert len(evaluations) == 2
    for row in evaluations:
        by_domain = [row[f"eval/{domain}/reward"] for domain in (*DOMAINS, "sums")]
        assert row["eval/reward"] == pytest.approx(sum(by_domain) / 3)
        assert row["eval/sums/tokens_mean"] <= 2
    assert set(summary["domains_before"]) == set(summary["domains_after"]) == {*DOMAINS, "sums"}
    assert summary["domains_after"]["sums"] == evaluations[-1]["eval/sums/reward"]
    assert json.loads((remains.path / "summary.json").read_text())["domains_after"] == summary["domains_after"]


DOMAINS = ("digits", "letters")


@pytest.mark.thorough
def test_a_run_with_domains_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """Stopped after a step and resumed, it ends in the same weights."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    exact = {"deterministic": True}
    whole = settings(tmp_path / "a").model_copy(update=exact)
    halves = settings(tmp_path / "b").model_copy(update=exact)
    train(whole, reporter=SilentReporter())
    first = halves.model_copy(update={"train": halves.train.model_copy(update={"steps": 1})})
    train(first, reporter=SilentReporter())
    train(halves, resume=True, reporter=SilentReporter())
    assert Remains(tmp_path / "a" / "run").weights() == Remains(tmp_path / "b" / "run").weights()


def test_evaluation_alone_says_it_by_domain(tmp_path: Path) -> None:
    found = evaluate(settings(tmp_path))
    assert "\n  digits: 10." in str(found)
    assert "\n  sums: " in str(found)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("domains.letters.reward=nubmer", "domains.letters.reward 'nubmer' is not known"),
        ("domains.letters.filter=nosignal", "domains.letters.filter 'nosignal' is not known"),
        ("domains.letters.tasks=ehco", "domains.letters.tasks.source 'ehco' is not known"),
        (
            "domains.letters.max_new_tokens=2000",
            "domains.letters.max_new_tokens is 2000 and the prompt of task 'letters/",
        ),
        ("rollout.max_new_tokens=2000", "rollout.max_new_tokens is 2000 and the prompt of task 'digits/"),
        ("train.micro_batch_tokens=9", "and domains.game.max_new_tokens may make a sample"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(override: str, says: str) -> None:
    overrides = [override]
    if "micro" in override:
        overrides += ["domains.game.tasks=addition", "domains.game.max_new_tokens=8"]
        overrides += ["domains.game.tasks.options={}"]
    with pytest.raises(UserError) as refused:
        check(load_config(EXAMPLES / "domains.yaml", overrides))
    assert says in str(refused.value)


def test_functions_cannot_replace_what_each_domain_has() -> None:
    config = load_config(EXAMPLES / "domains.yaml")
    given: list[dict[str, Callable[..., Any]]] = [{"reward": lambda task, response: 1.0}, {"tasks": lambda split: []}]
    for arguments in given:
        with pytest.raises(UserError, match="was given, but each of the config's domains has its own"):
            check(config, **arguments)


@pytest.mark.slow
def test_the_example_learns_in_every_domain(tmp_path: Path) -> None:
    summary = train(load_config(EXAMPLES / "domains.yaml", [f"run={tmp_path / 'run'}"]), reporter=SilentReporter())
    assert all(before <= 0.1 for before in summary["domains_before"].values())
    assert all(after >= 0.7 for after in summary["domains_after"].values())
