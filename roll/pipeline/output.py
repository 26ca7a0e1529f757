"""Standard output and standard error when nobody may be reading them.

A closed pipe (`roll train … | head -1`), a closed terminal or a stream that was closed from the start (`>&-`) is not an
error: what would be written is dropped, and the exit status is that of the work. Output that is lost for another reason,
such as a full disk, ends a command whose result it is; training goes on.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from roll.config.errors import RunError
from roll.config.secrets import KNOWN

_NOBODY_READS = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESHUTDOWN}


def say(text: str) -> None:
    """Prints a line at once, or drops it where standard output cannot be written."""
    _attempt(sys.stdout, lambda: print(KNOWN.redact(text), flush=True), lambda error: None)


@contextmanager
def tolerant_output(every_error: bool = False) -> Iterator[None]:
    """While the block runs, and when it is flushed at the end, output that nobody reads is dropped; with `every_error`,
    also output that cannot be written for another reason, which is otherwise a `RunError`."""
    _open_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Stream(sys.stdout, "standard output", every_error))
    sys.stderr = cast(TextIO, _Stream(sys.stderr, "standard error", every_error=True))
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush()


class _Stream:
    """A text stream whose writes do not fail where nobody reads it, and have no secrets in them."""

    def __init__(self, stream: Any, name: str, every_error: bool) -> None:
        self._stream: TextIO = stream._stream if isinstance(stream, _Stream) else stream
        self._name = name
        self._every_error = every_error

    def write(self, text: str) -> int:
        _attempt(self._stream, lambda: self._stream.write(KNOWN.redact(text)), self._refuse)
        return len(text)

    def flush(self) -> None:
        _attempt(self._stream, self._stream.flush, self._refuse)

    def _refuse(self, error: OSError) -> None:
        if not self._every_error and error.errno not in _NOBODY_READS:
            raise RunError(f"cannot write to {self._name}: {error.strerror}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _attempt(stream: TextIO | None, write: Callable[[], object], refuse: Callable[[OSError], None]) -> None:
    try:
        write()
    except OSError as error:
        if stream is not None:
            _silence(stream)
        refuse(error)
    except ValueError:
        if stream is None or not stream.closed:
            raise


def _silence(stream: TextIO) -> None:
    """Points the stream at nothing: what it still holds would otherwise fail again when Python flushes it at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def _open_descriptors() -> None:
    """Opens nothing where one of the standard streams is closed: the next file to be opened would take its number, and
    everything that is printed would go into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
