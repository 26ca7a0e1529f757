"""A log of users' code: bounded, in order, and it says what it lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import eventually
from test_child import said, with_child

from roll.process.bounded_log import SMALLEST_BYTES, BoundedLog, start_writer
from roll.process.managed_process import ManagedProcess

LIMIT = 3 << 16


def parts(log: Path) -> list[bytes]:
    """The first, the one before the newest, and the newest; headers taken off."""
    files = [log.with_name(log.name + end) for end in (".first", ".before", "")]
    return [re.sub(rb"^\[roll: [^\n]*\n", b"", file.read_bytes()) for file in files if file.exists()]


def dropped(log: Path) -> int:
    header = re.match(r"\[roll: (\d+) bytes of this log were dropped after log.first", log.read_text(errors="replace"))
    assert header is not None
    return int(header[1])


def size(log: Path) -> int:
    return sum(file.stat().st_size for file in log.parent.glob("log*"))


def test_a_log_within_its_limit_is_one_file(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", LIMIT)
    log.write(b"one\n")
    log.write(b"two")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo"
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("end", [b"\n", b""])
def test_the_beginning_and_the_end_are_kept_and_the_rest_is_counted(tmp_path: Path, end: bytes) -> None:
    log, pieces = BoundedLog(tmp_path / "log", LIMIT), [b"%06d" % number + end for number in range(200_000)]
    for begin in range(0, len(pieces), 500):
        log.write(b"".join(pieces[begin : begin + 500]))
    whole = b"".join(pieces)
    first, before, newest = parts(tmp_path / "log")
    assert whole.startswith(first)
    assert whole.endswith(before + newest)
    assert min(len(first), len(before + newest)) > LIMIT // 4
    assert size(tmp_path / "log") <= LIMIT
    # Headers of dropped parts were counted with them: some hundred bytes each.
    lost = len(whole) - len(first + before + newest)
    assert lost <= dropped(tmp_path / "log") <= lost * 1.02


def test_writers_share_a_log(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from roll.process.bounded_log import BoundedLog\n"
        f"log = BoundedLog(Path(sys.argv[1]), {LIMIT})\n"
        "for number in range(2000): log.write((sys.argv[2] * 60 + '\\n').encode())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = [subprocess.Popen([sys.executable, "-c", program, tmp_path / "log", name], env=env) for name in "ab"]
    assert [process.wait(60) for process in run] == [0, 0]
    assert size(tmp_path / "log") <= LIMIT
    lines = b"".join(parts(tmp_path / "log")).splitlines()
    assert set(lines) == {b"a" * 60, b"b" * 60}
    assert dropped(tmp_path / "log") + sum(len(part) for part in parts(tmp_path / "log")) >= 2 * 2000 * 61


def test_what_could_not_be_written_is_reported_later(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "there" / "log", LIMIT)
    log.write(b"lost")
    (tmp_path / "there").mkdir()
    log.write(b"kept")
    assert (tmp_path / "there" / "log").read_bytes() == b"\n[roll: 4 bytes could not be written here]\nkept"


def test_a_child_that_prints_without_end_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.process.managed_process.LIMIT_BYTES", SMALLEST_BYTES)
    monkeypatch.setattr(ManagedProcess.start.__func__, "__defaults__", (None, SMALLEST_BYTES))

    async def use(child: ManagedProcess) -> None:
        await said(child, "import os; [os.write(1, b'x' * 65536) for _ in range(200)]; print('the end'); say(1)")
        child.kill()
        await child.exit
        assert (tmp_path / "log").read_text().endswith("the end\n")
        assert dropped(tmp_path / "log") > 12_000_000
        assert size(tmp_path / "log") <= SMALLEST_BYTES

    with_child(tmp_path, monkeypatch, use)


def test_a_process_without_a_subreaper_has_a_writer_that_ends_with_it(tmp_path: Path) -> None:
    writing = start_writer(tmp_path / "log", LIMIT)
    with subprocess.Popen(["sh", "-c", "echo said by a child"], stdout=writing):
        os.close(writing)
    assert eventually(lambda: (tmp_path / "log").exists() and "said by a child" in (tmp_path / "log").read_text())
    mark = str(tmp_path / "log")
    assert eventually(lambda: not subprocess.run(["pgrep", "-f", mark], capture_output=True, check=False).stdout)
