"""How a program is started on each level: the command, and what the interpreter inside begins with."""

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

from roll.sandbox import filter
from roll.sandbox.inside import kernel
from roll.sandbox.inside.removal import FOLDER
from roll.sandbox.level import FIRST_USER, LANDLOCK_SIGNALS, NOBODY, Level, Sandbox
from roll.sandbox.program import Limits, Program, SandboxError

SCRATCH = "/scratch"
_INSIDE = "roll.sandbox.inside"
_MODULES = ("kernel", "program", "init", "removal", "supervisor", "values", "solution", "asserts")
_PARTS: Mapping[Level, tuple[str, ...]] = {
    "bubblewrap": ("program", "init"),
    "namespaces": ("kernel", "program", "init", "removal", "supervisor"),
    "plain": ("kernel", "program", "init", "removal", "supervisor"),
}
_MAINS: Mapping[Level, tuple[str, str]] = {
    "bubblewrap": ("init", "under_bubblewrap"),
    "namespaces": ("supervisor", "in_namespaces"),
    "plain": ("supervisor", "in_plain"),
}

# The interpreter's own command line: short, because every user of the machine may see it.
_COMMAND = (
    "import sys, marshal; loader, data = marshal.load(open(int(sys.argv[1]), 'rb', closefd=False)); "
    "exec(marshal.loads(loader))"
)

# What a module is given as, is its code where it is the sandbox's own, and else its text.
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
own, modules, config, main, run = data
load(own)
config["payload"] = int(sys.argv[1])
load(modules)
getattr(sys.modules[main[0]], main[1])(config, getattr(sys.modules[run[0]], run[1]))
"""

_COMPILE = """
import sys, marshal
codes = {name: marshal.dumps(compile(text, name, "exec")) for name, text in marshal.load(sys.stdin.buffer).items()}
marshal.dump(codes, sys.stdout.buffer, 2)
"""
_COMPILE_S = 60.0
_ANY_VERSION = 2
"""The form of marshalled data, other than code, that every Python reads."""


@functools.cache
def source_of(name: str) -> str:
    """The text of a module that runs inside."""
    return resources.files(_INSIDE).joinpath(f"{name}.py").read_text(encoding="utf-8")


def inside(name: str) -> str:
    """What a module that runs inside is called there."""
    return f"{_INSIDE}.{name}"


def command(sandbox: Sandbox, limits: Limits, payload: int, filter_fd: int, info: int) -> list[str]:
    """What starts the interpreter, shut in if the level has a tool for that."""
    python = [sandbox.python.path, "-s", "-c", _COMMAND, str(payload)]
    return [*_bubblewrap(sandbox, limits, filter_fd, info), *python] if sandbox.level == "bubblewrap" else python


def payload(
    sandbox: Sandbox,
    program: Program,
    limits: Limits,
    *,
    scratch: str,
    status_fd: int,
    joins: Sequence[int] = (),
    tidy: bool = False,
) -> bytes:
    """What the interpreter begins with. It reaches the program by no way that another process could see. `joins` are
    descriptors of the control groups that count what the program takes."""
    config = _config(sandbox, program, limits)
    config |= {"scratch": scratch, "status": status_fd, "joins": list(joins), "tidy": tidy}
    codes = _codes(sandbox.python.path)
    parts = [*_PARTS[sandbox.level], *(("kernel",) if config["filter"] and sandbox.level == "bubblewrap" else ())]
    own = [(inside(part), codes[inside(part)]) for part in parts]
    ours = {name: codes[name] for name, text in program.modules.items() if name in codes and text == _sources()[name]}
    modules = [(name, ours.get(name, text)) for name, text in program.modules.items()]
    module, function = _MAINS[sandbox.level]
    data = (own, modules, config, (inside(module), function), (inside("program"), "run"))
    return marshal.dumps((codes[""], data), _ANY_VERSION)


@functools.cache
def _sources() -> Mapping[str, str]:
    """The texts of all modules that run inside, by what they are called there."""
    return {inside(name): source_of(name) for name in _MODULES}


@functools.cache
def _codes(python: str) -> Mapping[str, bytes]:
    """What an interpreter makes of those texts, and of the loader, which has no name. Made once in a process: otherwise
    it would be a third of every execution's time."""
    texts = marshal.dumps({"": _LOADER, **_sources()}, _ANY_VERSION)
    try:
        done = subprocess.run(
            [python, "-I", "-c", _COMPILE], input=texts, capture_output=True, timeout=_COMPILE_S, env={}, cwd="/"
        )
        codes: dict[str, bytes] = marshal.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, EOFError, ValueError, TypeError) as error:
        raise SandboxError(f"the interpreter for use inside did not start: {python}: {error}") from error
    return codes


