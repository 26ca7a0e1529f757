"""A limit on the time for judging one text.

A user's regular expression, a library's verifier or a comparison of two long texts can take hours on an adversarial text.
Such a text is a wrong answer, not a broken reward: judging stops after some seconds and the text is worth nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

R = TypeVar("R")

TIME_LIMIT_S = 1.0
"""CPU seconds for a search or a comparison; an honest text takes milliseconds. They are the process's own CPU time, so
that a busy machine changes no verdict."""

_REPEAT_S = 0.2
"""Interval of further interrupts: Python drops exceptions raised in finalizers and garbage-collector callbacks."""


class TimeLimitReached(BaseException):
    """Judging took too long. A BaseException, so that a verifier's `except Exception` does not catch it."""


def with_time_limit(judge: Callable[[], R], default: R, seconds: float | None = None) -> R:
    """The result of `judge`, or `default` if it takes longer than `seconds` (`TIME_LIMIT_S` if None).

    A timer interrupts it, which works only in a process's main thread, where graders judge; elsewhere there is no limit.
    A timer that was already running continues afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return judge()
    judging = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if judging:
            raise TimeLimitReached

    handler = signal.signal(signal.SIGVTALRM, interrupt)
    started_s = time.process_time()
    remaining_s, interval_s = signal.setitimer(
        signal.ITIMER_VIRTUAL, TIME_LIMIT_S if seconds is None else seconds, _REPEAT_S
    )
    try:
        try:
            return judge()
        finally:
            judging = False
    except TimeLimitReached:
        return default
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        if remaining_s:
            signal.setitimer(
                signal.ITIMER_VIRTUAL, max(remaining_s - (time.process_time() - started_s), 1e-3), interval_s
            )
