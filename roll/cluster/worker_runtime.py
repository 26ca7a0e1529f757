"""The runtime of a worker process: creates the worker and executes calls on it.

Invariants: an exception is sent as itself only if the method declared it (`@dispatch(raises=...)`) or it is a `UserError`
or `RunError`; token columns of a result stay in this process and the caller gets a reference; token columns of a batch
argument are fetched before the method runs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle

from roll.cluster.errors import CallFailure
from roll.cluster.worker import Dispatch, DispatchSpec, Worker, WorkerPlacement, batched_methods, dispatch_of
from roll.config.errors import RunError, UserError
from roll.config.file_modes import inherit_folder_mode
from roll.config.secrets import print_no_secrets
from roll.data.batch import Batch
from roll.data.remote_columns import ColumnBlock, Columns, RemoteRef, TokenColumn, block_to_remote, to_remote
from roll.process.bounded_log import LIMIT_BYTES, start_writer

GATHER_S = 0.05
"""How long the reports of a call are collected before they are sent to another process."""
Get = Callable[[Sequence[Any]], Awaitable[Sequence[Columns]]]
Put = Callable[[Columns], Any]


@dataclass(frozen=True)
class CallResult:
    """The result of a call: a value, or a declared error."""

    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class StartInfo:
    """Reported by a process once its worker is created."""

    where: str
    batched_methods: frozenset[str]
    """The worker's methods whose calls are sent in batches."""


