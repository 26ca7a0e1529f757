"""A worker as a Ray actor, and the handle that calls it.

Invariants: an actor answers pings also while a method blocks its event loop, because pings have a separate event loop and
thread; tokens that an actor holds are lost with its process, and fetching them then raises `TokensLost`.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.cluster.batched_rpc import BatchedClient, BatchedServer, PackedAnswer, PackedCall
from roll.cluster.errors import CallFailure, CallTimedOut, TokensLost, WorkerDied, WorkerError
from roll.cluster.pid_handle import PidHandle
from roll.cluster.ray_connection import this_node
from roll.cluster.worker import Worker, WorkerPlacement
from roll.cluster.worker_runtime import CallResult, StartInfo, WorkerRuntime, unsendable
from roll.config.errors import RunError
from roll.data.remote_columns import Columns
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.gc_tuning import freeze_gc, pause_gc

_HEALTH = "health"
_CONCURRENT_CALLS = 10_000
_CONCURRENT_PINGS = 100
_TASK_S = 30.0
"""Deadline for a Ray task to start on another node."""


class ByteCounter:
    """Bytes of calls and results that went through this process; objects behind references are not counted."""

    def __init__(self) -> None:
        self.bytes = 0

    def count(self, *what: Any) -> None:
        file = io.BytesIO()
        _SizePickler(file, protocol=5).dump(what)
        self.bytes += file.tell()


class _SizePickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, ray.ObjectRef | ActorHandle):
            return str, ("reference",)
        return super().reducer_override(thing)


@dataclass(frozen=True)
class ActorLocation:
    """The process of an actor, and the node it is on."""

    node: str
    process: PidHandle

    async def kill(self, deadline_s: float) -> bool:
        """Kills the process on its node, also if it is stopped; returns whether it ended within the deadline."""
        if self.node == this_node():
            return await asyncio.to_thread(self.process.end, deadline_s)
        on_node = NodeAffinitySchedulingStrategy(self.node, soft=False)
        task = ray.remote(_end).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        try:
            async with asyncio.timeout(deadline_s + _TASK_S):
                ended: bool = await task.remote(self.process, deadline_s)
        except TimeoutError:
            return False
        except RayError:  # the node is lost, and the process with it
            return True
        return ended


def _end(process: PidHandle, deadline_s: float) -> bool:
    return process.end(deadline_s)


class _Actor:
    """The Ray actor: a worker runtime with Ray's object store."""

    def __init__(
        self, placement: WorkerPlacement, log: Path | None, deadline_s: float, gpus: str | None, log_bytes: int
    ) -> None:
        pause_gc()  # until the worker has started
        self._deadline_s = deadline_s
        if placement.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides GPUs only from workers that have some of them
        elif gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        self._runtime = WorkerRuntime(placement, log, self._get, ray.put, log_bytes)
        self._batched_server = BatchedServer(self._runtime.call_packed)

    async def _get(self, refs: Sequence[Any]) -> Sequence[Columns]:
        return await asyncio.to_thread(fetch_all, refs, self._deadline_s)

    @ray.method(concurrency_group=_HEALTH)  # type: ignore[untyped-decorator]
    async def ping(self) -> ActorLocation:
        return ActorLocation(this_node(), PidHandle.of(os.getpid()))

    async def start(self, make: Callable[[WorkerPlacement], Worker]) -> CallResult | CallFailure:
        started = await self._runtime.start(make)
        freeze_gc()
        return started

    async def warm_up(self, make: Callable[[WorkerPlacement], Worker], warm: Callable[[], None]) -> None:
        """Prepares the process for the worker: unpickling `make` imports the worker's modules; then calls `warm`."""
        warm()

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> CallResult | CallFailure:
        return await self._runtime.call(method, args, kwargs)

    async def post(self, client: str, calls: list[PackedCall]) -> None:
        self._batched_server.post(client, calls)

    async def answers(self, client: str) -> list[PackedAnswer]:
        return await self._batched_server.answers(client)

    async def close(self) -> None:
        await self._runtime.close()


