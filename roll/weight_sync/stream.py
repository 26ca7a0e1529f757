"""The stream of weights from one trainer to many engines, bucket by bucket, verified at the end.

Invariants: an engine accepts a version only if the digest of every tensor, computed from the engine's own storage after
loading, equals the trainer's; no side needs more memory than its slots (or one bucket for a broadcast) beside the tensors
themselves.

    trainer                                     each engine
    sender.manifest(version, …)     ──────►     receiver.begin(manifest, sender.open(kind))
    sender.write(bucket)            ─ slots ─►  receiver.load(bucket)           for every bucket: `stream`
                                                receiver.finish() → tensors that are not the manifest's

or, through a `BroadcastGroup`, `sender.broadcast(group)` while every engine runs `receiver.receive(group)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from roll.config.errors import RunError
from roll.weight_sync.broadcast import BroadcastGroup
from roll.weight_sync.channel import Channel, ChannelKind, CudaIpcChannel, Handle, SharedMemoryChannel, attach
from roll.weight_sync.digest import digests
from roll.weight_sync.layout import BucketLayout, TensorSpan, TensorSpec, pack, specs_of, unpack, used_bytes


@dataclass(frozen=True)
class WeightManifest:
    """Describes a version: its tensors' layout and digests, and the trainer's log-probs of the probe prompt."""

    version: int
    layout: BucketLayout
    digests: dict[str, int]
    """One per tensor, by name."""
    probe: Tensor
    """Token ids of the fixed prompt."""
    log_probs: Tensor
    """The trainer's log-probs of the probe's tokens after the first."""
    dtype: torch.dtype
    """The served dtype: that of the first floating-point tensor."""


class TensorSource(Protocol):
    """Where a sender gets its tensors from: this process, or all ranks of a trainer. Then the methods are collective:
    every rank calls them in the same order."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def digests(self) -> dict[str, int]: ...

    def pack(self, bucket: Tensor | None, spans: Iterable[TensorSpan]) -> None:
        """Writes the spans' bytes into the bucket; a rank that does not send passes None."""
        ...


class WholeTensors:
    """Unsharded tensors of this process. The mapping may compute them on access: none is kept."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return specs_of(self.tensors)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def digests(self) -> dict[str, int]:
        return digests(self.tensors)

    def pack(self, bucket: Tensor | None, spans: Iterable[TensorSpan]) -> None:
        if bucket is not None:
            pack(bucket, spans, self.tensors)


class Sender:
    """The trainer's side. The tensors must not change between `manifest` and the last bucket of a version."""

    def __init__(self, tensors: Mapping[str, Tensor] | TensorSource, bucket_bytes: int) -> None:
        self._source = _source(tensors)
        self.layout = BucketLayout.of_specs(self._source.specs, bucket_bytes)
        self._channel: Channel | None = None
        self._kind: ChannelKind | None = None
        self._buffer: Tensor | None = None

    def rebind(self, tensors: Mapping[str, Tensor] | TensorSource) -> None:
        """Replaces the tensors by the same ones after their storage has moved."""
        if isinstance(tensors, Mapping):
            self.layout.check(tensors)
        self._source = _source(tensors)

    def release_tensors(self) -> None:
        """Releases the tensors until `rebind`, so that their storage can be freed."""
        self._source = WholeTensors({})

    def manifest(self, version: int, probe: Tensor, log_probs: Tensor) -> WeightManifest:
        dtypes = [spec.dtype for spec in self.layout.tensors if spec.dtype.is_floating_point]
        if not dtypes:
            raise RunError("no tensor to publish is of floating point: are these the model's weights?")
        return WeightManifest(version, self.layout, self._source.digests(), probe.cpu(), log_probs.cpu(), dtypes[0])

    def open(self, kind: ChannelKind, slots: int = 2) -> Handle:
        """Opens a channel for the buckets. An open channel of that kind is reused, because touched memory is faster than
        fresh memory."""
        if self._channel is None or self._kind != kind or self._channel.slots != slots:
            self._close_channel()
            self._channel, self._kind = self._create(kind, slots), kind
        return self._channel.handle

    def write(self, bucket: int) -> None:
        """Packs the bucket into its slot. Every receiver must have loaded the slot's previous bucket."""
        channel = _require_open(self._channel)
        self._source.pack(channel.slot(bucket % channel.slots), self.layout.buckets[bucket])
        channel.settle()

    def contribute(self, bucket: int) -> None:
        """Adds the shards of a rank that does not send to a bucket that another rank writes or broadcasts."""
        self._source.pack(None, self.layout.buckets[bucket])

    def contribute_all(self) -> None:
        """Calls `contribute` for all buckets of a version."""
        for bucket in range(len(self.layout.buckets)):
            self.contribute(bucket)

    def broadcast(self, group: BroadcastGroup) -> None:
        """Sends every bucket to the group's other ranks, each of which must be in `receive`. If the broadcast fails, the
        remaining buckets are still packed, so that the ranks that contribute to them stay synchronized."""
        self._buffer = _bucket_buffer(self._buffer, self.layout, group)
        failure: Exception | None = None
        for spans in self.layout.buckets:
            self._source.pack(self._buffer, spans)
            try:
                if failure is None:
                    group.broadcast(self._buffer[: used_bytes(spans)])
            except Exception as error:
                failure = error
        if failure is not None:
            self._buffer = None  # the failed broadcast may still read it
            raise failure

    def close(self) -> None:
        self._close_channel()
        self._buffer = None

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _create(self, kind: ChannelKind, slots: int) -> Channel:
        slot_bytes = max(self.layout.slot_bytes, 1)
        if kind == "shared_memory":
            return SharedMemoryChannel.create(slots, slot_bytes)
        device = self._source.device
        if device.type != "cuda":
            raise RunError(f"CUDA IPC moves tensors on a GPU, and these are on {device}: use shared_memory")
        return CudaIpcChannel.create(slots, slot_bytes, device)


