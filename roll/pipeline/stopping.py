"""Signals that end a run early: Ctrl-C (SIGINT), `kill` (SIGTERM), and a terminal that is closed (SIGHUP).

A run that a signal ended raises `Stopped` or says so in its summary; its exit status is 128 + the signal's number, as
shells have it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    Only in the main thread: elsewhere, whoever started the thread handles signals. SIGHUP stays ignored where it is
    ignored already, as it is under `nohup`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = [(number, signal.signal(number, lambda caught, _: handler(caught))) for number in numbers]
    try:
        yield
    finally:
        for number, former in before:
            signal.signal(number, former)


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """The first signal cancels the running task, so that what the block opened is closed in order; then the block raises
    `Stopped`. The second raises it without waiting for that."""
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