def call_filter(sandbox: Sandbox) -> bytes:
    """What seccomp refuses; empty where it is not there."""
    return _filter(sandbox, watched=sandbox.level == "plain" or (sandbox.level == "namespaces" and not sandbox.cgroups))


def _last_filter(sandbox: Sandbox) -> bytes:
    """What the last process before the program has seccomp refuse. Under bubblewrap, which has done so before it hid the
    first process, that is only what lets programs be watched."""
    if sandbox.level != "bubblewrap":
        return call_filter(sandbox)
    return _filter(sandbox, watched=True) if sandbox.cgroups is None else b""


def _filter(sandbox: Sandbox, watched: bool) -> bytes:
    if "calls" not in sandbox.guards:
        return b""
    plain = sandbox.level == "plain"
    held = "user" in sandbox.guards or kernel.landlock_version() >= LANDLOCK_SIGNALS
    machine, counted = cast("filter.Machine", kernel.machine()), sandbox.cgroups is not None
    made = filter.call_filter(machine, watched=watched, signals=plain and not held, counted=counted)
    # as bubblewrap's first process becomes the program's parent, the program is the second
    return kernel.for_process(made, 2) if sandbox.level == "bubblewrap" else made


@contextlib.contextmanager
def sealed(content: bytes) -> Iterator[int]:
    """A file descriptor to read the content from, which no holder can change or make larger."""
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
    """Where the scratch folder of an execution is: on the plain level a new folder of the machine's."""
    if sandbox.level != "plain":
        return SCRATCH
    place = "/tmp" if "user" in sandbox.guards else tempfile.gettempdir()  # which another user may not reach
    return os.path.join(place, FOLDER + secrets.token_hex(8))


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
        "filter": _last_filter(sandbox),
        "parent": os.getpid(),
        "rlimits": {
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_AS": limits.memory_mb << 20,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_FSIZE": limits.scratch_bytes,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 1 << 16,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 1024,
        },
    }


def devices(sandbox: Sandbox) -> list[str]:
    """What programs see of the machine's devices. Mappings of /dev/zero can be shared memory, which must be counted."""
    return [path for path in kernel.DEVICES if path != "/dev/zero" or sandbox.cgroups is not None]


def _bubblewrap(sandbox: Sandbox, limits: Limits, filter_fd: int, info: int) -> list[str]:
    shown: list[str] = []
    for path in sandbox.python.readable:
        shown += ["--ro-bind", path, path]
    for link in ("/bin", "/lib", "/lib64", "/sbin"):
        if os.path.islink(link):
            shown += ["--symlink", os.readlink(link), link]
    return [
        *(sandbox.tool, "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--info-fd", str(info)),
        *shown,
        *("--proc", "/proc", "--tmpfs", "/dev"),
        *(part for device in devices(sandbox) for part in ("--dev-bind", device, device)),
        *(part for name, target in kernel.DEVICE_LINKS.items() for part in ("--symlink", target, f"/dev/{name}")),
        *("--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH),
        *(("--seccomp", str(filter_fd)) if call_filter(sandbox) else ()),
        "--",
    ]


def drops_user(sandbox: Sandbox) -> dict[str, Any]:
    """How the started process changes its user: on the plain level it does so itself, and stays above the program."""
    if os.geteuid() != 0 or sandbox.level == "plain":
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}
