"""Rewards of sets to evaluate on: each judges its own set and nothing else; and the answers that votes are counted by."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from roll.config.schema import RewardConfig, RewardRule
from roll.data import Response, Task
from roll.reward import RewardSpec, ScoreFailure, Verdict
from roll.reward.base import answer_of, reads_answers
from roll.reward.factory import make
from roll.reward.model_reward import ScoreBackend
from roll.reward.model_score_client import ModelScoreClient
from roll.reward.pool import GraderPool

JUDGES = """
def seven(task, response):
    return 7.0

class Reads:
    deterministic = True
    def __call__(self, task, response):
        return 0.5
    def answer_of(self, task, response):
        return {"none": None, "number": 5}.get(response.text, response.text[::-1])

def options(task, response, value=1.0):
    return value
options.answer_of = lambda task, response: "always"
"""


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judges") / "set_judges.py"
    path.write_text(JUDGES)
    return path


def task_of(domain: str, answer: Any = 5) -> Task:
    return Task.ask("t", "?", answer, domain=domain)


def scores(source: RewardSpec, *asked: tuple[str, str], votes: bool = False) -> list[Verdict | str]:
    async def one(pool: GraderPool, domain: str, text: str) -> Verdict | str:
        try:
            return await pool.score(task_of(domain), Response(text, 1, "stop"), votes=votes)
        except ScoreFailure as failure:
            return str(failure)

    async def main() -> list[Verdict | str]:
        async with GraderPool(pickle.loads(pickle.dumps(source)), cache=8) as pool:
            return [await one(pool, domain, text) for domain, text in asked]

    source.check()
    return asyncio.run(main())


def test_a_set_is_judged_by_its_own_reward_and_all_else_by_the_runs(judges: Path) -> None:
    """Also where the run's needs no process and the set's does, and the other way round."""
    sets = {"eval/mine": RewardRule(name=f"{judges}:seven"), "eval/text": RewardRule(name="exact")}
    source = RewardSpec.of_config(RewardConfig(name="number")).with_sets(sets)
    asked = [("eval/mine", "5"), ("eval/text", "so 5"), ("eval/other", "so 5"), ("default", "so 5"), ("eval/text", "5")]
    assert [v.reward for v in scores(source, *asked) if isinstance(v, Verdict)] == [7.0, 0.0, 1.0, 1.0, 1.0]


def test_sets_beside_domains_and_beside_a_function(judges: Path) -> None:
    sets = {"eval/mine": RewardRule(name=f"{judges}:seven")}
    domains = RewardSpec.of_domains({"maths": RewardRule(name="number")}).with_sets(sets)
    assert [v.reward for v in scores(domains, ("maths", "5"), ("eval/mine", "5")) if isinstance(v, Verdict)] == [1.0, 7.0]
    function = RewardSpec.of(lambda task, response: 0.25).with_sets(sets)
    assert [v.reward for v in scores(function, ("x", "5"), ("eval/mine", "5")) if isinstance(v, Verdict)] == [0.25, 7.0]


def test_no_role_is_queried_for_a_set_whose_reward_needs_none() -> None:
    class Nobody(ScoreBackend):
        pass

    run = RewardSpec.of_config(RewardConfig(name="reward_model"))
    source = run.with_sets({"eval/text": RewardRule(name="exact")})
    asking = ModelScoreClient(source.model_backed_rewards(), Nobody())
    assert asyncio.run(asking.scores(task_of("eval/text"), Response("5", 1, "stop"))) == {}
    assert source.model_backed_rewards().keys() == {None, "eval/text"}


def test_the_answer_comes_with_the_verdict_only_where_it_is_requested(judges: Path) -> None:
    run = RewardSpec.of_config(RewardConfig(name="number"))
    (asked,), (not_asked,) = scores(run, ("d", "It is 5.0"), votes=True), scores(run, ("d", "It is 5.0"))
    assert asked == Verdict(1.0, answer="5")
    assert not_asked == Verdict(1.0)
    own = RewardSpec.of_config(RewardConfig(name=f"{judges}:Reads"))
    words = [("d", "abc"), ("d", "none"), ("d", "abc")]
    assert scores(own, *words, votes=True) == [Verdict(0.5, answer=answer) for answer in ("cba", None, "cba")]
    (failed,) = scores(own, ("d", "number"), votes=True)
    assert "answer_of returned 5 (int), not a string or None" in str(failed)


def test_which_rewards_read_answers_is_known_before_the_run(judges: Path) -> None:
    def reads(rule: dict[str, Any], domain: str = "eval/x") -> bool:
        sets = {"eval/x": RewardRule.model_validate(rule)}
        return RewardSpec.of_config(RewardConfig(name="fuzzy")).with_sets(sets).reads_answers(domain)

    assert all(reads({"name": name}) for name in ("number", "math", "choice", "exact", f"{judges}:Reads"))
    assert not any(reads({"name": name}) for name in ("fuzzy", "format", f"{judges}:seven") if name != "format")
    assert not reads({"name": "number"}, "another domain")
    assert reads({"name": f"{judges}:options", "options": {"value": 2.0}})
    assert reads({"parts": {"right": "number", "short": {"name": "length", "options": {"budget": 9}}}})
    assert not reads({"parts": {"right": "number", "same": "exact"}}), "two answers are none"
    assert not RewardSpec.of(lambda task, response: 0.0).reads_answers("x")


@pytest.mark.parametrize(
    ("name", "options", "same", "other"),
    [
        ("number", {}, ["1,234.50", "It is $1234.5.", "= 1234.500"], "1234"),
        ("number", {}, ["0", "-0.0", "is 0.00"], "1"),
        ("math", {}, [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"so it is $\frac12$"], r"\boxed{2}"),
        ("math", {}, [r"\boxed{x+1}", r"\boxed{ x + 1 }"], r"\boxed{x+2}"),
        ("choice", {}, ["(b)", "The answer is B.", r"\boxed{\text{B}}"], "C"),
        ("exact", {"ignore_case": True, "find": "last_line"}, ["well\nRome", "  rome "], "Paris"),
    ],
)
def test_equal_answers_are_equal_strings(name: str, options: dict[str, Any], same: list[str], other: str) -> None:
    reward, task = make(name, options), Task.ask("t", "?", "1")
    assert reads_answers(reward)
    answers = {answer_of(reward, task, Response(text, 1, "stop")) for text in same}
    assert len(answers) == 1
    assert None not in answers
    assert answer_of(reward, task, Response(other, 1, "stop")) not in answers


@pytest.mark.parametrize(("name", "text"), [("number", "none"), ("math", ""), ("choice", "well, who knows")])
def test_a_response_without_an_answer_has_none(name: str, text: str) -> None:
    assert answer_of(make(name), Task.ask("t", "?", "1"), Response(text, 1, "stop")) is None
