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
from roll.cluster.worker_runtime import CallResult, StartInfo, unsent
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
        place: WorkerPlacement,
        make: Callable[[WorkerPlacement], Worker],
        log: Path | None,
        log_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.placement = place
        self.incarnation = 0
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
        await self._start_in(await self._process(), silent_s)

    async def keep_spare(self, warm: Callable[[], None]) -> None:
        """Keeps a spare process ready that has unpickled `make` and called `warm`: their imports are the longest part of
        a start."""
        if self._spare is not None and self._spare.is_open:
            return
        spare = self._spare = await self._process()
        try:
            await self._ask_in(spare, cloudpickle.dumps(WarmUpMessage(self._make, warm)), "its warm-up")
        except BaseException:
            if self._spare is spare:  # else a restart is already using it
                self._spare = None
                spare.kill()
            raise

    async def _process(self) -> _Connection:
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            inherit_folder_mode(self._log.parent)
        child = await ManagedProcess.start(_COMMAND, self._log, _environment(self.placement), self._log_bytes)
        return _Connection(child, self.placement.name, self._log)

    async def _start_in(self, process: _Connection, silent_s: float) -> None:
        """Creates the worker in a process."""
        self._connection = process
        try:
            self._where = (await self._made(silent_s)).where
        except BaseException:
            process.kill()
            raise

    async def _made(self, silent_s: float) -> StartInfo:
        asking = self._ask(cloudpickle.dumps(StartMessage(self.placement, self._log, self._make)), "its start")
        starting: asyncio.Future[StartInfo] = asyncio.ensure_future(asking)
        try:
            # waits: the executor bounds every start; `silent_s` does not apply to the start of the interpreter
            await self._reached.ask(b"")
            while not starting.done():
                await asyncio.wait({starting}, timeout=silent_s / 2)
                if not starting.done():
                    await self.ping(silent_s / 2)
            return starting.result()
        finally:
            starting.cancel()

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return await self._ask(self._packed(method, args, kwargs), method)

    async def ping(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._reached.ask(b"")
        except TimeoutError:
            raise CallTimedOut(self.placement.name, "ping", deadline_s) from None

    async def end(self, deadline_s: float) -> None:
        """Kills the process; returns once it has ended and freed its device memory."""
        if self._connection is not None and not await self._connection.end(deadline_s):
            raise RunError(f"{self.placement.name} ({self._where}) could not be ended within {deadline_s:g} s")

    async def restart(self, silent_s: float) -> None:
        await self.end(_END_S)
        await self.start(silent_s)
        self.incarnation += 1

    async def close(self, deadline_s: float) -> None:
        """Closes the worker, then kills its process, also if closing fails or takes longer than the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._ask(cloudpickle.dumps(CloseMessage()), "close")
        except (TimeoutError, RunError):
            pass  # the process is killed below anyway
        finally:
            spare, self._spare = self._spare, None
            if spare is not None:
                await spare.end(_END_S)
            await self.end(_END_S)

    @property
    def _reached(self) -> _Connection:
        if self._connection is None:
            raise WorkerDied(self.placement.name, "its process was not started", self._log)
        return self._connection

    def _packed(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        if isinstance(args, SharedArguments) and args.packed is not None:
            return args.packed
        try:
            packed = bytes(cloudpickle.dumps(CallMessage(method, tuple(args), kwargs)))
        except Exception as error:
            raise TypeError(
                f"{self.placement.name}.{method} cannot be called with what cannot be sent: {error}"
            ) from error
        if isinstance(args, SharedArguments):
            args.packed = packed
        return packed

    async def _ask(self, packed: bytes, method: str) -> Any:
        return await self._ask_in(self._reached, packed, method)

    async def _ask_in(self, process: _Connection, packed: bytes, method: str) -> Any:
        said = await process.ask(packed)
        self.bytes += len(packed) + len(said)
        try:
            answer: CallResult | CallFailure = cloudpickle.loads(said)
        except Exception as error:
            answer = unsent(CallFailure.of(error, self.placement.name, method, self._where))
        if isinstance(answer, CallFailure):
            raise WorkerError(answer)
        if answer.error is not None:
            raise answer.error
        return answer.value


class _Connection:
    """Requests to one process and their results. A cancelled request is still sent, and its result is ignored."""

    def __init__(self, child: ManagedProcess, worker: str, log: Path | None) -> None:
        self._child = child
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
        self._child.kill()

    async def ask(self, request: bytes) -> memoryview:
        """Sends a request and returns the result. An empty request is a ping, whose result is empty."""
        if not self.is_open:
            raise self._death()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._outgoing.put_nowait((HEADER.pack(NUMBER.size + len(request)) + NUMBER.pack(number), request))
        try:
            # waits: `Cluster` bounds every call, the executor every start
            found: memoryview = await answer
            return found
        finally:
            del self._waiting[number]

    async def end(self, deadline_s: float) -> bool:
        """Kills the process, also if it is stopped; returns whether it ended within the deadline."""
        self._child.kill()
        await asyncio.wait({self._child.exit}, timeout=deadline_s)
        if not self._child.exit.done():
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
                    for begin in range(0, len(view), _CHUNK_BYTES):
                        self._child.writer.write(view[begin : begin + _CHUNK_BYTES])
                        # waits: until the process has taken most of it, or has ended
                        await self._child.writer.drain()
        except OSError:
            pass  # the process has ended, which `_read` notices too

    async def _read(self) -> None:
        """Reads results until the process ends; then all pending requests fail with `WorkerDied`."""
        reader = self._child.reader
        try:
            while True:
                # waits: for as long as the process lives
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                # waits: the process has begun to send it
                payload = await reader.readexactly(size)
                (number,) = NUMBER.unpack_from(payload)
                answer = self._waiting.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(memoryview(payload)[NUMBER.size :])
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._child.kill()
            await asyncio.wait({self._child.exit}, timeout=_REAP_S)
            self._child.writer.transport.abort()
            self._sending.cancel()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(self._death())

    def _death(self) -> WorkerDied:
        return WorkerDied(self._worker, f"its process {self._child.exit_reason()}", self._log)


def _environment(place: WorkerPlacement) -> dict[str, str]:
    """Environment variables that libraries read at import."""
    threads = {"OMP_NUM_THREADS": str(place.threads)} if place.threads else {}
    return threads | ({"CUDA_VISIBLE_DEVICES": ""} if place.device == "cpu" else {})
