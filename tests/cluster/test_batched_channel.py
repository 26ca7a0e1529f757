"""A line to a worker: order, company on the way, when it asks, and what an error ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.cluster.batched_channel import BatchedChannel


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def go(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a test's coroutine, and holds that it leaves no task behind."""

    async def main() -> None:
        await asyncio.wait_for(coroutine, 200)
        await turns()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


class Far:
    """The other end: a test says when a call arrives, and what news there is. Waits for every item it was told of."""

    def __init__(self) -> None:
        self.line: BatchedChannel[int, list[int]] = BatchedChannel(
            self._send, self._ask, on_result=self._take, on_error=self._fail, busy=lambda: bool(self.waited)
        )
        self.waited: set[int] = set()
        self.sending: list[tuple[list[int], asyncio.Future[None]]] = []
        self.asking: list[asyncio.Future[list[int]]] = []
        self.sent: list[list[int]] = []
        self.asked = 0
        self.errors: list[str] = []
        self.failed: set[int] = set()

    def post(self, *items: int) -> None:
        for item in items:
            self.waited.add(item)
            self.line.post(item)

    async def _send(self, items: list[int]) -> None:
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sending.append((items, arrived))
        await arrived
        self.sent.append(items)

    async def _ask(self) -> list[int]:
        self.asked += 1
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self.asking.append(answer)
        return await answer

    def _take(self, news: list[int]) -> None:
        if -1 in news:
            raise LookupError("this news cannot be taken")
        self.waited -= set(news)

    def _fail(self, error: Exception) -> None:
        self.errors.append(str(error))
        self.failed |= self.waited
        self.waited.clear()

    async def arrive(self, error: Exception | None = None) -> None:
        """The call that is out ends."""
        await turns()
        _, future = self.sending.pop()
        future.set_result(None) if error is None else future.set_exception(error)
        await turns()

    async def tell(self, *items: int, error: Exception | None = None) -> None:
        """The question that is out is answered."""
        await turns()
        future = self.asking.pop()
        future.set_result(list(items)) if error is None else future.set_exception(error)
        await turns()


def test_what_is_posted_in_one_turn_or_while_a_call_is_out_travels_together() -> None:
    async def main() -> None:
        far = Far()
        far.post(1, 2)
        far.post(3)
        await turns()
        far.post(4)
        await turns()
        far.post(5, 6)
        assert [items for items, _ in far.sending] == [[1, 2, 3]]
        await far.arrive()
        await far.arrive()
        assert far.sent == [[1, 2, 3], [4, 5, 6]]
        await far.tell(1, 2, 3, 4, 5, 6)

    go(main())


def test_results_are_polled_only_while_an_item_waits_for_one() -> None:
    async def main() -> None:
        far = Far()
        await turns()
        assert far.asked == 0
        far.post(1, 2)
        await turns()
        assert far.asked == 0
        await far.arrive()
        assert far.asked == 1
        await far.tell()
        assert far.asked == 2
        await far.tell(1)
        assert far.asked == 3
        await far.tell(2)
        assert (far.asked, far.asking) == (3, [])
        far.post(3)
        await far.arrive()
        assert far.asked == 4
        await far.tell(3)
        far.post(5)
        await turns()
        far.waited.clear()  # refused, or given up
        await far.arrive()
        assert far.asked == 4

    go(main())


def test_one_question_is_out_at_a_time() -> None:
    async def main() -> None:
        far = Far()
        for item in range(5):
            far.post(item)
            await far.arrive()
        assert len(far.asking) == far.asked == 1
        await far.tell(*range(5))

    go(main())


def test_an_error_of_a_send_is_reported_once_and_the_channel_can_be_used_again() -> None:
    async def main() -> None:
        far = Far()
        far.post(1)
        await turns()
        far.post(2)
        await far.arrive(OSError("lost"))
        assert (far.errors, far.failed, far.sending) == (["lost"], {1, 2}, [])
        far.post(3)
        await far.arrive()
        assert far.sent == [[3]]
        await far.tell(3)
        assert far.errors == ["lost"]

    go(main())


