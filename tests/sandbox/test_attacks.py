"""Attacks, each tried at every level that is here. After each, the sandbox runs the next program as if nothing had been.

Those that a level does not promise to stop are skipped there, by the name of the guard that is missing.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import BARE, NAMES, alive, box, needs
from processes import eventually

from roll.sandbox import Limits, Outcome, Program, Sandbox, execution, launch, run_blocking

QUICK = Limits(wall_s=1.5, cpu_s=1)
PATIENT = Limits(wall_s=20, cpu_s=20)
"""For attacks that must fail by themselves, on a machine that is busy."""


@pytest.fixture(params=NAMES)
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    found, folders = box(request.param), []

    def scratch_of(sandbox: Sandbox) -> str:
        folders.append(launch.scratch_of(sandbox))
        return folders[-1]

    monkeypatch.setattr(execution, "scratch_of", scratch_of)
    yield found
    assert run_blocking(Program("print('still here')"), PATIENT, found).stdout == "still here\n"
    assert eventually(lambda: not any(map(os.path.exists, folders)))  # a process of its own removes what takes long


def attack(sandbox: Sandbox, source: str, limits: Limits = PATIENT) -> Outcome:
    return run_blocking(Program(source), limits, sandbox)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may read and write: only the sandbox keeps programs out."""
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


# Time


def test_an_endless_loop_is_ended(sandbox: Sandbox) -> None:
    assert attack(sandbox, "while True: pass", QUICK).kind == "timeout"


def test_cpu_time_is_limited_also_where_the_signal_is_ignored(sandbox: Sandbox) -> None:
    source = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    outcome = attack(sandbox, source, Limits(wall_s=60, cpu_s=1))
    assert outcome.kind == "killed"
    assert outcome.seconds < 50


def test_a_sleep_is_ended(sandbox: Sandbox) -> None:
    outcome = attack(sandbox, "print('before', flush=True)\nimport time\ntime.sleep(3600)", QUICK)
    assert (outcome.kind, outcome.stdout) == ("timeout", "before\n")


def test_a_program_that_ignores_every_signal_and_closes_its_output_is_ended(sandbox: Sandbox) -> None:
    source = """
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
os.close(1); os.close(2)
time.sleep(3600)
"""
    assert attack(sandbox, source, QUICK).kind == "timeout"


# Memory, processes, output, disk


def test_a_memory_bomb_is_ended(sandbox: Sandbox) -> None:
    outcome = attack(sandbox, "held = []\nwhile True: held.append(bytearray(10_000_000))", PATIENT)
    assert outcome.kind == "memory"


def test_a_memory_bomb_of_many_processes_is_ended(sandbox: Sandbox) -> None:
    source = """
import os, time
for _ in range(8):
    if os.fork() == 0: break
held = bytearray(150_000_000)
for n in range(0, len(held), 4096): held[n] = 1
time.sleep(60)
"""
    assert attack(sandbox, source, PATIENT).kind == "memory"


@pytest.mark.parametrize("how", ["os.memfd_create('x')", "__import__('ctypes').CDLL(None).shmget(0, 1 << 24, 0o1600)"])
def test_memory_that_no_limit_counts_is_refused(sandbox: Sandbox, how: str) -> None:
    needs(sandbox, "calls")
    source = f"import os\ntry: print({how})\nexcept OSError as error: print('refused', error.errno)"
    assert attack(sandbox, source).stdout in ("refused 1\n", "-1\n")


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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_hundred_megabytes_of_output_are_cut_off(sandbox: Sandbox, stream: str) -> None:
    source = f"import sys\nfor _ in range(100): sys.{stream}.write('x' * 1_000_000)"
    outcome = attack(sandbox, source, PATIENT)
    assert outcome.kind == "output"
    assert len(outcome.stdout) + len(outcome.stderr) <= PATIENT.output_bytes


def test_a_large_file_does_not_fit_into_the_scratch_folder(sandbox: Sandbox) -> None:
    source = "with open('large', 'wb') as file:\n for _ in range(100): file.write(bytes(1_000_000))"
    outcome = attack(sandbox, source)
    assert outcome.kind in ("failed", "disk")
    assert outcome.kind == "disk" or "Error" in outcome.stderr


def test_many_files_do_not_fit_into_the_scratch_folder(sandbox: Sandbox) -> None:
    source = """
import os, time
for folder in range(64):
    os.mkdir(str(folder))
    for n in range(8):
        with open(f"{folder}/{n}", "wb") as file: file.write(bytes(500_000))
time.sleep(60)
"""
    outcome = attack(sandbox, source)
    assert outcome.kind in ("failed", "disk")
    assert outcome.kind == "disk" or "No space left" in outcome.stderr


