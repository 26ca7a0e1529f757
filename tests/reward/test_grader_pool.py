"""The pool against functions that raise, hang, crash, shout and lie, and against the world outside killing things."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_examples import ALL
from processes import alive, gone, printed_pids

from roll.config.errors import RunError, UserError
from roll.data import Response, Task
from roll.reward import RewardSpec, ScoreFailure, Verdict
from roll.reward.pool import GraderPool

ACT = f"{Path(__file__).with_name('graders.py')}:act"
RESPONSE = Response("text", 1, "stop")
DEADLINE_S = 0.4


def do(*action: Any) -> Task:
    return Task.ask("task", "?", action)


def with_pool(use: Callable[[GraderPool], Awaitable[None]], reward: Any = ACT, **options: Any) -> None:
    """Run a test over a pool, and hold that nothing of the pool is left after it."""
    options = {"workers": 1, "deadline_s": DEADLINE_S, "tries": 1, **options}

    async def main() -> set[int]:
        async with GraderPool(RewardSpec.of(reward), **options) as pool:
            await asyncio.wait_for(use(pool), 200)
            graders = {grader.pid for grader in pool.processes}
        assert not pool.processes
        return graders

    left = asyncio.run(main())
    assert not any(alive(pid) for pid in left)


async def outcome(pool: GraderPool, *action: Any) -> tuple[str, Any]:
    try:
        verdict = await pool.score(do(*action), RESPONSE)
    except ScoreFailure as failure:
        return failure.kind, failure.reason
    return "scored", verdict.reward


def test_every_way_to_fail_is_named_and_the_next_job_is_judged() -> None:
    cases: list[tuple[tuple[Any, ...], str, str]] = [
        (("raise", "oops"), "raised", "KeyError: 'oops' (graders.py:"),
        (("sys.exit", 3), "raised", "SystemExit: 3"),
        (("give", None), "invalid", "returned None"),
        (("give", "high"), "invalid", "'high' (str), not a number"),
        (("nan",), "invalid", "nan, not a finite number"),
        (("give", {"a": float("inf")}), "invalid", "as 'a', inf"),
        (("give", -1e308), "invalid", "the reward function 'act' returned -1e+308, but a reward is from -1e+06 to 1e+06"),
        (("give", {"a": 1e200, "reward": 1}), "invalid", "'act' returned, as 'a', 1e+200, but a number beside a reward"),
        (("sleep", 60, 1), "deadline", "no verdict after 0.4 s"),
        (("spin",), "deadline", "no verdict after 0.4 s"),
        (("os._exit", 3), "crashed", "exited with status 3"),
        (("os._exit", 0), "crashed", "exited with status 0"),
        (("segfault",), "crashed", "killed by SIGSEGV"),
        (("kill itself",), "crashed", "killed by SIGKILL"),
        (("close connection",), "crashed", ""),
        (("write garbage",), "crashed", "broke its connection"),
    ]

    async def use(pool: GraderPool) -> None:
        for number, (action, kind, says) in enumerate(cases):
            got_kind, reason = await outcome(pool, *action)
            assert got_kind == kind, (action, reason)
            assert says in reason
            assert await outcome(pool, "give", number) == ("scored", number)
        stats = pool.stats()
        assert (stats.scored, stats.raised, stats.invalid) == (len(cases), 2, 6)
        assert (stats.deadline, stats.crashed, stats.restarts) == (2, 6, 8)
        assert 0 <= stats.mean_s < DEADLINE_S

    with_pool(use)


def test_parts_come_back_with_the_reward() -> None:
    async def use(pool: GraderPool) -> None:
        verdict = await pool.score(do("give", {"right": 1, "format": 0.5}), RESPONSE)
        assert verdict == Verdict(1.5, {"right": 1.0, "format": 0.5})

    with_pool(use)


def test_an_exception_carries_its_traceback() -> None:
    async def use(pool: GraderPool) -> None:
        with pytest.raises(ScoreFailure) as caught:
            await pool.score(do("raise", "oops"), RESPONSE)
        assert "in _raise" in caught.value.detail

    with_pool(use)


def test_what_the_function_prints_goes_to_the_log_and_breaks_nothing(tmp_path: Path) -> None:
    log = tmp_path / "graders.log"

    async def use(pool: GraderPool) -> None:
        for value in range(3):
            assert await outcome(pool, "shout", value) == ("scored", value)

    with_pool(use, log=log, deadline_s=60)
    text = log.read_bytes()
    assert b"garbage" in text
    assert b"noise" in text
    assert text.count(b"from a child") == 3


def test_a_job_is_tried_again_after_a_crash_but_not_after_an_exception(tmp_path: Path) -> None:
    async def use(pool: GraderPool) -> None:
        assert await outcome(pool, "die once", str(tmp_path / "died"), 7) == ("scored", 7)
        assert pool.stats().restarts == 1
        await outcome(pool, "raise", "oops")
        await outcome(pool, "nan")
        assert (pool.stats().raised, pool.stats().invalid) == (1, 1)
        assert await outcome(pool, "os._exit", 1) == (
            "crashed",
            "the grader process exited with status 1 (3 tries)",
        )
        assert pool.stats().crashed == 4

    with_pool(use, tries=3)


def test_a_process_killed_from_outside_costs_a_busy_job_one_try_and_an_idle_pool_nothing() -> None:
    async def use(pool: GraderPool) -> None:
        pid = int((await pool.score(do("pid"), RESPONSE)).reward)
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        await asyncio.sleep(0.1)
        assert await outcome(pool, "give", 1) == ("scored", 1)
        assert pool.stats().crashed == 0

        pid = int((await pool.score(do("pid"), RESPONSE)).reward)
        busy = asyncio.create_task(outcome(pool, "sleep", 0.3, 2))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert await busy == ("scored", 2)
        assert pool.stats().crashed == 1

    with_pool(use, tries=2, deadline_s=60)


@pytest.mark.parametrize("then", ["hang", "exit"])
def test_what_a_function_started_ends_with_its_process(tmp_path: Path, then: str) -> None:
    async def use(pool: GraderPool) -> None:
        kind, _ = await outcome(pool, "leave child", str(tmp_path / "pid"), then)
        assert kind == {"hang": "deadline", "exit": "crashed"}[then]
        assert gone(int((tmp_path / "pid").read_text()))

    with_pool(use)


def test_a_function_that_forks_or_leaves_threads_is_judged_once() -> None:
    async def use(pool: GraderPool) -> None:
        for value in range(5):
            assert await outcome(pool, "fork", value) == ("scored", value)
        assert await outcome(pool, "leave thread", 9) == ("scored", 9)

    with_pool(use, deadline_s=60)


def test_closures_and_answers_of_any_type_travel() -> None:
    bonus = 0.5

    class Odd:
        def __eq__(self, other: object) -> bool:
            return other == "odd"

    async def use(pool: GraderPool) -> None:
        assert await pool.score(Task.ask("t", "?", Odd()), Response("odd", 1, "stop")) == Verdict(1.5)
        with pytest.raises(ScoreFailure, match="raised: task 't' cannot be sent"):
            await pool.score(Task.ask("t", "?", (x for x in ())), RESPONSE)

    with_pool(use, reward=lambda task, response: float(task.answer == response.text) + bonus)


ENDS = {"give": "scored", "raise": "raised", "nan": "invalid", "os._exit": "crashed", "sleep": "deadline"}


@settings(max_examples=4 if ALL else 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(["give", "give", "give", "raise", "nan", "os._exit", "sleep"]), min_size=4, max_size=12),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_every_job_gets_its_own_outcome(jobs: list[str], tries: int, order: random.Random) -> None:
    """Of many at once over two processes, some of them cancelled: no outcome is lost, swapped or given twice."""

    async def use(pool: GraderPool) -> None:
        running = []
        for i, job in enumerate(jobs):
            arguments = {"raise": (f"job {i}",), "nan": (), "sleep": (60, i)}.get(job, (i,))
            running.append(asyncio.create_task(outcome(pool, job, *arguments)))
        cancelled = {i for i in range(len(jobs)) if order.random() < 0.15}
        for i in cancelled:
            asyncio.get_running_loop().call_later(order.random() * 0.2, running[i].cancel)
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        for i, (job, got) in enumerate(zip(jobs, outcomes, strict=True)):
            if isinstance(got, asyncio.CancelledError):
                assert i in cancelled
                continue
            assert not isinstance(got, BaseException), got
            kind, value = got
            assert kind == ENDS[job], (job, value)
            if job == "give":
                assert value == i
            if job == "raise":
                assert f"'job {i}'" in value
            if job == "os._exit":
                assert f"status {i}" in value
        assert await asyncio.gather(outcome(pool, "give", 1), outcome(pool, "give", 2)) == [
            ("scored", 1),
            ("scored", 2),
        ]

    with_pool(use, workers=2, tries=tries)


def test_jobs_are_taken_in_the_order_they_came() -> None:
    async def use(pool: GraderPool) -> None:
        finished: list[int] = []

        async def job(number: int) -> None:
            await outcome(pool, "give", number)
            finished.append(number)

        await asyncio.gather(*(job(number) for number in range(50)))
        assert finished == list(range(50))

    with_pool(use)


def test_a_cancelled_call_frees_its_process_whether_it_waited_or_ran() -> None:
    async def use(pool: GraderPool) -> None:
        running = asyncio.create_task(pool.score(do("spin"), RESPONSE))
        waiting = asyncio.create_task(pool.score(do("give", 1), RESPONSE))
        kept = asyncio.create_task(pool.score(do("give", 2), RESPONSE))
        await asyncio.sleep(0.05)
        for call in (waiting, running):
            call.cancel()
        assert (await kept).reward == 2
        for call in (waiting, running):
            with pytest.raises(asyncio.CancelledError):
                await call
        assert pool.stats().restarts == 1

    with_pool(use, deadline_s=60)


def test_a_call_cancelled_in_the_moment_its_turn_comes_passes_it_on() -> None:
    async def use(pool: GraderPool) -> None:
        grader = await pool._acquire("default", at_front=False)
        first = asyncio.create_task(pool.score(do("give", 1), RESPONSE))
        second = asyncio.create_task(pool.score(do("give", 2), RESPONSE))
        await asyncio.sleep(0)
        pool._release(grader, "default")  # to the first, which does not run before it is cancelled
        first.cancel()
        assert (await second).reward == 2
        assert pool.stats().restarts == 0

    with_pool(use)


def test_a_verdict_that_came_in_time_counts_even_if_the_event_loop_was_held_up() -> None:
    async def use(pool: GraderPool) -> None:
        for value in range(2):
            call = asyncio.create_task(outcome(pool, "sleep", 0.01, value))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            (grader,) = pool.processes
            answers = grader._child.writer.get_extra_info("socket").fileno()
            assert select.select([answers], [], [], 20)[0]  # however long this machine lets the process wait
            time.sleep(DEADLINE_S * 1.5)  # noqa: ASYNC251
            assert await call == ("scored", value)

    with_pool(use)


def test_closing_ends_calls_that_run_or_wait() -> None:
    async def main() -> None:
        pool = GraderPool(RewardSpec.of(ACT), deadline_s=60)
        with pytest.raises(RunError, match="not started"):
            await pool.score(do("give", 1), RESPONSE)
        await pool.start()
        calls = [asyncio.create_task(pool.score(do("spin"), RESPONSE)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await pool.close()
        await pool.close()
        for call in calls:
            with pytest.raises(RunError, match="pool was closed"):
                await asyncio.wait_for(call, 1)
        with pytest.raises(RunError, match="pool was closed"):
            await pool.score(do("give", 1), RESPONSE)

    asyncio.run(main())


def test_a_function_that_does_not_load_is_refused_at_the_start(tmp_path: Path) -> None:
    def started(reward: str, **options: Any) -> None:
        asyncio.run(GraderPool(RewardSpec.of(reward), workers=2, **options).start())

    (tmp_path / "dies.py").write_text("import os; os._exit(4)")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    with pytest.raises(UserError, match="'numbr' is not known"):
        started("numbr")
    with pytest.raises(RunError, match=r"while loading reward .*exited with status 4"):
        started(f"{tmp_path}/dies.py:score")
    with pytest.raises(RunError, match=r"took more than 0\.5 s"):
        started(f"{tmp_path}/hangs.py:score", start_deadline_s=0.5)


def test_a_start_that_is_cancelled_even_twice_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")

    async def main() -> None:
        pool = GraderPool(RewardSpec.of(f"{tmp_path}/hangs.py:score"), workers=2, log=tmp_path / "log")
        starting = asyncio.create_task(pool.start())
        async with asyncio.timeout(20):
            while len(pids()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _ in range(2):
            starting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def pids() -> list[int]:
        return [int(pid) for pid in (tmp_path / "log").read_text().split()] if (tmp_path / "log").exists() else []

    asyncio.run(main())
    assert not any(alive(pid) for pid in pids())


def test_when_no_process_starts_any_more_calls_fail_instead_of_waiting(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("import os\ndef score(task, response): os._exit(1)\n")

    async def use(pool: GraderPool) -> None:
        reward.unlink()
        calls = [pool.score(do("give", 1), RESPONSE) for _ in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, RunError) for result in results), results
        assert "no grader process starts any more (3 tries)" in str(results[0])
        assert "there is no file" in str(results[0])

    with_pool(use, reward=f"{reward}:score", tries=5)


def test_hostile_mathematics_is_bounded_by_the_deadline() -> None:
    async def use(pool: GraderPool) -> None:
        def judged(text: str) -> Awaitable[Verdict]:
            return pool.score(Task.ask("t", "?", r"\frac{1}{2}"), Response(text, 1, "stop"))

        assert await judged(r"\boxed{0.5}") == Verdict(1.0)
        started = time.monotonic()
        with pytest.raises(ScoreFailure, match="deadline"):
            await judged(r"\boxed{10^{10^{10}}}")
        assert time.monotonic() - started < 2
        assert await judged(r"\boxed{9^{9^{9^9}}}") == Verdict(0.0)

    with_pool(use, reward="math", deadline_s=0.5)


def test_a_grader_process_does_not_import_the_training_stack() -> None:
    async def use(pool: GraderPool) -> None:
        assert await outcome(pool, "loaded", ["torch", "transformers", "pydantic", "asyncio"]) == ("scored", 0)

    with_pool(use)


def test_graders_busy_or_idle_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = """
import asyncio, time
from roll.data import Response, Task
from roll.reward import RewardSpec
from roll.reward.pool import GraderPool

def reward(task, response):
    while True:
        pass

async def main():
    pool = GraderPool(RewardSpec.of(reward), workers=2, deadline_s=60)
    await pool.start()
    asyncio.create_task(pool.score(Task.ask("t", "?"), Response("", 0, "stop")))
    await asyncio.sleep(0.2)
    print(*(grader.pid for grader in pool.processes), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    parent, pids = printed_pids(script)
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids)
