"""Whose turn it is: fair between domains, in order within one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_grader_pool import DEADLINE_S, RESPONSE, with_pool

from roll.data import Task
from roll.reward import ScoreFailure
from roll.reward.fair_queue import FairQueue
from roll.reward.pool import GraderPool

moves = st.lists(
    st.tuples(st.just("wait"), st.sampled_from("abc"))
    | st.tuples(st.just("ahead"), st.sampled_from("abc"))
    | st.tuples(st.just("cancel"), st.integers(0, 20))
    | st.tuples(st.just("next"), st.just(0))
    | st.tuples(st.just("end"), st.integers(0, 20)),
    max_size=60,
)


@given(moves)
def test_turns_are_fair_between_domains_and_in_order_within_one(script: list[tuple[str, Any]]) -> None:
    """Against a list that is searched each time: fewest running, then served least recently, then first in the queue."""

    async def main() -> None:
        turns: FairQueue[int] = FairQueue()
        waiting: dict[str, list[asyncio.Future[int]]] = {"a": [], "b": [], "c": []}
        running: list[str] = []
        served: list[str] = []
        for move, what in script:
            if move in ("wait", "ahead"):
                turn = turns.enqueue(what, at_front=move == "ahead")
                waiting[what].insert(0 if move == "ahead" else len(waiting[what]), turn)
            elif move == "cancel":
                everyone = [(domain, turn) for domain, queue in waiting.items() for turn in queue]
                if everyone:
                    domain, turn = everyone[what % len(everyone)]
                    turn.cancel()
                    waiting[domain].remove(turn)
            elif move == "end" and running:
                turns.end(running.pop(what % len(running)))
            elif move == "next":
                expected = [domain for domain, queue in waiting.items() if queue]
                got = turns.pop()
                if not expected:
                    assert got is None
                    continue
                assert got is not None
                domain, turn = got

                def rank(name: str) -> tuple[int, int]:
                    return running.count(name), max((i + 1 for i, one in enumerate(served) if one == name), default=0)

                assert rank(domain) == min(rank(name) for name in expected)
                assert turn is waiting[domain].pop(0)
                turns.begin(domain)
                running.append(domain)
                served.append(domain)
        left = list(turns.clear())
        assert sorted(map(id, left)) == sorted(id(turn) for queue in waiting.values() for turn in queue)
        assert turns.pop() is None

    asyncio.run(main())


def do(domain: str, *action: Any) -> Task:
    return Task.ask(f"of {domain}", "?", action, domain=domain)


def test_a_domain_with_a_long_queue_does_not_hold_up_another() -> None:
    async def use(pool: GraderPool) -> None:
        finished: list[str] = []

        async def job(domain: str) -> None:
            await pool.score(do(domain, "give", 1), RESPONSE)
            finished.append(domain)

        jobs = [asyncio.create_task(job("long")) for _ in range(10)]
        await asyncio.sleep(0)
        jobs += [asyncio.create_task(job("short")) for _ in range(3)]
        await asyncio.gather(*jobs)
        assert finished == ["long", *["short", "long"] * 3, *["long"] * 6]

    with_pool(use)


def test_a_domain_whose_graders_all_hang_leaves_a_grader_to_another() -> None:
    """Tries again go ahead of their own domain only."""

    async def use(pool: GraderPool) -> None:
        hanging = [asyncio.create_task(pool.score(do("hangs", "sleep", 60, 1), RESPONSE)) for _ in range(6)]
        await asyncio.sleep(0)
        for value in range(5):
            assert (await pool.score(do("well", "give", value), RESPONSE)).reward == value
        assert not all(task.done() for task in hanging), "they still have tries left"
        results = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(result, ScoreFailure) and result.kind == "deadline" for result in results)
        assert pool.stats().deadline == 12

    with_pool(use, workers=2, tries=2)


def test_a_job_of_each_of_many_domains_runs_before_a_second_of_any() -> None:
    async def use(pool: GraderPool) -> None:
        finished: list[str] = []

        async def job(domain: str) -> None:
            await pool.score(do(domain, "give", 1), RESPONSE)
            finished.append(domain)

        held = await pool._acquire("other", at_front=False)
        jobs = [asyncio.create_task(job(domain)) for domain in "aaabbbccc"]
        await asyncio.sleep(0)
        pool._release(held, "other")
        await asyncio.gather(*jobs)
        assert finished == list("abcabcabc")

    with_pool(use)


@pytest.mark.parametrize("cancelled", ["waiting", "running"])
def test_a_cancelled_job_gives_its_domains_turn_back(cancelled: str) -> None:
    async def use(pool: GraderPool) -> None:
        running = asyncio.create_task(pool.score(do("a", "sleep", 60, 1), RESPONSE))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(pool.score(do("a", "give", 1), RESPONSE))
        await asyncio.sleep(0)
        for call in (running, waiting) if cancelled == "running" else (waiting, running):
            call.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert (await pool.score(do("b", "give", 2), RESPONSE)).reward == 2
        assert (await pool.score(do("a", "give", 3), RESPONSE)).reward == 3
        assert set(pool._fair_queue._running.values()) == {0}

    with_pool(use, deadline_s=max(DEADLINE_S, 30))
