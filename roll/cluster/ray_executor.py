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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.cluster.errors import CallTimedOut, ClusterLost, NodeLost, WorkerDied
from roll.cluster.executor import Handle, start_within_deadline
from roll.cluster.ray_actor import ByteCounter, RayHandle, death_reason, fetch_all, new_actor
from roll.cluster.ray_connection import NodeResources, connect, head_address, node_names, node_resources, this_node
from roll.cluster.ray_nodes import POLL_S, NodeWatch
from roll.cluster.worker import Worker, WorkerPlacement
from roll.config.errors import RunError
from roll.config.schema import RayConfig
from roll.data.batch import Batch
from roll.data.remote_columns import RemoteRef
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.structured_gather import structured_gather

W = TypeVar("W", bound=Worker)
T = TypeVar("T")
DeviceKey: TypeAlias = tuple[str, int | None]
"""A node and the index of one of its GPUs, or None for its CPU cores."""

_CLOSE_S = 10.0
"""Deadline for all workers to close; then the executor kills them."""
_END_S = 60.0
"""Deadline for a killed process to end: freeing much memory takes a while."""

_HEAD_S = 3.0
"""How long Ray's head may be silent before it counts as lost, if it was started on this machine."""
_JOINED_HEAD_S = 8.0
"""The same for the head of a joined cluster, which may be restarted with its state."""
_LOST_NODE_S = 3.0


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
        self._byte_counter = ByteCounter()
        self._workers: dict[RayHandle, Callable[[WorkerPlacement], Worker]] = {}
        """The function that creates each worker, oldest worker first."""
        self._restarting: set[RayHandle] = set()
        self._spares: dict[RayHandle, RayHandle] = {}
        """Warm spare processes, by the worker that they replace."""
        self._spare_placements: set[WorkerPlacement] = set()
        self._group: PlacementGroup | None = None
        self._bundles: dict[DeviceKey, int] = {}
        """Index of the placement-group bundle of each device."""
        self._shares: Counter[DeviceKey] = Counter()
        """Number of workers and spares per bundle; a worker with several GPUs counts in the bundle of its first."""
        self._gpu_names: dict[DeviceKey, str] = {}
        """Driver names of the GPUs of multi-GPU workers; Ray chooses the physical GPUs."""
        self._watch: NodeWatch | None = None
        self._connected_here = False
        self._connecting: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        """The thread that started Ray. The kernel ends Ray's processes with it, so it lives as long as the connection."""

    @property
    def deadline_s(self) -> float:
        return self._config.call_deadline_s

    @property
    def controller_bytes(self) -> int:
        return self._byte_counter.bytes

    def write_logs_to(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Sets the folder for the logs of workers that start from now on: one log per worker."""
        self._log_dir, self._log_bytes = folder, limit_bytes

    def start_connecting(self) -> None:
        """Begins to join or start Ray in a thread, unless this process is connected already."""
        if not ray.is_initialized():
            self._thread = ThreadPoolExecutor(1, "ray")
            self._connecting = self._thread.submit(connect, self._config, self._root)

    def connect(self) -> None:
        """Joins or starts Ray, unless this process is connected already."""
        if self._connecting is not None:
            # waits: as long as Ray needs in this thread
            self._connecting.result()
            self._connecting, self._connected_here = None, True
        elif not ray.is_initialized():
            connect(self._config, self._root)
            self._connected_here = True

    def nodes(self) -> list[NodeResources]:
        """The cluster's nodes: this one first, then by address and id."""
        self.connect()
        return node_resources()

    def reserve(self, placements: Sequence[WorkerPlacement], spares: Sequence[WorkerPlacement] = ()) -> None:
        """Reserves the devices of all placements at once; raises `RunError` with the free resources if that fails."""
        self.connect()
        self._watch_nodes()
        cores_of = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
        cores_of[""] = max(cores_of.values())
        self._shares = Counter(_devices_of(placement)[0] for placement in (*placements, *spares))
        self._spare_placements = set(spares)
        bundles: list[dict[str, float]] = []
        labels: list[dict[str, str]] = []
        for node, gpu in dict.fromkeys(device for placement in placements for device in _devices_of(placement)):
            here = [placement for placement in placements if _devices_of(placement) == [(node, gpu)]]
            cores = min(max(cores_of.get(node, 1), 1), sum(max(placement.threads, 1) for placement in here))
            self._bundles[node, gpu] = len(bundles)
            bundles.append({"CPU": cores} if gpu is None else {"GPU": 1})
            labels.append({"ray.io/node-id": node} if node else {})
        selectors = labels if any(labels) else None
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        if not group.wait(self._config.start_deadline_s):
            free = _listed([ray.available_resources()])
            remove_placement_group(group)  # else it would take the devices as soon as they are free
            raise RunError(
                f"the cluster did not give the run its devices within {self._config.start_deadline_s:g} s: it asked for "
                f"{_listed(bundles)}, and free are {free}"
            )
        self._group = group
        several = [
            device for placement in placements for device in _devices_of(placement) if len(_devices_of(placement)) > 1
        ]
        self._gpu_names = self._query_gpu_names(list(dict.fromkeys(several)))

    def _watch_nodes(self) -> None:
        if self._watch is None:
            silent_s = _HEAD_S if self._config.address is None else _JOINED_HEAD_S
            self._watch = NodeWatch(node_names(), this_node(), head_address(), silent_s)
            self._watch.start()

    @property
    def failure(self) -> ClusterLost | None:
        if self._watch is None or self._watch.failure is None:
            return None
        return ClusterLost(self._watch.failure, started_here=self._connected_here and self._config.address is None)

    async def lost_node(self, placement: WorkerPlacement) -> str | None:
        watch = self._watch
        if watch is None:
            return None
        if watch.failure is None and watch.lost_reason(placement.node) is None:
            await watch.poll_now(_LOST_NODE_S)
        return self._lost_node(placement)

    def _lost_node(self, placement: WorkerPlacement) -> str | None:
        if (failure := self.failure) is not None:
            raise failure
        return None if self._watch is None else self._watch.lost_reason(placement.node)

    async def _until_node_lost(self, placement: WorkerPlacement, work: Awaitable[T]) -> T:
        """Awaits work on a placement; raises `NodeLost` if its node is lost in the meantime, because Ray would wait for
        the node."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if not task.done() and (node := self._lost_node(placement)) is not None:
                    raise NodeLost(placement.name, node)
            return task.result()
        finally:
            task.cancel()

    def _query_gpu_names(self, devices: Sequence[DeviceKey]) -> dict[DeviceKey, str]:
        """Queries the node of each GPU for its driver name."""
        assert self._group is not None
        task, refs = ray.remote(_gpu_name), []
        for device in devices:
            strategy = PlacementGroupSchedulingStrategy(self._group, self._bundles[device])
            refs.append(task.options(num_cpus=0, num_gpus=1, max_retries=0, scheduling_strategy=strategy).remote())
        try:
            return dict(zip(devices, ray.get(refs, timeout=self._config.start_deadline_s), strict=True))
        except RayError as error:
            raise RunError(
                f"a node of the cluster does not say which GPUs it gave the run: {death_reason(error)}"
            ) from error

    async def start(self, make: Callable[[WorkerPlacement], W], placements: Sequence[WorkerPlacement]) -> list[Handle]:
        handles = [self._handle(placement, self._log_of(placement)) for placement in placements]
        self._workers.update((handle, make) for handle in handles)
        starts = structured_gather(self._until_node_lost(handle.placement, handle.start(make)) for handle in handles)
        await self._in_time(starts, f"the workers of {placements[0].role} have")
        return list(handles)

    async def restart(self, handle: Handle) -> None:
        old = self._handle_of(handle)
        if old in self._restarting:
            raise RunError(f"{old.placement.name} is being restarted already")
        self._restarting.add(old)
        try:
            if (node := await self.lost_node(old.placement)) is not None:
                raise NodeLost(old.placement.name, node)
            await self._until_node_lost(old.placement, old.end(_END_S))
            old.switch_to(await self._until_node_lost(old.placement, self._start_successor(old)))
        finally:
            self._restarting.discard(old)

    async def keep_spare(self, handle: Handle, warm: Callable[[], None]) -> None:
        old = self._handle_of(handle)
        if old in self._spares or old.placement not in self._spare_placements:
            return
        spare = self._spares[old] = self._handle(old.placement, old.log)
        try:
            await self._in_time(spare.warm_up(self._workers[old], warm), f"the spare of {old.placement.name} has")
        except BaseException:
            if self._spares.get(old) is spare:
                del self._spares[old]
            spare.kill()
            raise

    def _handle_of(self, handle: Handle) -> RayHandle:
        known = next((each for each in self._workers if each is handle), None)
        if known is None:
            raise RunError(f"{handle.placement.name} cannot be restarted: this executor runs no such worker")
        return known

    async def _start_successor(self, old: RayHandle) -> RayHandle:
        """A new actor for the old one's placement: its spare if that is alive, else a new one, which Ray schedules once
        the old actor's devices are free."""
        spare = self._spares.pop(old, None)
        if spare is not None:
            try:
                return await self._start_in(old, spare)
            except (WorkerDied, CallTimedOut):
                pass
        return await self._start_in(old, self._handle(old.placement, old.log))

    async def _start_in(self, old: RayHandle, new: RayHandle) -> RayHandle:
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
        await start_within_deadline(starts, self._config.start_deadline_s, who)

    async def fetch(self, batch: Batch) -> Batch:
        refs = [block.columns.ref for block in batch.blocks if isinstance(block.columns, RemoteRef)]
        try:
            fetched = await asyncio.to_thread(fetch_all, refs, self.deadline_s)
        except RayError as error:
            raise RunError(f"tokens that workers hold cannot be fetched: {death_reason(error)}") from error
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
                if self._watch is not None and self._watch.lost_reason(handle.placement.node) is not None:
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
        if self._connecting is not None:
            with suppress(Exception):  # the run ends before it needs Ray, so a failed start is not reported
                self.connect()
            self._connecting = None
        if self._connected_here:
            self._connected_here = False
            ray.shutdown()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _log_of(self, placement: WorkerPlacement) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"{placement.role}-{placement.rank}.log"

    def _handle(self, placement: WorkerPlacement, log: Path | None) -> RayHandle:
        """Creates an actor for a placement; its worker is not created yet."""
        devices = _devices_of(placement)
        device = devices[0]
        assert self._group is not None, "devices are reserved before workers start"
        share = int(1e4 / self._shares[device]) / 1e4
        index = self._bundles[device]
        cores = self._group.bundle_specs[index].get("CPU", 0)
        on_gpu = device[1] is not None
        # An actor's process sees only its own GPUs, numbered from 0.
        visible = replace(placement, device="cuda:0", gpus=tuple(range(len(devices)))) if on_gpu else placement
        actor = new_actor(
            visible,
            log,
            self.deadline_s,
            # Ray makes only the GPU of its bundle visible; a multi-GPU worker gets the names of all of its GPUs.
            ",".join(self._gpu_names[each] for each in devices) if len(devices) > 1 else None,
            self._log_bytes,
            num_cpus=int(cores * share * 1e4) / 1e4,
            num_gpus=share if on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
        )
        return RayHandle(placement, actor, log, self.deadline_s, byte_counter=self._byte_counter)


def _devices_of(placement: WorkerPlacement) -> list[DeviceKey]:
    """The devices of a placement: each of its GPUs, or the CPU cores of its node."""
    if not placement.device.startswith("cuda"):
        return [(placement.node, None)]
    return [(placement.node, gpu) for gpu in placement.gpus or (int(placement.device.removeprefix("cuda:")),)]


def _gpu_name() -> str:
    """The driver's name of this task's GPU."""
    (name,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(name)


def _listed(bundles: Sequence[Mapping[str, float]]) -> str:
    names = ("CPU", "GPU")
    amounts = [", ".join(f"{amount:g} {n}" for n in names if (amount := each.get(n, 0))) for each in bundles]
    listed = (f"{count} times {amount}" if count > 1 else amount for amount, count in Counter(amounts).items())
    return " + ".join(amount or "nothing" for amount in listed)
