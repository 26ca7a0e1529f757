"""Supervises the program where bubblewrap does not: isolates it, waits for its end and ends all its processes.

With namespaces there are two supervising processes: the outer one only has to live, and the inner one is the first
process of the PID namespace, with which the kernel ends all others. On the plain level there is one, which descendants
cannot leave: it adopts orphans.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from roll.sandbox.inside import kernel
from roll.sandbox.inside.program import ENDED, SCRATCH_LEFT
from roll.sandbox.inside.removal import lock_folder, old_scratch_folders, remove_in_background, remove_tree

TYPE_CHECKING = False  # without importing typing, which is slow
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_SIGNALLED = 128
"""Added to a signal's number to get an exit status."""
_REMOVE_S = 1.0
"""Time for which the run waits until a scratch folder is removed."""


def in_namespaces(config: dict[str, Any], program: Callable[[dict[str, Any]], None]) -> None:
    """Runs the program in namespaces of its own. Only the process that becomes the program returns."""
    kernel.die_with_parent(signal.SIGKILL)
    _end_without_parent(config)
    kernel.enter_namespaces()
    first = os.fork()
    if first:
        os.write(config["status"], b'{"child-pid": %d}' % first)
        _wait_for_child(config, first)
    kernel.die_with_parent(signal.SIGKILL)
    kernel.enter_new_root(config["readable"], config["devices"], config["scratch"], config["scratch_bytes"])
    kernel.drop_capabilities()
    child = _fork_undumpable()
    if child:
        _wait_for_child(config, child)
    os.setsid()
    if config["filter"]:
        kernel.filter_calls(config["filter"])
    program(config)


def in_plain(config: dict[str, Any], program: Callable[[dict[str, Any]], None]) -> None:
    """Runs the program with the guards that the machine has. Only the process that becomes the program returns."""
    if sys.platform == "linux":
        kernel.adopt_orphans()
        kernel.set_dumpable(0)
        signal.signal(signal.SIGTERM, lambda *_: _finish(config, _SIGNALLED + signal.SIGKILL))
        kernel.die_with_parent(signal.SIGTERM)
        _end_without_parent(config)
    _make_scratch(config)
    child = _fork_undumpable() if sys.platform == "linux" else os.fork()
    if child:
        _wait_for_child(config, child, clean=True)
    os.close(config["scratch_lock"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    _isolate(config)
    program(config)


def _make_scratch(config: dict[str, Any]) -> None:
    """Creates the scratch folder and locks it, so that cleanup skips it. As root it is a file system of its own."""
    os.mkdir(config["scratch"], 0o700)
    config["scratch_lock"] = lock_folder(config["scratch"])
    has_own_user = sys.platform == "linux" and "user" in config["guards"]
    config["mounted"] = has_own_user and kernel.mount_scratch(config["scratch"], config["scratch_bytes"])


def _isolate(config: dict[str, Any]) -> None:
    guards, scratch = config["guards"], config["scratch"]
    if "user" in guards:
        user = _own_user(config, scratch)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        # after a change of user a process cannot be inspected at first, and its open files could not be counted
        kernel.set_dumpable(1)
    elif sys.platform == "linux":
        # the limit counts all processes of the user
        config["rlimits"]["RLIMIT_NPROC"] += kernel.threads_of_user(os.getuid())
    if sys.platform == "linux":
        kernel.no_new_privileges()  # set-user-id programs no longer get another user's rights
    if "files" in guards:
        kernel.restrict_files(config["readable"], config["devices"], scratch)
    if config["filter"]:
        kernel.filter_calls(config["filter"])


def _own_user(config: dict[str, Any], scratch: str) -> int:
    """A user id that no other process on the machine has; it becomes the owner of the scratch folder."""
    for user in (config["users"] + os.getpid(), config["nobody"]):
        try:
            os.chown(scratch, user, user)
            return int(user)
        except OSError:  # in a container with few user ids
            continue
    raise OSError("the scratch folder cannot be given to another user")


def _wait_for_child(config: dict[str, Any], child: int, clean: bool = False) -> NoReturn:
    """Reaps ended processes until the child has ended, and exits with its status."""
    for fd in (0, 1, 2, config["payload"], *config["join_fds"]):
        os.close(fd)
    code = _reap_until(child)
    if clean:
        _end_group(child)
        os.write(config["status"], ENDED)  # what follows does not count as the program's time
        _finish(config, code)
    os._exit(code)


def _fork_undumpable() -> int:
    """Forks; no process of the same user can inspect, write to or interrupt the parent, at any moment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel.set_dumpable(0)
    child = os.fork()
    if not child:
        kernel.set_dumpable(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return child


def _reap_until(child: int) -> int:
    """Reaps ended processes until the child has ended; returns its exit status."""
    while True:
        # waits: the run ends this process when its time is up
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else _SIGNALLED + os.WTERMSIG(status)


def _finish(config: dict[str, Any], code: int) -> NoReturn:
    """Ends all descendants, removes the scratch folder (in another process if it takes long), and exits."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants()
    remaining = old_scratch_folders(os.path.dirname(config["scratch"])) if config["tidy"] else []
    try:
        if config["mounted"]:
            kernel.unmount(config["scratch"])
        removed = remove_tree(config["scratch"], time.monotonic() + _REMOVE_S)
    except OSError:
        removed = False
    if not removed:
        os.write(config["status"], SCRATCH_LEFT)
        remaining.append(config["scratch"])
    if remaining:
        os.close(config["scratch_lock"])
        remove_in_background(remaining)
    os._exit(code)


def _end_group(leader: int) -> None:
    """If descendants cannot be found, ends at least those in the program's process group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def end_descendants() -> None:
    """Stops all of them first, in rounds, because a running one can start another meanwhile; then kills them."""
    stopped: list[int] = []
    while True:
        running = [pid for pid in kernel.descendants(os.getpid()) if pid not in stopped]
        if not running:
            break
        _send(signal.SIGSTOP, running)
        stopped += running
    _send(signal.SIGKILL, stopped)
    while True:
        try:
            # waits: all were killed
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _end_without_parent(config: dict[str, Any]) -> None:
    """Exits if the parent ended before this process could request its death signal."""
    if os.getppid() != config["parent"]:
        os._exit(0)
