"""Environments that do what the action says, however bad. Environment processes load them from this file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from roll.env import Environment, Step

LEAKED: list[bytearray] = []


class World(Environment):
    """`options` name what to do on the way: `begin` in `reset`, `end` in `close`, each an action."""

    def __init__(self, begin: list[Any] | None = None, end: list[Any] | None = None) -> None:
        self.begin, self.end = begin, end
        self.seed, self.count = -1, 0
        self.held: list[bytearray] = []
        self.thread = threading.get_ident()

    def reset(self, seed: int) -> Any:
        self.seed = seed
        return f"seed {seed}" if self.begin is None else self.act(*self.begin)

    def step(self, action: str) -> Any:
        result = self.act(*json.loads(action))
        return Step(result) if isinstance(result, str) else result

    def close(self) -> None:
        if self.end is not None:
            self.act(*self.end)

    def act(self, name: str, *arguments: Any) -> Any:
        return ACTIONS[name](self, *arguments)

    def say(self, text: str) -> str:
        return text

    def give(self, *values: Any) -> Any:
        return tuple(values)

    def tell(self) -> str:
        """Whose world this is and how often it was asked."""
        self.count += 1
        return f"{self.seed}:{self.count}"

    def raises(self, text: str) -> None:
        raise KeyError(text)

    def sleep(self, seconds: float, text: str = "slept") -> str:
        time.sleep(seconds)
        return text

    def spin(self) -> None:
        while True:
            pass

    def touch(self, path: str) -> str:
        Path(path).touch()
        return "touched"

    def pid(self) -> str:
        return str(os.getpid())

    def shout(self) -> str:
        print("\x00garbage" * 10_000)
        sys.stderr.write("noise\n")
        os.write(1, b"\xff" * 1000)
        subprocess.run(["echo", "from a child"], check=True)
        assert sys.stdin.read() == ""
        return "shouted"

    def leave_child(self, pid_file: str, then: str) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(pid_file).write_text(str(child.pid))
        if then == "exit":
            os._exit(1)
        time.sleep(60)

    def fork(self) -> str:
        os.fork()
        return "forked"

    def fork_and_die(self) -> None:
        """Leaves a copy that holds the connection."""
        if os.fork():
            os._exit(9)
        time.sleep(60)

    def write_garbage(self, *garbage: int) -> str:
        for fd in map(int, os.listdir("/dev/fd")):
            if fd > 2:
                with contextlib.suppress(OSError):
                    os.write(fd, bytes(garbage))
        time.sleep(60)
        return "wrote"

    def hog(self, megabytes: int, where: str) -> str:
        """Memory that goes with the call, with the environment, or never."""
        mine = {"call": [], "environment": self.held, "process": LEAKED}[where]
        for _ in range(megabytes):
            mine.append(bytearray(1 << 20))
        return "hogged"

    def same_thread(self) -> str:
        return str(threading.get_ident() == self.thread)

    def loaded(self, *names: str) -> str:
        return " ".join(name for name in names if name in sys.modules)

    def order_of_a_set(self) -> str:
        return " ".join({f"word {number}" for number in range(20)})


ACTIONS: dict[str, Callable[..., Any]] = {
    "say": World.say,
    "give": World.give,
    "tell": World.tell,
    "raise": World.raises,
    "sys.exit": lambda world, status: sys.exit(status),
    "sleep": World.sleep,
    "spin": World.spin,
    "touch": World.touch,
    "pid": World.pid,
    "nothing": lambda world: None,
    "nan": lambda world: ("", float("nan"), False, False, {}),
    "os._exit": lambda world, status: os._exit(status),
    "segfault": lambda world: ctypes.string_at(0),
    "kill itself": lambda world: os.kill(os.getpid(), signal.SIGKILL),
    "close connection": lambda world: os.closerange(3, 65536),
    "write garbage": World.write_garbage,
    "shout": World.shout,
    "leave child": World.leave_child,
    "fork": World.fork,
    "fork and die": World.fork_and_die,
    "hog": World.hog,
    "huge": lambda world, megabytes: "x" * (megabytes << 20),
    "same thread": World.same_thread,
    "loaded": World.loaded,
    "order of a set": World.order_of_a_set,
}


class AsyncWorld:
    """The same on the event loop; sleeping does not block it, anything else may. Derives from nothing."""

    def __init__(self, **options: Any) -> None:
        self.world = World(**options)

    async def reset(self, seed: int) -> Any:
        return await self._awaited(self.world.reset(seed))

    async def step(self, action: str) -> Any:
        name, *arguments = json.loads(action)
        if name == "sleep":
            await asyncio.sleep(arguments[0])
            return Step("slept")
        if name == "background exit":
            task = asyncio.get_running_loop().create_task(self._exit())
            await asyncio.wait({task})
            return Step("left")
        return await self._awaited(self.world.step(action))

    async def close(self) -> None:
        self.world.close()

    @staticmethod
    async def _exit() -> None:
        sys.exit(3)

    @staticmethod
    async def _awaited(result: Any) -> Any:
        await asyncio.sleep(0)
        return result


class GymLike:
    """As written for Gymnasium: keyword-only reset with more arguments, an observation with info, a plain tuple."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.random = random.Random(seed)
        return "go", {"difficulty": 2}

    def step(self, action: str) -> tuple[str, int, bool, bool, dict[str, Any]]:
        return action.upper(), 1, False, action == "stop", {"draw": self.random.random(), "note": "ok"}


def make_async(**options: Any) -> AsyncWorld:
    return AsyncWorld(**options)


def make_nothing() -> int:
    return 3


class Forgetful:
    """Plain methods that return what should have been awaited."""

    def reset(self, seed: int) -> Awaitable[str]:
        return self._later(f"seed {seed}")

    def step(self, action: str) -> Awaitable[Step]:
        return self._later(Step(action))

    async def _later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value
