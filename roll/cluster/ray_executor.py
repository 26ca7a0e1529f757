"""The `ray` executor: every worker is an actor in its own process, on devices that were reserved for it.

Invariants: all devices of a run are one placement group, so a run gets all of them or none; an actor sees only its own
GPUs; a worker is restarted on the same devices, after its old process has ended; no actor outlives the executor. Without
`ray.address` the executor starts Ray for the run, and then also stops it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.cluster.errors import CallTimedOut, ClusterLost, NodeLost, WorkerDied
from roll.cluster.executor import Handle, started_in_time
from roll.cluster.ray_actor import ByteCounter, RayHandle, get_all, new_actor, reason
from roll.cluster.ray_connection import NodeResources, connect, head_address, node_facts, node_names, this_node
from roll.cluster.ray_nodes import LOOK_S, NodeWatch
from roll.cluster.worker import Worker, WorkerPlacement
from roll.config.errors import RunError
from roll.config.schema import RayConfig
from roll.data.batch import Batch
from roll.data.remote_columns import RemoteRef
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.structured_gather import structured_gather

W = TypeVar("W", bound=Worker)
T = TypeVar("T")
Seat: TypeAlias = tuple[str, int | None]
"""A node and the index of one of its GPUs, or None for its CPU cores."""

_CLOSE_S = 10.0
"""Deadline for all workers to close; then the executor kills them."""
_END_S = 60.0
"""Deadline for a killed process to end: freeing much memory takes a while."""

_HEAD_S = 3.0
"""How long Ray's head may be silent before it counts as lost, if it was started on this machine."""
_FAR_HEAD_S = 8.0
"""The same for the head of a joined cluster, which may be restarted with its state."""
_ASK_S = 3.0


