"""How a program is started on each level: the command, and the interpreter's first code."""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, cast

from roll.sandbox.inside import kernel
from roll.sandbox.inside.removal import FOLDER
from roll.sandbox.isolation import FIRST_USER, LANDLOCK_SIGNALS, NOBODY, Level, Sandbox
from roll.sandbox.program import OPEN_FILES, Limits, Program, SandboxError
from roll.sandbox.seccomp_filter import Machine, call_filter

SCRATCH = "/scratch"
_INSIDE = "roll.sandbox.inside"
_MODULES = ("kernel", "program", "removal", "supervisor", "codec", "solution", "remote_tests")
_PARTS: Mapping[Level, tuple[str, ...]] = {
    "bubblewrap": ("program",),
    "namespaces": ("kernel", "program", "removal", "supervisor"),
    "plain": ("kernel", "program", "removal", "supervisor"),
}
_SUPERVISORS: Mapping[Level, tuple[str, str]] = {
    "namespaces": ("supervisor", "in_namespaces"),
    "plain": ("supervisor", "in_plain"),
}

# The interpreter's own command line: short, because every user of the machine may see it.
_COMMAND = (
    "import sys, marshal; loader, data = marshal.load(open(int(sys.argv[1]), 'rb', closefd=False)); "
    "exec(marshal.loads(loader))"
)

# A module is given as code if it is the sandbox's own, otherwise as text.
_LOADER = """
sys.path[:] = [place for place in sys.path if place]
def load(modules):
    module = type(sys)
    for name, made in modules:
        parent, _, short = name.rpartition(".")
        missing = [".".join(parent.split(".")[:n + 1]) for n in range(parent.count(".") + 1)] if parent else []
        for each in missing:
            if each not in sys.modules:
                sys.modules[each] = module(each)
                sys.modules[each].__path__ = []
        sys.modules[name] = new = module(name)
        if parent:
            setattr(sys.modules[parent], short, new)
        exec(marshal.loads(made) if isinstance(made, bytes) else compile(made, name, "exec"), new.__dict__)
own, modules, config, program, supervisor = data
load(own)
config["payload"] = int(sys.argv[1])
load(modules)
run = sys.modules[program].run
getattr(sys.modules[supervisor[0]], supervisor[1])(config, run) if supervisor else run(config)
"""

_COMPILE = """
import sys, marshal
codes = {name: marshal.dumps(compile(text, name, "exec")) for name, text in marshal.load(sys.stdin.buffer).items()}
marshal.dump(codes, sys.stdout.buffer, 2)
"""
_COMPILE_S = 60.0
_ANY_VERSION = 2
"""The marshal version, for data other than code, that every Python reads."""


@functools.cache
def source_of(name: str) -> str:
    """The source of a module that runs inside."""
    return resources.files(_INSIDE).joinpath(f"{name}.py").read_text(encoding="utf-8")


def inside(name: str) -> str:
    """The name, inside the sandbox, of a module that runs there."""
    return f"{_INSIDE}.{name}"


def command(sandbox: Sandbox, limits: Limits, payload: int, filter_fd: int, info: int) -> list[str]:
    """The command that starts the interpreter, isolated if the level has a tool for that."""
    python = [sandbox.python.path, "-s", "-c", _COMMAND, str(payload)]
    return [*_bubblewrap(sandbox, limits, filter_fd, info), *python] if sandbox.level == "bubblewrap" else python


def payload(
    sandbox: Sandbox,
    program: Program,
    limits: Limits,
    *,
    scratch: str,
    status_fd: int,
    join_fds: Sequence[int] = (),
    tidy: bool = False,
) -> bytes:
    """What the interpreter loads first. No other process can see it. `join_fds` are descriptors of the control groups
    that account the program's memory."""
    config = _config(sandbox, program, limits)
    config |= {"scratch": scratch, "status": status_fd, "join_fds": list(join_fds), "tidy": tidy}
    codes = _codes(sandbox.python.path)
    sandbox_modules = [(inside(part), codes[inside(part)]) for part in _PARTS[sandbox.level]]
    compiled = {name: codes[name] for name, text in program.modules.items() if name in codes and text == _sources()[name]}
    modules = [(name, compiled.get(name, text)) for name, text in program.modules.items()]
    supervisor = _SUPERVISORS.get(sandbox.level)
    data = (sandbox_modules, modules, config, inside("program"), supervisor and (inside(supervisor[0]), supervisor[1]))
    return marshal.dumps((codes[""], data), _ANY_VERSION)


