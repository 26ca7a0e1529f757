"""Domains in a configuration: what each has for itself, what is common, and what excludes each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config import Config, UserError, dump_config, load_config

TWO: dict[str, Any] = {
    "maths": {"tasks": "addition", "weight": 3, "max_new_tokens": 64, "temperature": 0.7, "stop": ["\n"]},
    "echo": {"tasks": {"source": "echo"}, "reward": {"parts": {"right": "number"}}, "filter": "none"},
}


def load(domains: Any = None, *overrides: str, **rest: Any) -> Config:
    return load_config({"domains": TWO if domains is None else domains, **rest}, overrides)


def test_a_domain_has_its_own_limits_and_the_common_ones_where_it_has_none() -> None:
    config = load(rollout={"max_new_tokens": 16, "stop": ["x"], "top_k": 0})
    maths, echo, other = (config.rollout_of(name) for name in ("maths", "echo", "no such"))
    assert (maths.max_new_tokens, maths.temperature, maths.stop, maths.filter) == (64, 0.7, ("\n",), "no_signal")
    assert (echo.max_new_tokens, echo.temperature, echo.stop, echo.filter) == (16, 1.0, ("x",), "none")
    assert other == config.rollout
    assert maths.group_size == config.rollout.group_size
    assert config.longest_response == 64
    assert config.domain_mix == {"maths": 3.0, "echo": 1.0}
    assert config.reward_label == "number (maths), right (echo)"


def test_the_longest_response_is_that_of_a_domain_that_is_there() -> None:
    short = {"a": {"tasks": "echo", "max_new_tokens": 4}}
    assert load(short).longest_response == 4
    assert load({}).longest_response == 256


def test_an_empty_list_of_stops_is_one_of_its_own() -> None:
    assert load({"a": {"tasks": "echo", "stop": []}}, rollout={"stop": ["x"]}).rollout_of("a").stop == ()


def test_domains_are_written_and_read_back(tmp_path: Path) -> None:
    config = load()
    (tmp_path / "x.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "x.yaml") == config


def test_overrides_reach_into_domains() -> None:
    config = load(None, "domains.maths.weight=5", "domains.echo.tasks.options.symbols=abc", "domains.maths.reward=math")
    assert (config.domains["maths"].weight, config.domains["maths"].reward.name) == (5, "math")
    assert config.domains["echo"].tasks.options == {"symbols": "abc"}
    assert config.domains["maths"].max_new_tokens == 64


def test_what_is_measured_only_is_not_in_the_mix() -> None:
    assert load(None, "domains.echo.weight=0").domain_mix == {"maths": 3.0}


def test_settings_of_graders_and_of_the_order_are_common() -> None:
    config = load(tasks={"sampler": "solve_rate"}, reward={"workers": 3})
    assert (config.tasks.sampler, config.reward.workers) == ("solve_rate", 3)


@pytest.mark.parametrize(
    ("domains", "rest", "says"),
    [
        (
            None,
            {"tasks": "echo"},
            "tasks.source is set, and so are domains, each with its own tasks: remove tasks.source",
        ),
        (None, {"tasks": {"domain_weights": {"a": 1}}}, "tasks.domain_weights is set, and so are domains"),
        (None, {"reward": "math"}, "reward.name is set, and so are domains, each with its own reward"),
        (None, {"reward": {"parts": {"a": "math"}}}, "is set, and so are domains, each with its own reward"),
        (None, {"pipeline": "sft"}, "domains is set, but nothing reads domains in pipeline sft"),
        ({"a b": {"tasks": "echo"}}, {}, "domains has 'a b': a name is of letters, digits, - and _"),
        ({"a/b": {"tasks": "echo"}}, {}, "domains has 'a/b'"),
        ({"a": {"tasks": "echo", "wieght": 2}}, {}, "domains.a.wieght is not a setting; did you mean domains.a.weight?"),
        ({"a": {"tasks": "echo", "group_size": 2}}, {}, "did you mean rollout.group_size?"),
        ({"a": {"tasks": "echo", "weight": -1}}, {}, "domains.a.weight is -1, but takes a number ≥ 0"),
        ({"a": {"tasks": "echo", "weight": 0}}, {}, "domains.a.weight is 0, and so are all others"),
        ({"a": {"weight": 1}}, {}, "domains.a.tasks has no source, and no other domain has one"),
        ({"a": {"tasks": "echo", "filter_range": [0, 1]}}, {}, "write domains.a.filter=mean_range"),
        ({"a": {"tasks": "echo", "filter": "mean_range", "filter_range": [1, 0]}}, {}, "write the lower bound first"),
        (
            {"a": {"tasks": "echo", "filter": "no_signal"}},
            {"rollout": {"group_size": 1, "filter": "none"}, "algorithm": "raft_pp"},
            "domains.a.filter=no_signal drops groups whose rewards are all equal: write domains.a.filter=none",
        ),
        ({"a": {"tasks": "echo", "reward": {"name": "x", "parts": {"r": "math"}}}}, {}, "domains.a.reward.parts is set"),
    ],
)
def test_what_does_not_go_together_is_said(domains: Any, rest: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        load(domains, **rest)
    assert says in str(refused.value)


def test_a_mistake_in_a_domain_is_found_in_the_file(tmp_path: Path) -> None:
    text = "seed: 1\ndomains:\n  a:\n    tasks: echo\n    reward:\n      name: math\n      parts: {r: math}\n"
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=r"x\.yaml:6, .*x\.yaml:7: domains\.a\.reward\.name is 'math'"):
        load_config(tmp_path / "x.yaml")


def test_groups_of_one_are_fine_where_the_domain_keeps_them() -> None:
    rollout = {"group_size": 1}
    assert load({"a": {"tasks": "echo", "filter": "none"}}, rollout=rollout, algorithm="raft_pp").rollout.group_size == 1
