"""How long the way of a sample through the program is: in functions from the scheduler to the engine, and in modules.

`functions`: the length of the chain of calls of functions of `roll`, under `executor: local`, from the scheduler that
issues a group to the engine's step that computes it. The function that created a task called its first function;
comprehensions belong to their functions. `modules`: the modules of `roll` of which a function runs in a training step of
the loop `rlvr`, as `roll train` makes it. The step before is made first, so that nothing is loaded or created for the
first time. Functions in processes of their own (graders) are not counted.

`--list` prints their names.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Coroutine
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

import roll

ROOT = str(Path(roll.__file__).parent) + os.sep
ROLLOUT = {"groups_per_step": 1, "group_size": 2, "max_new_tokens": 4, "filter": "none"}
SETTINGS = {
    "model": "tiny",
    "tasks": "echo",
    "reward": "number",
    "executor": "local",
    "devices": "cpu",
    "threads": 1,
    "rollout": ROLLOUT,
    "train": {"steps": 2},
    "eval": {"every": 0, "samples": 1},
    "run": {"tensorboard": False, "curve": False, "checkpoint_every": 0},
}
ISSUE = "roll.scheduler.scheduler:RolloutScheduler._issue"
ENGINE_STEP = "roll.engine.slot_engine:SlotEngine.step"


@dataclass(frozen=True)
class Call:
    name: str
    """`module:function`."""
    caller: Call | None


class Calls:
    """The calls of functions of `roll` while the block runs, each with its caller."""

    def __init__(self) -> None:
        self.made: list[Call] = []
        self._of_frame: dict[FrameType, Call] = {}
        """Keeps the frames, so that none is mistaken for another."""
        self._creators: dict[asyncio.Task[Any], Call | None] = {}

    def __enter__(self) -> Calls:
        asyncio.get_running_loop().set_task_factory(self._create_task)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        asyncio.get_running_loop().set_task_factory(None)

    @property
    def modules(self) -> list[str]:
        return sorted({call.name.partition(":")[0] for call in self.made})

    def chain(self, first: str, last: str) -> list[str]:
        """The functions from a function to another that it leads to, in order."""
        call: Call | None = next(call for call in self.made if call.name == last)
        names: list[str] = []
        while call is not None:
            if not call.name.endswith(">"):  # a comprehension
                names.append(call.name)
            if call.name == first:
                return names[::-1]
            call = call.caller
        raise RuntimeError(f"{last} was not called because of {first}: {names}")

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(ROOT) or frame in self._of_frame:  # a coroutine that continues
            return
        module = "roll." + file.removeprefix(ROOT).removesuffix(".py").replace(os.sep, ".")
        call = Call(f"{module}:{frame.f_code.co_qualname}", self._caller(frame.f_back))
        self._of_frame[frame] = call
        self.made.append(call)

    def _caller(self, frame: FrameType | None) -> Call | None:
        while frame is not None:
            if frame in self._of_frame:
                return self._of_frame[frame]
            frame = frame.f_back
        task = asyncio.current_task()
        return self._creators.get(task) if task is not None else None

    def _create_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        creator = self._caller(sys._getframe())
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._creators[task] = creator
        return task


async def functions_to_engine() -> list[str]:
    config = roll.load_config(SETTINGS)
    tasks, judge = roll.check(config)
    async with roll.start_roles(config, judge) as roles:
        scheduler = roll.make_scheduler(config, tasks, roles, roll.Lifecycle(None), roll.RLVRState())
        await roll.publish(roles.actor, roles.engines, version=0)
        scheduler.commit(await scheduler.next_rollout(), version=0)
        with Calls() as calls:
            await scheduler.next_rollout()
        await scheduler.close()
    return calls.chain(ISSUE, ENGINE_STEP)


def modules_of_a_step() -> list[str]:
    from roll.pipeline.entrypoints import train
    from roll.pipeline.rlvr import RLVR

    found: list[list[str]] = []
    step = RLVR._step

    async def counted(self: RLVR) -> None:
        with Calls() as calls:
            await step(self)
        found.append(calls.modules)

    RLVR._step = counted  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            train(roll.load_config(SETTINGS, [f"run.dir={folder}/run"]))
    finally:
        RLVR._step = step  # type: ignore[method-assign]
    return found[-1]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--list", action="store_true", help="print the names")
    args = options.parse_args()
    functions, modules = asyncio.run(functions_to_engine()), modules_of_a_step()
    if args.list:
        print("\n".join([*functions, "", *modules]))
    report({"functions": len(functions), "modules": len(modules)}, args.json)


if __name__ == "__main__":
    main()
