"""A child process: what it says arrives, how it ended is told, and what it started ends with it.

The pools' tests have what users' code can do to it.
"""

from __future__ import annotations

import asyncio
import io
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import eventually, gone

from roll.process.child_main import command, detail, log_failure, reason
from roll.process.framing import HEADER, frame, read_payload
from roll.process.managed_process import ManagedProcess

ECHO = """
from roll.process.framing import frame, read_payload
from roll.process.child_main import connect

def main():
    stream = connect().makefile("rwb")
    print("in the log")
    while (payload := read_payload(stream)) is not None:
        exec(payload.decode(), {"say": lambda value: (stream.write(frame(str(value).encode())), stream.flush())})
"""


def with_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[ManagedProcess], Awaitable[None]]) -> None:
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)

    async def run() -> None:
        child = await ManagedProcess.start(command("echo_child"), tmp_path / "log", {"GREETING": "hello"})
        try:
            await asyncio.wait_for(use(child), 300)
        finally:
            child.kill()
            await child.wait_exit()

    asyncio.run(run())


async def said(child: ManagedProcess, code: str) -> str:
    child.writer.write(frame(code.encode()))
    (size,) = HEADER.unpack(await child.reader.readexactly(HEADER.size))
    return (await child.reader.readexactly(size)).decode()


def test_it_answers_in_its_environment_and_prints_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(child: ManagedProcess) -> None:
        assert await said(child, "import os; say(os.environ['GREETING'])") == "hello"
        assert await said(child, "import os; say(os.getpid())") == str(child.pid)
        assert child.exit_reason() == "broke its connection"
        assert await asyncio.to_thread(eventually, lambda: "in the log" in (tmp_path / "log").read_text())

    with_child(tmp_path, monkeypatch, use)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("os._exit(3)", "exited with status 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        (f"os.kill(os.getpid(), {signal.SIGRTMIN + 1})", f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_its_exit_reason_is_reported_and_what_it_started_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    async def use(child: ManagedProcess) -> None:
        grandchild = int(await said(child, "import subprocess; say(subprocess.Popen(['sleep', '60']).pid)"))
        child.writer.write(frame(f"import os; {code}".encode()))
        await child.exit
        assert child.exit_reason() == says
        assert await asyncio.to_thread(gone, grandchild)

    with_child(tmp_path, monkeypatch, use)


@given(st.lists(st.binary(max_size=50)), st.integers(0, 5000))
def test_frames_come_out_as_they_went_in_and_a_cut_one_not_at_all(payloads: list[bytes], cut: int) -> None:
    content = b"".join(map(frame, payloads))
    stream = io.BytesIO(content[:cut])
    whole = list(iter(lambda: read_payload(stream), None))
    assert whole == payloads[: len(whole)]
    assert len(b"".join(map(frame, whole))) <= cut
    assert cut < len(content) or whole == payloads


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "says"),
    [(ValueError("two\nlines"), "ValueError: two lines"), (KeyError(), "KeyError"), (Mute(), "Mute")],
)
def test_an_error_is_one_line_with_where_it_was_raised(error: Exception, says: str) -> None:
    assert reason(error) == says
    with pytest.raises(type(error)) as caught:
        raise error
    assert reason(caught.value).startswith(f"{says} (test_child.py:")


def test_the_root_cause_of_an_error_comes_first() -> None:
    def fails(quietly: bool) -> None:
        try:
            {}["a"]
        except KeyError as error:
            if quietly:
                raise ValueError("b") from None
            try:
                raise OSError("c") from error
            except OSError:
                raise ValueError("b")  # noqa: B904

    for quietly, says in ((False, r"KeyError: 'a' \(.*\), then ValueError: b \(.*\)"), (True, r"ValueError: b \(.*\)")):
        with pytest.raises(ValueError) as caught:
            fails(quietly)
        assert re.fullmatch(says, reason(caught.value))


def test_each_failure_is_logged_once_and_only_the_first_of_many(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(100):
        log_failure(f"failure {number}\n")
        log_failure(f"failure {number}\n")
    told = capsys.readouterr().err.splitlines()
    assert told == [f"failure {number}" for number in range(len(told))]
    assert 10 <= len(told) < 100


def test_a_long_traceback_is_cut_at_its_beginning() -> None:
    assert detail(ValueError("x" * 10_000 + "the end")).endswith("the end\n")
    assert len(detail(ValueError("x" * 10_000))) == 4000
