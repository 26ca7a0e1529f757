"""Sets the limits and becomes the program: the last trusted lines before untrusted ones."""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False  # without importing typing, which is slow
if TYPE_CHECKING:
    from typing import Any


BEGUN, ENDED, SCRATCH_LEFT = b"begun", b"ended", b"left"
"""Status messages of the sandbox: the program began; it ended; it left more in its scratch folder than can be removed at
once."""


def run(config: dict[str, Any]) -> None:
    """Runs the program in this process, in its scratch folder, as a script would run. Does not return."""
    os.chdir(config["scratch"])
    files = {"main.py": config["source"]}  # for source lines in tracebacks
    files.update(config["files"])
    for name, text in files.items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    set_limits(config["rlimits"])
    join(config["join_fds"])
    report_begun(config)
    code, syntax_error = _compile(config["source"])
    _execute(code, syntax_error, main.__dict__)


def join(groups: list[int]) -> None:
    """Makes the kernel account the memory of this process and its children from now on."""
    for fd in groups:
        os.write(fd, b"0")
        os.close(fd)


def report_begun(config: dict[str, Any]) -> None:
    """Tells the run that from here on the program's code runs."""
    os.close(config["payload"])
    os.write(config["status"], BEGUN)
    os.close(config["status"])


def set_limits(limits: dict[str, Any]) -> None:
    """Sets the soft and hard limits to the same value, except for CPU time, whose hard limit kills a second later."""
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            _, hard = resource.getrlimit(kind)
            hard_limit = value + 1 if name == "RLIMIT_CPU" else value
            hard_limit = hard_limit if hard == resource.RLIM_INFINITY else min(hard_limit, hard)
            try:
                resource.setrlimit(kind, (min(value, hard_limit), hard_limit))
            except (OSError, ValueError):  # macOS does not limit the address space
                if sys.platform == "linux":
                    raise


def _compile(source: str) -> Any:
    try:
        return compile(source, "main.py", "exec", dont_inherit=True), None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, error


def _execute(code: Any, broken: BaseException | None, names: dict[str, Any]) -> None:
    try:
        if broken is not None:
            raise broken
        exec(code, names)
    except SystemExit:
        raise
    except BaseException as error:
        # the first frame is this one
        error.__traceback__ = None if broken is not None or not error.__traceback__ else error.__traceback__.tb_next
        try:
            sys.stdout.flush()
        finally:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
