"""Attacks of which it takes more to see that they failed than what the program says; the others are in the table
(`attack_table.py`). After each, the sandbox runs the next program as if nothing had been."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import BARE, NAMES, alive, box, needs
from processes import eventually
from thorough import but

from roll.sandbox import Limits, Program, ProgramResult, Sandbox, execution, launch, run_blocking

QUICK = Limits(wall_s=1.5, cpu_s=1)
PATIENT = Limits(wall_s=20, cpu_s=20)
"""For attacks that must fail by themselves, on a machine that is busy."""


@pytest.fixture(params=but({"plain", "namespaces"}, NAMES))
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    found, folders = box(request.param), []

    def scratch_of(sandbox: Sandbox) -> str:
        folders.append(launch.scratch_of(sandbox))
        return folders[-1]

    monkeypatch.setattr(execution, "scratch_of", scratch_of)
    yield found
    assert run_blocking(Program("print('still here')"), PATIENT, found).stdout == "still here\n"
    assert eventually(lambda: not any(map(os.path.exists, folders)))  # a process of its own removes what takes long


def attack(sandbox: Sandbox, source: str, limits: Limits = PATIENT) -> ProgramResult:
    return run_blocking(Program(source), limits, sandbox)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may read and write: only the sandbox keeps programs out."""
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_a_fork_bomb_is_held_and_ended(sandbox: Sandbox) -> None:
    mark = f"bomb-{secrets.token_hex(8)}"
    source = f"""
import os, sys, time
if len(sys.argv) < 2: os.execv(sys.executable, [sys.executable, "-c", open("main.py").read(), "{mark}"])
while True:
    try: os.fork()
    except OSError: time.sleep(0.01)
"""
    most, done = 0, threading.Event()

    def count() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, len(alive(mark)))

    counting = threading.Thread(target=count)
    counting.start()
    outcome = attack(sandbox, source, Limits(wall_s=2, cpu_s=2, processes=12))
    done.set()
    counting.join(timeout=10)
    assert outcome.kind in ("timeout", "memory")
    assert 1 < most <= 14  # the supervisors have the mark too, between fork and exec
    assert alive(mark) == []


def test_what_a_program_leaves_behind_ends_with_it(sandbox: Sandbox) -> None:
    mark = f"daemon-{secrets.token_hex(8)}"
    source = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", "{mark}"])
    os._exit(0)
time.sleep(0.3)
print("done")
"""
    assert attack(sandbox, source).stdout == "done\n"
    assert alive(mark) == []


def test_what_a_program_leaves_behind_ends_with_it_also_at_a_timeout(sandbox: Sandbox) -> None:
    mark = f"daemon-{secrets.token_hex(8)}"
    source = f"""
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", "{mark}"])
time.sleep(3600)
"""
    assert attack(sandbox, source, QUICK).kind == "timeout"
    assert alive(mark) == []


def test_private_files_of_the_run_cannot_be_read_by_another_user(sandbox: Sandbox, tmp_path: Path) -> None:
    needs(sandbox, "user")
    secret = tmp_path / "secret"
    secret.write_text("the answer")
    secret.chmod(0o600)
    if os.geteuid() != 0:
        needs(sandbox, "files")
    assert "answer" not in attack(sandbox, f"print(open({str(secret)!r}).read())").stdout


def test_environment_variables_of_the_run_are_not_there(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "a-secret-value")
    source = """
import os, glob
print(dict(os.environ))
for path in glob.glob("/proc/*/environ") + ["/proc/self/environ", "/proc/1/environ"]:
    try: print(open(path, "rb").read())
    except OSError: pass
"""
    outcome = attack(sandbox, source)
    if sandbox.guards & {"user", "files"}:
        assert "a-secret-value" not in outcome.stdout
    assert "a-secret-value" not in outcome.stdout.splitlines()[0]


def test_no_file_of_the_run_is_open_in_the_program(sandbox: Sandbox) -> None:
    source = """
import os
for fd in range(256):
    try: os.fstat(fd); print(fd, end=" ")
    except OSError: pass
"""
    assert attack(sandbox, source).stdout == "0 1 2 "


def test_links_in_the_scratch_folder_lead_nowhere(sandbox: Sandbox, public: Path) -> None:
    victim = public / "folder"
    victim.mkdir(mode=0o777)
    victim.chmod(0o777)
    kept = victim / "kept"
    kept.write_text("kept")
    source = f"""
import os
os.symlink({str(victim)!r}, "link")
os.symlink({str(kept)!r}, "file")
os.symlink("/", "root")
os.symlink("..", "up")
os.symlink("loop", "loop")
os.mkdir("closed"); os.symlink({str(victim)!r}, "closed/inside"); os.mkdir("closed/more")
os.fchmod(os.open("closed", os.O_RDONLY), 0)
for n in range(1100):
    os.mkdir("deep"); os.chdir("deep")
print("made")
"""
    assert attack(sandbox, source).stdout == "made\n"
    assert kept.read_text() == "kept"


def test_an_event_loop_works_without_a_network(sandbox: Sandbox) -> None:
    source = "import asyncio\nasync def f(): return await asyncio.sleep(0, 7)\nprint(asyncio.run(f()))"
    assert attack(sandbox, source).stdout == "7\n"


def test_the_plain_level_is_always_here() -> None:
    assert box(BARE).level == "plain"
    assert box("plain").level == "plain"
