"""What a caller hears when a worker fails: who, where, and the first cause first."""

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
    """An error on its way from a worker to its caller, in plain text, so that it arrives whatever its types are."""

    worker: str
    method: str
    where: str
    """Process and node."""
    causes: tuple[str, ...]
    """One line an error, the first cause first."""
    trace: str
    at_s: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, worker: str, method: str, where: str) -> CallFailure:
        trace = KNOWN.redact("".join(traceback.format_exception(error)))
        return cls(worker, method, where, tuple(map(KNOWN.redact, _causes(error))), trace)


class RemoteError(RunError):
    """Something went wrong at a worker. It may pass through other workers on its way."""

    worker: str
    at_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        return _told, (type(self), self.args), self.__dict__


def _told(kind: type[RemoteError], args: tuple[Any, ...]) -> RemoteError:
    """An error that was raised elsewhere, with its message as it is."""
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
    """A worker's process ended, or cannot be reached any more."""

    def __init__(self, worker: str, reason: str, log: Path | None = None) -> None:
        said = _tail(log)
        last = f"\n  the end of {log}:\n{_indented(said)}" if said else ""
        super().__init__(f"{worker} died: {reason}{last}")
        self.worker = worker
        self.at_s = time.time()


class CallTimedOut(RemoteError):
    """A worker has not answered in time."""

    def __init__(self, worker: str, method: str, deadline_s: float) -> None:
        super().__init__(f"{worker} has not answered {method} for {deadline_s:g} s")
        self.worker = worker
        self.at_s = time.time()


class NodeLost(RunError):
    """The node that a worker was on is gone, and Ray with it: nothing can be started there."""

    def __init__(self, worker: str, node: str) -> None:
        """`node` says which, and why it is lost."""
        super().__init__(f"{worker} was on {node}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _said, (type(self), str(self))


def _said(kind: type[NodeLost], message: str) -> NodeLost:
    error = kind.__new__(kind)
    error.args = (message,)
    return error


class ClusterLost(RunError):
    """What all workers depend on is gone: the head of Ray's cluster, or Ray on the node of this program."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}: no worker can be reached any more. Start Ray again, and continue from the last checkpoint with "
            f"{option('resume')}"
        )


class TokensLost(RunError):
    """Tokens cannot be fetched any more: the worker that held them is gone."""


def first_of(errors: Iterable[E]) -> E | None:
    """The error that came first, if there is one: what a role's other workers then say is often only that they lost each
    other."""
    return min(errors, key=lambda error: getattr(error, "at_s", float("inf")), default=None)


def _causes(error: BaseException) -> list[str]:
    """The chain that ended in this error, one line each, the first cause first."""
    chain: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        lines = str(at).strip().splitlines()
        chain.append(f"{type(at).__name__}: {lines[0]}" if lines else type(at).__name__)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return chain[::-1]


def _tail(log: Path | None, lines: int = 15, reach_bytes: int = 8192) -> str:
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - reach_bytes, 0))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
