"""Runs on a Ray of their own that are ended from outside, and what is left of their processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from small_runs import TINY, Child, Remains, start_roll

RAYS_AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""Two small processes of Ray's own that notice a killed head at once but take a minute to leave."""


@dataclass(frozen=True)
class LongRun:
    """`roll train`, some steps into a run that takes very long."""

    child: Child
    remains: Remains
    marker: str
    shared_before: set[Path]

    def processes(self) -> list[int]:
        """Those it has started, and they: they have the marker in their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                ours = self.marker.encode() in (folder / "environ").read_bytes()
                if ours and not (folder / "cmdline").read_bytes().startswith(RAYS_AGENTS):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def end(self) -> tuple[int, str]:
        """Exit status and output, once all its processes are gone, and with them what they shared."""
        status, deadline = self.child.end(), time.monotonic() + 120
        while left := self.processes():
            assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in left]
            time.sleep(0.1)
        assert left_in_shared_memory() <= self.shared_before
        return status, self.child.said


def left_in_shared_memory() -> set[Path]:
    """What processes that are gone have left there."""
    files = Path("/dev/shm").glob("roll-*")
    return {file for file in files if not Path(f"/proc/{file.name.split('-')[1]}").exists()}


@contextmanager
def long_run(folder: Path, *settings: str, steps: int) -> Iterator[LongRun]:
    """The run, once it has made so many steps."""
    path, marker = folder / "run", f"ROLL_TEST_{os.getpid()}_{folder.name}"
    arguments = ["train", TINY, *settings, f"run={path}", "train.steps=100000", "--plain"]
    shared = left_in_shared_memory()
    run = LongRun(start_roll(arguments, folder / "out", {marker: "1"}), Remains(path), marker, shared)
    try:
        run.child.wait_for(lambda: len(list(path.glob("samples/step-*.jsonl"))) >= steps, every_s=0.05)
        assert len(run.processes()) > 8, "its actors, its graders and Ray's own processes"
        yield run
    finally:
        run.child.kill()
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
