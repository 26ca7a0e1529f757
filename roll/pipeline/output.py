"""Standard output and standard error whose reader may be gone.

A closed pipe (`roll train … | head -1`), a closed terminal or a stream that was closed from the start (`>&-`) is not an
error: output is dropped, and the exit status is that of the work. If output is lost for another reason, such as a full
disk, a command whose result it is fails; training continues.
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

_READER_GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESHUTDOWN}


def print_line(text: str) -> None:
    """Prints a line immediately, or drops it if standard output cannot be written."""
    _attempt(sys.stdout, lambda: print(KNOWN.redact(text), flush=True), lambda error: None)


@contextmanager
def tolerant_output(every_error: bool = False) -> Iterator[None]:
    """While the block runs, and at its final flush, output without a reader is dropped; with `every_error`, also output
    that cannot be written for another reason, which is otherwise a `RunError`."""
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
    """A text stream whose writes do not fail when its reader is gone, and contain no secrets."""

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
        if not self._every_error and error.errno not in _READER_GONE:
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
    """Redirects the stream to /dev/null: its buffer would otherwise fail again when Python flushes it at exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def _open_descriptors() -> None:
    """Opens /dev/null in place of closed standard streams: the next opened file would otherwise get their number, and all
    output would go into it."""
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
