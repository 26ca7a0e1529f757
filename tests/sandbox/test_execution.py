"""Programs in the sandbox that mean no harm, and what becomes of them when the run does not wait for their end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from boxes import NAMES, alive, box
from processes import eventually
from thorough import but

from roll.sandbox import Limits, Program, Sandbox, SandboxError, best, execution, run, run_blocking
from roll.sandbox.calls import CallFailed, CallReturned, FunctionCall, call_all, check_all

PATIENT = Limits(wall_s=20, cpu_s=20)


@pytest.fixture(params=but({"plain", "namespaces"}, NAMES))
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return box(request.param)


def test_a_look_that_takes_long_does_not_hold_up_the_end(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many mappings that change all the time a program can make the kernel take seconds to say what it holds."""

    def until_it_ended(pid: int, *_: object) -> bool:
        look = os.pidfd_open(pid)
        select.select([look], [], [], 60)
        os.close(look)
        return False

    monkeypatch.setattr(execution, "exceeds_memory", until_it_ended)
    watched = dataclasses.replace(sandbox, cgroups=None)
    outcome = run_blocking(Program("import time\ntime.sleep(600)"), Limits(wall_s=0.5), watched)
    assert outcome.kind == "timeout"
    assert outcome.seconds < 30


class TestOutcomes:
    def test_what_a_program_reads_writes_and_says(self, sandbox: Sandbox) -> None:
        source = """
import sys, helper
print(input(), sys.stdin.read(), open("data.txt").read(), helper.NAME, __name__, sys.argv)
print("ä€😀", file=sys.stderr)
exit(3)
"""
        program = Program(source, b"one\ntwo\nthree", {"data.txt": "räksmörgås"}, {"helper": "NAME = 'helped'"})
        outcome = run_blocking(program, PATIENT, sandbox)
        assert outcome.stdout == "one two\nthree räksmörgås helped __main__ ['main.py']\n"
        assert (outcome.stderr, outcome.kind, outcome.status) == ("ä€😀\n", "failed", 3)

    @pytest.mark.parametrize(
        ("source", "kind", "status"),
        [
            ("pass", "ok", 0),
            ("raise SystemExit", "ok", 0),
            ("1 / 0", "failed", 1),
            ("def f(:", "failed", 1),
            ("import os\nos.abort()", "failed", 128 + signal.SIGABRT),
            ("import os\nos.kill(os.getpid(), 9)", "killed", None),
            ("import os\nos._exit(7)", "failed", 7),
            ("", "ok", 0),
        ],
    )
    def test_how_it_ended(self, sandbox: Sandbox, source: str, kind: str, status: int | None) -> None:
        outcome = run_blocking(Program(source), PATIENT, sandbox)
        assert (outcome.kind, outcome.status) == (kind, status)

    def test_a_traceback_is_that_of_the_program(self, sandbox: Sandbox) -> None:
        outcome = run_blocking(Program("def f():\n    return 1 / 0\n\nf()"), PATIENT, sandbox)
        assert outcome.stderr.startswith(
            'Traceback (most recent call last):\n  File "main.py", line 4, in <module>\n    f()'
        )
        assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")

    def test_output_that_is_not_text_is_replaced(self, sandbox: Sandbox) -> None:
        assert run_blocking(Program("import os\nos.write(1, b'a\\xffb')"), PATIENT, sandbox).stdout == "a�b"

    def test_programs_may_have_threads_and_children(self, sandbox: Sandbox) -> None:
        source = """
import subprocess, sys, threading
threads = [threading.Thread(target=print, args=("thread",)) for _ in range(4)]
for thread in threads: thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout, end="")
"""
        assert run_blocking(Program(source), PATIENT, sandbox).stdout == "thread\n" * 4 + "child\n"

    def test_memory_that_processes_share_counts_once(self, sandbox: Sandbox) -> None:
        source = """
import os, time
held = bytearray(150_000_000)
for _ in range(4):
    if os.fork() == 0: time.sleep(1); os._exit(0)
for _ in range(4): os.wait()
print("done")
"""
        assert run_blocking(Program(source), PATIENT, sandbox).stdout == "done\n"

    def test_the_order_of_sets_repeats(self, sandbox: Sandbox) -> None:
        program = Program("print(list({str(n) for n in range(50)}))")
        assert run_blocking(program, PATIENT, sandbox).stdout == run_blocking(program, PATIENT, sandbox).stdout

    def test_many_at_once_do_not_meet(self, sandbox: Sandbox) -> None:
        def one(n: int) -> str:
            program = Program(
                f"import os, time\nopen('mine', 'w').write('{n}')\ntime.sleep(0.3)\nprint(open('mine').read())"
            )
            return run_blocking(program, PATIENT, sandbox).stdout

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(one, range(12))) == [f"{n}\n" for n in range(12)]


