"""A worker, and how a call on a role reaches its workers.

`@parallel` marks what the controller may call and says how arguments are split and results joined; the method stays an
ordinary method, so an editor can jump to it and a type checker can check the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from roll.cluster.mesh import MeshShape

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_roll_parallel"


class Dispatch(Enum):
    """How the arguments of a call reach a role's workers."""

    ALL = "all"
    """Every worker gets the same arguments; the result is the first worker's."""
    ONE = "one"
    """Only the first worker is called."""
    DATA = "data"
    """Batches are split over the workers, balanced by tokens; results are joined by the method's `join`."""


Join = Callable[[Sequence[Any], Sequence[Any], Any], Any]
"""Joins the workers' results: (results, the indices each worker had, the whole batch) → one result."""


@dataclass(frozen=True)
class DispatchSpec:
    """What `@parallel` says of a method."""

    dispatch: Dispatch
    join: Join | None = None
    raises: tuple[type[Exception], ...] = ()
    crowded: bool = False


def dispatch(
    dispatch: Dispatch,
    join: Join | None = None,
    *,
    raises: tuple[type[Exception], ...] = (),
    crowded: bool = False,
) -> Callable[[F], F]:
    """`raises` names errors that are answers to the call, such as a refusal: they reach the caller as they are from any
    worker. Of other errors a worker in another process sends a description, a `WorkerError`. `crowded`: many such calls
    are under way at once, and travel together to another process; no token columns are among what they send."""
    if (dispatch is Dispatch.DATA) != (join is not None):
        raise TypeError("a method dispatched by data needs a join, and only such a method")
    if crowded and dispatch is not Dispatch.ONE:
        raise TypeError("only calls on one worker travel in a crowd")

    def mark(method: F) -> F:
        setattr(method, _MARK, DispatchSpec(dispatch, join, raises, crowded))
        return method

    return mark


def parallel_of(method: Callable[..., Any]) -> DispatchSpec:
    found = getattr(method, _MARK, None)
    if not isinstance(found, DispatchSpec):
        raise TypeError(f"{method.__qualname__} is not a @parallel method: the controller cannot call it on a role")
    return found


def crowded_methods(worker: type) -> frozenset[str]:
    """Names of a worker's methods whose calls travel together."""
    marks = ((name, getattr(getattr(worker, name), _MARK, None)) for name in dir(worker))
    return frozenset(name for name, mark in marks if isinstance(mark, DispatchSpec) and mark.crowded)


class SharedArguments(tuple[Any, ...]):
    """Arguments of a call that several workers get: who sends them to other processes packs the call once."""

    packed: bytes | None = None


@dataclass(frozen=True)
class WorkerPlacement:
    """Where a worker is: its role, its number in it, and the device it computes on."""

    role: str
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    """What it computes on: `cpu`, or `cuda:3` for its node's GPU number 3."""
    threads: int = 0
    """CPU threads, 0 for one a core."""
    node: str = ""
    """Id of the cluster's node it must be on; empty for any."""
    cores: tuple[int, ...] = ()
    """The cores it is held to; empty for all of its node."""
    gpus: tuple[int, ...] = ()
    """Its node's GPUs, by number; empty on a CPU."""
    mesh: MeshShape | None = None
    """How the role's ranks are arranged, where all of them together are one trainer: `rank` is then the rank in the
    mesh. Each of them needs a process of its own."""

    @property
    def name(self) -> str:
        return f"{self.role}[{self.rank}]"


class Worker:
    """Base of all roles' workers."""

    def __init__(self, place: WorkerPlacement) -> None:
        self.place = place

    async def close(self) -> None:
        """Frees what the worker holds. Called once, also after an error."""
