"""Gates in the calls of a run's workers: a call waits at its gate until a test opens it, so that a test knows what the
run is doing when it kills something.

Every process that Ray starts for such a run runs `install` first. Test and workers speak through files:

    NAME.gate      the calls that it is for, from now on
    NAME.reached   a call has come to it, and when
    NAME.open      who waits, and who comes later, goes on
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "ROLL_TEST_GATES"
"""The environment variable that names the folder of the files, in the processes of Ray."""
_POLL_S = 0.005


@dataclass(frozen=True)
class Gate:
    """As the test sees it."""

    path: Path
    """Of its files, without their suffixes."""

    @property
    def reached_s(self) -> float | None:
        """When the first call came, by the system's clock; None if none has."""
        file = self.path.with_suffix(".reached")
        return file.stat().st_mtime if file.exists() else None

    def open(self) -> None:
        self.path.with_suffix(".open").touch()


class Gates:
    """The gates of one test, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def close_at(self, calls: Sequence[str], after: bool = False, holds: bool = True) -> Gate:
        """A gate before calls such as `actor_infer[1].generate`, or `after` they have done their work. One that does not
        hold lets them pass, and tells when the first did."""
        gate = Gate(self._folder / f"{next(self._numbers):04d}")
        draft = gate.path.with_suffix(".draft")
        draft.write_text(json.dumps({"calls": list(calls), "after": after, "holds": holds}))
        draft.rename(gate.path.with_suffix(".gate"))
        return gate


def install() -> None:
    """Makes this process, which is to be a worker, stop at gates."""
    from roll.cluster.worker_runtime import WorkerRuntime

    folder, call = Path(os.environ[FOLDER]), WorkerRuntime.call

    async def gated(self: WorkerRuntime, method: str, args: Sequence[Any], kwargs: dict[str, Any], *report: Any) -> Any:
        closed = _closed(folder, f"{self._placement.name}.{method}")
        await _pass([gate for gate, after in closed if not after])
        answer = await call(self, method, args, kwargs, *report)
        await _pass([gate for gate, after in closed if after])
        return answer

    WorkerRuntime.call = gated  # type: ignore[method-assign]


def _closed(folder: Path, call: str) -> list[tuple[Path, bool]]:
    """The gates that a call finds closed, and whether it comes to them after its work."""
    found = []
    for file in sorted(folder.glob("*.gate")):
        gate = json.loads(file.read_text())
        if call in gate["calls"] and not file.with_suffix(".open").exists():
            found.append((file, gate["after"]))
            if not gate["holds"]:
                file.with_suffix(".open").touch()
    return found


async def _pass(gates: Sequence[Path]) -> None:
    for gate in gates:
        gate.with_suffix(".reached").touch()
        while not gate.with_suffix(".open").exists():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
