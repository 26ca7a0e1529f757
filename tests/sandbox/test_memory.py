"""Memory that no process is seen to hold: the kernel counts it where it can, and else it is refused or watched."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from boxes import NAMES, box, needs
from memory_attacks import ATTACKS, LIMIT_MB
from processes import eventually
from thorough import but

from roll.data.task import Response, Task
from roll.env.python_tool import PythonTool
from roll.reward.code import Code
from roll.reward.pool import GraderPool
from roll.reward.reward_spec import RewardSpec
from roll.sandbox import Limits, Program, Sandbox, SandboxError, best, run_blocking
from roll.sandbox.cgroups import groups_of, sweep

SURVEY = sys.modules["roll.sandbox.capabilities"]  # the package has a function of that name
LIMITS = Limits(wall_s=10, cpu_s=10, memory_mb=LIMIT_MB)
ENDED = ("memory", "disk", "failed", "timeout")
"""How attacks end: they take too much, are refused something, or their time is up before they hold much (file locks)."""
PATIENT = Limits(wall_s=20, cpu_s=20)
SAMPLE = ("shared mappings that shrink", "pairs of sockets", "links", "page tables")
"""Those that are tried every time; the others are slow together."""

attacks = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in ATTACKS]
)


@pytest.fixture(params=but({"plain", "namespaces"}, NAMES))
def counted(request: pytest.FixtureRequest) -> Sandbox:
    """A level whose programs the kernel counts."""
    found = box(request.param)
    if found.cgroups is None:
        pytest.skip(f"the kernel does not count here: {found.uncounted}")
    return found


@pytest.fixture(params=but({"plain", "namespaces"}, NAMES))
def watched(request: pytest.FixtureRequest) -> Sandbox:
    """A level as it is where the kernel does not count."""
    return dataclasses.replace(box(request.param), cgroups=None)


@attacks
def test_the_kernel_counts_what_no_process_is_seen_to_hold(counted: Sandbox, name: str) -> None:
    outcome = run_blocking(Program(ATTACKS[name]), LIMITS, counted)
    assert "held" not in outcome.stdout, outcome
    assert outcome.kind in ENDED, outcome
    assert run_blocking(Program("print('still here')"), LIMITS, counted).stdout == "still here\n"


@attacks
def test_where_the_kernel_does_not_count_such_memory_is_refused_or_watched(watched: Sandbox, name: str) -> None:
    needs(watched, "calls")
    outcome = run_blocking(Program(ATTACKS[name]), LIMITS, watched)
    assert "held" not in outcome.stdout, outcome
    assert outcome.kind in ENDED, outcome


def test_memory_up_to_the_limit_is_the_programs_own(counted: Sandbox) -> None:
    source = """
import mmap, os
shared = mmap.mmap(-1, 40_000_000)
shared.write(bytes(40_000_000))
held = bytearray(40_000_000)
with open("file", "wb") as file: file.write(bytes(16_000_000))
print("done")
"""
    assert run_blocking(Program(source), LIMITS, counted).stdout == "done\n"


def test_a_child_that_takes_too_much_ends_the_program(counted: Sandbox) -> None:
    source = """
import mmap, os, time
if os.fork() == 0:
    kept = []
    while True:
        kept.append(mmap.mmap(-1, 1 << 24)); kept[-1].write(bytes(1 << 24)); kept[-1].resize(4096)
time.sleep(600)
"""
    assert run_blocking(Program(source), LIMITS, counted).kind == "memory"


def test_processes_are_counted_too(counted: Sandbox) -> None:
    assert counted.cgroups is not None
    if not counted.cgroups.pids:
        pytest.skip("no control group counts processes here")
    with groups_of(counted.cgroups).group(LIMITS) as group:
        assert Path(group.folders[-1], "pids.max").read_text() == f"{LIMITS.processes}\n"


def test_a_group_is_used_again_and_has_nothing_of_the_last_program(counted: Sandbox) -> None:
    assert counted.cgroups is not None
    groups = groups_of(counted.cgroups)
    with groups.group(LIMITS) as first:
        pass
    run_blocking(Program(ATTACKS["shared mappings that shrink"]), LIMITS, counted)
    with groups.group(PATIENT) as one, groups.group(LIMITS) as other:
        assert one is not other
        assert not one.ran_out()
        assert not other.ran_out()
        assert one.folders != first.folders or one is first
    assert run_blocking(Program("print(1)"), LIMITS, counted).stdout == "1\n"


def test_nothing_of_the_groups_is_seen_inside(counted: Sandbox) -> None:
    source = """
