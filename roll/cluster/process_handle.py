"""The handle of a worker that the `local` executor runs in a separate process, such as a rank of a sharded trainer.

Invariants: a call ends in its result, or in `WorkerDied` once the process has ended for any reason; calls start on the
worker in the order they were made; killing the process also kills its child processes; the process ends with this one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from roll.cluster.errors import CallFailure, CallTimedOut, WorkerDied, WorkerError
from roll.cluster.process_main import NUMBER, CallMessage, CloseMessage, StartMessage, WarmUpMessage
from roll.cluster.worker import SharedArguments, Worker, WorkerPlacement
from roll.cluster.worker_runtime import CallResult, StartInfo, unsendable
from roll.config.errors import RunError
from roll.config.file_modes import inherit_folder_mode
from roll.process.bounded_log import LIMIT_BYTES
from roll.process.child_main import command
from roll.process.framing import HEADER
from roll.process.managed_process import ManagedProcess

_COMMAND = command("roll.cluster.process_main")
_CHUNK_BYTES = 1 << 20
_REAP_S = 5.0
"""How long to wait for the exit of a process that closed its connection, so that the error can name its exit reason."""
_END_S = 60.0
"""Deadline for a killed process to end: freeing much memory takes a while."""


class ProcessHandle:
    in_process = False

    def __init__(
        self,
        placement: WorkerPlacement,
        make: Callable[[WorkerPlacement], Worker],
        log: Path | None,
        log_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.placement = placement
        self.restart_count = 0
        self.bytes = 0
        """Bytes of calls and results so far."""
        self._make = make
        self._log = log
        self._log_bytes = log_bytes
        self._where = "not started yet"
        self._connection: _Connection | None = None
        self._spare: _Connection | None = None
        """A spare process that has done the worker's imports, for the next restart."""

    async def start(self, silent_s: float) -> None:
        """Starts the process and creates the worker in it; the executor has a deadline for it. The start fails if the
        process answers no ping for `silent_s`. A start that fails or is cancelled leaves no process."""
        spare, self._spare = self._spare, None
        if spare is not None:
            try:
                await self._start_in(spare, silent_s)
                return
            except (WorkerDied, CallTimedOut):
                await spare.end(_END_S)  # the spare has died or hangs
        await self._start_in(await self._start_process(), silent_s)

    async def keep_spare(self, warm: Callable[[], None]) -> None:
        """Keeps a spare process ready that has unpickled `make` and called `warm`: their imports are the longest part of
        a start."""
        if self._spare is not None and self._spare.is_open:
            return
        spare = self._spare = await self._start_process()
        try:
            await self._request_in(spare, cloudpickle.dumps(WarmUpMessage(self._make, warm)), "its warm-up")
        except BaseException:
            if self._spare is spare:  # else a restart is already using it
                self._spare = None
                spare.kill()
            raise

    async def _start_process(self) -> _Connection:
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            inherit_folder_mode(self._log.parent)
        process = await ManagedProcess.start(_COMMAND, self._log, _environment(self.placement), self._log_bytes)
        return _Connection(process, self.placement.name, self._log)

    async def _start_in(self, process: _Connection, silent_s: float) -> None:
        """Creates the worker in a process."""
        self._connection = process
        try:
            self._where = (await self._create_worker(silent_s)).where
        except BaseException:
            process.kill()
            raise

    async def _create_worker(self, silent_s: float) -> StartInfo:
        request = self._request(cloudpickle.dumps(StartMessage(self.placement, self._log, self._make)), "its start")
        starting: asyncio.Future[StartInfo] = asyncio.ensure_future(request)
        try:
            # waits: the executor bounds every start; `silent_s` does not apply to the start of the interpreter
            await self._live_connection.request(b"")
            while not starting.done():
                await asyncio.wait({starting}, timeout=silent_s / 2)
                if not starting.done():
                    await self.ping(silent_s / 2)
            return starting.result()
        finally:
            starting.cancel()

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return await self._request(self._pack_call(method, args, kwargs), method)

    async def stream(
        self, method: str, report: Callable[[Any], None], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The ranks of a mesh have no methods that report."""
        raise TypeError(f"{self.placement.name}.{method} cannot report: it is a rank of a mesh")

    async def ping(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._live_connection.request(b"")
        except TimeoutError:
            raise CallTimedOut(self.placement.name, "ping", deadline_s) from None

    async def end(self, deadline_s: float) -> None:
        """Kills the process; returns once it has ended and freed its device memory."""
        if self._connection is not None and not await self._connection.end(deadline_s):
            raise RunError(f"{self.placement.name} ({self._where}) could not be ended within {deadline_s:g} s")

    async def restart(self, silent_s: float) -> None:
        await self.end(_END_S)
        await self.start(silent_s)
        self.restart_count += 1

    async def close(self, deadline_s: float) -> None:
        """Closes the worker, then kills its process, also if closing fails or takes longer than the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._request(cloudpickle.dumps(CloseMessage()), "close")
        except (TimeoutError, RunError):
            pass  # the process is killed below anyway
        finally:
            spare, self._spare = self._spare, None
            if spare is not None:
                await spare.end(_END_S)
            await self.end(_END_S)

    @property
    def _live_connection(self) -> _Connection:
        if self._connection is None:
            raise WorkerDied(self.placement.name, "its process was not started", self._log)
        return self._connection

    def _pack_call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        if isinstance(args, SharedArguments) and args.packed is not None:
            return args.packed
        try:
            packed = bytes(cloudpickle.dumps(CallMessage(method, tuple(args), kwargs)))
        except Exception as error:
            raise TypeError(
                f"{self.placement.name}.{method} cannot be called: its arguments cannot be pickled: {error}"
            ) from error
        if isinstance(args, SharedArguments):
            args.packed = packed
        return packed

    async def _request(self, packed: bytes, method: str) -> Any:
        return await self._request_in(self._live_connection, packed, method)

    async def _request_in(self, process: _Connection, packed: bytes, method: str) -> Any:
        packed_result = await process.request(packed)
        self.bytes += len(packed) + len(packed_result)
        try:
            result: CallResult | CallFailure = cloudpickle.loads(packed_result)
        except Exception as error:
            result = unsendable(CallFailure.of(error, self.placement.name, method, self._where))
        if isinstance(result, CallFailure):
            raise WorkerError(result)
        if result.error is not None:
            raise result.error
        return result.value


class _Connection:
    """Requests to one process and their results. A cancelled request is still sent, and its result is ignored."""

    def __init__(self, process: ManagedProcess, worker: str, log: Path | None) -> None:
        self._process = process
        self._worker = worker
        self._log = log
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}
        self._outgoing: asyncio.Queue[tuple[bytes, ...]] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send())
        self._reading = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self._reading.done()

    def kill(self) -> None:
        self._process.kill()

    async def request(self, payload: bytes) -> memoryview:
        """Sends a request and returns the result. An empty request is a ping, whose result is empty."""
        if not self.is_open:
            raise self._died_error()
        number, result = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = result
        self._outgoing.put_nowait((HEADER.pack(NUMBER.size + len(payload)) + NUMBER.pack(number), payload))
        try:
            # waits: `Cluster` bounds every call, the executor every start
            payload_of_result: memoryview = await result
            return payload_of_result
        finally:
            del self._waiting[number]

    async def end(self, deadline_s: float) -> bool:
        """Kills the process, also if it is stopped; returns whether it ended within the deadline."""
        self._process.kill()
        await asyncio.wait({self._process.exit}, timeout=deadline_s)
        if not self._process.exit.done():
            return False
        await asyncio.wait({self._reading}, timeout=deadline_s)
        return True

    async def _send(self) -> None:
        """Sends requests in chunks, so that arguments shared by several workers are in memory once."""
        try:
            while True:
                # waits: for as long as the process lives
                for part in await self._outgoing.get():
                    view = memoryview(part)
                    for offset in range(0, len(view), _CHUNK_BYTES):
                        self._process.writer.write(view[offset : offset + _CHUNK_BYTES])
                        # waits: until the process has taken most of it, or has ended
                        await self._process.writer.drain()
        except OSError:
            pass  # the process has ended, which `_read` notices too

    async def _read(self) -> None:
        """Reads results until the process ends; then all pending requests fail with `WorkerDied`."""
        reader = self._process.reader
        try:
            while True:
                # waits: for as long as the process lives
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                # waits: the process has begun to send it
                payload = await reader.readexactly(size)
                (number,) = NUMBER.unpack_from(payload)
                result = self._waiting.get(number)
                if result is not None and not result.done():
                    result.set_result(memoryview(payload)[NUMBER.size :])
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._process.kill()
            await asyncio.wait({self._process.exit}, timeout=_REAP_S)
            self._process.writer.transport.abort()
            self._sending.cancel()
            for result in self._waiting.values():
                if not result.done():
                    result.set_exception(self._died_error())

    def _died_error(self) -> WorkerDied:
        return WorkerDied(self._worker, f"its process {self._process.exit_reason()}", self._log)


def _environment(placement: WorkerPlacement) -> dict[str, str]:
    """Environment variables that libraries read at import."""
    threads = {"OMP_NUM_THREADS": str(placement.threads)} if placement.threads else {}
    return threads | ({"CUDA_VISIBLE_DEVICES": ""} if placement.device == "cpu" else {})
