"""The inference worker: an engine that serves one version of the weights at a time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.cluster import Dispatch, WorkerPlacement, dispatch
from roll.config.schema import Config
from roll.engine.request import Completion, Progress, Request
from roll.workers.broadcast_membership import BroadcastMember
from roll.workers.device import DeviceWorker

if TYPE_CHECKING:  # processes that only call an engine do not import torch
    from roll.engine.slot_engine import EngineStats
    from roll.strategy.infer.base import InferStrategy
    from roll.strategy.offload import Residency
    from roll.weight_sync.rendezvous import Rendezvous, WeightAnnouncement
    from roll.weight_sync.stream import Receiver, WeightManifest
    from roll.weight_sync.weights import Weights

POLL_S = 5.0
"""How long `results` waits before it returns an empty batch."""
NO_CLIENT = ""
"""Stands for the client of a request whose output is discarded."""
PROGRESS_S = 0.5
"""Seconds between progress messages of running requests."""


@dataclass(frozen=True)
class Rejection:
    """A rejected request, which can never run, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True)
class OutputBatch:
    """Outputs for one client: completions of finished requests and new tokens of running ones."""

    completions: list[Completion]
    progress: list[Progress]


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine: running and waiting requests, and tokens in its KV cache."""

    running: int
    waiting: int
    cached_tokens: int


@dataclass
class _ClientOutputs:
    """Outputs that a client has not fetched yet: completions and progress, or the error that ended all its requests."""

    completions: list[Completion] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    error: Exception | None = None
    outputs: asyncio.Event = field(default_factory=asyncio.Event)


class InferWorker(DeviceWorker):
    """A worker with an inference engine: it takes requests and serves one version of the weights at a time."""

    def __init__(self, placement: WorkerPlacement, config: Config, *, own_weights: bool | None = None) -> None:
        """`own_weights`: whether the engine has its own copy of the weights; the default is no for the `local` executor,
        else yes."""
        from roll.strategy.infer.engine_role import EngineRole
        from roll.strategy.registry import engine_backend_of

        super().__init__(placement, config.deterministic)
        own_weights = config.executor != "local" if own_weights is None else own_weights
        backend, role = engine_backend_of(config), EngineRole.of(config)
        self._strategy: InferStrategy = backend.engine(config, placement, role, own_weights=own_weights)
        self._receiver: Receiver | None = None
        self._member = BroadcastMember()
        self._clients_of: dict[str, list[str]] = {}
        """Clients that wait for completions of each request id: several if an aborted request was followed by another."""
        self._outputs: defaultdict[str, _ClientOutputs] = defaultdict(_ClientOutputs)
        self._sent_tokens: dict[str, int] = {}
        """Tokens of each running request that were already sent to its client."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @dispatch(Dispatch.ALL)
    async def load_weights(self, weights: Weights) -> None:
        """Loads the weights of a trainer in this process, and verifies them."""
        await self._strategy.load_weights(weights)

    @dispatch(Dispatch.ALL)
    def begin_weights(self, announcement: WeightAnnouncement) -> None:
        """Prepares to receive a version; the engine serves nothing until `end_weights`."""
        from roll.weight_sync.stream import Receiver

        tensors = self._strategy.begin_loading(announcement.manifest)
        if self._receiver is None:
            self._receiver = Receiver(tensors)
        self._receiver.rebind(tensors)  # offloading moves their storage
        self._receiver.begin(announcement.manifest, announcement.handle)

    @dispatch(Dispatch.ONE)
    def load_bucket(self, bucket: int) -> None:
        """Loads the bucket of weights that the trainer has written."""
        assert self._receiver is not None
        self._receiver.load(bucket)

    @dispatch(Dispatch.ALL)
    async def receive_weights(self, rendezvous: Rendezvous) -> None:
        """Receives all buckets from the trainer, which must be sending."""
        assert self._receiver is not None
        join = partial(rendezvous.join, rendezvous.ranks[self.placement.rank], self.placement.device)
        await self._member.broadcast(join, self._receiver.receive)

    @dispatch(Dispatch.ALL)
    async def leave_group(self) -> None:
        """Aborts a broadcast in progress and destroys the process group; the next publish creates a new one."""
        await self._member.leave()

    @dispatch(Dispatch.ALL)
    async def end_weights(self, manifest: WeightManifest) -> list[str]:
        """Verifies the digests of all tensors and serves the version if they match; returns the names that do not."""
        assert self._receiver is not None
        mismatched = self._receiver.finish()
        if not mismatched:
            await self._strategy.end_loading(manifest)
        return mismatched

    @dispatch(Dispatch.ONE)
    def submit(self, client: str, requests: Sequence[Request]) -> list[Rejection]:
        """Submits requests; returns the rejected ones, each with the reason why it can never run."""
        rejections: list[Rejection] = []
        for request in requests:
            try:
                self._submit_one(request)
            except ValueError as error:
                rejections.append(Rejection(request.id, str(error)))
            else:
                self._clients_of.setdefault(request.id, []).append(client)
        if self._clients_of:
            self._keep_running("results", self._deliver_results)
            self._keep_running("progress", self._report_progress)
        return rejections

    def _keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    def _submit_one(self, request: Request) -> None:
        """Submits a request. A running request with the same id belongs to a client that died: it is aborted first."""
        try:
            self._strategy.submit([request])
        except ValueError:
            if request.id not in self._clients_of:
                raise
            self._strategy.abort([request.id])
            self._clients_of[request.id][-1] = NO_CLIENT
            self._strategy.submit([request])

    @dispatch(Dispatch.ALL)
    def drop_clients(self, prefix: str) -> None:
        """Drops dead clients, whose names start with `prefix`: aborts their requests and discards the outputs."""
        for client in [client for client in self._outputs if client.startswith(prefix)]:
            del self._outputs[client]
        orphans = [id for id, clients in self._clients_of.items() if any(c.startswith(prefix) for c in clients)]
        for id in orphans:
            self._clients_of[id] = [NO_CLIENT if c.startswith(prefix) else c for c in self._clients_of[id]]
        if orphans:
            self._strategy.abort(orphans)

    @dispatch(Dispatch.ONE)
    async def results(self, client: str) -> OutputBatch:
        """New outputs of the client's requests. Long-polls: waits up to `POLL_S` for the first output."""
        outputs = self._outputs[client]
        with suppress(TimeoutError):
            await asyncio.wait_for(outputs.outputs.wait(), POLL_S)
        outputs.outputs.clear()
        batch = OutputBatch(outputs.completions, outputs.progress)
        outputs.completions, outputs.progress = [], []
        error, outputs.error = outputs.error, None
        if error is not None:
            raise error
        return batch

    async def _report_progress(self) -> None:
        """Sends the new tokens of running requests to their clients every `PROGRESS_S`, while there are any requests."""
        while self._clients_of:
            await asyncio.sleep(PROGRESS_S)
            for progress in self._strategy.progress(self._sent_tokens):
                clients = self._clients_of.get(progress.id)
                if clients and clients[-1] != NO_CLIENT:
                    self._sent_tokens[progress.id] = progress.start + len(progress.ids)
                    outputs = self._outputs[clients[-1]]
                    outputs.progress.append(progress)
                    outputs.outputs.set()

    async def _deliver_results(self) -> None:
        """Puts each completion into the box of its client, while there are any requests."""
        try:
            while self._clients_of:
                for completion in await self._strategy.results():
                    self._sent_tokens.pop(completion.id, None)
                    if (client := self._client_of(completion.id)) not in (None, NO_CLIENT):
                        outputs = self._outputs[client]
                        outputs.completions.append(completion)
                        outputs.outputs.set()
                await asyncio.sleep(0)
        except Exception as error:
            clients = {client for waiting in self._clients_of.values() for client in waiting}
            self._clients_of.clear()
            self._sent_tokens.clear()
            for outputs in map(self._outputs.__getitem__, clients):
                outputs.error = error
                outputs.outputs.set()

    def _client_of(self, id: str) -> str | None:
        """The client that a completion belongs to; None if an error ended its request."""
        clients = self._clients_of.pop(id, [])
        if len(clients) > 1:
            self._clients_of[id] = clients[1:]
        return clients[0] if clients else None

    @dispatch(Dispatch.ALL)
    def abort(self, ids: Sequence[str]) -> None:
        """Aborts requests; their completions have the tokens sampled so far."""
        self._strategy.abort(ids)

    @dispatch(Dispatch.ALL)
    async def pause(self) -> None:
        """Pauses all running requests until `resume`; they keep their state."""
        await self._strategy.pause()

    @dispatch(Dispatch.ALL)
    async def resume(self) -> None:
        """Resumes the requests that `pause` stopped."""
        await self._strategy.resume()

    @dispatch(Dispatch.ALL)
    async def set_residency(self, level: Residency) -> None:
        """Sets the residency level: keeps that much on the device. Below `all` no request may be running."""
        if self._receiver is not None:
            self._receiver.release_tensors()
        await self._strategy.set_residency(level)

    @dispatch(Dispatch.ONE)
    def stats(self) -> EngineStats:
        """The engine's counters since its start."""
        return self._strategy.stats()

    @dispatch(Dispatch.ALL)
    def load(self) -> EngineLoad:
        """The current load of the engine."""
        if not self._clients_of:  # also before the engine has weights
            return EngineLoad(0, 0, 0)
        stats = self._strategy.stats()
        return EngineLoad(stats.running, stats.waiting, stats.cached_tokens)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._receiver is not None:
            self._receiver.close()
        self._member.close()
        await self._strategy.close()
