"""The `ray` executor: every worker an actor in a process of its own, on devices that were reserved for it.

What always holds: all of a run's devices are one placement group, so a run has all of them or none; an actor sees its own
GPU and no other; whatever ends the executor, no actor of it stays. Ray is started for the run if it is not told where to
join; what it started, it stops.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from roll.cluster.errors import Failure, WorkerDied, WorkerError
from roll.cluster.executor import Handle
from roll.cluster.host import Answer, Host
from roll.cluster.worker import Place, Worker
from roll.config.errors import RunError, UserError
from roll.config.schema import RayConfig
from roll.data.batch import Batch
from roll.data.columns import Columns, Elsewhere

W = TypeVar("W", bound=Worker)

_CLOSE_S = 10.0
"""For all workers to close; then they are ended."""
_FACTS_S = 60.0
_REACH_S = 5.0
"""Ray itself tries for minutes to reach an address nobody listens at."""
_CONCURRENT_CALLS = 10_000
_NOT_SENT = ["runs", ".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"]


@dataclass(frozen=True)
class NodeFacts:
    """A node of the cluster as Ray counts it."""

    id: str
    host: str
    address: str
    cores: int
    gpus: int
    memory_bytes: int
    gpu_bytes: int
    """Memory of each GPU, 0 if it could not be found out."""


class Traffic:
    """Bytes of calls and results that went through this process, references not counted with what they stand for."""

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


class _Actor:
    """What Ray runs: a host, and the object store as its shared memory."""

    def __init__(self, place: Place, log: Path | None, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        if place.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides GPUs only from workers that have some of them
        self._host = Host(place, log, self._get, ray.put)

    async def _get(self, refs: Sequence[Any]) -> Sequence[Columns]:
        return await asyncio.to_thread(_get_all, refs, self._deadline_s)

    async def start(self, make: Callable[[Place], Worker]) -> Answer | Failure:
        return await self._host.start(make)

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer | Failure:
        return await self._host.call(method, args, kwargs)

    async def close(self) -> None:
        await self._host.close()


def _get_all(refs: Sequence[Any], deadline_s: float) -> list[Columns]:
    """All at once, which costs much less than awaiting each. Blocks: call it in a thread."""
    found: list[Columns] = ray.get(list(refs), timeout=deadline_s)
    return found


class RayHandle:
    """One worker's actor. It may travel to other actors; only where it was made its traffic is counted."""

    in_process = False

    def __init__(
        self, place: Place, actor: Any, log: Path | None, where: str = "not started yet", traffic: Traffic | None = None
    ) -> None:
        self.place = place
        self._actor = actor
        self._log = log
        self._where = where
        self._traffic = traffic

    def __reduce__(self) -> tuple[Any, ...]:
        return RayHandle, (self.place, self._actor, self._log, self._where)

    async def start(self, make: Callable[[Place], Worker]) -> None:
        self._where = self._open(await self._ask(self._actor.start.remote(make), "its start"))

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            if self._traffic is not None:
                self._traffic.count(args, kwargs)
            ref = self._actor.call.remote(method, args, kwargs)
        except Exception as error:
            raise TypeError(f"{self.place.name}.{method} cannot be called with what cannot be sent: {error}") from error
        answer = await self._ask(ref, method)
        if self._traffic is not None:
            self._traffic.count(answer)
        return self._open(answer)

    async def _ask(self, ref: Any, method: str) -> Answer | Failure:
        try:
            answer: Answer | Failure = await ref
        except RayActorError as error:
            raise WorkerDied(self.place.name, _reason(error), self._log) from None
        except (RayTaskError, RaySystemError) as error:  # what the worker's own code raises comes as an answer
            return _unsent(error, self.place.name, method, self._where)
        except RayError as error:
            raise WorkerDied(self.place.name, _reason(error), self._log) from error
        return answer

    def _open(self, answer: Answer | Failure) -> Any:
        if isinstance(answer, Failure):
            raise WorkerError(answer)
        if answer.error is not None:
            raise answer.error
        return answer.value

    async def close(self, deadline_s: float) -> None:
        await asyncio.wait_for(self._actor.close.remote(), deadline_s)

    def kill(self) -> None:
        ray.kill(self._actor)


