"""Byte slots that processes of one machine share: in shared memory, or on a GPU that both use.

Invariants: bytes that one side wrote to a slot and settled are the bytes that the other side reads; the callers
coordinate when each side writes (`stream`). The creator owns the memory: once its channel was closed or collected, or its
process has ended, nothing new can attach, and the memory is freed when the last side releases it. A slot tensor that is
used after `close` is still valid memory (on a GPU, memory that may contain other bytes by then).
"""

from __future__ import annotations

import fcntl
import inspect
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from roll.config.errors import RunError

SHM = Path("/dev/shm")
PREFIX = "roll-"
"""Prefix of every file name of this module; the creator's process id follows."""

ChannelKind: TypeAlias = Literal["shared_memory", "cuda_ipc"]
Backing: TypeAlias = Literal["memfd", "file"]


class Channel(Protocol):
    @property
    def slots(self) -> int: ...

    @property
    def handle(self) -> Handle:
        """A picklable handle with which the other side attaches."""

    def slot(self, index: int) -> Tensor:
        """The slot's bytes as a flat uint8 tensor."""

    def settle(self) -> None:
        """Returns once all copies of this side into and out of the slots are complete."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class SharedMemoryHandle:
    path: str
    inode: int
    """Distinguishes the memory from a later one with the same path."""
    slots: int
    slot_bytes: int


@dataclass(frozen=True)
class CudaIpcHandle:
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    gpu: str
    """UUID of the GPU, because processes number their GPUs differently."""
    slots: int
    slot_bytes: int


Handle: TypeAlias = SharedMemoryHandle | CudaIpcHandle


def attach(handle: Handle) -> Channel:
    """Attaches to a channel that was created on this machine."""
    if isinstance(handle, SharedMemoryHandle):
        return SharedMemoryChannel.attach(handle)
    return CudaIpcChannel.attach(handle)


class SharedMemoryChannel:
    """Slots in host memory: a memfd of the creator or, if other processes may not open that, a file in /dev/shm.

    A memfd has no name and cannot be leaked, not even by SIGKILL; other processes of the user open it as
    /proc/<pid>/fd/<n>. A file in /dev/shm is removed by `close`, garbage collection and exit; if its creator was killed,
    it is removed when the next file is created.
    """

    def __init__(self, handle: SharedMemoryHandle, descriptor: int) -> None:
        self._handle = handle
        memory = mmap.mmap(descriptor, handle.slots * handle.slot_bytes)
        self._memory: Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._release: Callable[[], object] = lambda: None

    @classmethod
    def create(cls, slots: int, slot_bytes: int, backing: Backing | None = None) -> SharedMemoryChannel:
        """Allocates all memory at once, so that a lack of memory fails here and not in the middle of a copy."""
        _check_size(slots, slot_bytes)
        backing = backing or ("memfd" if _descriptors_are_open_to_others() else "file")
        descriptor, path = _memfd() if backing == "memfd" else _file()
        file = path if backing == "file" else None
        try:
            os.posix_fallocate(descriptor, 0, slots * slot_bytes)
            handle = SharedMemoryHandle(str(path), os.fstat(descriptor).st_ino, slots, slot_bytes)
            channel = cls(handle, descriptor)
        except OSError as error:
            _free_memory(os.getpid(), descriptor, file)
            raise RunError(
                f"no shared memory for {slots} slots of {slot_bytes} bytes ({error}): use smaller buckets"
                + (", or give /dev/shm more space" if file else "")
            ) from error
        except BaseException:
            _free_memory(os.getpid(), descriptor, file)
            raise
        channel._release = weakref.finalize(channel, _free_memory, os.getpid(), descriptor, file)
        return channel

    @classmethod
    def attach(cls, handle: SharedMemoryHandle) -> SharedMemoryChannel:
        try:
            descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(
                f"cannot attach to the shared memory {handle.path} ({error.strerror}): its creator has closed it or "
                "died, or is not a process of this user on this machine; across machines, broadcast"
            ) from error
        try:
            if os.fstat(descriptor).st_ino != handle.inode:
                raise RunError(f"the shared memory {handle.path} is not the one meant: its creator has closed it or died")
            return cls(handle, descriptor)
        finally:
            os.close(descriptor)  # the memory stays mapped

    @property
    def handle(self) -> SharedMemoryHandle:
        return self._handle

    @property
    def slots(self) -> int:
        return self._handle.slots

    def slot(self, index: int) -> Tensor:
        return _slot(self._memory, index, self._handle)

    def settle(self) -> None:
        """Does nothing: copies to and from host memory are synchronous."""

    def close(self) -> None:
        self._memory = None
        self._release()


class CudaIpcChannel:
    """Slots in the memory of a GPU that any number of processes share.

    Torch expects exactly one receiver per handle and otherwise never frees the memory. So the creator releases its
    reference count at once, and each receiver counts on a tensor of its own.
    """

    def __init__(self, handle: CudaIpcHandle, memory: Tensor, counter: Tensor | None = None) -> None:
        self._handle = handle
        self._memory: Tensor | None = memory
        self._counter = counter

    @classmethod
    def create(cls, slots: int, slot_bytes: int, device: torch.device) -> CudaIpcChannel:
        _check_size(slots, slot_bytes)
        memory = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
        rebuild, arguments = reduce_tensor(memory)  # type: ignore[no-untyped-call]
        named = inspect.signature(rebuild).bind(*arguments).arguments
        torch.UntypedStorage._release_ipc_counter(  # type: ignore[no-untyped-call]
            named["ref_counter_handle"], named["ref_counter_offset"], device=memory.device
        )
        gpu = str(torch.cuda.get_device_properties(memory.device).uuid)
        return cls(CudaIpcHandle(rebuild, arguments, gpu, slots, slot_bytes), memory)

    @classmethod
    def attach(cls, handle: CudaIpcHandle) -> CudaIpcChannel:
        visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if handle.gpu not in visible:
            raise RunError(
                f"cannot attach to memory of GPU {handle.gpu}: this process sees {visible or 'no GPU'}; "
                "use CUDA IPC only between roles that share a GPU"
            )
        device = visible.index(handle.gpu)
        counter = torch.empty(1, dtype=torch.uint8, device=f"cuda:{device}")
        _, arguments = reduce_tensor(counter)  # type: ignore[no-untyped-call]
        signature = inspect.signature(handle.rebuild)
        own, call = signature.bind(*arguments), signature.bind(*handle.arguments)
        for name in ("ref_counter_handle", "ref_counter_offset", "storage_device"):
            call.arguments[name] = own.arguments[name]
        return cls(handle, handle.rebuild(*call.args, **call.kwargs), counter)

    @property
    def handle(self) -> CudaIpcHandle:
        return self._handle

    @property
    def slots(self) -> int:
        return self._handle.slots

    def slot(self, index: int) -> Tensor:
        return _slot(self._memory, index, self._handle)

    def settle(self) -> None:
        if self._memory is not None:
            torch.cuda.synchronize(self._memory.device)

    def close(self) -> None:
        if self._memory is not None:
            self.settle()
            self._memory = None
            self._counter = None
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _slot(memory: Tensor | None, index: int, handle: Handle) -> Tensor:
    if memory is None:
        raise RunError("the channel is closed: open a new one")
    if not 0 <= index < handle.slots:
        raise IndexError(f"slot {index} of a channel with {handle.slots}")
    return memory[index * handle.slot_bytes : (index + 1) * handle.slot_bytes]


def _check_size(slots: int, slot_bytes: int) -> None:
    if slots < 1 or slot_bytes < 1:
        raise ValueError(f"a channel of {slots} slots of {slot_bytes} bytes: give at least one of each")


def _descriptors_are_open_to_others() -> bool:
    """Whether other processes of this user may open this process's descriptors: in /proc, those of a protected process
    belong to root."""
    try:
        return os.stat(f"/proc/{os.getpid()}/fd").st_uid == os.geteuid()
    except OSError:
        return False


def _memfd() -> tuple[int, Path]:
    descriptor = os.memfd_create(f"{PREFIX}{os.getpid()}")
    return descriptor, Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def _file() -> tuple[int, Path]:
    """Creates a locked file. The kernel releases the lock when the creator ends for any reason, so others can detect
    that."""
    _remove_leftovers()
    path = SHM / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    unlocked = path.with_name(f".{path.name}")  # so that an unlocked file under the final name is always a leftover
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(path)
    return descriptor, path


def _remove_leftovers() -> None:
    for path in SHM.glob(f"{PREFIX}[0-9]*-????????"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # it belongs to another user, or was removed in the meantime
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its creator is alive
        finally:
            os.close(descriptor)


def _free_memory(creator: int, descriptor: int, file: Path | None) -> None:
    if file is not None and creator == os.getpid():  # a forked child of the creator runs this too at exit
        file.unlink(missing_ok=True)
    os.close(descriptor)