@functools.cache
def _sources() -> Mapping[str, str]:
    """The sources of all modules that run inside, by their names there."""
    return {inside(name): source_of(name) for name in _MODULES}


@functools.cache
def _codes(python: str) -> Mapping[str, bytes]:
    """These sources and the loader (named ""), compiled by an interpreter, once per process: otherwise compiling would
    take a third of every execution's time."""
    texts = marshal.dumps({"": _LOADER, **_sources()}, _ANY_VERSION)
    try:
        done = subprocess.run(
            [python, "-I", "-c", _COMPILE], input=texts, capture_output=True, timeout=_COMPILE_S, env={}, cwd="/"
        )
        codes: dict[str, bytes] = marshal.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, EOFError, ValueError, TypeError) as error:
        raise SandboxError(f"the interpreter for use inside did not start: {python}: {error}") from error
    return codes


def call_filter_of(sandbox: Sandbox) -> bytes:
    """The seccomp filter; empty if there is none."""
    if "calls" not in sandbox.guards:
        return b""
    plain, counted = sandbox.level == "plain", sandbox.cgroups is not None
    own_user = not plain or "user" in sandbox.guards
    bpf = call_filter(
        cast(Machine, kernel.machine()),
        watched=plain or not counted,
        signals=not own_user and kernel.landlock_version() < LANDLOCK_SIGNALS,
        counted=counted,
        own_user=own_user,
    )
    # the program is the second process, after bubblewrap's own
    return kernel.for_process(bpf, 2) if sandbox.level == "bubblewrap" else bpf


@contextlib.contextmanager
def sealed_file(content: bytes) -> Iterator[int]:
    """A descriptor to read the content from, which no holder can change or enlarge."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            yield file.fileno()
        return
    import fcntl

    fd = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def scratch_of(sandbox: Sandbox) -> str:
    """The path of an execution's scratch folder: on the plain level a new folder of the machine."""
    if sandbox.level != "plain":
        return SCRATCH
    # the latter may not be accessible to another user
    parent = "/tmp" if "user" in sandbox.guards else tempfile.gettempdir()
    return os.path.join(parent, FOLDER + secrets.token_hex(8))


def _config(sandbox: Sandbox, program: Program, limits: Limits) -> dict[str, Any]:
    return {
        "source": program.source,
        "files": dict(program.files),
        "scratch_bytes": limits.scratch_bytes,
        "readable": list(sandbox.python.readable),
        "devices": devices(sandbox),
        "guards": sorted(sandbox.guards),
        "users": FIRST_USER,
        "nobody": NOBODY,
        "filter": call_filter_of(sandbox) if sandbox.level != "bubblewrap" else b"",
        "parent": os.getpid(),
        "rlimits": {
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_AS": limits.memory_mb << 20,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_FSIZE": limits.scratch_bytes,
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 1 << 16,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 1024,
        },
    }


def devices(sandbox: Sandbox) -> list[str]:
    """The devices that programs see. Mappings of /dev/zero can be shared memory, which must be accounted."""
    return [path for path in kernel.DEVICES if path != "/dev/zero" or sandbox.cgroups is not None]


def _bubblewrap(sandbox: Sandbox, limits: Limits, filter_fd: int, info: int) -> list[str]:
    mounts: list[str] = []
    for path in sandbox.python.readable:
        mounts += ["--ro-bind", path, path]
    for link in ("/bin", "/lib", "/lib64", "/sbin"):
        if os.path.islink(link):
            mounts += ["--symlink", os.readlink(link), link]
    return [
        *(sandbox.tool, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--info-fd", str(info)),
        *mounts,
        # The first process, bubblewrap's own, has the program's user: paths by which programs could write into it are
        # covered.
        *("--proc", "/proc", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
        *("--tmpfs", "/dev"),
        *(part for device in devices(sandbox) for part in ("--dev-bind", device, device)),
        *(part for name, target in kernel.DEVICE_LINKS.items() for part in ("--symlink", target, f"/dev/{name}")),
        *("--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH),
        *(("--seccomp", str(filter_fd)) if call_filter_of(sandbox) else ()),
        "--",
    ]


def drops_user(sandbox: Sandbox) -> dict[str, Any]:
    """How the started process changes its user: on the plain level it does so itself, and stays above the program."""
    if os.geteuid() != 0 or sandbox.level == "plain":
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}