class RayExecutor:
    """Joins the cluster the config names, or starts Ray on this machine, when it is first needed."""

    def __init__(self, config: RayConfig, log_dir: Path | None = None) -> None:
        self._config = config
        self._log_dir = log_dir
        self._traffic = Traffic()
        self._handles: list[RayHandle] = []
        self._group: PlacementGroup | None = None
        self._bundles: dict[tuple[str, int | None], int] = {}
        """Bundle number by node and GPU; None for the node's cores."""
        self._shares: Counter[tuple[str, int | None]] = Counter()
        self._owner = False

    @property
    def deadline_s(self) -> float:
        return self._config.call_deadline_s

    @property
    def controller_bytes(self) -> int:
        return self._traffic.bytes

    def write_logs_to(self, folder: Path) -> None:
        """Where workers started from now on write what they print, a file each."""
        self._log_dir = folder

    def connect(self) -> None:
        """Joins or starts Ray, unless this process is connected already."""
        if not ray.is_initialized():
            _connect(self._config)
            self._owner = True

    def nodes(self) -> list[NodeFacts]:
        """The cluster's nodes: this one first, then by address and id."""
        self.connect()
        here = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
        return [
            NodeFacts(
                id=node["NodeID"],
                host=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                cores=int(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
                memory_bytes=int(node["Resources"].get("memory", 0) + node["Resources"].get("object_store_memory", 0)),
                gpu_bytes=_gpu_bytes(node["NodeID"]) if node["Resources"].get("GPU") else 0,
            )
            for node in alive
        ]

    def reserve(self, places: Sequence[Place]) -> None:
        """Takes the devices of all places at once, or says what the cluster lacks."""
        self.connect()
        cores_of = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
        cores_of[""] = max(cores_of.values())
        self._shares = Counter(_seat(place) for place in places)
        bundles: list[dict[str, float]] = []
        labels: list[dict[str, str]] = []
        for node, gpu in self._shares:
            here = [place for place in places if _seat(place) == (node, gpu)]
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

    async def start(self, make: Callable[[Place], W], places: Sequence[Place]) -> list[Handle]:
        handles = [self._actor(place) for place in places]
        self._handles.extend(handles)
        limit = asyncio.timeout(self._config.start_deadline_s)
        try:
            async with limit:
                await asyncio.gather(*(handle.start(make) for handle in handles))
        except TimeoutError:
            if not limit.expired():
                raise
            role, seconds = places[0].role, self._config.start_deadline_s
            raise RunError(
                f"the workers of {role} have not started within {seconds:g} s (ray.start_deadline_s)"
            ) from None
        return list(handles)

    async def fetch(self, batch: Batch) -> Batch:
        refs = [block.columns.ref for block in batch.blocks if isinstance(block.columns, Elsewhere)]
        try:
            fetched = await asyncio.to_thread(_get_all, refs, self.deadline_s)
        except RayError as error:
            raise RunError(f"tokens that workers hold cannot be fetched: {_reason(error)}") from error
        values = dict(zip(map(id, refs), fetched, strict=True))
        return batch.resolved(lambda wanted: [values[id(ref)] for ref in wanted])

    async def close(self) -> None:
        """Closes every worker, the youngest first, then ends their processes, then Ray if this executor started it."""
        handles, self._handles = self._handles[::-1], []
        end_s = time.monotonic() + _CLOSE_S
        try:
            for handle in handles:
                # One that is dead or hangs is killed below, which is all that closing is for then.
                await asyncio.gather(handle.close(max(end_s - time.monotonic(), 0.1)), return_exceptions=True)
        finally:
            for handle in handles:
                handle.kill()
            if self._group is not None:
                remove_placement_group(self._group)
                self._group = None
            self.disconnect()

    def disconnect(self) -> None:
        """Leaves Ray, and stops it if it was started here. Safe to repeat."""
        if self._owner:
            self._owner = False
            ray.shutdown()

    def _actor(self, place: Place) -> RayHandle:
        seat = _seat(place)
        assert self._group is not None, "devices are reserved before workers start"
        share = int(1e4 / self._shares[seat]) / 1e4
        index = self._bundles[seat]
        cores = self._group.bundle_specs[index].get("CPU", 0)
        options: dict[str, Any] = {
            "num_cpus": int(cores * share * 1e4) / 1e4,
            "num_gpus": 0 if seat[1] is None else share,
            "max_concurrency": _CONCURRENT_CALLS,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
        }
        log = None if self._log_dir is None else self._log_dir / f"{place.role}-{place.rank}.log"
        seen = place if seat[1] is None else replace(place, device="cuda:0")  # the only one the actor's process sees
        actor = ray.remote(_Actor).options(**options).remote(seen, log, self.deadline_s)
        return RayHandle(place, actor, log, traffic=self._traffic)


def _connect(config: RayConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if config.address is None:
        settings |= {"address": "local", "include_dashboard": False}
        # What Ray has started here ends within seconds after its head has, also when that was killed.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
        if config.object_store_gb:
            settings["object_store_memory"] = int(config.object_store_gb * 2**30)
        environment = dict(config.runtime_env)
    else:
        _reach(config.address)
        settings["address"] = config.address
        environment = {**_code_for_workers(), **config.runtime_env}
    try:
        ray.init(**settings, runtime_env=environment or None)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        where = "on this machine" if config.address is None else f"at ray.address={config.address!r}"
        raise UserError(f"Ray could not be reached or started {where}: {error}") from error


def _reach(address: str) -> None:
    """Refuses an address nobody listens at. What names none is Ray's to judge."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # where a cluster of this machine listens
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"nothing answers at ray.address={address!r} ({error}): is Ray running there?") from error


def _code_for_workers() -> Mapping[str, Any]:
    """How the nodes of a cluster get this code and the user's: the current folder, and this package if it is elsewhere
    and not installed. A job that Ray runs has its environment already."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return {}
    folder, package = Path.cwd(), Path(__file__).parents[1]
    env: dict[str, Any] = {"working_dir": str(folder), "excludes": _NOT_SENT}
    if not _is_installed(package) and not package.is_relative_to(folder):
        env["py_modules"] = [str(package)]
    return env


def _is_installed(package: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in package.parts)


def _gpu_bytes(node: str) -> int:
    """Asks a node for the memory of its smallest GPU."""
    task = ray.remote(_ask_driver_for_memory).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    try:
        found: int = ray.get(task.remote(), timeout=_FACTS_S)
    except RayError:
        return 0
    return found


def _ask_driver_for_memory() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_FACTS_S).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(line) << 20 for line in said.split() if line.isdigit()), default=0)


def _seat(place: Place) -> tuple[str, int | None]:
    """What a place takes of the cluster: a GPU of a node, or some of its cores."""
    gpu = int(place.device.removeprefix("cuda:")) if place.device.startswith("cuda") else None
    return place.node, gpu


def _unsent(error: RayError, worker: str, method: str, where: str) -> Failure:
    """A call whose arguments did not arrive, or whose result could not leave or be read here."""
    cause = getattr(error, "cause", None) or error
    failure = Failure.of(getattr(cause, "client_exc", cause), worker, method, where)
    causes = (*failure.causes, "an argument or a result that cannot be sent to another process")
    return replace(failure, causes=causes, trace=re.sub(r"\x1b\[\d*m", "", str(error)))


def _reason(error: Exception) -> str:
    """What Ray says of an actor's end, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def _listed(bundles: Sequence[Mapping[str, float]]) -> str:
    names = ("CPU", "GPU")
    amounts = (", ".join(f"{amount:g} {n}" for n in names if (amount := each.get(n, 0))) for each in bundles)
    return " + ".join(amount or "nothing" for amount in amounts)
