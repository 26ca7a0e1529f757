"""Memory limits, verdicts that are kept, latencies, and parts that hang or die."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_grader_pool import ACT, RESPONSE, do, outcome, with_pool

from roll.config.reward import RewardPart, RewardRule
from roll.config.schema import RewardConfig
from roll.data import Response, Task
from roll.reward import RewardSpec, ScoreFailure, Verdict
from roll.reward.cache import VerdictCache
from roll.reward.pool import QUICK_CHARS, GraderPool
from roll.reward.stats import GraderStats, Latency, RoleStats

STEADY = f"{Path(__file__).with_name('graders.py')}:Steady"


# memory


def test_a_function_that_takes_too_much_memory_fails_and_its_process_goes_on() -> None:
    async def use(pool: GraderPool) -> None:
        pid = await outcome(pool, "pid")
        kind, reason = await outcome(pool, "greedy", 4000)
        assert kind == "raised"
        assert reason.startswith("it took more memory than reward.memory_mb=100 allows: MemoryError (graders.py:")
        assert await outcome(pool, "take memory", 50, False) == ("scored", 50)
        assert await outcome(pool, "pid") == pid, "what it asked for was given back, so there was no need to replace it"
        assert pool.stats().restarts == 0

    with_pool(use, memory_mb=100, deadline_s=60)


def test_a_function_that_keeps_what_it_takes_loses_its_process_and_nothing_else() -> None:
    async def use(pool: GraderPool) -> None:
        before = await outcome(pool, "pid")
        for _ in range(3):
            kind, reason = await outcome(pool, "take memory", 400, True)
            assert (kind, "MemoryError" in reason) == ("raised", True)
            assert await outcome(pool, "take memory", 20, False) == ("scored", 20)
        assert await outcome(pool, "pid") != before
        assert (pool.stats().restarts, pool.stats().crashed) == (3, 0)

    with_pool(use, memory_mb=100, deadline_s=60)


def test_without_a_limit_memory_is_not_counted() -> None:
    async def use(pool: GraderPool) -> None:
        assert await outcome(pool, "take memory", 200, False) == ("scored", 200)

    with_pool(use, deadline_s=60)


def test_the_limit_leaves_mathematics_alone() -> None:
    async def use(pool: GraderPool) -> None:
        task = Task.ask("t", "?", r"\frac{1}{2}")
        assert await pool.score(task, Response(r"\boxed{0.5}", 1, "stop")) == Verdict(1.0)

    with_pool(use, reward="math", memory_mb=200, deadline_s=60)


# the cache


def test_the_same_response_to_the_same_task_is_judged_once() -> None:
    async def use(pool: GraderPool) -> None:
        async def calls(
            answer: Any = "a", text: str = "x", tokens: int = 1, finish: str = "stop", id: str = "t"
        ) -> float:
            verdict = await pool.score(Task.ask(id, "?", answer), Response(text, tokens, finish))
            assert verdict.parts == {"calls": verdict.reward}
            verdict.parts["calls"] = -1.0  # its own copy
            return verdict.reward

        assert [await calls() for _ in range(3)] == [1, 1, 1]
        others: list[dict[str, Any]] = [{"answer": "b"}, {"text": "y"}, {"tokens": 2}, {"finish": "length"}, {"id": "u"}]
        assert [await calls(**other) for other in others] == [2, 3, 4, 5, 6]
        assert [await calls(**other) for other in others] == [2, 3, 4, 5, 6]
        stats = pool.stats()
        assert (stats.scored, stats.hits) == (6, 7)

    with_pool(use, reward=STEADY, cache=100, deadline_s=60)


def test_the_same_job_many_times_at_once_is_judged_by_the_graders_that_were_free() -> None:
    async def use(pool: GraderPool) -> None:
        task = Task.ask("t", "?", "a")
        verdicts = await asyncio.gather(*(pool.score(task, RESPONSE) for _ in range(50)))
        assert {verdict.reward for verdict in verdicts} == {1}
        assert (pool.stats().scored, pool.stats().hits) == (2, 48)
        assert set(pool._fair_queue._running.values()) == {0}

    with_pool(use, reward=STEADY, cache=100, deadline_s=60, workers=2)


def test_verdicts_outlive_the_process_that_gave_them() -> None:
    async def use(pool: GraderPool) -> None:
        task = Task.ask("t", "?", "a")
        assert (await pool.score(task, RESPONSE)).reward == 1
        for grader in pool.processes:
            grader.kill()
        assert (await pool.score(task, RESPONSE)).reward == 1
        assert (await pool.score(Task.ask("u", "?", "a"), RESPONSE)).reward == 1, "the first of a new process"

    with_pool(use, reward=STEADY, cache=100, deadline_s=60)


def test_failures_and_verdicts_of_rewards_that_promise_nothing_are_not_cached() -> None:
    async def use(pool: GraderPool) -> None:
        for _ in range(2):
            await outcome(pool, "give", 1)
        assert (pool.stats().scored, pool.stats().hits) == (2, 0)

    async def fail(pool: GraderPool) -> None:
        for _ in range(2):
            with pytest.raises(ScoreFailure, match="again"):
                await pool.score(Task.ask("t", "?", "raise"), RESPONSE)
        assert (pool.stats().raised, pool.stats().hits) == (2, 0)

    with_pool(use, cache=100)
    with_pool(fail, reward=STEADY, cache=100, deadline_s=60)


def test_built_in_rewards_are_cached_and_services_are_not() -> None:
    async def use(pool: GraderPool) -> None:
        for _ in range(4):
            assert await pool.score(Task.ask("t", "?", "it is 5"), Response("It is 5.", 1, "stop")) == Verdict(1.0)
        assert (pool.stats().scored, pool.stats().hits) == (1, 3)

    with_pool(use, reward="fuzzy", cache=10, deadline_s=60)


def test_quick_rewards_judge_short_texts_without_a_process_and_the_same() -> None:
    async def use(pool: GraderPool) -> None:
        for grader in list(pool.processes):
            grader._child.kill()  # nobody is there to be asked
        assert await pool.score(Task.ask("t", "?", 5), Response("It is 5.", 1, "stop")) == Verdict(1.0)
        with pytest.raises(ScoreFailure, match="is not a number") as told:
            await pool.score(Task.ask("t", "?", "five"), RESPONSE)
        assert told.value.kind == "raised"
        assert (pool.stats().scored, pool.stats().raised) == (1, 1)
        assert pool.stats().restarts == 0
        long = "It is 5." + " " * QUICK_CHARS
        assert await pool.score(Task.ask("t", "?", 5), Response(long, 1, "stop")) == Verdict(1.0)
        assert pool.stats().restarts >= 1

    with_pool(use, reward="number", workers=2, deadline_s=60)


def test_only_rewards_of_rolls_own_without_patterns_are_quick() -> None:
    assert RewardSpec.of("number").quick().keys() == {None}
    assert not RewardSpec.of("math").quick()
    assert not RewardSpec.of(lambda task, response: 0.0).quick()
    assert not RewardSpec.of(STEADY).quick()
    with_pattern = RewardRule(name="exact", options={"pattern": "(a+)+b"})
    both = RewardRule(
        parts={"right": RewardPart(name="number"), "short": RewardPart(name="length", options={"target": 9})}
    )
    one = RewardRule(parts={"right": RewardPart(name="number"), "sound": RewardPart(name="math")})
    found = RewardSpec.of_domains({"a": with_pattern, "b": both, "c": one, "d": RewardRule(name="exact")}).quick()
    assert found.keys() == {"b", "d"}


@given(st.integers(0, 4), st.lists(st.integers(0, 6)))
def test_the_cache_holds_the_most_recent_jobs(size: int, jobs: list[int]) -> None:
    cache, recent = VerdictCache(size), list[int]()
    for job in jobs:
        kept = cache.get(bytes([job]))
        assert kept == (Verdict(job) if job in recent else None)
        if kept is None:
            cache.put(bytes([job]), Verdict(job))
        recent = [*(other for other in recent if other != job), job][-size:] if size else []
        assert len(cache) == len(recent) <= size


# latencies


def test_latencies_are_counted_by_domain_and_part() -> None:
    config = RewardConfig.model_validate(
        {"parts": {"right": "math", "short": {"name": "length", "options": {"budget": 5}}}}
    )

    async def main() -> tuple[GraderStats, GraderStats]:
        async with GraderPool(RewardSpec.of_config(config)) as pool:
            for domain in ("sums", "sums", "puzzles"):
                await pool.score(Task.ask("t", "?", 5, domain=domain), RESPONSE)
            first = pool.take_stats()
            await pool.score(Task.ask("t", "?", 5, domain="sums"), RESPONSE)
            return first, pool.take_stats()

    first, second = asyncio.run(main())
    kinds = ("verdict", "wait", "part/right", "part/short")
    names = {f"{domain}/{kind}" for domain in ("sums", "puzzles") for kind in kinds}
    assert {name: took.count for name, took in first.latency.items()} == {
        name: 2 if name.startswith("sums") else 1 for name in names
    }
    assert first.latency["sums/verdict"].seconds >= first.latency["sums/part/right"].seconds > 0
    assert (first.scored, second.scored, second.latency["puzzles/verdict"].count) == (3, 1, 0)
    assert second.metrics().keys() == {
        *("graders/verdict_s", "graders/failed", "graders/restarts", "graders/cache_hits"),
        *(f"graders/sums/{kind}_s" for kind in kinds),
    }


latencies = st.builds(Latency, st.integers(0, 9), st.integers(0, 9))
stats = st.builds(
    GraderStats,
    *[st.integers(0, 9)] * 8,
    latencies,
    st.dictionaries(st.sampled_from("ab"), latencies),
    st.dictionaries(
        st.sampled_from("jr"), st.builds(RoleStats, latencies, latencies, st.integers(0, 9), st.integers(0, 9))
    ),
)


@given(stats, stats)
def test_stats_add_up(a: GraderStats, b: GraderStats) -> None:
    assert a + b == b + a
    assert (a + b - a).verdicts == b.verdicts
    assert (a + b - a).hits == b.hits
    assert {name: took for name, took in (a + b - a).latency.items() if took != Latency()} == {
        name: took for name, took in b.latency.items() if took != Latency()
    }


# parts


def test_a_process_with_composed_rewards_does_not_import_the_training_stack_or_pydantic() -> None:
    names = ("number", "choice", "exact", "instructions", "repetition")
    parts: dict[str, Any] = {name: {"name": name, "weight": 0} for name in names}
    config = RewardConfig.model_validate({"parts": {"acts": ACT, "judge": {"name": "judge", "options": JUDGE}, **parts}})

    async def main() -> None:
        source = RewardSpec.of_config(config)
        source.check()
        async with GraderPool(source) as pool:
            with pytest.raises(ScoreFailure, match="part 'judge'"):  # after the first part has counted
                await pool.score(do("raise if loaded", ["torch", "transformers", "pydantic", "asyncio"]), RESPONSE)

    asyncio.run(main())


JUDGE = {"url": "http://127.0.0.1:9/v1", "model": "m", "tries": 1, "timeout_s": 0.2}


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (("sleep", 60, 1), "no verdict after 1 s, in part 'acts'"),
        (("os._exit", 3), "the grader process exited with status 3, in part 'acts'"),
        (("raise", "oops"), "part 'acts': KeyError: 'oops'"),
        (("greedy", 4000), "it took more memory than reward.memory_mb=100 allows: part 'acts': MemoryError"),
    ],
)
def test_a_part_that_hangs_dies_or_takes_too_much_is_named(action: tuple[Any, ...], says: str) -> None:
    config = RewardConfig.model_validate({"parts": {"short": {"name": "length", "options": {"budget": 5}}, "acts": ACT}})

    async def main() -> None:
        source = RewardSpec.of_config(config)
        async with GraderPool(source, deadline_s=1, tries=1, memory_mb=100) as pool:
            with pytest.raises(ScoreFailure) as caught:
                await pool.score(do(*action), RESPONSE)
            assert caught.value.reason.startswith(says)
            assert await pool.score(do("give", 2), RESPONSE) == Verdict(3, {"short": 1, "acts": 2})

    asyncio.run(main())
