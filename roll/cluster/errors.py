"""Errors that callers get when a worker fails: they name the worker, the process and the root cause first."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from roll.config.errors import RunError
from roll.config.hints import option
from roll.config.secrets import KNOWN

E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True)
class CallFailure:
    """An error in plain text, so that it can be sent from a worker to its caller whatever its type is."""

    worker: str
    method: str
    where: str
    """Process and node."""
    causes: tuple[str, ...]
    """One line per error of the chain, root cause first."""
    trace: str
    at_s: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, worker: str, method: str, where: str) -> CallFailure:
        trace = KNOWN.redact("".join(traceback.format_exception(error)))
        return cls(worker, method, where, tuple(map(KNOWN.redact, _causes(error))), trace)


class RemoteError(RunError):
    """A worker failed. Other workers may pass this error on to their callers."""

    worker: str
    at_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_error, (type(self), self.args), self.__dict__


def _unpickled_error(kind: type[RemoteError], args: tuple[Any, ...]) -> RemoteError:
    """Unpickles an error that was raised in another process, with its message unchanged."""
    return kind.__new__(kind, *args)


class WorkerError(RemoteError):
    """A worker's method raised. `trace` is the traceback of the worker's process."""

    def __init__(self, failure: CallFailure) -> None:
        first, *rest = failure.causes
        led_to = "".join(f"\n  which led to {line}" for line in rest)
        super().__init__(
            f"{failure.worker} failed in {failure.method}: {first}{led_to}\n"
            f"  ({failure.where})\n{_indented(failure.trace)}"
        )
        self.worker = failure.worker
        self.trace = failure.trace
        self.at_s = failure.at_s


class WorkerDied(RemoteError):
    """A worker's process ended or cannot be reached."""

    def __init__(self, worker: str, reason: str, log: Path | None = None) -> None:
        tail = _tail(log)
        log_end = f"\n  the end of {log}:\n{_indented(tail)}" if tail else ""
        super().__init__(f"{worker} died: {reason}{log_end}")
        self.worker = worker
        self.at_s = time.time()


class CallTimedOut(RemoteError):
    """A worker has not answered a call within its deadline."""

    def __init__(self, worker: str, method: str, deadline_s: float) -> None:
        super().__init__(f"{worker} has not answered {method} for {deadline_s:g} s")
        self.worker = worker
        self.at_s = time.time()


class NodeLost(RunError):
    """The node of a worker is lost, and Ray on it: no worker can be restarted there."""

    def __init__(self, worker: str, node: str) -> None:
        """`node` names the node and says why it is lost."""
        super().__init__(f"{worker} was on {node}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_node_lost, (type(self), str(self))


def _unpickled_node_lost(kind: type[NodeLost], message: str) -> NodeLost:
    error = kind.__new__(kind)
    error.args = (message,)
    return error


class ClusterLost(RunError):
    """No worker can be reached: the head of the Ray cluster is gone, or Ray on the node of this process."""

    def __init__(self, why: str, started_here: bool = False) -> None:
        """`own`: the run itself has started Ray, and starts it again when it is resumed."""
        advice = "" if started_here else "start Ray again, and "
        todo = f"{advice}continue from the last checkpoint with {option('resume')}"
        super().__init__(f"{why}: no worker can be reached any more. {todo[0].upper()}{todo[1:]}")


class TokensLost(RunError):
    """Tokens cannot be fetched: the worker that held them died."""


def first_of(errors: Iterable[E]) -> E | None:
    """The earliest error, or None. Later errors of a role's workers are often only lost connections to each other."""
    return min(errors, key=lambda error: getattr(error, "at_s", float("inf")), default=None)


def _causes(error: BaseException) -> list[str]:
    """The chain of exceptions that led to this error, one line each, root cause first."""
    chain: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines = str(current).strip().splitlines()
        chain.append(f"{type(current).__name__}: {lines[0]}" if lines else type(current).__name__)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain[::-1]


def _tail(log: Path | None, lines: int = 15, max_bytes: int = 8192) -> str:
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - max_bytes, 0))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
