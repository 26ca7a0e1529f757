"""An engine's processes end with their owner, and only they; a terminal's Ctrl-C does not reach them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from roll.strategy.infer.orphan_reaper import OrphanReaper, shield_sigint

WAITS = "import sys, time; print('here', flush=True); time.sleep(600)"
WAITS_NAMED = f"import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); {WAITS}"
BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)"
STARTS_ANOTHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BLOCKED!r}], check=True)"
HEARS = """
import os, signal, threading, time
from roll.strategy.infer.orphan_reaper import shield_sigint
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(threading.current_thread().name))
try:
    with shield_sigint():
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            try:
                time.sleep(0.01)
            except KeyboardInterrupt:
                pass
except KeyboardInterrupt:
    print("ended")
os.kill(os.getpid(), signal.SIGINT)
while len(heard) < 2:
    time.sleep(0.01)
print(*heard)
"""
HEARS_AT_THE_END = """
import os, signal, time
from roll.strategy.infer.orphan_reaper import shield_sigint
heard = []
def hear(*_): heard.append(0)
signal.signal(signal.SIGINT, hear)
for number in range(1000):
    try:
        with shield_sigint():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1e-5 * (number % 16))
    except KeyboardInterrupt:
        pass
    while len(heard) <= number:
        time.sleep(1e-4)
    assert signal.getsignal(signal.SIGINT) is hear
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
print(len(heard))
"""
OWNER = f"""
import os, subprocess, sys, time
from roll.strategy.infer.orphan_reaper import OrphanReaper, shield_sigint
keeper = OrphanReaper()
child = subprocess.Popen([sys.executable, "-c", {WAITS!r}], env={{**os.environ, **keeper.environment}})
time.sleep(600)
"""
END_S = 60


@contextmanager
def started(code: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said its first word."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == b"here"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("code", [WAITS, pytest.param(WAITS_NAMED, marks=pytest.mark.vllm)], ids=["plain", "named"])
def test_closing_ends_what_has_the_mark_and_nothing_else(code: str) -> None:
    keeper, other = OrphanReaper(), OrphanReaper()
    with (
        started(code, keeper.environment) as its,
        started(code, other.environment) as of_another,
        started(code, {}) as none,
    ):
        keeper.close()
        its.wait(END_S)
        assert of_another.poll() is None
        assert none.poll() is None
        other.close()
        of_another.wait(END_S)
        assert none.poll() is None


def test_an_owner_that_is_killed_takes_them_along() -> None:
    with started(OWNER, {}) as owner:
        owner.kill()
        assert owner.stdout is not None
        ended, _, _ = select.select([owner.stdout], [], [], END_S)  # when the last process that can write there has
        assert ended
        assert owner.stdout.read() == b""


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=END_S, text=True).stdout


@pytest.mark.parametrize("code", [BLOCKED, STARTS_ANOTHER], ids=["started", "started by it"])
def test_what_is_started_deaf_hears_no_ctrl_c_and_what_is_started_later_does(code: str) -> None:
    with shield_sigint():
        assert said(code) == "True\n"
    assert said(code) == "False\n"


def test_ctrl_c_ends_the_start_also_of_what_would_take_it_for_its_own() -> None:
    assert said(HEARS) == "ended\nMainThread MainThread\n"


def test_ctrl_c_in_the_last_moment_of_a_start_is_heard_once() -> None:
    """No other exception gets out, and the handler is put back."""
    assert said(HEARS_AT_THE_END) == "1000\n"
