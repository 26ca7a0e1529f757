"""The subreaper: daemons of users' code end with the child, with its subreapers and with the parent, and only then."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import alive, eventually, gone, printed_pids
from test_child import said, with_child

from roll.process import subreaper
from roll.process.managed_process import ManagedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere daemons cannot be found")

DAEMON = "import os,sys,time; print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True); time.sleep(600)"


def start_daemons(notes: Path) -> str:
    """Code that starts a process in a session of its own, and one that is nobody's child and has lost its environment."""
    arguments = [sys.executable, "-c", DAEMON, str(notes)]
    return f"""
import os, subprocess
subprocess.Popen({arguments!r}, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 65536)
        os.execve({sys.executable!r}, {arguments!r}, {{}})
    os._exit(0)
os.wait()
"""


def daemons(notes: Path) -> list[int]:
    assert eventually(lambda: notes.exists() and notes.read_text().count("\n") == 2)
    return [int(line) for line in notes.read_text().split()]


def subreapers(child: ManagedProcess) -> tuple[int, int]:
    """The outer one and the inner one."""
    inner = _parent(child.pid)
    return _parent(inner), inner


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    "how",
    ["kill", "exit", "outer subreaper killed", "inner subreaper killed", "inner subreaper killed, outer one stopped"],
)
def test_daemons_end_with_the_child_however_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def use(child: ManagedProcess) -> None:
        await said(child, start_daemons(tmp_path / "pids") + "say(1)")
        started = daemons(tmp_path / "pids")
        assert all(map(alive, started))
        outer, inner = subreapers(child)
        if how == "kill":
            child.kill()
        elif how == "exit":
            os.kill(child.pid, signal.SIGTERM)
        else:
            if how.endswith("stopped"):
                os.kill(outer, signal.SIGSTOP)
            os.kill(outer if how.startswith("outer") else inner, signal.SIGKILL)
            if how.endswith("stopped"):
                os.kill(outer, signal.SIGCONT)
        await asyncio.wait({child.exit}, timeout=20)
        assert child.exit.done()
        for pid in (*started, child.pid, inner, outer):
            assert await asyncio.to_thread(gone, pid, 10)

    with_child(tmp_path, monkeypatch, use)


def test_daemons_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = f"exec({start_daemons(tmp_path / 'pids')!r}); import time; time.sleep(600)"
    (tmp_path / "host.py").write_text(
        f"""
import asyncio
from roll.process.managed_process import ManagedProcess

async def main():
    child = await ManagedProcess.start({command!r}, None)
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    )
    parent, (pid,) = printed_pids(tmp_path / "host.py")
    started = daemons(tmp_path / "pids")
    parent.kill()
    parent.wait()
    assert all(gone(each, 10) for each in (*started, pid))


def test_signals_for_all_processes_of_a_job_leave_a_subreaper_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(child: ManagedProcess) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            for pid in subreapers(child):
                os.kill(pid, number)
        assert await said(child, "say('here')") == "here"

    with_child(tmp_path, monkeypatch, use)


def test_processes_that_start_others_all_the_time_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"roll-test-{os.getpid()}"
    restless = f"import os, time\nwhile True:\n    if os.fork():\n        os._exit(0)\n    time.sleep(0.001)  # {mark}\n"

    async def use(child: ManagedProcess) -> None:
        await said(child, f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {restless!r}]); say(1)")
        child.kill()
        await asyncio.wait({child.exit}, timeout=20)
        assert child.exit.done()

    with_child(tmp_path, monkeypatch, use)
    assert not subprocess.run(["pgrep", "-f", mark], capture_output=True, check=False).stdout


def test_children_are_found_where_the_kernel_has_no_list_of_them() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in subreaper._children_by_parent(os.getpid())
        assert child.pid in subreaper._children(os.getpid())
        child.kill()