class Receiver:
    """An engine's side: loads into the storage of the engine's tensors, which are no valid version between `begin` and
    `finish`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._manifest: WeightManifest | None = None
        self._channel: Channel | None = None
        self._buffer: Tensor | None = None

    def rebind(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the tensors by the same ones after their storage has moved."""
        self._tensors = dict(tensors)

    def release_tensors(self) -> None:
        """Releases the tensors until `rebind`, so that their storage can be freed."""
        self._tensors = {}

    def begin(self, manifest: WeightManifest, handle: Handle | None = None) -> None:
        """Starts a version: checks that the manifest matches the tensors, and attaches to the channel if it is new."""
        manifest.layout.check(self._tensors)
        if self._channel is not None and self._channel.handle != handle:
            self._channel.close()
            self._channel = None
        if self._channel is None and handle is not None:
            self._channel = attach(handle)
        self._manifest = manifest

    def load(self, bucket: int) -> None:
        channel = _require_open(self._channel)
        unpack(channel.slot(bucket % channel.slots), self._require_manifest().layout.buckets[bucket], self._tensors)
        channel.settle()

    def receive(self, group: BroadcastGroup) -> None:
        """Loads every bucket from the group's rank 0, which must be in `broadcast`."""
        layout = self._require_manifest().layout
        buffer = _bucket_buffer(self._buffer, layout, group)
        self._buffer = None  # a failed broadcast may still write to it
        for spans in layout.buckets:
            group.broadcast(buffer[: used_bytes(spans)])
            unpack(buffer, spans, self._tensors)
        self._buffer = buffer

    def finish(self) -> list[str]:
        """The names of the tensors whose digests differ from the manifest's; an empty list means verified."""
        manifest = self._require_manifest()
        own = digests({spec.name: self._tensors[spec.name] for spec in manifest.layout.tensors})
        return [name for name, value in own.items() if value != manifest.digests[name]]

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._manifest = self._buffer = None

    def _require_manifest(self) -> WeightManifest:
        if self._manifest is None:
            raise RunError("no version is being received: call begin(manifest) first")
        return self._manifest


async def stream(
    buckets: int,
    slots: int,
    write: Callable[[int], Awaitable[None]],
    loads: Sequence[Callable[[int], Awaitable[None]]],
) -> None:
    """Moves all buckets through the slots: each is written once, then loaded once by every receiver, in order.

    A bucket is loaded only after it was written, and its slot (bucket % slots) is rewritten only after every receiver has
    loaded it; apart from that, the writer and all receivers run concurrently. An error or a cancellation anywhere ends
    all of them, and the first error is raised; calls already sent to another process may still run there. The waits are
    as long as those calls: put a deadline around it.

    Example: four buckets, two slots, two receivers, of which B takes twice as long as all others. Bucket 2 shares a slot
    with 0 and waits for B; receiver A then waits for the writer, by never more than two buckets.

        time     1    2    3    4    5    6    7    8    9
        write    0    1    .    2    .    3    .    .    .
        A        .    0    1    .    2    .    3    .    .
        B        .    0    0    1    1    2    2    3    3
    """
    written = [asyncio.Event() for _ in range(buckets)]
    loaded = [[asyncio.Event() for _ in range(buckets)] for _ in loads]

    async def send() -> None:
        for bucket in range(buckets):
            if bucket >= slots:
                for receiver in loaded:
                    # waits: the receivers are calls with deadlines, and an error cancels this
                    await receiver[bucket - slots].wait()
            await write(bucket)
            written[bucket].set()

    async def receive(load: Callable[[int], Awaitable[None]], done: list[asyncio.Event]) -> None:
        for bucket in range(buckets):
            # waits: the sender is a call with a deadline, and an error cancels this
            await written[bucket].wait()
            await load(bucket)
            done[bucket].set()

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            for load, done in zip(loads, loaded, strict=True):
                tasks.create_task(receive(load, done))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _source(tensors: Mapping[str, Tensor] | TensorSource) -> TensorSource:
    return WholeTensors(tensors) if isinstance(tensors, Mapping) else tensors


def _require_open(channel: Channel | None) -> Channel:
    if channel is None:
        raise RunError("no channel is open: call open(kind) at the sender and begin(manifest, handle) at the receiver")
    return channel


def _bucket_buffer(buffer: Tensor | None, layout: BucketLayout, group: BroadcastGroup) -> Tensor:
    """A buffer for any bucket of the layout on the group's device; reuses the given one if it is large enough."""
    if buffer is not None and buffer.device == group.device and len(buffer) >= layout.slot_bytes:
        return buffer
    return torch.empty(layout.slot_bytes, dtype=torch.uint8, device=group.device)
