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

from roll.cluster.batched_rpc import POLL_S, BatchedClient, BatchedServer, PackedAnswer, PackedCall, Report
from roll.cluster.errors import CallTimedOut, WorkerDied

DEADLINE_S = 100.0
REPORTS = 3
"""How many each call makes while it runs."""
LONG_S = 3 * POLL_S
"""By then whoever asks for answers that nobody waits for has gone home."""


class Wire:
    """A server far away: a trip takes `trip_s`, and from `broken_s` on it ends in an error."""

    def __init__(self, work_s: Callable[[bytes], float] = lambda packed: 0.0, *, trip_s: float = 0.001) -> None:
        self.began: list[bytes] = []
        self.running: set[bytes] = set()
        self.cleanup_s = 0.0
        self.posts: list[int] = []
        self.asked = 0
        self.trip_s = trip_s
        self.broken_s = float("inf")
        self.server = BatchedServer(self._do)
        self._work_s = work_s

    def batched_client(self) -> BatchedClient:
        return BatchedClient("toy[0]", self._post, self._answers, DEADLINE_S)

    async def _do(self, packed: bytes, report: Report) -> bytes:
        self.began.append(packed)
        self.running.add(packed)
        try:
            for number in range(REPORTS):
                report(b"%d of " % number + packed)
                await asyncio.sleep(self._work_s(packed) / REPORTS)
            return packed[::-1]
        except asyncio.CancelledError:
            await asyncio.sleep(self.cleanup_s)
            raise
        finally:
            self.running.discard(packed)

    async def _post(self, client: str, calls: list[PackedCall]) -> None:
        self.posts.append(len(calls))
        await self._trip()
        self.server.post(client, calls)
        await self._trip()

    async def _answers(self, client: str) -> list[PackedAnswer]:
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


def test_a_call_cancelled_before_it_was_sent_never_begins_and_a_later_one_has_ended_when_its_caller_goes_on() -> None:
    async def main() -> None:
        wire = Wire(lambda packed: 20.0, trip_s=1.0)
        wire.cleanup_s = 0.5
        batched_client = wire.batched_client()
        first, second = (asyncio.ensure_future(batched_client.call(packed(number))) for number in range(2))
        await asyncio.sleep(0.5)
        late = asyncio.ensure_future(batched_client.call(packed(2)))
        await asyncio.sleep(0.1)
        late.cancel()
        second.cancel()
        await asyncio.wait([late])
        assert now_s() == 0.6
        await asyncio.wait([second])
        assert wire.began == [packed(0), packed(1)]
        assert wire.running == {packed(0)}
        assert now_s() < 8
        assert await first == packed(0)[::-1]
        await asyncio.sleep(LONG_S)
        assert not wire.server._boxes

    run_virtually(main)


def test_a_cancelled_call_that_has_not_begun_yet_ends_too() -> None:
    async def main() -> None:
        server = BatchedServer(Wire()._do)
        server.post("me", [(1, b"never"), (1, None)])  # in one message
        assert await server.answers("me") == [(1, None, True)]
        assert not server._boxes

    run_virtually(main)


def test_a_caller_does_not_wait_long_for_a_worker_that_does_not_end_its_call() -> None:
    async def main() -> None:
        wire = Wire(lambda packed: 1000.0)
        wire.cleanup_s = 50.0
        batched_client = wire.batched_client()
        call = asyncio.ensure_future(batched_client.call(packed(0)))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert 10 < now_s() < 12
        await asyncio.sleep(60 + LONG_S)
        assert not batched_client._waiting
        assert not wire.server._boxes

    run_virtually(main)


def test_reports_come_in_order_and_before_the_result() -> None:
    async def main() -> None:
        wire = Wire(lambda packed: 3.0)
        batched_client, heard = wire.batched_client(), {}

        async def call(number: int) -> None:
            heard[number] = []
            await batched_client.call(packed(number), lambda each: heard[number].append((each, now_s())))
            expected = [b"%d of " % each + packed(number) for each in range(REPORTS)]
            assert [each for each, _ in heard[number]] == expected
            assert [round(at_s) for _, at_s in heard[number]] == [0, 1, 2], "as they are made"

        await asyncio.gather(*map(call, range(20)))
        await asyncio.sleep(LONG_S)

    run_virtually(main)


def test_answers_to_a_client_that_is_dead_are_forgotten_in_the_end() -> None:
    async def main() -> None:
        wire = Wire(lambda packed: 1.0)
        wire.server.post("dead", [(1, packed(1))])
        await asyncio.sleep(7200)
        assert "dead" in wire.server._boxes
        await wire.batched_client().call(packed(2))
        assert "dead" not in wire.server._boxes
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
        await asyncio.sleep(LONG_S)
        assert not batched_client._waiting
        assert not wire.running or breaks

    run_virtually(main)
