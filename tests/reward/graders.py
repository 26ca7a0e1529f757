"""A reward function that does what the task's answer says, however bad. Grader processes load it from this file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from roll.data import Response, Task


class Steady:
    """A reward that says it is deterministic, and returns each time how often it was called in this process."""

    deterministic = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, task: Task, response: Response) -> Any:
        if task.answer == "raise":
            raise KeyError("again")
        self.calls += 1
        return {"calls": self.calls}


def act(task: Task, response: Response) -> Any:
    action, *arguments = task.answer
    return ACTIONS[action](*arguments)


def _raise(text: str) -> None:
    raise KeyError(text)


def _spin() -> None:
    while True:
        pass


def _die_once(marker: str, value: float) -> float:
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def _shout(value: float) -> float:
    print("\x00garbage" * 10_000)
    sys.stderr.write("noise\n")
    os.write(1, b"\xff" * 1000)
    subprocess.run(["echo", "from a child"], check=True)
    assert sys.stdin.read() == ""
    return value


def _leave_child(pid_file: str, then: str) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    if then == "exit":
        os._exit(1)
    time.sleep(60)
    return 0.0


def _fork_and_return(value: float) -> float:
    os.fork()
    return value


def _leave_thread(value: float) -> float:
    threading.Thread(target=time.sleep, args=(60,)).start()
    return value


def _sleep_then(seconds: float, value: float) -> float:
    time.sleep(seconds)
    return value


def _write_garbage() -> None:
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):
                os.write(fd, b"\x00" * 7 + b"\x04oops")


def _loaded(names: list[str]) -> float:
    return float(sum(name in sys.modules for name in names))


_KEPT: list[bytearray] = []


def _take_memory(megabytes: int, keep: bool) -> float:
    for _ in range(megabytes):
        block = bytearray(1 << 20)
        _KEPT.append(block)
    if not keep:
        _KEPT.clear()
    return float(megabytes)


def _greedy(megabytes: int) -> float:
    return float(len(bytearray(megabytes << 20)))


def _raise_if_loaded(names: list[str]) -> float:
    loaded = [name for name in names if name in sys.modules]
    if loaded:
        raise ImportError(f"loaded: {loaded}")
    return 0.0


ACTIONS: dict[str, Any] = {
    "give": lambda value: value,
    "raise": _raise,
    "sys.exit": sys.exit,
    "sleep": _sleep_then,
    "spin": _spin,
    "os._exit": os._exit,
    "segfault": lambda: ctypes.string_at(0),
    "kill itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "die once": _die_once,
    "shout": _shout,
    "leave child": _leave_child,
    "fork": _fork_and_return,
    "leave thread": _leave_thread,
    "take memory": _take_memory,
    "greedy": _greedy,
    "pid": lambda: float(os.getpid()),
    "loaded": _loaded,
    "raise if loaded": _raise_if_loaded,
    "nan": lambda: float("nan"),
    "write garbage": _write_garbage,
    "close connection": lambda: os.closerange(3, 65536),
}
