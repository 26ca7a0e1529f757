"""Shared memory: seen by both sides, and gone with its creator."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from transfer_peer import hold_channels, spawn

import roll.weight_sync.channel as channel_module
from roll.config.errors import RunError
from roll.weight_sync.channel import SHM, SharedMemoryChannel, attach


def files_of(pid: int) -> set[str]:
    """A process's files of this module in /dev/shm, hidden ones too. Others' may come and go meanwhile."""
    return {path.name for path in SHM.iterdir() if path.name.lstrip(".").startswith(f"roll-{pid}-")}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    resource_tracker.ensure_running()  # these two are started by the first spawning, and keep descriptors
    forkserver.ensure_running()
    files = open_files()
    yield
    gc.collect()
    assert files_of(os.getpid()) == set()
    assert open_files() <= files


@pytest.mark.parametrize("backing", ["memfd", "file", None])
def test_both_sides_see_the_same_bytes(backing: channel_module.Backing | None) -> None:
    one = SharedMemoryChannel.create(3, 100, backing)
    other = attach(pickle.loads(pickle.dumps(one.handle)))
    for index in range(3):
        one.slot(index).fill_(index + 1)
    assert [other.slot(i).tolist() for i in range(3)] == [[i + 1] * 100 for i in range(3)]
    other.slot(1)[5] = 77
    assert one.slot(1)[5] == 77
    assert one.slots == other.slots == 3
    assert bool(files_of(os.getpid())) == (backing == "file")
    other.close()
    one.close()


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_after_close_nothing_attaches_and_held_memory_stays(backing: channel_module.Backing) -> None:
    one = SharedMemoryChannel.create(2, 64, backing)
    other, held = attach(one.handle), one.slot(1)
    other.slot(1).fill_(9)
    one.close()
    one.close()
    with pytest.raises(RunError, match="closed it or"):
        attach(one.handle)
    with pytest.raises(RunError, match="the channel is closed"):
        one.slot(0)
    assert held.tolist() == other.slot(1).tolist() == [9] * 64
    other.close()
    other.close()


def test_another_memory_at_the_same_place_is_refused() -> None:
    one = SharedMemoryChannel.create(1, 64)
    handle = one.handle
    one.close()
    again = SharedMemoryChannel.create(1, 64)
    assert again.handle.path == handle.path, "the descriptor's number was expected to be used again"
    with pytest.raises(RunError, match="is not the one meant"):
        attach(handle)
    again.close()


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_forgotten_channel_is_let_go(backing: channel_module.Backing) -> None:
    handle = SharedMemoryChannel.create(1, 64, backing).handle
    gc.collect()
    with pytest.raises(RunError):
        attach(handle)


def test_where_descriptors_are_closed_to_others_a_file_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module.os, "geteuid", lambda: os.getuid() + 1)
    one = SharedMemoryChannel.create(1, 64)
    assert Path(one.handle.path).parent == SHM
    attach(one.handle).close()
    one.close()


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_memory_that_is_not_there_is_an_error_at_once(
    backing: channel_module.Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(channel_module.os, "posix_fallocate", refuse)
    with pytest.raises(RunError, match=r"no shared memory for 2 slots of 64 bytes .*No space left.* use smaller buckets"):
        SharedMemoryChannel.create(2, 64, backing)


def test_wrong_sizes_and_slots_are_refused() -> None:
    for slots, size in ((0, 10), (2, 0)):
        with pytest.raises(ValueError, match="at least one of each"):
            SharedMemoryChannel.create(slots, size)
    one = SharedMemoryChannel.create(2, 16)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"slot {index} of a channel with 2"):
            one.slot(index)
    one.close()


def test_a_killed_creator_leaves_nothing() -> None:
    """The memory without a name goes with the process; a file goes when the next one is made."""
    process, pipe = spawn(hold_channels)
    by_descriptor, by_file = pipe.recv()
    assert by_descriptor.path.startswith(f"/proc/{process.pid}/fd/")
    attached = [attach(handle) for handle in (by_descriptor, by_file)]
    assert process.pid is not None
    SharedMemoryChannel.create(1, 16, "file").close()
    assert Path(by_file.path).exists(), "its creator lives"
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    pipe.close()
    for channel in attached:
        assert channel.slot(0).tolist() == [7] * 4096
        channel.close()
    assert files_of(process.pid) <= {Path(by_file.path).name}
    with pytest.raises(RunError, match=r"closed it or died"):
        attach(by_descriptor)
    SharedMemoryChannel.create(1, 16, "file").close()
    assert files_of(process.pid) == set()
    process.close()


def test_others_files_stay() -> None:
    """Only names of ours that nobody holds are removed."""
    foreign, held = SHM / "roll-of-somebody", SHM / "roll-1-0123abcd"
    foreign.touch()
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        SharedMemoryChannel.create(1, 16, "file").close()
        assert foreign.exists()
        assert held.exists()
    SharedMemoryChannel.create(1, 16, "file").close()
    assert not held.exists()
    foreign.unlink()


def test_a_creator_that_fails_leaves_nothing_and_is_silent() -> None:
    program = (
        "from roll.weight_sync.channel import SharedMemoryChannel, attach\n"
        "one = SharedMemoryChannel.create(2, 64, 'file')\n"
        "other = attach(one.handle)\n"
        "print(one.handle.path)\n"
        "raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr == ""
    assert not Path(done.stdout.strip()).exists()
