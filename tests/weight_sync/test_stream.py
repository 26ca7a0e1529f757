"""The order of buckets, whatever is slow: no slot is rewritten too early, and whatever fails ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.config.errors import RunError
from roll.weight_sync.stream import Receiver, Sender, stream
from roll.weight_sync.weights import check_probe

PAUSES = st.lists(st.integers(0, 7), min_size=1, max_size=12)


class VirtualClock(asyncio.SelectorEventLoop):
    """Time is 1 at first, and passes only when everybody sleeps: so a deadlock is at once at its deadline."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def run_virtually(work: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(work)


class Broken(Exception):
    pass


@dataclass
class Slots:
    """Slots that know what lies in them and who is at them, and check it at every step."""

    count: int
    receivers: int
    pauses: list[int]
    fails_at: int | None = None
    holds: dict[int, int] = field(default_factory=dict)
    reading: list[int] = field(default_factory=list)
    loaded: list[list[int]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    calls: int = 0

    def __post_init__(self) -> None:
        self.loaded = [[] for _ in range(self.receivers)]

    async def write(self, bucket: int) -> None:
        slot = bucket % self.count
        assert slot not in self.reading, "rewritten while read"
        if bucket >= self.count:
            assert all(bucket - self.count in done for done in self.loaded), "rewritten before all had it"
        self.holds.pop(slot, None)
        await self._pause()
        assert slot not in self.reading
        self.holds[slot] = bucket
        self.written.append(bucket)

    def load(self, receiver: int) -> Callable[[int], Awaitable[None]]:
        async def load(bucket: int) -> None:
            slot = bucket % self.count
            assert self.holds.get(slot) == bucket, "read before it was written"
            self.reading.append(slot)
            await self._pause()
            assert self.holds.get(slot) == bucket, "changed while read"
            self.reading.remove(slot)
            self.loaded[receiver].append(bucket)

        return load

    async def _pause(self) -> None:
        call, self.calls = self.calls, self.calls + 1
        for _ in range(self.pauses[call % len(self.pauses)]):
            await asyncio.sleep(0)
        if call == self.fails_at:
            raise Broken(f"call {call}")

    async def run(self, buckets: int) -> None:
        async with asyncio.timeout(30):
            await stream(buckets, self.count, self.write, [self.load(r) for r in range(self.receivers)])


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 4), PAUSES)
def test_every_receiver_gets_every_bucket_in_order(buckets: int, count: int, receivers: int, pauses: list[int]) -> None:
    slots = Slots(count, receivers, pauses)
    run_virtually(slots.run(buckets))
    assert slots.written == list(range(buckets))
    assert slots.loaded == [list(range(buckets))] * receivers


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), PAUSES, st.data())
def test_the_first_error_ends_all(
    buckets: int, count: int, receivers: int, pauses: list[int], draw: st.DataObject
) -> None:
    fails_at = draw.draw(st.integers(0, buckets * (1 + receivers) - 1))
    slots = Slots(count, receivers, pauses, fails_at)

    async def run() -> None:
        with pytest.raises(Broken, match=f"^call {fails_at}$"):
            await slots.run(buckets)
        calls = slots.calls
        assert asyncio.all_tasks() == {asyncio.current_task()}
        for _ in range(20):
            await asyncio.sleep(0)
        assert slots.calls == calls

    run_virtually(run())


@settings(deadline=None)
@given(st.integers(1, 3), PAUSES, st.integers(0, 20))
def test_a_cancellation_ends_all(receivers: int, pauses: list[int], when: int) -> None:
    async def run() -> None:
        task = asyncio.create_task(Slots(2, receivers, [*pauses, 7]).run(1000))
        for _ in range(when):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(run())


def test_a_bucket_is_written_while_the_one_before_is_loaded() -> None:
    async def run() -> None:
        second_written = asyncio.Event()

        async def write(bucket: int) -> None:
            if bucket == 1:
                second_written.set()

        async def load(bucket: int) -> None:
            await second_written.wait()

        async with asyncio.timeout(10):
            await stream(4, 2, write, [load, load])

    run_virtually(run())


def test_the_example_of_the_docstring() -> None:
    """In units of one write: receiver B takes two."""
    log: dict[str, list[tuple[int, float]]] = {"write": [], "A": [], "B": []}

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def takes(who: str, units: int) -> Callable[[int], Awaitable[None]]:
            async def call(bucket: int) -> None:
                log[who].append((bucket, loop.time()))
                await asyncio.sleep(units)

            return call

        await stream(4, 2, takes("write", 1), [takes("A", 1), takes("B", 2)])

    run_virtually(run())
    assert log == {
        "write": [(0, 1), (1, 2), (2, 4), (3, 6)],
        "A": [(0, 2), (1, 3), (2, 5), (3, 7)],
        "B": [(0, 2), (1, 4), (2, 6), (3, 8)],
    }


