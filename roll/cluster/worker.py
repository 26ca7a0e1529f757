"""The Parallel Worker of the paper (arXiv 2506.06122), and how a call on a role reaches its workers.

`@dispatch` marks a method that the single controller may call and says how arguments are split and results joined; the
method stays an ordinary method, so an editor can jump to it and a type checker can check the call.
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
    """Every worker gets the same arguments; the result is rank 0's."""
    ONE = "one"
    """Only rank 0 is called."""
    DATA = "data"
    """Batches are split over the workers, balanced by tokens; results are joined by the method's `join`."""


Join = Callable[[Sequence[Any], Sequence[Any], Any], Any]
"""Joins the workers' results: (results, the batch indices of each worker, the whole batch) → one result."""


@dataclass(frozen=True)
class DispatchSpec:
    """The arguments of a method's `@dispatch`."""

    dispatch: Dispatch
    join: Join | None = None
    raises: tuple[type[Exception], ...] = ()
    batched: bool = False


def dispatch(
    dispatch: Dispatch,
    join: Join | None = None,
    *,
    raises: tuple[type[Exception], ...] = (),
    batched: bool = False,
) -> Callable[[F], F]:
    """`raises` lists exceptions that are valid results of the call, such as a rejection: they reach the caller unchanged
    from any worker. For other exceptions a worker in another process sends a description, a `WorkerError`. `batched`:
    many such calls are in flight at once, and they are sent to another process in batches; their arguments and results
    must not contain token columns."""
    if (dispatch is Dispatch.DATA) != (join is not None):
        raise TypeError("a method dispatched by data needs a join, and only such a method")
    if batched and dispatch is not Dispatch.ONE:
        raise TypeError("only a method dispatched to one worker can be batched")

    def mark(method: F) -> F:
        setattr(method, _MARK, DispatchSpec(dispatch, join, raises, batched))
        return method

    return mark


def dispatch_of(method: Callable[..., Any]) -> DispatchSpec:
    spec = getattr(method, _MARK, None)
    if not isinstance(spec, DispatchSpec):
        raise TypeError(f"{method.__qualname__} is not a @dispatch method: the controller cannot call it on a role")
    return spec


def batched_methods(worker: type) -> frozenset[str]:
    """Names of a worker's methods whose calls are sent in batches."""
    marks = ((name, getattr(getattr(worker, name), _MARK, None)) for name in dir(worker))
    return frozenset(name for name, mark in marks if isinstance(mark, DispatchSpec) and mark.batched)


class SharedArguments(tuple[Any, ...]):
    """Arguments of a call to several workers: the executor serializes the call once for all of them."""

    packed: bytes | None = None


@dataclass(frozen=True)
class WorkerPlacement:
    """Where a worker runs: its role, its rank in the role, and its device."""

    role: str
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    """Its device: `cpu`, or `cuda:3` for GPU 3 of its node."""
    threads: int = 0
    """CPU threads, 0 for one per core."""
    node: str = ""
    """Id of the node it must run on; empty for any."""
    cores: tuple[int, ...] = ()
    """CPU cores it is pinned to; empty for all cores of its node."""
    gpus: tuple[int, ...] = ()
    """Indices of its GPUs on its node; empty on a CPU."""
    mesh: MeshShape | None = None
    """Shape of the device mesh if the ranks of the role are one sharded trainer: `rank` is then the rank in the mesh.
    Each rank needs its own process."""

    @property
    def name(self) -> str:
        return f"{self.role}[{self.rank}]"


class Worker:
    """Base of all roles' workers."""

    def __init__(self, placement: WorkerPlacement) -> None:
        self.placement = placement

    async def close(self) -> None:
        """Frees the worker's resources. Called once, also after an error."""
