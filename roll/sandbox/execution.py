"""One execution of a program, from its start to its result.

Invariants: it ends at most `wall_s` after the program began (and `_START_S` before that) plus the time to kill it,
whatever the program does; and when it has ended, so has every process that the program started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from roll.sandbox.cgroups import Cgroup, groups_of
from roll.sandbox.inside.kernel import descendants
from roll.sandbox.inside.program import BEGUN, ENDED, SCRATCH_LEFT
from roll.sandbox.isolation import Sandbox
from roll.sandbox.launch import SCRATCH, call_filter_of, command, drops_user, payload, scratch_of, sealed_file
from roll.sandbox.program import Kind, Limits, Program, ProgramResult, SandboxError
from roll.sandbox.scratch_usage import Scratch
from roll.sandbox.usage import child_pids, exceeds_memory, has_free_files

_log = logging.getLogger(__name__)

_START_S = 20.0
"""Time for a sandbox to start the program; it does not count as the program's."""
_TICK_S = 0.05
_END_S = 5.0
_CLEAN_S = 20.0
"""Time for a supervisor to end and remove everything that a program left behind."""
_READ_BYTES = 1 << 16

_INIT_PID = re.compile(rb'"child-pid": *([0-9]+)')

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass
class _Watch:
    """The state of a running execution."""

    process: subprocess.Popen[bytes]
    limits: Limits
    scratch: Scratch | None
    """The folder to watch, if the kernel does not limit it."""
    group: Cgroup | None
    """Accounts the program's memory; without it, the memory is watched."""
    started_s: float = field(default_factory=time.monotonic)
    begun_s: float | None = None
    ended_s: float | None = None
    status_messages: bytes = b""
    """Status messages of the sandbox: the process with which all others end, and that the program began and ended."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    def verdict(self, stopped: Callable[[], bool]) -> Kind | None:
        """Why the program has to be ended now, or None."""
        now = time.monotonic()
        if stopped():
            return "killed"
        if len(self.stdout) + len(self.stderr) > self.limits.output_bytes:
            return "output"
        if self.begun_s is None:
            return "killed" if now - self.started_s > _START_S else None
        if self.ended_s is None and now - self.begun_s > self.limits.wall_s:
            return "timeout"
        return None

    def add_status(self, data: bytes) -> None:
        """Adds status messages of the sandbox."""
        self.status_messages += data
        if self.begun_s is None and BEGUN in self.status_messages:
            self.begun_s = time.monotonic()
        if self.ended_s is None and ENDED in self.status_messages:
            self.ended_s = time.monotonic()

    def seconds(self) -> float:
        """The program's run time so far, or in total."""
        return (self.ended_s or time.monotonic()) - (self.begun_s or self.started_s)

    def exceeds_memory(self) -> bool:
        """Whether the program exceeds its memory limit."""
        if self.group is not None:
            return self.group.ran_out()
        sandbox_pids = [self.process.pid, *(() if self.scratch is not None else child_pids(self.process.pid))]
        return exceeds_memory(self.process.pid, self.limits.memory_mb << 20, sandbox_pids)

    def exceeds_disk(self) -> bool:
        """Whether its scratch folder exceeds its limit."""
        if self.scratch is not None:
            return self.scratch.exceeds(self.process.pid)
        return not has_free_files(self.process.pid, SCRATCH, self.limits.scratch_files)


class _LimitCheck:
    """Checks repeatedly whether a program exceeds a limit, in a thread of its own: a program with many mappings can make
    one check take seconds, during which its deadline would not be enforced."""

    def __init__(self, exceeds: Callable[[], bool]) -> None:
        self._exceeds, self._stop = exceeds, threading.Event()
        self._found: bool | BaseException = False
        self._thread = threading.Thread(target=self._run, name="sandbox-look", daemon=True)
        self._thread.start()

    def found(self) -> bool:
        """Whether a check found that the program exceeds the limit."""
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def end(self) -> None:
        self._stop.set()
        self._thread.join(timeout=_END_S)

    def _run(self) -> None:
        try:
            while not self._found and not self._stop.is_set():
                self._found = self._exceeds()
                self._stop.wait(_TICK_S)
        except BaseException as error:
            self._found = error


