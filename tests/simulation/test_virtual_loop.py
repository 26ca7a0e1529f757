"""The virtual clock: time passes only when nothing else can happen, in the order that was asked for."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.simulation.clock import Deadlock, VirtualLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_sleeping_takes_virtual_time_only() -> None:
    async def main() -> float:
        await asyncio.sleep(14 * 24 * 3600)
        return now()

    assert run(main()) == 14 * 24 * 3600
    assert run(main(), start_s=5.0) == 14 * 24 * 3600 + 5.0


@pytest.mark.parametrize("start_s", [0.0, 1.2e6, 1.75e9])
def test_timers_fire_at_their_very_time(start_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []

        def note(when: float) -> None:
            fired.append((when, now()))

        for number in range(1, 200):
            when = start_s + number / 7
            loop.call_at(when, note, when)
        await asyncio.sleep(100)
        assert len(fired) == 199
        assert all(when == at for when, at in fired)

    run(main(), start_s)


@given(st.lists(st.integers(0, 5), max_size=40))
@settings(max_examples=examples(50), deadline=None)
def test_by_time_then_in_the_order_asked_for(delays: list[int]) -> None:
    async def main() -> list[tuple[int, int]]:
        order: list[tuple[int, int]] = []
        loop = asyncio.get_running_loop()
        for number, delay in enumerate(delays):
            loop.call_later(delay, order.append, (delay, number))
        await asyncio.sleep(10)
        return order

    assert run(main()) == sorted((delay, number) for number, delay in enumerate(delays))


def test_what_is_ready_runs_before_the_clock_moves() -> None:
    async def main() -> None:
        turns = 0

        async def busy() -> None:
            nonlocal turns
            for _ in range(1000):
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(busy())
        await asyncio.sleep(1e-9)
        assert turns == 1000
        await task

    run(main())


def test_timeouts_events_and_groups() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        assert now() == 3
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 4)
        assert now() == 7
        assert await asyncio.wait_for(asyncio.sleep(1, "slept"), 4) == "slept"
        event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(event.wait())
            asyncio.get_running_loop().call_later(5, event.set)
        assert now() == 13
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(s)) for s in (1, 2, 3)], return_when=asyncio.FIRST_COMPLETED
        )
        assert (now(), len(done), len(pending)) == (14, 1, 2)

    run(main())


def test_a_wait_for_nothing_is_an_error_that_names_who_waits() -> None:
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(True)

    async def named() -> None:
        await asyncio.create_task(main(), name="the one who waits")

    with pytest.raises(Deadlock, match=r"deadlock: nothing is scheduled at 3 s, and 2 tasks wait: .*the one who waits"):
        run(named(), start_s=3.0)
    assert cleaned == [True]


def test_a_cancelled_deadline_is_no_reason_to_wait() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(5, lambda: None).cancel()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="at 0 s"):
        run(main())


def test_cancelled_deadlines_do_not_pile_up() -> None:
    loop = VirtualLoop()

    async def main() -> int:
        most = 0
        for _ in range(5000):
            async with asyncio.timeout(1e6):
                await asyncio.sleep(0.001)
            most = max(most, len(loop._timers))
        return most

    assert loop.run_until_complete(main()) < 200
    loop.close()


def test_threads_take_no_virtual_time() -> None:
    async def main() -> None:
        late: list[bool] = []
        asyncio.get_running_loop().call_later(1.0, late.append, True)
        await asyncio.to_thread(time.sleep, 0.05)
        assert not late
        assert now() == 0
        await asyncio.sleep(1.5)
        assert late

    run(main())


def test_errors_and_leftovers() -> None:
    cancelled = []

    async def left() -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            cancelled.append(now())
            raise

    async def main() -> None:
        task = asyncio.create_task(left())
        await asyncio.sleep(2)
        assert not task.done()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())
    assert cancelled == [2]


def test_stop_ends_the_loop_where_it_is() -> None:
    loop = VirtualLoop()
    loop.call_later(3, loop.stop)
    loop.run_forever()
    assert loop.time() == 3
    loop.close()