class TestEnds:
    def test_a_cancelled_run_kills_its_program(self, sandbox: Sandbox) -> None:
        mark = f"cancelled-{secrets.token_hex(8)}"
        source = (
            f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(3600)', '{mark}'])"
        )

        async def cancel() -> None:
            task = asyncio.create_task(run(Program(source), Limits(wall_s=600), sandbox))
            for _ in range(1000):
                if alive(mark):
                    break
                await asyncio.sleep(0.02)
            assert alive(mark)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert alive(mark) == []

    def test_a_program_ends_when_the_run_is_killed(self, sandbox: Sandbox, tmp_path: Path) -> None:
        mark = f"orphan-{secrets.token_hex(8)}"
        source = f"""
import os, sys
for _ in range(2):
    if os.fork() == 0: os.setsid()
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", "{mark}"])
"""
        script = tmp_path / "run.py"
        script.write_text(
            "import pickle, sys\nfrom roll.sandbox import Limits, Program, run_blocking\n"
            "sandbox, source = pickle.load(sys.stdin.buffer)\n"
            "run_blocking(Program(source), Limits(wall_s=600, cpu_s=600), sandbox)\n"
        )
        import pickle

        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, env=env, start_new_session=True)
        try:
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(pickle.dumps((sandbox, source)))
            assert eventually(lambda: len(alive(mark)) == 4)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)
        assert eventually(lambda: alive(mark) == [])

    def test_a_sandbox_that_cannot_start_is_no_fault_of_the_program(self, sandbox: Sandbox) -> None:
        broken = dataclasses.replace(sandbox, python=dataclasses.replace(sandbox.python, path="/usr/bin/false"))
        with pytest.raises(SandboxError, match="did not start"):
            run_blocking(Program("pass"), PATIENT, broken)

    def test_a_sandbox_whose_tool_has_gone_is_no_fault_of_the_program(self) -> None:
        broken = dataclasses.replace(best(), python=dataclasses.replace(best().python, path="/nowhere"), tool="/nowhere")
        with pytest.raises(SandboxError, match="did not start"):
            run_blocking(Program("pass"), PATIENT, broken)

    def test_side_by_side_in_an_event_loop(self) -> None:
        async def all_of_them() -> list[str]:
            outcomes = await asyncio.gather(*(run(Program(f"print({n})"), PATIENT) for n in range(10)))
            return [outcome.stdout for outcome in outcomes]

        assert asyncio.run(all_of_them()) == [f"{n}\n" for n in range(10)]

    def test_nothing_stays_open(self) -> None:
        run_blocking(Program("pass"), PATIENT)
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(5):
            run_blocking(Program("print(1)"), PATIENT)
        assert sorted(os.listdir("/proc/self/fd")) == before


class TestCalls:
    def test_calls_return_plain_values(self, sandbox: Sandbox) -> None:
        source = "def same(x): return x\ndef late(): import time; time.sleep(0)\nclass C: pass\ndef odd(): return C()"
        values = [
            None,
            True,
            1,
            -(2**100),
            0.5,
            float("inf"),
            "ä\ud800",
            b"\0",
            (1, [2]),
            {1, 2},
            {"a": {(1, 2): None}},
            1j,
        ]
        calls = [FunctionCall("same", (value,)) for value in values]
        results, outcome = call_all(
            sandbox, source, [*calls, FunctionCall("odd"), FunctionCall("none"), FunctionCall("same", (7,))], PATIENT
        )
        assert results[: len(values)] == [CallReturned(value) for value in values]
        assert [type(result) for result in results[len(values) :]] == [CallFailed, CallFailed, CallReturned]
        assert outcome.ok

    def test_a_call_that_ends_the_process_fails_and_so_do_the_rest(self, sandbox: Sandbox) -> None:
        source = "import os\ndef f(n):\n    print('noise')\n    return n if n < 2 else os._exit(0)"
        results, _ = call_all(sandbox, source, [FunctionCall("f", (n,)) for n in range(4)], PATIENT)
        assert results[:2] == [CallReturned(0), CallReturned(1)]
        assert [type(result) for result in results[2:]] == [CallFailed, CallFailed]

    def test_tests_hear_at_once_that_the_program_has_gone(self, sandbox: Sandbox) -> None:
        began_s = time.monotonic()
        source = "import os\ndef f(): os._exit(0)"
        failures, _ = check_all(sandbox, source, "", ["f()", "assert True"], ["f"], Limits(wall_s=300, cpu_s=300))
        assert failures == ["gone", ""]
        assert time.monotonic() - began_s < 100


def test_the_best_level_is_the_first_that_works() -> None:
    assert best() is best()
    for name in NAMES[:3]:
        try:
            first = box(name)
        except pytest.skip.Exception:
            continue
        assert best().level == first.level
        break


@pytest.mark.parametrize("limits", [{"wall_s": 0}, {"memory_mb": -1}, {"output_bytes": 0}])
def test_limits_are_above_zero(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Limits(**limits)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/x"])
def test_files_have_no_folders(name: str) -> None:
    with pytest.raises(ValueError, match="no folders"):
        Program("", files={name: ""})
