"""The inference role: an engine that serves one version of the weights at a time."""

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

if TYPE_CHECKING:  # those who only call an engine do without torch
    from roll.engine.slot_engine import EngineStats
    from roll.strategy.infer.base import InferStrategy
    from roll.strategy.offload import Level
    from roll.weight_sync.rendezvous import Rendezvous, WeightAnnouncement
    from roll.weight_sync.stream import Receiver, WeightManifest
    from roll.weight_sync.weights import Weights

POLL_S = 5.0
"""How long `results` waits before it says that there are none yet."""
NOBODY = ""
"""The client of a request that nobody waits for."""
PROGRESS_S = 0.5
"""How often it says what running requests have drawn so far."""


@dataclass(frozen=True)
class Rejection:
    """A request that can never run, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class OutputBatch:
    """What a client hears of its requests: how some have got on, and which have ended."""

    completions: list[Completion]
    progress: list[Progress]


@dataclass(frozen=True)
class EngineLoad:
    """How full an engine is."""

    running: int
    waiting: int
    cached_tokens: int


@dataclass
class _Box:
    """What a client has not asked for yet: completions, or the error that took all its requests."""

    completions: list[Completion] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    error: Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class InferWorker(DeviceWorker):
    """A worker with an inference engine: it takes requests and serves one version of the weights at a time."""

    def __init__(self, place: WorkerPlacement, config: Config, *, own_weights: bool | None = None) -> None:
        """By default an engine has weights of its own where it has a process of its own."""
        from roll.strategy.infer.factory import make_engine

        super().__init__(place, config.deterministic)
        self._strategy: InferStrategy = make_engine(
            place, config, own_weights=config.executor != "local" if own_weights is None else own_weights
        )
        self._receiver: Receiver | None = None
        self._member = BroadcastMember()
        self._clients_of: dict[str, list[str]] = {}
        """Who waits for completions of each id: more than one where an aborted request was followed by another."""
        self._boxes: defaultdict[str, _Box] = defaultdict(_Box)
        self._heard: dict[str, int] = {}
        """Tokens of each running request that its client was told of."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @dispatch(Dispatch.ALL)
    async def load_weights(self, weights: Weights) -> None:
        """Loads weights that are here whole, and verifies their digests."""
        await self._strategy.load_weights(weights)

    @dispatch(Dispatch.ALL)
    def begin_weights(self, offer: WeightAnnouncement) -> None:
        """Prepares to receive a version; nothing is served until `end_weights`."""
        from roll.weight_sync.stream import Receiver

        tensors = self._strategy.begin_loading(offer.manifest)
        if self._receiver is None:
            self._receiver = Receiver(tensors)
        self._receiver.rebind(tensors)  # a turn elsewhere moves their storage
        self._receiver.begin(offer.manifest, offer.handle)

    @dispatch(Dispatch.ONE)
    def load_bucket(self, bucket: int) -> None:
        """Takes over the bucket of weights that the trainer has written."""
        assert self._receiver is not None
        self._receiver.load(bucket)

    @dispatch(Dispatch.ALL)
    async def receive_weights(self, meeting: Rendezvous) -> None:
        """Receives all buckets from the trainer, which must be sending."""
        assert self._receiver is not None
        join = partial(meeting.join, meeting.ranks[self.place.rank], self.place.device)
        await self._member.broadcast(join, self._receiver.receive)

    @dispatch(Dispatch.ALL)
    async def leave_group(self) -> None:
        """Ends a broadcast that is under way; the next one is in a new group."""
        await self._member.leave()

    @dispatch(Dispatch.ALL)
    async def end_weights(self, manifest: WeightManifest) -> list[str]:
        """Serves the version if every tensor is the trainer's; else the names of those that are not."""
        assert self._receiver is not None
        wrong = self._receiver.finish()
        if not wrong:
            await self._strategy.end_loading(manifest)
        return wrong

    @dispatch(Dispatch.ONE)
    def submit(self, client: str, requests: Sequence[Request]) -> list[Rejection]:
        """Takes requests in; the refusals among them say why they can never run."""
        refusals: list[Rejection] = []
        for request in requests:
            try:
                self._take_in(request)
            except ValueError as refused:
                refusals.append(Rejection(request.id, str(refused)))
            else:
                self._clients_of.setdefault(request.id, []).append(client)
        if self._clients_of:
            self._keep_running("results", self._sort_results)
            self._keep_running("progress", self._tell_progress)
        return refusals

    def _keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    def _take_in(self, request: Request) -> None:
        """One that is here already is of a client that died: it gives way to the new one."""
        try:
            self._strategy.submit([request])
        except ValueError:
            if request.id not in self._clients_of:
                raise
            self._strategy.abort([request.id])
            self._clients_of[request.id][-1] = NOBODY
            self._strategy.submit([request])

    @dispatch(Dispatch.ALL)
    def forget_clients(self, beginning: str) -> None:
        """Clients whose names begin so have died: their requests end, and nobody hears of them."""
        for client in [client for client in self._boxes if client.startswith(beginning)]:
            del self._boxes[client]
        orphans = [id for id, clients in self._clients_of.items() if any(c.startswith(beginning) for c in clients)]
        for id in orphans:
            self._clients_of[id] = [NOBODY if c.startswith(beginning) else c for c in self._clients_of[id]]
        if orphans:
            self._strategy.abort(orphans)

    @dispatch(Dispatch.ONE)
    async def results(self, client: str) -> OutputBatch:
        """What became of the client's requests; waits a while for something."""
        box = self._boxes[client]
        with suppress(TimeoutError):
            await asyncio.wait_for(box.news.wait(), POLL_S)
        box.news.clear()
        news = OutputBatch(box.completions, box.progress)
        box.completions, box.progress = [], []
        error, box.error = box.error, None
        if error is not None:
            raise error
        return news

    async def _tell_progress(self) -> None:
        """Tells clients from time to time what their requests have so far, while there are any."""
        while self._clients_of:
            await asyncio.sleep(PROGRESS_S)
            for progress in self._strategy.progress(self._heard):
                clients = self._clients_of.get(progress.id)
                if clients and clients[-1] != NOBODY:
                    self._heard[progress.id] = progress.start + len(progress.ids)
                    box = self._boxes[clients[-1]]
                    box.progress.append(progress)
                    box.news.set()

    async def _sort_results(self) -> None:
        """Puts each completion into its client's box, while there is any to come."""
        try:
            while self._clients_of:
                for completion in await self._strategy.results():
                    self._heard.pop(completion.id, None)
                    if (client := self._client_of(completion.id)) not in (None, NOBODY):
                        box = self._boxes[client]
                        box.completions.append(completion)
                        box.news.set()
                await asyncio.sleep(0)
        except Exception as error:
            clients = {client for some in self._clients_of.values() for client in some}
            self._clients_of.clear()
            self._heard.clear()
            for box in map(self._boxes.__getitem__, clients):
                box.error = error
                box.news.set()

    def _client_of(self, id: str) -> str | None:
        """Whose completion this is; None if an error took the request it belongs to."""
        clients = self._clients_of.pop(id, [])
        if len(clients) > 1:
            self._clients_of[id] = clients[1:]
        return clients[0] if clients else None

    @dispatch(Dispatch.ALL)
    def abort(self, ids: Sequence[str]) -> None:
        """Ends requests; what they have sampled so far is returned as their result."""
        self._strategy.abort(ids)

    @dispatch(Dispatch.ALL)
    async def pause(self) -> None:
        """Holds all running requests where they are, until `resume`."""
        await self._strategy.pause()

    @dispatch(Dispatch.ALL)
    async def resume(self) -> None:
        """Continues the requests that `pause` held."""
        await self._strategy.resume()

    @dispatch(Dispatch.ALL)
    async def hold(self, level: Level) -> None:
        """Keeps so much on the device; below `all` nothing may be running."""
        if self._receiver is not None:
            self._receiver.let_go()
        await self._strategy.hold(level)

    @dispatch(Dispatch.ONE)
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self._strategy.stats()

    @dispatch(Dispatch.ALL)
    def load(self) -> EngineLoad:
        """How many requests and tokens the engine holds."""
        if not self._clients_of:  # also while it has no weights yet
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