@dataclass
class _LimitChecks:
    """The checks of both limits that the kernel does not enforce, started when the program has run for a while."""

    watch: _Watch
    created_s: float = field(default_factory=time.monotonic)
    _checks: dict[Kind, _LimitCheck] = field(default_factory=dict)

    def exceeded(self) -> Kind | None:
        """The limit that the program exceeds, or None."""
        if self.watch.begun_s is None or self.watch.ended_s is not None:
            return None
        if not self._checks and time.monotonic() - self.created_s > _TICK_S:
            self._checks = {
                "memory": _LimitCheck(self.watch.exceeds_memory),
                "disk": _LimitCheck(self.watch.exceeds_disk),
            }
        return next((kind for kind, check in self._checks.items() if check.found()), None)

    def end(self) -> None:
        """Ends the checks, after the program has ended."""
        for check in self._checks.values():
            check.end()


def execute(
    sandbox: Sandbox,
    program: Program,
    limits: Limits,
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    tidy: bool = False,
) -> ProgramResult:
    """Runs a program and waits for its end, which comes at once if `stopped` returns True.

    If standard input and output are given as descriptors, the result does not contain their text. With `tidy`, also
    removes scratch folders that earlier runs left behind.
    """
    scratch = scratch_of(sandbox)
    with (
        _memory_group(sandbox, limits) as group,
        _start(sandbox, program, limits, scratch, stdin, stdout, tidy, group) as (process, status),
    ):
        folder = Scratch(scratch, limits.scratch_bytes) if sandbox.level == "plain" else None
        watch = _Watch(process, limits, folder, group)
        checks = _LimitChecks(watch)
        try:
            kind = _collect(watch, checks, status, stopped)
            seconds = watch.seconds()
        finally:
            _end(process, gently=sandbox.level == "plain")
            _wait_for_init(watch.status_messages)
            checks.end()
        if kind is None and group is not None and group.ran_out():
            kind = "memory"
    if SCRATCH_LEFT in watch.status_messages:
        _log.warning("a program left so much in %s that a background process has to remove it", scratch)
    if watch.begun_s is None and not stopped():
        raise SandboxError(f"the sandbox ({sandbox.level}) did not start a program: {_start_failure(watch, process)}")
    output, error = (_text(data[: limits.output_bytes]) for data in (watch.stdout, watch.stderr))
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    kind = kind or _kind(code, error)
    return ProgramResult(kind, None if kind not in ("ok", "failed") else code, output, error, seconds)


async def execute_async(sandbox: Sandbox, program: Program, limits: Limits) -> ProgramResult:
    """Runs a program in a thread of its own, which must live as long as the program: the kernel ends the program with
    it."""
    loop, stop = asyncio.get_running_loop(), threading.Event()
    done: asyncio.Future[ProgramResult] = loop.create_future()

    def work() -> None:
        try:
            outcome: ProgramResult | BaseException = execute(sandbox, program, limits, stopped=stop.is_set)
        except BaseException as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_settle, done, outcome)

    threading.Thread(target=work, name="sandbox", daemon=True).start()
    try:
        # waits: the program's limits end it
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({done}, timeout=_END_S)
        raise


def _settle(done: asyncio.Future[ProgramResult], outcome: ProgramResult | BaseException) -> None:
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
        done.exception()  # retrieved so asyncio does not warn if the caller was cancelled
    else:
        done.set_result(outcome)


@contextlib.contextmanager
def _memory_group(sandbox: Sandbox, limits: Limits) -> Iterator[Cgroup | None]:
    """A group in which the kernel accounts the program's memory, if there are control groups."""
    if sandbox.cgroups is None:
        yield None
        return
    with contextlib.ExitStack() as closing:
        try:
            group = closing.enter_context(groups_of(sandbox.cgroups).group(limits))
        except OSError as error:
            why = f"no more control groups can be created ({sandbox.cgroups.label}): {error}"
            raise SandboxError(f"the sandbox ({sandbox.level}) did not start: {why}") from error
        yield group


