"""Graders: so many at once, the others in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from roll.simulation.clock import run
from roll.simulation.graders import SimGraderPool


def graded(play: Callable[[SimGraderPool, Callable[[str], None]], None]) -> tuple[dict[str, float], SimGraderPool]:
    """When two graders were done with each response."""

    async def main() -> tuple[dict[str, float], SimGraderPool]:
        loop = asyncio.get_running_loop()
        pool = SimGraderPool(loop, servers=2)
        done: dict[str, float] = {}
        play(pool, lambda id: done.update({id: loop.time()}))
        await asyncio.sleep(100)
        return done, pool

    return run(main())


def test_in_order_and_never_idle() -> None:
    def play(pool: SimGraderPool, done: Callable[[str], None]) -> None:
        for id, seconds in (("a", 5.0), ("b", 1.0), ("c", 2.0), ("d", 1.0)):
            pool.submit(id, seconds, done)
        assert (pool.serving, pool.waiting) == (2, 2)

    done, pool = graded(play)
    assert done == {"b": 1.0, "c": 3.0, "d": 4.0, "a": 5.0}
    assert (pool.stats.busy_s, pool.stats.graded, pool.stats.queue_high) == (9.0, 4, 2)


def test_cancelling_frees_the_grader() -> None:
    def play(pool: SimGraderPool, done: Callable[[str], None]) -> None:
        for id in "abcd":
            pool.submit(id, 4.0, done)
        asyncio.get_running_loop().call_later(1.0, pool.cancel, "a")
        pool.cancel("c")

    done, pool = graded(play)
    assert done == {"b": 4.0, "d": 5.0}
    assert pool.stats.busy_s == 9.0


def test_refuses_nonsense() -> None:
    def play(pool: SimGraderPool, done: Callable[[str], None]) -> None:
        pool.submit("a", 1.0, done)
        with pytest.raises(ValueError, match="being graded already"):
            pool.submit("a", 1.0, done)
        with pytest.raises(KeyError, match="not being graded"):
            pool.cancel("b")
        with pytest.raises(ValueError, match="at least one grader"):
            SimGraderPool(asyncio.get_running_loop(), 0)

    graded(play)