def test_an_error_on_the_way_back_keeps_what_was_posted_meanwhile_from_going_out() -> None:
    async def main() -> None:
        far = Far()
        far.post(1)
        await far.arrive()
        far.post(2)
        await turns()
        far.post(3)  # waits for 2 to arrive
        await far.tell(error=OSError("lost"))
        assert (far.errors, far.failed) == (["lost"], {1, 2, 3})
        await far.arrive()
        assert far.sending == []
        far.post(4)
        await far.arrive()
        assert far.sent == [[1], [2], [4]]
        await far.tell(4)
        assert far.errors == ["lost"]

    go(main())


def test_a_result_that_cannot_be_taken_is_an_error_too() -> None:
    async def main() -> None:
        far = Far()
        far.post(1)
        await far.arrive()
        await far.tell(-1)
        assert far.errors == ["this news cannot be taken"]
        far.post(2)
        await far.arrive()
        await far.tell(2)

    go(main())


def test_an_item_can_be_taken_back_until_it_goes_out() -> None:
    async def main() -> None:
        far = Far()
        far.post(1, 2, 3)
        assert far.line.remove(2)
        assert not far.line.remove(2)
        await turns()
        assert [items for items, _ in far.sending] == [[1, 3]]
        far.post(4)
        assert not far.line.remove(1)
        assert far.line.remove(4)
        await far.arrive()
        assert far.sent == [[1, 3]]
        far.post(5)
        far.line.remove(5)
        await turns()
        assert far.sending == []
        await far.tell(1, 2, 3, 4, 5)

    go(main())


@pytest.mark.parametrize("error", [None, OSError("lost")])
def test_who_waits_for_arrival_waits_for_what_has_gone_out_and_no_longer(error: Exception | None) -> None:
    async def main() -> None:
        far = Far()
        await far.line.wait_sent()
        far.post(1)
        await turns()
        far.post(2)
        wait = asyncio.create_task(far.line.wait_sent())
        await turns()
        assert not wait.done()
        await far.arrive(error)
        assert wait.done()
        assert wait.exception() is None
        await far.line.wait_sent() if error else None
        if error is None:
            await far.arrive()
            await far.tell(1, 2)

    go(main())


STEPS = ["post", "post", "post", "arrive", "arrive", "lose", "tell", "tell", "silence", "break", "back"]


@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=60),
    pauses=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(150), derandomize=True, deadline=None)
def test_any_interleaving_loses_nothing_and_keeps_the_order(steps: list[str], pauses: Any) -> None:
    async def main() -> None:
        far = Far()
        posted = 0
        back: set[int] = set()
        broken = 0
        for step in steps:
            if step == "post":
                far.post(posted)
                posted += 1
            elif step in ("arrive", "lose") and far.sending:
                broken += step == "lose"
                await far.arrive(OSError("lost") if step == "lose" else None)
            elif step == "tell" and far.asking:
                await far.tell(*[item for items in far.sent for item in items if item in far.waited][:2])
            elif step == "silence" and far.asking:
                await far.tell()
            elif step == "break" and far.asking:
                broken += 1
                await far.tell(error=OSError("broken"))
            elif step == "back" and far.waited and far.line.remove(last := max(far.waited)):
                far.waited.discard(last)
                back.add(last)
            await turns(pauses.randint(0, 6))
            assert len(far.sending) <= 1
            assert len(far.asking) <= 1
        while far.waited:
            await turns()
            if far.sending:
                await far.arrive()
            if far.asking:
                await far.tell(*[item for items in far.sent for item in items])
        await turns()
        while far.sending:
            await far.arrive()
        if far.asking:  # asked before an error on the way there
            await far.tell()
        out = [item for items in far.sent for item in items]
        assert out == sorted(set(out))
        assert len(far.errors) == broken
        assert set(range(posted)) - back - far.failed <= set(out)
        assert not back & set(out)

    go(main())