def new_actor(
    placement: WorkerPlacement,
    log: Path | None,
    deadline_s: float,
    gpus: str | None,
    log_bytes: int = LIMIT_BYTES,
    **options: Any,
) -> Any:
    """Creates an actor for a placement, with Ray's `options`; Ray never restarts it by itself. `gpus`: its visible GPUs,
    if they differ from those that Ray assigns."""
    kind = ray.remote(concurrency_groups={_HEALTH: _CONCURRENT_PINGS})(_Actor)
    options |= {"max_concurrency": _CONCURRENT_CALLS, "max_restarts": 0}
    return kind.options(**options).remote(placement, log, deadline_s, gpus, log_bytes)


def fetch_all(refs: Sequence[Any], deadline_s: float) -> list[Columns]:
    """Fetches all references at once, which is much cheaper than awaiting each. Blocks: call it in a thread."""
    try:
        found: list[Columns] = ray.get(list(refs), timeout=deadline_s)
    except ObjectLostError as error:
        raise TokensLost(f"tokens that a worker held are lost ({type(error).__name__})") from error
    return found


class RayHandle:
    """The handle of one worker's actor. It can be sent to other actors; only the process that created it counts its bytes
    and can restart the worker."""

    in_process = False

    def __init__(
        self,
        placement: WorkerPlacement,
        actor: Any,
        log: Path | None,
        deadline_s: float,
        where: str = "not started yet",
        restart_count: int = 0,
        batched_methods: frozenset[str] = frozenset(),
        byte_counter: ByteCounter | None = None,
    ) -> None:
        """`batched_methods`: the worker's methods whose calls are sent in batches. `deadline_s`: deadline of one batch;
        `Cluster` has deadlines for calls only."""
        self.placement = placement
        self.restart_count = restart_count
        self._actor = actor
        self.log = log
        self._deadline_s = deadline_s
        self._where = where
        self._batched_methods = batched_methods
        self._batched_client: BatchedClient | None = None
        self._byte_counter = byte_counter
        self._location: ActorLocation | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        state = (
            self.placement,
            self._actor,
            self.log,
            self._deadline_s,
            self._where,
            self.restart_count,
            self._batched_methods,
        )
        return RayHandle, state

    async def start(self, make: Callable[[WorkerPlacement], Worker], silent_s: float | None = None) -> None:
        """Creates the worker; fails if the actor answers no ping for `silent_s` in the meantime."""
        self._location = await self._await_result(self._live_actor.ping.remote(), "its start")
        starting = asyncio.ensure_future(self._await_result(self._live_actor.start.remote(make), "its start"))
        try:
            while silent_s is not None and not starting.done():
                await asyncio.wait({starting}, timeout=silent_s / 2)
                await self.ping(silent_s / 2)
            # waits: the executor bounds every start
            started: StartInfo = self._value_of(await starting)
            self._where, self._batched_methods = started.where, started.batched_methods
        finally:
            starting.cancel()

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if method in self._batched_methods:
            return await self._call_batched(method, args, kwargs)
        actor = self._live_actor
        try:
            if self._byte_counter is not None:
                self._byte_counter.count(args, kwargs)
            ref = actor.call.remote(method, args, kwargs)
        except Exception as error:
            raise self._unsendable(method, error) from error
        answer = await self._await_result(ref, method)
        if self._byte_counter is not None:
            self._byte_counter.count(answer)
        return self._value_of(answer)

    async def stream(
        self, method: str, report: Callable[[Any], None], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        return await self._call_batched(method, args, kwargs, report)

    async def _call_batched(
        self, method: str, args: Sequence[Any], kwargs: dict[str, Any], report: Callable[[Any], None] | None = None
    ) -> Any:
        """Makes a call that is sent in a batch with others; `report` gets what it reports while it runs."""

        def unpickled(packed: bytes) -> None:
            if self._byte_counter is not None:
                self._byte_counter.bytes += len(packed)
            assert report is not None, "only a call that is asked for reports makes some"
            for each in cloudpickle.loads(packed):
                report(each)

        try:
            packed = cloudpickle.dumps((method, args, kwargs, report is not None))
        except Exception as error:
            raise self._unsendable(method, error) from error
        if self._batched_client is None:
            self._batched_client = self._new_batched_client()
        answer = await self._batched_client.call(packed, unpickled)
        if self._byte_counter is not None:
            self._byte_counter.bytes += len(packed) + len(answer)
        try:
            result: CallResult | CallFailure = cloudpickle.loads(answer)
        except Exception as error:
            result = unsendable(CallFailure.of(error, self.placement.name, method, self._where))
        return self._value_of(result)

    def _new_batched_client(self) -> BatchedClient:
        actor = self._live_actor

        async def post(client: str, calls: list[PackedCall]) -> None:
            _result_or_raise(await self._await_result(actor.post.remote(client, calls), "post"))

        async def answers(client: str) -> list[PackedAnswer]:
            found: list[PackedAnswer] = _result_or_raise(
                await self._await_result(actor.answers.remote(client), "answers")
            )
            return found

        return BatchedClient(self.placement.name, post, answers, self._deadline_s)

    def _unsendable(self, method: str, error: Exception) -> TypeError:
        return TypeError(f"{self.placement.name}.{method} cannot be called: its arguments cannot be pickled: {error}")

    async def ping(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._await_result(self._live_actor.ping.remote(), "ping")
        except TimeoutError:
            raise CallTimedOut(self.placement.name, "ping", deadline_s) from None

    @property
    def _live_actor(self) -> Any:
        """The actor. Raises `WorkerDied` once Ray has been shut down, because a call would start Ray again."""
        if not ray.is_initialized():
            raise WorkerDied(self.placement.name, "Ray has ended", self.log)
        return self._actor

    async def _await_result(self, ref: Any, method: str) -> Any:
        """The result of a call on the actor. Failures of the actor are raised; failures of its worker are results."""
        try:
            # waits: `Cluster` bounds every call, the executor every start
            return await ref
        except RayActorError as error:
            raise WorkerDied(self.placement.name, death_reason(error), self.log) from None
        except (RayTaskError, RaySystemError) as error:  # (un)pickling failed: errors of the worker's code are results
            return _unsendable(error, self.placement.name, method, self._where)
        except RayError as error:
            raise WorkerDied(self.placement.name, death_reason(error), self.log) from error

    def _value_of(self, answer: CallResult | CallFailure) -> Any:
        result: CallResult = _result_or_raise(answer)
        if result.error is not None:
            raise result.error
        return result.value

    async def close(self, deadline_s: float) -> None:
        await asyncio.wait_for(self._live_actor.close.remote(), deadline_s)

    async def warm_up(self, make: Callable[[WorkerPlacement], Worker], warm: Callable[[], None]) -> None:
        """Prepares a spare process for a fast start of the worker."""
        self._location = await self._await_result(self._live_actor.ping.remote(), "its warm-up")
        await self._await_result(self._live_actor.warm_up.remote(make, warm), "its warm-up")

    def kill(self) -> None:
        if ray.is_initialized():  # else Ray was shut down, and the actor with it
            ray.kill(self._actor)

    async def end(self, deadline_s: float) -> None:
        """Kills the actor; returns once its process has ended and freed its device memory."""
        self.kill()
        if self._location is not None and not await self._location.kill(deadline_s):
            raise RunError(f"{self.placement.name} ({self._where}) could not be ended within {deadline_s:g} s")

    def switch_to(self, other: RayHandle) -> None:
        """Switches this handle to the actor of another handle: the restarted worker."""
        self._actor, self._where, self._location = other._actor, other._where, other._location
        self._batched_methods, self._batched_client = other._batched_methods, None
        self.restart_count += 1


def _result_or_raise(answer: Any) -> Any:
    """Returns the result, or raises `WorkerError` if it is a failure."""
    if isinstance(answer, CallFailure):
        raise WorkerError(answer)
    return answer


def death_reason(error: Exception) -> str:
    """Ray's reason for the death of an actor, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def _unsendable(error: RayError, worker: str, method: str, where: str) -> CallFailure:
    """The failure of a call whose arguments or result could not be pickled or unpickled."""
    cause = getattr(error, "cause", None) or error
    failure = CallFailure.of(getattr(cause, "client_exc", cause), worker, method, where)
    return unsendable(replace(failure, trace=re.sub(r"\x1b\[\d*m", "", str(error))))
