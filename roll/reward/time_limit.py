"""A limit on the time that judging one text may take, where nothing else bounds it.

A pattern of the user's, a verifier of a library's or a comparison of two long texts can take hours on a text made for
that. Such a text is a wrong answer, not a broken reward: it is given up after some seconds, and is worth nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

R = TypeVar("R")

PATIENCE_S = 1.0
"""Seconds of computing that a search or a comparison may take; an honest text takes milliseconds. They are the process's
own, so that a busy machine changes no verdict."""

_AGAIN_S = 0.2
"""Python drops what is raised in a finalizer or a callback of the garbage collector: it is interrupted again."""


class TimeLimitReached(BaseException):
    """It took too long. No `except Exception` of a verifier's takes it for an error of its own."""


def patiently(judge: Callable[[], R], otherwise: R, seconds: float | None = None) -> R:
    """What `judge` returns, or `otherwise` if that takes longer (`PATIENCE_S` where nothing else is said).

    A timer interrupts it, which works only in a process's main thread, where graders judge; elsewhere there is no limit.
    A timer that was running goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return judge()
    judging = True

    def give_up(number: int, frame: FrameType | None) -> None:
        if judging:
            raise TimeLimitReached

    handler = signal.signal(signal.SIGVTALRM, give_up)
    started_s = time.process_time()
    left_s, interval_s = signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S if seconds is None else seconds, _AGAIN_S)
    try:
        try:
            return judge()
        finally:
            judging = False
    except TimeLimitReached:
        return otherwise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_VIRTUAL, max(left_s - (time.process_time() - started_s), 1e-3), interval_s)
