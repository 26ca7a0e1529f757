"""Signals that end a run early: Ctrl-C (SIGINT), `kill` (SIGTERM), and a terminal that is closed (SIGHUP).

A run that was ended by a signal raises `Stopped` or notes it in its summary; its exit status is 128 + the signal's
number, as in shells.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal ended the run. Like any KeyboardInterrupt, it passes through `except Exception`."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


def exit_status(stop: KeyboardInterrupt) -> int:
    """128 + the number of the signal."""
    return 128 + (stop.signal if isinstance(stop, Stopped) else signal.SIGINT)


@contextmanager
def signals_to(handler: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, `handler` is called with the number of each signal that would end the process.

    Outside the main thread it gets the signals that `outside_loop` forwards; without `outside_loop`, the thread's creator
    handles signals. SIGHUP stays ignored if it is ignored already, as under `nohup`.
    """
    if threading.current_thread() is not threading.main_thread():
        relay = _relay.get(None)
        if relay is not None and relay.thread is threading.current_thread():
            with relay.forwarding_to(handler):
                yield
        else:
            yield
        return
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = [(number, signal.signal(number, lambda caught, _: handler(caught))) for number in numbers]
    try:
        yield
    finally:
        for number, handler_before in before:
            signal.signal(number, handler_before)


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """The first signal cancels the running task, so that everything the block opened is closed in order; then the block
    raises `Stopped`. The second raises it without waiting for that."""
    task = asyncio.current_task()
    assert task is not None
    caught: list[int] = []

    def cancel(number: int) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise Stopped(number)
        task.get_loop().call_soon_threadsafe(task.cancel)

    with signals_to(cancel):
        try:
            yield
        except asyncio.CancelledError:
            if not caught:
                raise
            raise Stopped(caught[0]) from None


def outside_loop(work: Callable[[], T]) -> T:
    """Calls `work`, which runs an event loop of its own. If this thread already runs one, as in a notebook, `work` gets
    its own thread; this thread waits for it and forwards its signals."""
    if not _loop_is_running():
        return work()  # outside any `except`, so that an error of `work` has no other error as its context
    done: Future[T] = Future()
    relay = _Relay()

    def run() -> None:
        _relay.set(relay)
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    context = contextvars.copy_context()
    relay.thread = threading.Thread(target=context.run, args=(run,), name="roll", daemon=True)
    with signals_to(relay.forward):
        relay.thread.start()
        return done.result()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Relay:
    """Forwards signals from the main thread to a run in another thread.

    Invariants: the first signal reaches the run, even if it arrives before the run handles signals; if the handler would
    end the run by an exception, the run's task is cancelled instead; after that, the next signal ends the wait in the
    main thread.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._early: list[int] = []
        self._handler: Callable[[int], None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def forward(self, number: int) -> None:
        if self._cancelled or (self._handler is None and self._early):
            raise Stopped(number)
        if self._handler is None:
            self._early.append(number)
            return
        try:
            self._handler(number)
        except Stopped:
            self._cancelled = True
            assert self._task is not None
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    @contextmanager
    def forwarding_to(self, handler: Callable[[int], None]) -> Iterator[None]:
        """While the block runs, in the run's task, signals go to the handler."""
        self._task = asyncio.current_task()
        self._handler = handler
        try:
            if self._early:
                raise Stopped(self._early[0])
            yield
        finally:
            self._handler = None


_relay: ContextVar[_Relay | None] = ContextVar("relay")