class RayExecutor:
    """Joins the configured cluster, or starts Ray on this machine, on first use."""

    def __init__(self, config: RayConfig, log_dir: Path | None = None, silent_s: float = 60.0, root: str = "") -> None:
        """`silent_s`: a restart fails if the worker answers no ping for this long. `root` is the folder of the user's
        code."""
        self._root = root
        self._config = config
        self._silent_s = silent_s
        self._log_dir = log_dir
        self._log_bytes = LIMIT_BYTES
        self._traffic = ByteCounter()
        self._workers: dict[RayHandle, Callable[[WorkerPlacement], Worker]] = {}
        """The function that creates each worker, oldest worker first."""
        self._restarting: set[RayHandle] = set()
        self._spares: dict[RayHandle, RayHandle] = {}
        """Warm spare processes, by the worker that they replace."""
        self._spare_places: set[WorkerPlacement] = set()
        self._group: PlacementGroup | None = None
        self._bundles: dict[Seat, int] = {}
        """Index of the placement-group bundle of each device."""
        self._shares: Counter[Seat] = Counter()
        """Number of workers and spares per bundle; a worker with several GPUs counts in the bundle of its first."""
        self._gpu_names: dict[Seat, str] = {}
        """Driver names of the GPUs of multi-GPU workers; Ray chooses the physical GPUs."""
        self._watch: NodeWatch | None = None
        self._owner = False

    @property
    def deadline_s(self) -> float:
        return self._config.call_deadline_s

    @property
    def controller_bytes(self) -> int:
        return self._traffic.bytes

    def write_logs_to(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Sets the folder for the logs of workers that start from now on: one log per worker."""
        self._log_dir, self._log_bytes = folder, limit_bytes

    def connect(self) -> None:
        """Joins or starts Ray, unless this process is connected already."""
        if not ray.is_initialized():
            connect(self._config, self._root)
            self._owner = True

    def nodes(self) -> list[NodeResources]:
        """The cluster's nodes: this one first, then by address and id."""
        self.connect()
        return node_facts()

    def reserve(self, places: Sequence[WorkerPlacement], spares: Sequence[WorkerPlacement] = ()) -> None:
        """Reserves the devices of all placements at once; raises `RunError` with the free resources if that fails."""
        self.connect()
        self._watch_nodes()
        cores_of = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
        cores_of[""] = max(cores_of.values())
        self._shares = Counter(_seats(place)[0] for place in (*places, *spares))
        self._spare_places = set(spares)
        bundles: list[dict[str, float]] = []
        labels: list[dict[str, str]] = []
        for node, gpu in dict.fromkeys(seat for place in places for seat in _seats(place)):
            here = [place for place in places if _seats(place) == [(node, gpu)]]
            cores = min(max(cores_of.get(node, 1), 1), sum(max(place.threads, 1) for place in here))
            self._bundles[node, gpu] = len(bundles)
            bundles.append({"CPU": cores} if gpu is None else {"GPU": 1})
            labels.append({"ray.io/node-id": node} if node else {})
        selectors = labels if any(labels) else None
        self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        if not self._group.wait(self._config.start_deadline_s):
            raise RunError(
                f"the cluster did not give the run its devices within {self._config.start_deadline_s:g} s: it asked for "
                f"{_listed(bundles)}, and free are {_listed([ray.available_resources()])}"
            )
        several = [seat for place in places for seat in _seats(place) if len(_seats(place)) > 1]
        self._gpu_names = self._names_of(list(dict.fromkeys(several)))

    def _watch_nodes(self) -> None:
        if self._watch is None:
            silent_s = _HEAD_S if self._config.address is None else _FAR_HEAD_S
            self._watch = NodeWatch(node_names(), this_node(), head_address(), silent_s)
            self._watch.start()

    @property
    def failure(self) -> ClusterLost | None:
        if self._watch is None or self._watch.failure is None:
            return None
        return ClusterLost(self._watch.failure, own=self._owner and self._config.address is None)

    async def lost_node(self, place: WorkerPlacement) -> str | None:
        watch = self._watch
        if watch is None:
            return None
        if watch.failure is None and watch.lost(place.node) is None:
            await watch.look_now(_ASK_S)
        return self._lost(place)

    def _lost(self, place: WorkerPlacement) -> str | None:
        if (failure := self.failure) is not None:
            raise failure
        return None if self._watch is None else self._watch.lost(place.node)

    async def _unless_lost(self, place: WorkerPlacement, work: Awaitable[T]) -> T:
        """Awaits work on a placement; raises `NodeLost` if its node is lost in the meantime, because Ray would wait for
        the node."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if not task.done() and (node := self._lost(place)) is not None:
                    raise NodeLost(place.name, node)
            return task.result()
        finally:
            task.cancel()

    def _names_of(self, seats: Sequence[Seat]) -> dict[Seat, str]:
        """Queries the node of each GPU for its driver name."""
        assert self._group is not None
        task, asked = ray.remote(_gpu_name), []
        for seat in seats:
            there = PlacementGroupSchedulingStrategy(self._group, self._bundles[seat])
            asked.append(task.options(num_cpus=0, num_gpus=1, max_retries=0, scheduling_strategy=there).remote())
        try:
            return dict(zip(seats, ray.get(asked, timeout=self._config.start_deadline_s), strict=True))
        except RayError as error:
            raise RunError(f"a node of the cluster does not say which GPUs it gave the run: {reason(error)}") from error

    async def start(self, make: Callable[[WorkerPlacement], W], places: Sequence[WorkerPlacement]) -> list[Handle]:
        handles = [self._handle(place, self._log_of(place)) for place in places]
        self._workers.update((handle, make) for handle in handles)
        starts = structured_gather(self._unless_lost(handle.placement, handle.start(make)) for handle in handles)
        await self._in_time(starts, f"the workers of {places[0].role} have")
        return list(handles)

    async def restart(self, handle: Handle) -> None:
        old = self._own(handle)
        if old in self._restarting:
            raise RunError(f"{old.placement.name} is being restarted already")
        self._restarting.add(old)
        try:
            if (node := await self.lost_node(old.placement)) is not None:
                raise NodeLost(old.placement.name, node)
            await self._unless_lost(old.placement, old.end(_END_S))
            old.become(await self._unless_lost(old.placement, self._successor(old)))
        finally:
            self._restarting.discard(old)

    async def keep_spare(self, handle: Handle, warm: Callable[[], None]) -> None:
        old = self._own(handle)
        if old in self._spares or old.placement not in self._spare_places:
            return
        spare = self._spares[old] = self._handle(old.placement, old.log)
        try:
            await self._in_time(spare.warm_up(self._workers[old], warm), f"the spare of {old.placement.name} has")
        except BaseException:
            if self._spares.get(old) is spare:
                del self._spares[old]
            spare.kill()
            raise

    def _own(self, handle: Handle) -> RayHandle:
        own = next((each for each in self._workers if each is handle), None)
        if own is None:
            raise RunError(f"{handle.placement.name} cannot be restarted: this executor runs no such worker")
        return own

    async def _successor(self, old: RayHandle) -> RayHandle:
        """A new actor for the old one's placement: its spare if that is alive, else a new one, which Ray schedules once
        the old actor's devices are free."""
        spare = self._spares.pop(old, None)
        if spare is not None:
            try:
                return await self._started(old, spare)
            except (WorkerDied, CallTimedOut):
                pass
        return await self._started(old, self._handle(old.placement, old.log))

    async def _started(self, old: RayHandle, new: RayHandle) -> RayHandle:
        make = self._workers.get(old)
        if make is None:
            raise RunError(f"{old.placement.name} cannot be restarted: its executor was closed")
        self._workers[new] = make  # so that `close` finds it
        try:
            await self._in_time(new.start(make, self._silent_s), f"{old.placement.name} has")
        except CallTimedOut:
            await new.end(_END_S)  # Ray's kill does not reach a stopped process
            raise
        except BaseException:
            new.kill()
            raise
        finally:
            self._workers.pop(new, None)
        return new

    async def _in_time(self, starts: Awaitable[Any], who: str) -> None:
        await started_in_time(starts, self._config.start_deadline_s, who)

    async def fetch(self, batch: Batch) -> Batch:
        refs = [block.columns.ref for block in batch.blocks if isinstance(block.columns, RemoteRef)]
        try:
            fetched = await asyncio.to_thread(get_all, refs, self.deadline_s)
        except RayError as error:
            raise RunError(f"tokens that workers hold cannot be fetched: {reason(error)}") from error
        values = dict(zip(map(id, refs), fetched, strict=True))
        return batch.resolved(lambda wanted: [values[id(ref)] for ref in wanted])

    async def close(self) -> None:
        """Closes every worker, newest first, then kills their processes, then stops Ray if this executor started it."""
        handles = [*self._spares.values(), *list(self._workers)[::-1]]
        self._workers.clear()
        self._spares.clear()
        end_s = time.monotonic() + _CLOSE_S
        try:
            for handle in handles if self.failure is None else ():
                if self._watch is not None and self._watch.lost(handle.placement.node) is not None:
                    continue  # Ray would wait for the lost node until the deadline
                # A dead or hung worker is killed below.
                await asyncio.gather(handle.close(max(end_s - time.monotonic(), 0.1)), return_exceptions=True)
        finally:
            for handle in handles:
                handle.kill()
            if self._group is not None:
                if self.failure is None:
                    remove_placement_group(self._group)
                self._group = None
            self.disconnect()

    def disconnect(self) -> None:
        """Disconnects from Ray, and stops it if this executor started it. Idempotent."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._owner:
            self._owner = False
            ray.shutdown()

    def _log_of(self, place: WorkerPlacement) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"{place.role}-{place.rank}.log"

    def _handle(self, place: WorkerPlacement, log: Path | None) -> RayHandle:
        """Creates an actor for a placement; its worker is not created yet."""
        seats = _seats(place)
        seat = seats[0]
        assert self._group is not None, "devices are reserved before workers start"
        share = int(1e4 / self._shares[seat]) / 1e4
        index = self._bundles[seat]
        cores = self._group.bundle_specs[index].get("CPU", 0)
        on_gpu = seat[1] is not None
        # An actor's process sees only its own GPUs, numbered from 0.
        seen = replace(place, device="cuda:0", gpus=tuple(range(len(seats)))) if on_gpu else place
        actor = new_actor(
            seen,
            log,
            self.deadline_s,
            # Ray makes only the GPU of its bundle visible; a multi-GPU worker gets the names of all of its GPUs.
            ",".join(self._gpu_names[each] for each in seats) if len(seats) > 1 else None,
            self._log_bytes,
            num_cpus=int(cores * share * 1e4) / 1e4,
            num_gpus=share if on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
        )
        return RayHandle(place, actor, log, self.deadline_s, traffic=self._traffic)


def _seats(place: WorkerPlacement) -> list[Seat]:
    """The devices of a placement: each of its GPUs, or the CPU cores of its node."""
    if not place.device.startswith("cuda"):
        return [(place.node, None)]
    return [(place.node, gpu) for gpu in place.gpus or (int(place.device.removeprefix("cuda:")),)]


def _gpu_name() -> str:
    """The driver's name of this task's GPU."""
    (name,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(name)


def _listed(bundles: Sequence[Mapping[str, float]]) -> str:
    names = ("CPU", "GPU")
    amounts = [", ".join(f"{amount:g} {n}" for n in names if (amount := each.get(n, 0))) for each in bundles]
    listed = (f"{count} times {amount}" if count > 1 else amount for amount, count in Counter(amounts).items())
    return " + ".join(amount or "nothing" for amount in listed)
