"""The subreaper of a child: a process between parent and child that kills all processes that user code started.

    parent ── outer subreaper ── inner subreaper ── child ── processes started by user code
                                        └─────────────────── daemons: orphans become children of the nearest subreaper

A process that leaves the child's group and session (a daemon, by setsid and two forks) would outlive the child. Linux
reparents orphans to the nearest ancestor with PR_SET_CHILD_SUBREAPER. When its child or its own parent ends, a subreaper
kills its child and all processes below itself; then it exits with the child's exit status or signal.

There are two because one may be killed: if the parent or the outer subreaper ends, the inner one kills everything; if the
inner one is killed, the child is killed with it, and its orphans go to the outer one. The inner subreaper also writes the
child's output to its log.

A subreaper ignores signals that a terminal or a job scheduler sends to every process of a job: the parent handles them.
On other systems than Linux it kills the child's process group only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from roll.process.bounded_log import CHUNK_BYTES, BoundedLog, is_bounded, wide_pipe
from roll.process.framing import HEADER

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_ENDED = signal.SIGRTMIN + 9 if _LINUX else signal.SIGUSR2
"""The signal that makes a subreaper kill everything. No job scheduler sends it."""
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SWEEP_S = 5.0
"""Deadline for killed processes to end; a process that waits for a broken disk may never end."""
_POLL_S = 1.0
_STOP_ROUNDS = 50


def program() -> str:
    """A subreaper's program: `python -I -S -c PROGRAM log log_bytes parent_pid connection_fd python command
    *sys.path`."""
    root = str(Path(__file__).parents[2])
    return f"import sys; sys.path.insert(0, {root!r}); from roll.process.subreaper import main; main()"


def main() -> NoReturn:
    """Runs the outer subreaper, which starts the inner one, which starts the child. The child's process id is sent over
    the connection before the child's command runs."""
    log, log_bytes, parent, connection, python, command, *path = sys.argv[1:]
    output = _Output(Path(log), int(log_bytes)) if log and is_bounded(Path(log)) else None

    def run_child() -> NoReturn:
        if output is not None:
            output.redirect()
        os.write(int(connection), HEADER.pack(os.getpid()))
        os.execv(python, [python, "-P", "-c", command, connection, str(os.getppid()), *path])

    def run_inner() -> NoReturn:
        _Subreaper(os.getppid(), run_child, int(connection), output, outer=False).run()

    _Subreaper(int(parent), run_inner, int(connection), output, outer=True).run()


class _Output:
    """The pipe from the child's output to the log."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._log = BoundedLog(path, limit_bytes)
        self.reading, self._writing = wide_pipe()
        os.set_blocking(self.reading, False)

    def redirect(self) -> None:
        """In the child: redirects stdout and stderr to the pipe."""
        os.dup2(self._writing, 1)
        os.dup2(self._writing, 2)

    def close_write_end(self, *, read: bool) -> None:
        """In a subreaper: closes the write end, so that the reader sees the end of the output when the child closes
        it."""
        os.close(self._writing)
        if not read:
            os.close(self.reading)

    def copy_available(self) -> bool:
        """Copies available output to the log; returns whether there may be more."""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self.reading, CHUNK_BYTES)
            self._log.write(chunk)
            return bool(chunk)
        return False


class _Subreaper:
    def __init__(
        self, parent: int, start: Callable[[], NoReturn], connection: int, output: _Output | None, *, outer: bool
    ) -> None:
        """`start` runs in the child; only the child keeps the connection. The outer subreaper's child is the inner
        one."""
        self._parent = parent
        self._start = start
        self._connection = connection
        self._child_output = output
        self._output = None if outer else output
        self._outer = outer
        self._child = 0
        self._orphaned = False

    def run(self) -> NoReturn:
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (*_IGNORED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(PARENT_ENDED, self._on_parent_end)
        _prctl(_PR_SET_PDEATHSIG, int(PARENT_ENDED))
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != self._parent:
            os._exit(0)
        self._child = os.fork()
        if self._child == 0:
            self._begin_child(wake_read, wake_write)
        os.close(self._connection)
        if self._child_output is not None:
            self._child_output.close_write_end(read=not self._outer)
        self._watch(wake_read)
        self._end()

    def _begin_child(self, *pipes: int) -> NoReturn:
        """Starts a session, so that its process group can be killed, and sets the child to die with its subreaper."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (*_IGNORED_SIGNALS, signal.SIGCHLD, PARENT_ENDED):
                signal.signal(number, signal.SIG_DFL)
            for end in pipes:
                os.close(end)
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            self._start()
        except BaseException as error:
            print(f"a process could not be started: {error}", file=sys.stderr, flush=True)
        os._exit(127)

    def _on_parent_end(self, *_: object) -> None:
        self._orphaned = True

    def _watch(self, wake_read: int) -> None:
        """Returns when the child has ended (it is not reaped yet) or the parent has."""
        watched = [wake_read] if self._output is None else [wake_read, self._output.reading]
        while not self._is_over():
            ready, _, _ = select.select(watched, [], [], _POLL_S if not _LINUX else None)
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if self._output is not None and self._output.reading in ready and not self._output.copy_available():
                watched = [wake_read]  # the child has closed its output
            self._reap_orphans()

    def _is_over(self) -> bool:
        return self._orphaned or os.getppid() != self._parent or self._child_ended()

    def _reap_orphans(self) -> None:
        for pid in _children(os.getpid()):
            if pid != self._child:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _end(self) -> NoReturn:
        """Kills all remaining processes, then exits with the child's exit status or signal."""
        if self._outer:
            self._end_inner()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child, signal.SIGKILL)  # its process id is not reused before it is reaped
        self._sweep()
        deadline = time.monotonic() + _SWEEP_S
        while self._output is not None and self._output.copy_available() and time.monotonic() < deadline:
            pass
        _, status = os.waitpid(self._child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with contextlib.suppress(OSError, ValueError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(max(code, 0))

    def _end_inner(self) -> None:
        """Signals the inner subreaper to end, which kills its processes and finishes the log, and waits for it; `_end`
        kills one that does not end."""
        _send(self._child, PARENT_ENDED)
        deadline = time.monotonic() + 2 * _SWEEP_S
        while not self._child_ended() and time.monotonic() < deadline:
            time.sleep(0.002)

    def _sweep(self) -> None:
        """Kills every process below this one. All are stopped first, so that none can start others in the meantime."""
        deadline = time.monotonic() + _SWEEP_S
        while time.monotonic() < deadline:
            stopped: set[int] = set()
            for _ in range(_STOP_ROUNDS):
                new = set(_descendants(os.getpid())) - stopped - {self._child}
                if not new:
                    break
                for pid in new:
                    _send(pid, signal.SIGSTOP)
                stopped |= new
            for pid in stopped:
                _send(pid, signal.SIGKILL)
            self._reap_orphans()
            if not stopped and self._child_ended():
                return
            if self._output is not None:
                self._output.copy_available()  # a full pipe may keep a process from ending
            time.sleep(0.002)

    def _child_ended(self) -> bool:
        return os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descendants(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    """A process's children, including zombies; none on other systems than Linux."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                found += map(int, children.read().split())
    except OSError:  # the process has ended, or the kernel has no such list
        return found or _children_by_parent(pid)
    return found


def _children_by_parent(pid: int) -> list[int]:
    found: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc") if _LINUX else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == pid:
                found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
