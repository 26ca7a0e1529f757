"""The memory limit of a process that runs user code.

The kernel enforces it (RLIMIT_DATA): an environment or reward that allocates more gets a `MemoryError`, and others in the
process are not affected. The limit applies to memory beyond what the process had at the start, without the stacks of
environment threads, which are almost unused. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import threading

_STACK_BYTES = 8 << 20
_SPARE_STACKS = 8  # of threads that have ended, and of threads that are no environment's
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's mallopt


class MemoryLimit:
    def __init__(self, limit_mb: int) -> None:
        """`limit_mb`: 0 for no limit. Create this before any thread is started."""
        self._limit_bytes = limit_mb << 20 if sys.platform == "linux" else 0
        self._threads = 0
        self._ending_threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        if self._limit_bytes:
            threading.stack_size(_STACK_BYTES)
            _return_freed_memory()
            self._start_bytes = _data_bytes()
            self._apply()

    def add_thread(self) -> None:
        """Call this before an environment's thread is started."""
        if self._limit_bytes:
            with self._lock:
                self._threads += 1
                self._apply()

    def remove_thread(self) -> None:
        """Call this in an environment's thread before it ends."""
        if self._limit_bytes:
            with self._lock:
                self._ending_threads.append(threading.current_thread())
                self._apply()

    def is_short(self) -> bool:
        """Whether more than half of the limit is still used after a garbage collection."""
        if not self._limit_bytes:
            return False
        gc.collect()
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        return _data_bytes() > self._rlimit_bytes - self._limit_bytes // 2

    def _apply(self) -> None:
        ending = [thread for thread in self._ending_threads if thread.is_alive()]  # a live thread still has its stack
        self._threads -= len(self._ending_threads) - len(ending)
        self._ending_threads = ending
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._rlimit_bytes if hard == resource.RLIM_INFINITY else min(self._rlimit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    @property
    def _rlimit_bytes(self) -> int:
        return self._start_bytes + self._limit_bytes + (self._threads + _SPARE_STACKS) * _STACK_BYTES


def _return_freed_memory() -> None:
    """Makes glibc return freed memory to the kernel, which would otherwise count it as used."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")  # loaded when the first thread ends, which is fatal if memory is short then


def _data_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
