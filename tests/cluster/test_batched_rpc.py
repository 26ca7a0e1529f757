"""Calls that travel together: each has its own answer, whatever is slow, given up or broken on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from toy_workers import now_s, run_virtually

from roll.cluster.batched_rpc import POLL_S, BatchedClient, BatchedServer, Packed
from roll.cluster.errors import CallTimedOut, WorkerDied

DEADLINE_S = 100.0
LONG_S = 3 * POLL_S
"""By then whoever asks for answers that nobody waits for has gone home."""


class Wire:
    """A server far away: a trip takes `trip_s`, and from `broken_s` on it ends in an error."""

    def __init__(self, work_s: Callable[[bytes], float] = lambda packed: 0.0, *, trip_s: float = 0.001) -> None:
        self.began: list[bytes] = []
        self.posts: list[int] = []
        self.asked = 0
        self.trip_s = trip_s
        self.broken_s = float("inf")
        self.server = BatchedServer(self._do)
        self._work_s = work_s

    def batched_client(self) -> BatchedClient:
        return BatchedClient("toy[0]", self._post, self._answers, DEADLINE_S)

    async def _do(self, packed: bytes) -> bytes:
        self.began.append(packed)
        await asyncio.sleep(self._work_s(packed))
        return packed[::-1]

    async def _post(self, client: str, calls: list[Packed]) -> None:
        self.posts.append(len(calls))
        await self._trip()
        self.server.post(client, calls)
        await self._trip()

    async def _answers(self, client: str) -> list[Packed]:
        self.asked += 1
        await self._trip()
        answers = await self.server.answers(client)
        await self._trip()
        return answers

    async def _trip(self) -> None:
        await asyncio.sleep(self.trip_s)
        if now_s() >= self.broken_s:
            raise WorkerDied("toy[0]", "the wire broke")


def packed(number: int) -> bytes:
    return f"call {number}".encode()


def test_calls_of_one_moment_travel_in_one_trip_and_answers_come_as_they_are_ready() -> None:
    async def main() -> None:
        wire = Wire(lambda packed: 1.0 if packed == b"call 3" else 0.0)
        batched_client, ended = wire.batched_client(), {}

        async def call(number: int) -> None:
            assert await batched_client.call(packed(number)) == packed(number)[::-1]
            ended[number] = now_s()

        await asyncio.gather(*map(call, range(100)))
        assert wire.posts == [100]
        assert wire.asked == 2
        assert ended.pop(3) > 1.0
        assert max(ended.values()) < 0.01
        await asyncio.sleep(LONG_S)
        assert not wire.server._boxes

    run_virtually(main)


def test_calls_made_while_others_travel_go_with_the_next_trip() -> None:
    async def main() -> None:
        wire = Wire(trip_s=1.0)
        batched_client = wire.batched_client()
        calls = [asyncio.ensure_future(batched_client.call(packed(0)))]
        for number in range(1, 6):
            await asyncio.sleep(0.1)
            calls.append(asyncio.ensure_future(batched_client.call(packed(number))))
        assert await asyncio.gather(*calls) == [packed(number)[::-1] for number in range(6)]
        assert wire.posts == [1, 5]
        await asyncio.sleep(LONG_S)

    run_virtually(main)


def test_a_call_cancelled_before_it_was_sent_never_begins_and_a_later_one_is_discarded() -> None:
    async def main() -> None:
        wire = Wire(lambda packed: 2.0, trip_s=1.0)
        batched_client = wire.batched_client()
        first, second, third = (asyncio.ensure_future(batched_client.call(packed(number))) for number in range(3))
        await asyncio.sleep(0.5)
        late = asyncio.ensure_future(batched_client.call(packed(3)))
        await asyncio.sleep(0.1)
        late.cancel()
        second.cancel()
        assert (await first, await third) == (packed(0)[::-1], packed(2)[::-1])
        assert wire.began == [packed(number) for number in range(3)]
        assert second.cancelled()
        assert late.cancelled()
        await asyncio.sleep(LONG_S)

    run_virtually(main)


def test_a_worker_that_dies_ends_every_call_and_a_later_one_is_told_too() -> None:
    async def main() -> None:
        wire = Wire(lambda packed: 100.0)
        wire.broken_s = 10.0
        batched_client = wire.batched_client()
        calls = [asyncio.ensure_future(batched_client.call(packed(number))) for number in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(result) for result in results] == ["toy[0] died: the wire broke"] * 3
        assert len({id(result) for result in results}) == 3  # each has a traceback of its own
        with pytest.raises(WorkerDied, match="the wire broke"):
            await batched_client.call(packed(4))
        await asyncio.sleep(200)

    run_virtually(main)


@pytest.mark.parametrize("lost", ["post", "answers"])
def test_a_trip_that_gets_lost_ends_the_calls_that_wait_and_no_later_one(lost: str) -> None:
    async def main() -> None:
        wire = Wire()
        trip, lose = getattr(wire, f"_{lost}"), True

        async def once_lost(*args: Any) -> Any:
            nonlocal lose
            if lose:
                lose = False
                await asyncio.Event().wait()
            return await trip(*args)

        setattr(wire, f"_{lost}", once_lost)
        batched_client = wire.batched_client()
        calls = [asyncio.ensure_future(batched_client.call(packed(number))) for number in range(3)]
        await asyncio.sleep(1)
        calls.append(asyncio.ensure_future(batched_client.call(packed(3))))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, CallTimedOut) for result in results)
        assert DEADLINE_S <= now_s() < DEADLINE_S + POLL_S + 1
        assert await batched_client.call(packed(4)) == packed(4)[::-1]
        await asyncio.sleep(LONG_S)

    run_virtually(main)


def test_clients_have_their_own_answers() -> None:
    async def main() -> None:
        wire = Wire()
        batched_clients = [wire.batched_client() for _ in range(3)]
        calls = [
            batched_client.call(f"{client} {number}".encode())
            for client, batched_client in enumerate(batched_clients)
            for number in range(4)
        ]
        answers = await asyncio.gather(*calls)
        assert answers == [f"{client} {number}".encode()[::-1] for client in range(3) for number in range(4)]
        await asyncio.sleep(LONG_S)
        assert not wire.server._boxes
        assert not wire.server._running

    run_virtually(main)


@given(seed=st.integers(0, 10**6), breaks=st.booleans())
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_every_call_has_its_own_answer_whatever_happens(seed: int, breaks: bool) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        lasts = {packed(number): rng.choice([0.0, 0.001, 0.5, 7.0]) for number in range(40)}
        wire = Wire(lasts.__getitem__, trip_s=rng.choice([0.0, 0.01, 1.0]))
        if breaks:
            wire.broken_s = rng.uniform(0, 10)
        batched_client, calls = wire.batched_client(), {}
        for number in range(40):
            calls[number] = asyncio.ensure_future(batched_client.call(packed(number)))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.4]))
            if rng.random() < 0.2:
                calls[rng.choice(list(calls))].cancel()
        await asyncio.wait(calls.values())
        for number, call in calls.items():
            if call.cancelled():
                continue
            if (error := call.exception()) is not None:
                assert breaks
                assert isinstance(error, WorkerDied)
            else:
                assert call.result() == packed(number)[::-1]
        numbers = [int(each.split()[1]) for each in wire.began]
        assert numbers == sorted(set(numbers))  # each at most once, in the order they were made
        assert not batched_client._waiting
        await asyncio.sleep(LONG_S)

    run_virtually(main)