class _GatheredReports:
    """Collects what a call reports for `GATHER_S` and sends it as one pickled list."""

    def __init__(self, report: Callable[[bytes], None]) -> None:
        self._report = report
        self._reports: list[Any] = []

    def add(self, each: Any) -> None:
        self._reports.append(each)
        if len(self._reports) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self.send)

    def send(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._report(bytes(cloudpickle.dumps(reports)))


class WorkerRuntime:
    """Runs one worker in its process, independent of the executor: `get` and `put` access the object store. Without
    `put`, token columns of results are sent in full."""

    def __init__(
        self, placement: WorkerPlacement, log: Path | None, get: Get, put: Put | None, log_bytes: int = LIMIT_BYTES
    ) -> None:
        self._placement = placement
        self._log = log
        self._log_bytes = log_bytes
        self._get, self._put = get, put
        self._worker: Worker | None = None

    async def start(self, make: Callable[[WorkerPlacement], Worker]) -> CallResult | CallFailure:
        """Creates the worker in the thread that will execute its calls: thread counts and CPU affinity are per thread."""
        try:
            if self._log is not None:
                _write_output_to(self._log, self._log_bytes)
            if self._placement.cores:
                os.sched_setaffinity(0, _usable_cores(self._placement))
            logging.getLogger(__name__).info("%s is %s", self._placement.name, where())
            self._worker = make(self._placement)
            logging.getLogger(__name__).info("%s is ready", self._placement.name)
        except (UserError, RunError) as error:
            return self._error_result(error, "start")
        except Exception as error:
            return self._failure(error, "its start")
        return CallResult(StartInfo(where(), batched_methods(type(self._worker))))

    async def call(
        self, method: str, args: Sequence[Any], kwargs: dict[str, Any], report: Callable[[Any], None] | None = None
    ) -> CallResult | CallFailure:
        """Executes a call. A method that reports while it runs gets `report` as its first argument."""
        assert self._worker is not None, "a worker is started before it is called"
        function = getattr(self._worker, method)
        how = dispatch_of(function)
        declared: tuple[type[Exception], ...] = (UserError, RunError, *how.raises)
        try:
            args = [await self._fetched(arg) for arg in args]
            kwargs = {name: await self._fetched(arg) for name, arg in kwargs.items()}
            result = function(*args, **kwargs) if report is None else function(report, *args, **kwargs)
            if inspect.isawaitable(result):
                # waits: the caller has a deadline
                result = await result
            return CallResult() if self._is_discarded(how) else CallResult(self._with_references(result))
        except declared as error:
            return self._error_result(error, method)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return self._failure(error, method)

    async def call_packed(self, packed: bytes, report: Callable[[bytes], None]) -> bytes:
        """Executes a pickled call and returns its pickled result; a pickling error becomes a `CallFailure`. If the method
        reports while it runs, `report` gets pickled lists of its reports."""
        method = "a call"
        try:
            method, args, kwargs, reports = cloudpickle.loads(packed)
            if not reports:
                return bytes(cloudpickle.dumps(await self.call(method, args, kwargs)))
            gathered = _GatheredReports(report)
            result = await self.call(method, args, kwargs, gathered.add)
            gathered.send()
            return bytes(cloudpickle.dumps(result))
        except Exception as error:
            failure = unsendable(CallFailure.of(error, self._placement.name, method, where()))
            return bytes(cloudpickle.dumps(failure))

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    async def _fetched(self, arg: Any) -> Any:
        """A batch with all of its tokens in this process; any other argument unchanged."""
        if not isinstance(arg, Batch):
            return arg
        refs = [block.columns.ref for block in arg.blocks if isinstance(block.columns, RemoteRef)]
        fetched = dict(zip(map(id, refs), await self._get(refs), strict=True)) if refs else {}
        return arg.resolved(lambda wanted: [fetched[id(ref)] for ref in wanted])

    def _is_discarded(self, how: DispatchSpec) -> bool:
        """Whether the caller takes this result from rank 0 instead: the ranks of a mesh execute a call together, and only
        `Dispatch.ALL` methods have a result per rank."""
        return self._placement.mesh is not None and self._placement.rank > 0 and how.dispatch is not Dispatch.ALL

    def _with_references(self, result: Any) -> Any:
        """The result with its token columns replaced by references."""
        put = self._put
        if put is None:
            return result
        if isinstance(result, TokenColumn):
            return to_remote(result, put)
        if isinstance(result, ColumnBlock):
            return block_to_remote(result, put)
        if isinstance(result, Batch):
            tokens = {n: to_remote(c, put) for n, c in result.columns.items() if isinstance(c, TokenColumn)}
            return result.with_columns(**tokens)
        if isinstance(result, list):
            return [self._with_references(each) for each in result]
        return result

    def _error_result(self, error: Exception, method: str) -> CallResult | CallFailure:
        """The exception itself, with a note on its origin, if it can be pickled; else its description."""
        origin = f"in {self._placement.name}.{method} ({where()})"
        if origin not in getattr(error, "__notes__", ()):  # one error may end many calls
            error.add_note(origin)
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:
            return self._failure(error, method)
        return CallResult(error=error)

    def _failure(self, error: Exception, method: str) -> CallFailure:
        failure = CallFailure.of(error, self._placement.name, method, where())
        logging.getLogger(__name__).error("%s", failure.trace)
        return failure


def unsendable(failure: CallFailure) -> CallFailure:
    """The failure of a call whose arguments or result could not be pickled or unpickled."""
    return replace(failure, causes=(*failure.causes, "an argument or a result that cannot be sent to another process"))


def where() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _usable_cores(placement: WorkerPlacement) -> set[int]:
    """The cores of a placement, which are indices into the cores that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[core] for core in placement.cores if core < len(allowed)} or set(allowed)


def _write_output_to(log: Path, limit_bytes: int) -> None:
    """Redirects stdout and stderr of this process to a log of at most `limit_bytes`."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        inherit_folder_mode(log.parent)
        log.touch()
        inherit_folder_mode(log)
        writing = start_writer(log, limit_bytes)
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot write {log} ({error.strerror}): "
            "on a cluster run.dir must be on a file system that all nodes share"
        ) from error
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    log_to_stderr()


def log_to_stderr() -> None:
    """Sends log records of ROLL and other libraries to stderr; secrets are redacted from all output."""
    print_no_secrets()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
