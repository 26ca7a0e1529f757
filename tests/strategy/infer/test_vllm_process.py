"""An engine's processes end with their owner, and only they; a terminal's Ctrl-C does not reach them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from roll.strategy.infer.vllm_process import Keeper

WAITS = "import sys, time; print('here', flush=True); time.sleep(600)"
WAITS_NAMED = f"import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); {WAITS}"
GROUP = "from roll.strategy.infer.vllm_process import attach; attach(); import os; print(os.getpgid(0) == os.getpid())"
OWNER = f"""
import os, subprocess, sys, time
from roll.strategy.infer.vllm_process import Keeper
keeper = Keeper()
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
    keeper, other = Keeper(), Keeper()
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


@pytest.mark.parametrize("owned", [False, True])
def test_only_a_process_below_the_owner_leaves_its_group(owned: bool) -> None:
    environment = {**os.environ, "ROLL_VLLM_ENGINE": f"{os.getpid()}:some" if owned else ""}
    said = subprocess.run([sys.executable, "-c", GROUP], env=environment, capture_output=True, check=True, timeout=END_S)
    assert said.stdout.strip() == (b"True" if owned else b"False")