@contextlib.contextmanager
def _start(
    sandbox: Sandbox,
    program: Program,
    limits: Limits,
    scratch: str,
    stdin: int | None,
    stdout: int | None,
    tidy: bool,
    group: Cgroup | None,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and the descriptor of its status messages."""
    with contextlib.ExitStack() as closing:
        status_read, status_write = os.pipe()
        closing.callback(os.close, status_read)
        child_fds = closing.enter_context(contextlib.ExitStack())
        child_fds.callback(os.close, status_write)
        bubblewrap_status = os.dup(status_write)  # for bubblewrap itself
        child_fds.callback(os.close, bubblewrap_status)
        join_fds = group.join_fds if group is not None else ()
        text = payload(sandbox, program, limits, scratch=scratch, status_fd=status_write, join_fds=join_fds, tidy=tidy)
        text_fd = child_fds.enter_context(sealed_file(text))
        filter_fd = child_fds.enter_context(sealed_file(call_filter_of(sandbox)))
        stdin_fd = child_fds.enter_context(sealed_file(program.stdin)) if stdin is None else stdin
        try:
            process = subprocess.Popen(
                command(sandbox, limits, text_fd, filter_fd, bubblewrap_status),
                stdin=stdin_fd,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                pass_fds=(
                    status_write,
                    text_fd,
                    *join_fds,
                    *((filter_fd, bubblewrap_status) if sandbox.level == "bubblewrap" else ()),
                ),
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                umask=0o077,
                **drops_user(sandbox),
            )
        except OSError as error:
            raise SandboxError(f"the sandbox ({sandbox.level}) did not start: {error}") from error
        child_fds.close()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                closing.callback(stream.close)
        yield process, status_read


def _collect(watch: _Watch, checks: _LimitChecks, status: int, stopped: Callable[[], bool]) -> Kind | None:
    """Collects output until the program has ended, or until it has to be ended for the returned reason."""
    streams: dict[IO[bytes], bytearray] = {}
    for stream, buffer in ((watch.process.stdout, watch.stdout), (watch.process.stderr, watch.stderr)):
        if stream is not None:
            os.set_blocking(stream.fileno(), False)
            streams[stream] = buffer
    os.set_blocking(status, False)
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(_TICK_S):
                _read_stream(watch, selector, key, status, streams)
            if (kind := watch.verdict(stopped)) is not None:
                return kind
            if (kind := checks.exceeded()) is not None:
                return kind
            if watch.ended_s is not None and time.monotonic() - watch.ended_s > _CLEAN_S:
                return None
            if watch.process.poll() is not None:
                watch.add_status(_read_available(status, _READ_BYTES))
                for stream, buffer in streams.items():  # output written before the end
                    buffer += _read_available(stream.fileno(), watch.limits.output_bytes)
                return watch.verdict(stopped) if watch.begun_s is not None else None


def _read_stream(
    watch: _Watch,
    selector: selectors.BaseSelector,
    key: selectors.SelectorKey,
    status: int,
    streams: dict[IO[bytes], bytearray],
) -> None:
    if key.fd == status:
        data = os.read(status, _READ_BYTES)
        watch.add_status(data)
        if not data:
            selector.unregister(status)
        return
    stream = next(each for each in streams if each.fileno() == key.fd)
    data = os.read(key.fd, _READ_BYTES)
    if not data:
        selector.unregister(stream)
        with contextlib.suppress(subprocess.TimeoutExpired):
            watch.process.wait(timeout=_TICK_S)  # most programs end when their output does
    streams[stream] += data


def _read_available(fd: int, limit: int) -> bytes:
    """Everything that can be read without blocking."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while len(found) <= limit and (data := os.read(fd, _READ_BYTES)):
            found += data
    return found


def _end(process: subprocess.Popen[bytes], gently: bool) -> None:
    """Ends the process and all its descendants: on the plain level it ends them itself when it gets SIGTERM."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_CLEAN_S if gently else _END_S)
        return
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_S)


def _wait_for_init(status_messages: bytes) -> None:
    """Waits until the first process of the sandbox's PID namespace has ended: the kernel ends all others before it."""
    match = _INIT_PID.search(status_messages)
    if match is None:
        return
    try:
        init = os.pidfd_open(int(match[1]))
    except OSError:  # it has ended
        return
    try:
        poller = select.poll()
        poller.register(init, select.POLLIN)
        poller.poll(_END_S * 1000)
    finally:
        os.close(init)


def _kind(code: int, error: str) -> Kind:
    if code == 0:
        return "ok"
    if code == 128 + signal.SIGXCPU:
        return "timeout"
    if code in (128 + signal.SIGKILL, 128 + signal.SIGTERM):
        return "killed"
    last = error.rstrip().rpartition("\n")[2]
    return "memory" if last.startswith("MemoryError") else "failed"


def _start_failure(watch: _Watch, process: subprocess.Popen[bytes]) -> str:
    if time.monotonic() - watch.started_s > _START_S:
        return f"it reported nothing for {_START_S:g} s"
    lines = _text(bytes(watch.stderr)).strip().splitlines()
    return lines[-1] if lines else f"it ended with status {process.returncode}"


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "replace")