import os
found = []
for fd in range(3, 256):
    try: os.fstat(fd); found.append(fd)
    except OSError: pass
for folder in ("/sys/fs/cgroup", "/sys"):
    try: open(folder + "/cgroup.procs", "w"); found.append(folder)
    except OSError: pass
print(found)
"""
    assert run_blocking(Program(source), LIMITS, counted).stdout == "[]\n"


_RUN = """
import pickle, sys
from roll.sandbox import Limits, Program, run_blocking
from roll.sandbox.cgroups import groups_of
sandbox, source = pickle.load(sys.stdin.buffer)
run_blocking(Program("pass"), Limits(), sandbox)
with groups_of(sandbox.cgroups).group(Limits()) as group: print(*group.folders, flush=True)
run_blocking(Program(source), Limits(wall_s=600, cpu_s=600), sandbox)
"""
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_groups_of_a_killed_run_are_removed_at_the_next_start(counted: Sandbox) -> None:
    assert counted.cgroups is not None
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, start_new_session=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin:
            process.stdin.write(pickle.dumps((counted, "import time\ntime.sleep(600)")))
        own = process.stdout.readline().decode().split()
        assert eventually(lambda: Path(own[0], "cgroup.procs").read_text() != "")
        sweep()
        assert all(map(os.path.exists, own))  # their process lives
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
        process.stdout.close()

    def swept() -> bool:
        sweep()
        return not any(map(os.path.exists, own))

    assert eventually(swept)  # as soon as the kernel has ended the program


def test_a_run_that_ends_by_itself_leaves_no_group(counted: Sandbox) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=pickle.dumps((counted, "pass")), capture_output=True, env=ENV, timeout=60
    )
    own = done.stdout.decode().split()
    assert own, done.stderr
    assert not any(map(os.path.exists, own))


def groups_held(task: Task, response: Response) -> float:
    """A reward that runs a program, and writes down which groups its process keeps."""
    assert run_blocking(Program("pass")).ok
    found = best().cgroups
    assert found is not None
    with groups_of(found).group(Limits()) as group:
        Path(response.text).write_text("\n".join(group.folders))
    return 1.0


def test_graders_that_end_with_the_run_leave_no_group(tmp_path: Path) -> None:
    if best().cgroups is None:
        pytest.skip(f"the kernel does not count here: {best().uncounted}")
    written = tmp_path / "groups"

    async def judge() -> list[str]:
        async with GraderPool(RewardSpec.of(f"{__file__}:groups_held"), deadline_s=60) as pool:
            verdict = await pool.score(Task("one", ()), Response(str(written), 1, "stop"))
            assert verdict.reward == 1.0
            own = written.read_text().split()
            assert all(map(os.path.exists, own))
            return own

    assert not any(map(os.path.exists, asyncio.run(judge())))


class TestMinimum:
    @pytest.fixture(autouse=True)
    def weak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine that has only the plain level, and whose kernel does not count."""
        found = dataclasses.replace(box("plain"), cgroups=None, uncounted="no hierarchy is mounted")
        monkeypatch.setattr(SURVEY, "_best", lambda: (found, "no bubblewrap: bwrap is not installed"))

    def test_what_is_strong_enough_is_taken(self) -> None:
        assert best().level == "plain"
        Code(sandbox="plain").warm_up()

    def test_a_level_below_the_minimum_is_refused(self) -> None:
        with pytest.raises(
            SandboxError, match=r"is plain, but the setting is sandbox=namespaces \(no bubblewrap: bwrap is"
        ):
            best("namespaces")
        with pytest.raises(SandboxError, match="set sandbox=plain"):
            Code(sandbox="bubblewrap").warm_up()
        with pytest.raises(SandboxError, match="set sandbox=plain"):
            PythonTool(sandbox="bubblewrap").reset(1)

    def test_memory_that_is_only_watched_is_refused(self) -> None:
        with pytest.raises(SandboxError, match=r"does not count .*\(no hierarchy is mounted\).*memory_counted=false"):
            Code(memory_counted=True).warm_up()
        with pytest.raises(SandboxError, match="memory_counted=false"):
            PythonTool(memory_counted=True).reset(1)

    def test_levels_have_names(self) -> None:
        with pytest.raises(ValueError, match="sandbox is 'strong', but takes bubblewrap or namespaces or plain"):
            Code(sandbox="strong")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="sandbox is 'strong': write plain or namespaces or bubblewrap"):
            PythonTool(sandbox="strong")  # type: ignore[arg-type]