def model(version: int) -> dict[str, Tensor]:
    value = float(version)
    return {
        "steps": torch.full((3,), version),
        "large": torch.full((100, 10), value),
        "half": torch.full((33,), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 4),
    }


def send_through_slots(sender: Sender, receivers: list[Receiver]) -> None:
    async def write(bucket: int) -> None:
        sender.write(bucket)

    def loader(receiver: Receiver) -> Callable[[int], Awaitable[None]]:
        async def load(bucket: int) -> None:
            receiver.load(bucket)

        return load

    asyncio.run(stream(len(sender.layout.buckets), 2, write, [loader(receiver) for receiver in receivers]))


def test_versions_go_through_the_same_slots_one_after_the_other() -> None:
    source, targets = model(1), [model(0), model(5)]
    sender, receivers = Sender(source, 512), [Receiver(target) for target in targets]
    handles = set()
    for version in (1, 2, 3):
        for name, tensor in model(version).items():
            source[name].copy_(tensor)
        manifest = sender.manifest(version, torch.arange(3), torch.zeros(2))
        handle = sender.open("shared_memory")
        handles.add(handle)
        for receiver in receivers:
            receiver.begin(manifest, handle)
            assert set(receiver.finish()) == set(source) - {"empty"}
        send_through_slots(sender, receivers)
        for receiver, target in zip(receivers, targets, strict=True):
            assert receiver.finish() == []
            assert all(torch.equal(target[name], source[name]) for name in source)
    assert len(handles) == 1
    sender.close()
    for receiver in receivers:
        receiver.close()


def test_a_flipped_byte_in_a_slot_is_named() -> None:
    sender, receiver = Sender(model(1), 512), Receiver(model(0))
    receiver.begin(sender.manifest(1, torch.arange(3), torch.zeros(2)), sender.open("shared_memory", slots=1))
    for bucket, spans in enumerate(sender.layout.buckets):
        sender.write(bucket)
        for span in spans:
            if span.tensor == "half":
                _opened_slot(receiver)[span.offset + 5] ^= 4
        receiver.load(bucket)
    assert receiver.finish() == ["half"]
    sender.close()
    receiver.close()


def _opened_slot(receiver: Receiver) -> Tensor:
    channel = receiver._channel
    assert channel is not None
    return channel.slot(0)


def test_weights_that_change_after_the_manifest_are_noticed() -> None:
    source = model(1)
    sender, receiver = Sender(source, 512), Receiver(model(0))
    receiver.begin(sender.manifest(1, torch.arange(3), torch.zeros(2)), sender.open("shared_memory"))
    source["scalar"].fill_(7)
    send_through_slots(sender, [receiver])
    assert receiver.finish() == ["scalar"]
    sender.close()
    receiver.close()


def test_slots_are_no_larger_than_asked_and_than_needed() -> None:
    for bucket_bytes in (64, 512, 1 << 30):
        sender = Sender(model(1), bucket_bytes)
        handle = sender.open("shared_memory", slots=3)
        assert handle.slots == 3
        assert handle.slot_bytes <= min(bucket_bytes, sum(tensor.nbytes + 16 for tensor in model(1).values()))
        sender.close()


def test_a_manifest_carries_the_probe() -> None:
    manifest = Sender(model(1), 512).manifest(4, torch.arange(3), torch.tensor([-1.0, -2.0]))
    assert manifest.dtype is torch.float32
    check_probe(manifest, torch.tensor([-1.0, -2.0]))
    with pytest.raises(RunError, match=r"version 4 .* differ by 0\.5000"):
        check_probe(manifest, torch.tensor([-1.5, -2.5]))


def test_wrong_use_is_refused_with_a_word() -> None:
    sender, receiver = Sender(model(1), 512), Receiver(model(0))
    with pytest.raises(RunError, match=r"no channel is open: call open"):
        sender.write(0)
    with pytest.raises(RunError, match=r"call begin\(manifest\) first"):
        receiver.finish()
    with pytest.raises(RunError, match="these are on cpu: use shared_memory"):
        sender.open("cuda_ipc")
    with pytest.raises(RunError, match="of floating point"):
        Sender({"steps": torch.arange(3)}, 512).manifest(1, torch.arange(3), torch.zeros(2))
    manifest = sender.manifest(1, torch.arange(3), torch.zeros(2))
    other = {**model(0), "half": torch.zeros(33)}
    with pytest.raises(RunError, match="'half'"):
        Receiver(other).begin(manifest)
    sender.close()
    sender.close()
    receiver.close()
    receiver.close()
