"""Rewards by domain: a task is judged by its own domain's reward, whatever comes before or beside it."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import UserError
from roll.config.reward import RewardRule
from roll.data import Response, Task
from roll.reward import RewardSpec, ScoreFailure
from roll.reward.base import is_deterministic, normalise
from roll.reward.pool import GraderPool

JUDGES = """
def fixed(task, response, value=0.0):
    return value

class Warm:
    ready = False
    def warm_up(self):
        Warm.ready = True
    def __call__(self, task, response):
        return float(Warm.ready)
"""


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judges") / "domain_judges.py"
    path.write_text(JUDGES)
    return path


def fixed(judges: Path, value: float) -> RewardRule:
    return RewardRule(name=f"{judges}:fixed", options={"value": value})


def task_of(domain: str, **rest: Any) -> Task:
    return Task.ask("t", "?", 5, domain=domain, **rest)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.dictionaries(st.text("abcde", min_size=1, max_size=3), st.floats(-5, 5), min_size=1), st.data())
def test_nothing_but_the_domain_decides(judges: Path, values: dict[str, float], data: st.DataObject) -> None:
    source = RewardSpec.of_domains({domain: fixed(judges, value) for domain, value in values.items()})
    reward = pickle.loads(pickle.dumps(source)).load()
    order = data.draw(st.lists(st.sampled_from(sorted(values)), max_size=20))
    for domain in order:
        assert reward(task_of(domain), Response("whatever", 1, "stop")) == values[domain]


def test_verdicts_of_processes_with_answers_out_of_order(judges: Path) -> None:
    values = {"a": 0.25, "b": 0.5, "c": 1.0}
    source = RewardSpec.of_domains({domain: fixed(judges, value) for domain, value in values.items()})

    async def verdicts() -> list[float]:
        async with GraderPool(source, workers=2) as pool:
            scored = [pool.score(task_of(domain), Response("", 0, "stop")) for domain in "abcacb" * 5]
            return [verdict.reward for verdict in await asyncio.gather(*scored)]

    assert asyncio.run(verdicts()) == [values[domain] for domain in "abcacb" * 5]


def test_a_domain_may_have_a_composed_reward(judges: Path) -> None:
    composed = RewardRule.model_validate(
        {"parts": {"right": "number", "bonus": {"name": f"{judges}:fixed", "options": {"value": 1}, "weight": 0.5}}}
    )
    source = RewardSpec.of_domains({"maths": composed, "other": fixed(judges, 0.125)})
    assert source.label == f"right + bonus (maths), {judges}:fixed (other)"
    source.check()
    reward = source.load()
    verdict = normalise(reward(task_of("maths"), Response("it is 5", 3, "stop")))
    assert (verdict.reward, verdict.parts) == (1.5, {"right": 1.0, "bonus": 1.0})
    assert normalise(reward(task_of("other"), Response("it is 5", 3, "stop"))).reward == 0.125
    assert is_deterministic(RewardSpec.of_domains({"a": RewardRule(name="number")}).load(), task_of("a"))
    assert not is_deterministic(reward, task_of("other"))


def test_all_domains_are_warmed_up(judges: Path) -> None:
    source = RewardSpec.of_domains({"a": RewardRule(name="number"), "b": RewardRule(name=f"{judges}:Warm")})
    assert source.load()(task_of("b"), Response("", 0, "stop")) == 1.0


def test_a_mistake_is_named_with_its_domain() -> None:
    source = RewardSpec.of_domains({"good": RewardRule(name="number"), "bad": RewardRule(name="nubmer")})
    with pytest.raises(UserError, match=r"domains\.bad\.reward 'nubmer' is not known.*did you mean 'number'"):
        source.check()
    odd = RewardSpec.of_domains({"bad": RewardRule(name="number", options={"tolerance": "x"})})
    with pytest.raises(UserError, match=r"domains\.bad\.reward\.options\.tolerance is \"x\", but takes"):
        odd.check()


def test_a_task_of_no_domain_is_that_samples_failure() -> None:
    source = RewardSpec.of_domains({"a": RewardRule(name="number")})

    async def verdict() -> None:
        async with GraderPool(source) as pool:
            await pool.score(task_of("b"), Response("5", 1, "stop"))

    with pytest.raises(ScoreFailure, match="no reward is for the domain 'b' of task 't'"):
        asyncio.run(verdict())