# Files


def test_nothing_outside_the_scratch_folder_can_be_written(sandbox: Sandbox, public: Path) -> None:
    needs(sandbox, "files")
    victim = public / "checkpoint"
    victim.write_text("weights")
    victim.chmod(0o666)
    source = f"""
import os
elsewhere = ["/tmp/new-file", "/dev/shm/new-file", "/usr/new-file", "/new-file", "/etc/new-file"]
for path in [{str(victim)!r}, {str(public / "new")!r}, *elsewhere]:
    try: open(path, "w").close(); print("wrote", path)
    except OSError: pass
for act in (os.unlink, os.rmdir, lambda path: os.truncate(path, 0), lambda path: os.rename(path, path + "2")):
    try: act({str(victim)!r}); print("changed", act)
    except OSError: pass
open("mine", "w").write("fine")
print(open("mine").read())
"""
    outcome = attack(sandbox, source)
    assert (outcome.stdout, outcome.stderr) == ("fine\n", "")
    assert victim.read_text() == "weights"
    assert os.listdir(public) == ["checkpoint"]


def test_files_of_the_run_cannot_be_read(sandbox: Sandbox, public: Path) -> None:
    needs(sandbox, "files")
    (public / "secret").write_text("the answer")
    (public / "secret").chmod(0o644)
    places = [str(public / "secret"), __file__, f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/cwd/README.md"]
    source = f"""
import os
for path in {places!r}:
    try: print("read", path, open(path).read()[:20])
    except OSError: pass
for path in [{str(public)!r}, os.path.expanduser("~root"), "/home", "/root", {os.getcwd()!r}]:
    try: print("listed", path, os.listdir(path)[:3])
    except OSError: pass
"""
    assert attack(sandbox, source).stdout == ""


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
os.mkdir("closed"); os.symlink({str(victim)!r}, "closed/inside"); os.mkdir("closed/more"); os.chmod("closed", 0)
for n in range(1100):
    os.mkdir("deep"); os.chdir("deep")
print("made")
"""
    assert attack(sandbox, source).stdout == "made\n"
    assert kept.read_text() == "kept"


# The network and other processes


def test_there_is_no_network(sandbox: Sandbox, public: Path) -> None:
    needs(sandbox, "network")
    name, path = f"run-{secrets.token_hex(8)}", str(public / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        abstract.bind(f"\0{name}")
        unix.bind(path)
        os.chmod(path, 0o777)
        for each in (abstract, unix):
            each.listen()
        source = f"""
import socket
tcp, abstract, unix = ("127.0.0.1", {tcp.getsockname()[1]}), "\\0{name}", {path!r}
for kind, place in [(socket.AF_INET, tcp), (socket.AF_UNIX, abstract), (socket.AF_UNIX, unix)]:
    try: socket.socket(kind).connect(place); print("connected", place)
    except OSError: pass
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)); print("sent")
except OSError: pass
print("done")
"""
        assert attack(sandbox, source).stdout == "done\n"


def test_an_event_loop_works_without_a_network(sandbox: Sandbox) -> None:
    source = "import asyncio\nasync def f(): return await asyncio.sleep(0, 7)\nprint(asyncio.run(f()))"
    assert attack(sandbox, source).stdout == "7\n"


def test_signals_do_not_reach_the_run(sandbox: Sandbox) -> None:
    needs(sandbox, "signals")
    if sandbox.level == "plain" and sandbox.guards == {"user"}:
        assert os.geteuid() == 0
    source = f"""
import os, signal
for pid in ({os.getpid()}, {os.getppid()}):
    try: os.kill(pid, 0); os.kill(pid, signal.SIGKILL); print("sent to", pid)
    except OSError: pass
try: os.kill(os.getppid(), signal.SIGKILL)
except OSError: pass
try: os.kill(-1, signal.SIGTERM)
except OSError: pass
print("done")
"""
    assert attack(sandbox, source).stdout == "done\n"


def test_no_new_namespaces_and_no_tracing(sandbox: Sandbox) -> None:
    needs(sandbox, "calls")
    source = f"""
import ctypes
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.ptrace(16, {os.getpid()}, 0, 0))
"""
    assert attack(sandbox, source).stdout == "-1 -1\n"


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    source = """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); print("raised", kind)
    except (OSError, ValueError): pass
"""
    assert attack(sandbox, source).stdout == ""


def test_the_plain_level_is_always_here() -> None:
    assert box(BARE).level == "plain"
    assert box("plain").level == "plain"
