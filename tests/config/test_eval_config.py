"""The settings of evaluations: what each set gets, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from roll.config import Config, load_config


def config(eval: dict[str, Any], **more: Any) -> Config:
    return Config.model_validate({"eval": eval, **more})


def test_a_set_has_what_it_says_and_else_what_eval_says() -> None:
    own = {"source": "echo", "attempts": 4, "pass_at": 2, "temperature": 0.5, "max_new_tokens": 7}
    made = config({"samples": 40, "attempts": 8, "pass_at": [1, 8], "sets": {"a": "echo", "b": own}})
    assert made.eval.settings("a").pass_at == (1, 8)
    assert (made.eval.settings("b").attempts, made.eval.settings("b").pass_at) == (4, (2,))
    assert (made.eval.settings("b").samples, made.eval.settings("b").temperature) == (40, 0.5)
    assert made.rollout_of("eval/b").max_new_tokens == 7
    assert made.rollout_of("eval/a") == made.rollout
    assert (made.longest_response, made.longest_evaluated) == (256, 256)


def test_long_answers_of_a_set_do_not_make_training_samples_long() -> None:
    made = config({"sets": {"a": {"source": "echo", "max_new_tokens": 4096}}})
    assert (made.longest_response, made.longest_evaluated) == (256, 4096)


def test_rewards_of_sets_may_ask_roles() -> None:
    asks = {"sets": {"a": {"source": "echo", "reward": "judge"}}}
    with pytest.raises(ValidationError, match=r"eval\.sets\.a\.reward\.name is judge, but roles\.judge has no model"):
        config(asks)
    made = config(asks, roles={"judge": {"model": "tiny"}})
    assert made.scoring_roles == {"judge": "eval.sets.a.reward"}


@pytest.mark.parametrize(
    ("eval", "says"),
    [
        ({"pass_at": [1]}, "eval.pass_at has 1, but eval.attempts is 0: write eval.attempts=1 or more"),
        ({"attempts": 4, "pass_at": [1, 5]}, "eval.pass_at has 5, but eval.attempts is 4: write eval.attempts=5 or more"),
        ({"attempts": 4, "majority_at": 8}, "eval.majority_at has 8, but eval.attempts is 4"),
        (
            {"attempts": 8, "pass_at": [8], "sets": {"a": {"source": "echo", "attempts": 4}}},
            "eval.sets.a.pass_at has 8, but eval.sets.a.attempts is 4: write eval.sets.a.attempts=8 or more",
        ),
        ({"attempts": 8, "samples": 4}, "eval.samples is 4, fewer than eval.attempts=8 at one task"),
        ({"attempts": 2, "temperature": 0}, "eval.temperature is 0, where all 2 attempts at a task are the same"),
        ({"sets": {"a b": "echo"}}, "eval.sets has 'a b': a name is of letters, digits, - and _"),
        ({"sets": {"a": {}}}, "source"),
        ({"sets": {"a": "echo"}, "pass_at": [0]}, "pass_at"),
    ],
)
def test_what_does_not_go_together_is_refused(eval: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        config(eval)
    assert says in str(refused.value)


def test_of_a_run_with_domains_every_set_has_its_own_reward() -> None:
    domains = {"x": {"tasks": "echo"}}
    with pytest.raises(
        ValidationError, match=r"eval\.sets\.a has no reward, and the run has one for each of its domains"
    ):
        config({"sets": {"a": "echo"}}, domains=domains)
    config({"sets": {"a": {"source": "echo", "reward": "exact"}}}, domains=domains)


def test_supervised_fine_tuning_reads_none_of_it() -> None:
    for key, value in {"sets": {"a": "echo"}, "attempts": 2, "pass_at": [], "solved_at": 2.0}.items():
        if value:
            with pytest.raises(ValidationError, match=f"eval.{key} is set, but nothing reads eval.{key} in pipeline sft"):
                config({key: value}, pipeline="sft")


def test_a_set_without_a_reward_has_none_either_when_its_config_is_loaded_again() -> None:
    config = load_config({"eval": {"sets": {"x": {"source": "echo"}}}})
    assert config.eval.sets["x"].reward is None
    assert load_config(config) == load_config({"eval": {"sets": {"x": {"source": "echo", "reward": None}}}}) == config
