"""The inference worker: an engine that serves one version of the weights at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from roll.cluster import Dispatch, WorkerPlacement, dispatch
from roll.config.schema import Config
from roll.engine.request import Completion, Progress, Request, RequestRejected
from roll.workers.broadcast_membership import BroadcastMember
from roll.workers.device import DeviceWorker

if TYPE_CHECKING:  # processes that only call an engine do not import torch
    from roll.engine.slot_engine import EngineStats
    from roll.strategy.infer.base import InferStrategy
    from roll.strategy.offload import Residency
    from roll.weight_sync.rendezvous import Rendezvous, WeightAnnouncement
    from roll.weight_sync.stream import Receiver, WeightManifest
    from roll.weight_sync.weights import Weights

PROGRESS_S = 0.5
"""Seconds between progress messages of running requests."""


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine: running and waiting requests, and tokens in its KV cache."""

    running: int
    waiting: int
    cached_tokens: int


@dataclass(eq=False)
class _Running:
    """A request that the engine has, and the call that waits for its completion."""

    id: str
    key: str
    report: Callable[[Progress], None]
    completion: asyncio.Future[Completion]
    reported: int = 0
    """Tokens that were already reported."""
    is_over: bool = False
    """Whether it has ended, or the engine was told to end it; then its completion may still be to come."""


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
        self._running: dict[str, deque[_Running]] = {}
        """By id, the requests whose completions are still to come, in this order; all but the last of an id are over."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By method, the tasks that run while there are requests."""

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

    @dispatch(Dispatch.ONE, batched=True, raises=(RequestRejected,))
    async def generate(self, report: Callable[[Progress], None], key: str, request: Request) -> Completion:
        """Generates one response, and reports its new tokens every `PROGRESS_S`. `key` begins with the client's name and
        is used once. Cancelling this coroutine aborts the request."""
        running = self._submit(report, key, request)
        for work in (self._deliver_results, self._report_progress):
            if (task := self._tasks.get(work.__name__)) is None or task.done():
                self._tasks[work.__name__] = asyncio.create_task(work())
        try:
            # waits: the caller has a deadline
            return await running.completion
        except asyncio.CancelledError:
            self._abort([running])
            raise

    def _submit(self, report: Callable[[Progress], None], key: str, request: Request) -> _Running:
        """Submits a request. A running request with the same id belongs to a client that died: it is aborted first."""
        for earlier in self._running.get(request.id, ()):
            self._abort([earlier])
        completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        running = _Running(request.id, key, report, completion)
        try:
            self._strategy.submit([request])
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        self._running.setdefault(request.id, deque()).append(running)
        return running

    @dispatch(Dispatch.ONE, batched=True)
    def abort(self, keys: Sequence[str]) -> None:
        """Aborts requests; their completions have the tokens sampled so far. Unknown keys are ignored."""
        self._abort(running for running in self._requests() if running.key in keys)

    @dispatch(Dispatch.ALL)
    def drop_clients(self, prefix: str) -> None:
        """Aborts the requests of dead clients, whose names start with `prefix`."""
        self._abort(running for running in self._requests() if running.key.startswith(prefix))

    def _requests(self) -> Iterator[_Running]:
        return itertools.chain.from_iterable(self._running.values())

    def _abort(self, requests: Iterable[_Running]) -> None:
        chosen = [running for running in requests if not running.is_over]
        for running in chosen:
            running.is_over = True
        if chosen:
            self._strategy.abort([running.id for running in chosen])

    async def _report_progress(self) -> None:
        """Reports the new tokens of running requests every `PROGRESS_S`, while there are any requests."""
        while self._running:
            await asyncio.sleep(PROGRESS_S)
            newest = {id: requests[-1] for id, requests in self._running.items()}
            for progress in self._strategy.progress({id: running.reported for id, running in newest.items()}):
                running = newest.get(progress.id)
                if running is not None and not running.is_over:
                    running.reported = progress.start + len(progress.ids)
                    running.report(progress)

    async def _deliver_results(self) -> None:
        """Ends each call with its completion, while there are any requests."""
        try:
            while self._running:
                for completion in await self._strategy.results():
                    if (requests := self._running.get(completion.id)) is None:
                        continue
                    running = requests.popleft()
                    running.is_over = True
                    if not requests:
                        del self._running[completion.id]
                    if not running.completion.done():
                        running.completion.set_result(completion)
                await asyncio.sleep(0)
        except Exception as error:
            failed, self._running = self._running, {}
            for running in itertools.chain.from_iterable(failed.values()):
                running.is_over = True
                if not running.completion.done():
                    running.completion.set_exception(error)

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
        if not self._running:  # also before the engine has weights
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
