"""One environment inside its process: how it is created and called, and how its errors and results are reported."""

from __future__ import annotations

import inspect
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from roll.env.base import parse_reset, parse_step, tools_of
from roll.env.crash_report import current_env
from roll.env.ipc import EnvAct, EnvCall, EnvClose, EnvFailed, EnvReady, EnvReset, Result
from roll.env.resolve import EnvSpecError, Factory, check_options, resolve_options
from roll.process.child_main import REASON_CHARS, detail, log_failure, reason

if TYPE_CHECKING:
    from roll.env.shared_loop import SharedLoop

SendResult: TypeAlias = Callable[[int, Result, float], None]
"""Sends the result of a request to the pool, with the seconds it took."""


class EnvRunner(Protocol):
    """Runs the calls of one environment, one after the other."""

    def submit(self, number: int, request: EnvCall) -> None:
        """Executes and answers the request. Returns at once."""


class EnvInstance:
    """An environment, from its creation in `EnvReset` to its `EnvClose`."""

    def __init__(self, factory: Factory, root: str = "", handle: int | None = None) -> None:
        self.handle = handle
        self._factory = factory
        self._root = root
        self._environment: Any = None
        self.hit_memory_limit = False
        """Whether it has reached the memory limit."""

    @property
    def is_async(self) -> bool:
        """Whether it needs an event loop."""
        return any(inspect.iscoroutinefunction(getattr(self._factory, method, None)) for method in ("reset", "step"))

    def begin(self, request: EnvCall) -> Any:
        """Calls the environment; the result may still have to be awaited."""
        current_env.set(self.handle)
        if isinstance(request, EnvReset):
            self._environment = self._make(request)
            return self._environment.reset(seed=request.seed)
        if isinstance(request, EnvAct):
            return self._environment.step(request.action)
        environment, self._environment = self._environment, None
        close = getattr(environment, "close", None)
        return None if close is None else close()

    def finish(self, request: EnvCall, returned: Any) -> Result:
        """The environment's return value as a result for the pool."""
        try:
            if isinstance(request, EnvClose):
                return EnvReady()
            if isinstance(request, EnvReset):
                return parse_reset(returned, tools_of(self._environment))
            return parse_step(returned)
        except ValueError as error:
            return EnvFailed("invalid", str(error)[:REASON_CHARS])
        except BaseException as error:
            method = "reset" if isinstance(request, EnvReset) else "step"
            return EnvFailed("invalid", f"{method} returned what cannot be read: {reason(error)}", detail(error))

    def fail(self, error: BaseException) -> EnvFailed:
        """The failure for an exception of the environment, including the SystemExit of a `sys.exit()`."""
        if isinstance(error, EnvSpecError):
            return EnvFailed("invalid", str(error)[:REASON_CHARS])
        if isinstance(error, MemoryError):
            self.hit_memory_limit = True
            traceback.clear_frames(error.__traceback__)  # frees the memory that the call's frames hold
        try:
            failure = EnvFailed("raised", reason(error), detail(error))
            log_failure(failure.detail)
            return failure
        except MemoryError:
            return EnvFailed("raised", "MemoryError")

    def _make(self, request: EnvReset) -> Any:
        try:
            options: dict[str, Any] = pickle.loads(request.options)
        except Exception as error:
            raise EnvSpecError(f"the options cannot be read in the environment process: {reason(error)}") from error
        try:
            environment = self._factory(**resolve_options(request.name, options, self._root))
        except TypeError:
            check_options(request.name, self._factory, options)
            raise
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                kind = type(environment).__name__
                raise EnvSpecError(f"environment {request.name!r} was made as a {kind}, which has no method {method}")
        return environment


class ThreadRunner:
    """Runs one environment in a thread of its own from beginning to end, as some libraries require."""

    def __init__(
        self,
        instance: EnvInstance,
        send_result: SendResult,
        loop: Callable[[], SharedLoop],
        on_closed: Callable[[], None],
    ) -> None:
        """`on_closed` is called when the thread is about to end."""
        self._instance = instance
        self._send_result = send_result
        self._loop = loop
        self._on_closed = on_closed
        self._requests: queue.SimpleQueue[tuple[int, EnvCall]] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        self.thread = thread.ident or 0

    def submit(self, number: int, request: EnvCall) -> None:
        self._requests.put((number, request))

    def _run(self) -> None:
        closed = False
        while not closed:
            # waits: the process ends with its pool
            number, request = self._requests.get()
            started = time.perf_counter()
            result = self._result(request)
            closed = isinstance(request, EnvClose)
            if closed:
                self._on_closed()
            self._send_result(number, result, time.perf_counter() - started)

    def _result(self, request: EnvCall) -> Result:
        try:
            returned = self._instance.begin(request)
            if inspect.isawaitable(returned):
                returned = self._loop().wait_for(returned)
        except BaseException as error:
            return self._instance.fail(error)
        return self._instance.finish(request, returned)
