"""The pool against environments that raise, hang, crash, hog, shout and lie, and against the world outside."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import alive, eventually, gone, printed_pids, state
from thorough import but

from roll.config.errors import RunError
from roll.data.task import EnvSpec
from roll.env import EnvFailure, ResetResult, Step, ipc
from roll.env.builtin import Guess
from roll.env.env_server import EnvServer
from roll.env.pool import Deadlines, EnvPool
from roll.env.stats import EnvStats
from roll.process.framing import read_payload

WORLDS = str(Path(__file__).with_name("worlds.py"))
STEP_S = 0.5
PATIENT = Deadlines(start_s=30, reset_s=30, step_s=30, admission_s=30)
NO_PICKLE = [0, 0, 0, 0, 0, 0, 0, 4, *b"oops"]
TOO_LONG = [255] * 8
HASTY = Deadlines(start_s=30, reset_s=30, step_s=STEP_S, admission_s=30)


def world(seed: int = 0, kind: str = "World", **options: Any) -> EnvSpec:
    return EnvSpec(f"{WORLDS}:{kind}", seed, options)


def do(*action: Any) -> str:
    return json.dumps(action)


def with_pool(
    use: Callable[[EnvPool], Awaitable[None]], deadlines: Deadlines = PATIENT, workers: int = 1, **options: Any
) -> None:
    """Run a test over a pool; hold that no room is taken when all is closed, and that nothing is left after it."""

    async def main() -> set[int]:
        async with EnvPool(workers, deadlines=deadlines, **options) as pool:
            await asyncio.wait_for(use(pool), 300)
            for episode in list(pool._episodes):
                await pool.close_episode(episode)
            await settled(pool)
            assert not any(pool._slots.values())
            assert not any(pool._queue.admitted_counts.values())
            assert len(pool._slots) == workers
            pids = {host.pid for host in pool.processes}
        assert not any((pool.processes, pool.replacements, pool._slots, pool._episodes, pool._closures, pool._queue))
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        return pids

    left = asyncio.run(main())
    assert not any(alive(pid) for pid in left)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def settled(pool: EnvPool) -> None:
    """Until the background has nothing to do."""
    while background := [*pool._closures, *pool.replacements]:
        await asyncio.wait(background)


async def outcome(call: Awaitable[ResetResult | Step]) -> tuple[str, str]:
    try:
        result = await call
    except EnvFailure as failure:
        return failure.kind, failure.reason
    return "ok", result.messages[0]["content"]


async def told(pool: EnvPool, episode: str, *action: Any) -> tuple[str, str]:
    return await outcome(pool.step(episode, do(*action)))


async def process_of(pool: EnvPool, episode: str) -> int:
    return int((await told(pool, episode, "pid"))[1])


def test_an_episode_from_its_first_message_to_its_last() -> None:
    async def use(pool: EnvPool) -> None:
        opened = await pool.reset("a", EnvSpec("guess", 3, {"low": 1, "high": 7, "tries": 3}))
        assert opened.messages[0]["role"] == "user"
        steps, guess, low, high = [], 4, 1, 7
        while not steps or not steps[-1].done:
            steps.append(await pool.step("a", f"My guess is {guess}."))
            low, high = (guess + 1, high) if "Higher" in str(steps[-1].observation) else (low, guess - 1)
            guess = (low + high) // 2
        assert steps[-1].reward == 1.0
        stats = pool.stats()
        assert (stats.resets, stats.steps, stats.finished, stats.open) == (1, len(steps), 1, 0)
        assert 0 <= stats.step_mean_s < 1
        assert await told(pool, "a", "tell") == ("lost", "episode 'a' is not open here")

    with_pool(use)


def test_every_way_to_fail_is_named_and_the_next_episode_is_played() -> None:
    cases: list[tuple[tuple[Any, ...], str, str]] = [
        (("raise", "oops"), "raised", "KeyError: 'oops' (worlds.py:"),
        (("sys.exit", 3), "raised", "SystemExit: 3"),
        (("nothing",), "invalid", "step returned None"),
        (("give", "hi", 1.0, True, {}), "invalid", "4 values, not 5"),
        (("nan",), "invalid", "nan, not a finite number"),
        (("sleep", 60), "deadline", "step of episode 'a' took more than 0.5 s"),
        (("spin",), "deadline", "took more than 0.5 s"),
        (("os._exit", 3), "crashed", "its process exited with status 3"),
        (("os._exit", 0), "crashed", "its process exited with status 0"),
        (("segfault",), "crashed", "its process was killed by SIGSEGV"),
        (("kill itself",), "crashed", "its process was killed by SIGKILL"),
        (("close connection",), "crashed", ""),
        (("write garbage", *NO_PICKLE), "crashed", "broke its connection"),
        (("write garbage", *TOO_LONG), "crashed", "broke its connection"),
    ]

    async def use(pool: EnvPool) -> None:
        for number, (action, kind, says) in enumerate(cases):
            assert await outcome(pool.reset("a", world(number))) == ("ok", f"seed {number}")
            got_kind, reason = await told(pool, "a", *action)
            assert (got_kind, says in reason) == (kind, True), (action, reason)
            assert (await told(pool, "a", "tell"))[0] == "lost", "a failure ends the episode"
        await settled(pool)
        stats = pool.stats()
        assert (stats.raised, stats.invalid, stats.deadline, stats.crashed) == (2, 3, 2, 7)
        assert (stats.lost, stats.restarts) == (len(cases), 9)
        assert pool.take_stats() == stats
        assert pool.take_stats() == EnvStats(), "nothing since"
        assert stats.metrics() == {
            "environments/failed": len(cases),
            "environments/deadlines": 2,
            "environments/lost": len(cases),
            "environments/restarts": 9,
            "environments/reset_s": stats.reset_s / len(cases),
        }
        assert (stats + stats).metrics()["environments/reset_s"] == stats.reset_mean_s
        await pool.reset("a", world())
        with pytest.raises(EnvFailure) as caught:
            await pool.step("a", do("raise", "oops"))
        assert "in raises" in caught.value.detail

    with_pool(use, HASTY, workers=2)


def test_a_reset_fails_in_the_same_ways() -> None:
    bad: list[tuple[EnvSpec, str, str]] = [
        (world(begin=["raise", "oops"]), "raised", "KeyError: 'oops'"),
        (world(begin=["nothing"]), "invalid", "reset returned None"),
        (world(begin=["sleep", 60]), "deadline", "reset of episode 'a' took more than 0.5 s"),
        (world(begin=["os._exit", 4]), "crashed", "status 4"),
        (world(bgein=["tell"]), "invalid", "did you mean 'begin'"),
        (world(kind="Wordl"), "invalid", "did you mean 'World'"),
        (world(kind="make_nothing"), "invalid", "made as a int, which has no method reset"),
        (world(begin=(x for x in ())), "invalid", "cannot be sent to a process"),
        (EnvSpec("gess"), "invalid", "did you mean 'guess'"),
        (EnvSpec("guess", 0, {"tries": 0}), "raised", "ValueError: guess: "),
    ]

    async def use(pool: EnvPool) -> None:
        for spec, kind, says in bad:
            got_kind, reason = await outcome(pool.reset("a", spec))
            assert (got_kind, says in reason) == (kind, True), (spec, reason)
        assert await outcome(pool.reset("a", world(5))) == ("ok", "seed 5")

    with_pool(use, Deadlines(30, STEP_S, STEP_S, 30))


def test_what_environments_print_goes_to_the_log_and_breaks_nothing(tmp_path: Path) -> None:
    log = tmp_path / "environments.log"

    async def use(pool: EnvPool) -> None:
        for name in "abc":
            await pool.reset(name, world())
        outcomes = await asyncio.gather(*(told(pool, name, "shout") for name in "abc"))
        assert outcomes == [("ok", "shouted")] * 3

    with_pool(use, log=log)
    text = log.read_bytes()
    assert b"garbage" in text
    assert b"noise" in text
    assert text.count(b"from a child") == 3


def test_kinds_of_environments_live_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: EnvPool) -> None:
        monkeypatch.chdir("/")
        await pool.reset("dies", world())
        await told(pool, "dies", "os._exit", 0)  # the next process too looks names up from where the pool was made
        for kind in ("World", "AsyncWorld", "make_async", "Forgetful"):
            assert await outcome(pool.reset(kind, world(7, kind))) == ("ok", "seed 7")
        assert await told(pool, "World", "tell") == ("ok", "7:1")
        assert await told(pool, "World", "same thread") == ("ok", "True")
        assert await told(pool, "AsyncWorld", "tell") == ("ok", "7:1")
        assert await told(pool, "make_async", "tell") == ("ok", "7:1")
        assert await told(pool, "AsyncWorld", "tell") == ("ok", "7:2")
        assert await told(pool, "AsyncWorld", "same thread") == ("ok", "True")
        assert await outcome(pool.step("Forgetful", "hm")) == ("ok", "hm")
        assert (await told(pool, "AsyncWorld", "raise", "oops"))[0] == "raised"
        too_much = "the environment returned 65 MB; at most 64 MB are taken"
        assert await told(pool, "World", "huge", 65) == ("invalid", too_much)
        gym = EnvSpec("worlds.py:GymLike", 3)
        assert await pool.reset("gym", gym) == ResetResult(({"role": "user", "content": "go"},), {"difficulty": 2.0})
        step = await pool.step("gym", "stop")
        assert (step.observation, step.reward, step.terminated, step.truncated) == ("STOP", 1.0, False, True)
        assert step.info == {"draw": random.Random(3).random(), "note": "ok"}

    monkeypatch.chdir(Path(WORLDS).parent)
    with_pool(use)


def test_an_environments_own_task_that_exits_does_not_take_the_event_loop_along() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world(1, "AsyncWorld"))
        await pool.reset("b", world(2, "AsyncWorld"))
        await told(pool, "a", "background exit")
        assert await told(pool, "b", "tell") == ("ok", "2:1")

    with_pool(use)


def test_environments_of_a_process_act_at_once() -> None:
    async def use(pool: EnvPool) -> None:
        for number in range(20):
            await pool.reset(str(number), world(number, "World" if number % 2 else "AsyncWorld"))
        started = time.monotonic()
        outcomes = await asyncio.gather(*(told(pool, str(number), "sleep", 0.5) for number in range(20)))
        assert outcomes == [("ok", "slept")] * 20
        assert time.monotonic() - started < 4  # one after the other: 10, of one kind: 5
        answers = await asyncio.gather(*(told(pool, str(number), "huge", 2) for number in range(20)))
        assert {(kind, len(text)) for kind, text in answers} == {("ok", 2 << 20)}, "answers do not mix"

    with_pool(use)


def test_a_kind_at_its_limit_waits_and_holds_up_nobody_else() -> None:
    limited, other = f"{WORLDS}:World", f"{WORLDS}:AsyncWorld"

    async def use(pool: EnvPool) -> None:
        def begin(name: str, kind: str) -> asyncio.Task[tuple[str, str]]:
            return asyncio.create_task(outcome(pool.reset(name, EnvSpec(kind, 1))))

        first = [await begin(name, limited) for name in "ab"]
        waits = [begin(name, limited) for name in "cde"]
        await asyncio.sleep(0)
        others = [await asyncio.wait_for(begin(name, other), 60) for name in "vwx"]
        assert {kind for kind, _ in (*first, *others)} == {"ok"}
        assert (pool.stats().waiting, pool._queue.admitted_counts[limited]) == (3, 2)
        await pool.close_episode("d")
        assert (await waits[1])[0] == "lost"
        await pool.close_episode("a")
        assert (await asyncio.wait_for(waits[0], 60))[0] == "ok"
        assert not waits[2].done(), "b and c are open"
        await told(pool, "b", "os._exit", 3)
        assert (await asyncio.wait_for(waits[2], 60))[0] == "ok", "those of a process that died are not open any more"

    with_pool(use, workers=2, limits={limited: 2})


def test_an_episode_that_waits_too_long_is_told_which_slots_are_in_use() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world())
        kind, reason = await outcome(pool.reset("b", world()))
        assert (kind, reason) == (
            "lost",
            f"no slot became free within 0.2 s: all 1 slots for '{WORLDS}:World' are in use",
        )
        assert (await outcome(pool.reset("c", world(kind="AsyncWorld"))))[0] == "ok"

    with_pool(use, Deadlines(admission_s=0.2), limits={f"{WORLDS}:World": 1})


@pytest.mark.thorough
def test_thousands_may_wait_for_a_few_slots_and_the_limit_holds_all_the_while() -> None:
    most = 0

    async def episode(pool: EnvPool, seed: int) -> float:
        nonlocal most
        said = (await pool.reset(str(seed), EnvSpec("echo_turns", seed, {"turns": 2}))).messages[0]["content"]
        most = max(most, pool._queue.admitted_counts["echo_turns"])
        first = await pool.step(str(seed), said)
        return first.reward + (await pool.step(str(seed), str(first.observation))).reward

    async def use(pool: EnvPool) -> None:
        assert set(await asyncio.gather(*(episode(pool, seed) for seed in range(2_000)))) == {1.0}

    with_pool(use, workers=2, per_process=100, limits={"echo_turns": 20})
    assert most == 20


def test_the_same_seed_is_the_same_episode_in_any_process() -> None:
    """Also where an environment leans on the order of a set."""

    async def episode(pool: EnvPool, name: str, seed: int) -> list[str]:
        said = [str(await pool.reset(name, EnvSpec("echo_turns", seed, {"turns": 5})))]
        while len(said) < 6:
            said.append(str(await pool.step(name, "4")))
        return said

    async def use(pool: EnvPool) -> None:
        played = await asyncio.gather(*(episode(pool, f"{seed}/{copy}", seed) for seed in range(9) for copy in range(4)))
        assert all(played[i] == played[i - i % 4] for i in range(len(played)))
        assert len({str(said) for said in played}) == 9
        for name in "ab":
            await pool.reset(name, world())
        assert await process_of(pool, "a") != await process_of(pool, "b")
        assert await told(pool, "a", "order of a set") == await told(pool, "b", "order of a set")

    with_pool(use, workers=2)


def test_only_who_hangs_is_to_blame() -> None:
    async def use(pool: EnvPool) -> None:
        for name in ("hangs", "waits", "idle"):
            await pool.reset(name, world())
        pid = await process_of(pool, "idle")
        hanging = asyncio.create_task(told(pool, "hangs", "spin"))
        await asyncio.sleep(STEP_S / 2)
        waiting = asyncio.create_task(told(pool, "waits", "sleep", 60))
        assert await hanging == ("deadline", f"step of episode 'hangs' took more than {STEP_S} s")
        why = f"its process was killed, because step of episode 'hangs' took more than {STEP_S} s"
        assert await waiting == ("lost", why)
        assert gone(pid)
        assert await told(pool, "idle", "tell") == ("lost", why)
        for name in ("hangs", "waits", "idle"):
            assert (await outcome(pool.reset(name, world(3))))[0] == "ok"
        assert pool.stats().restarts == 1

    with_pool(use, HASTY)


def test_a_process_killed_from_outside_crashes_calls_under_way_and_loses_the_others() -> None:
    async def use(pool: EnvPool) -> None:
        for name in ("busy", "idle", "unheard"):
            await pool.reset(name, world())
        pid = await process_of(pool, "idle")
        busy = asyncio.create_task(told(pool, "busy", "sleep", 20))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert await busy == ("crashed", "its process was killed by SIGKILL")
        assert await told(pool, "idle", "tell") == ("lost", "its process was killed by SIGKILL")
        await pool.close_episode("unheard")
        assert (await outcome(pool.reset("idle", world(4)))) == ("ok", "seed 4")
        stats = pool.stats()
        assert (stats.crashed, stats.lost, stats.restarts, stats.open) == (1, 1, 1, 1)

    with_pool(use)


@pytest.mark.parametrize("busy", [1, 3])
def test_a_crash_says_how_many_calls_may_have_caused_it(busy: int) -> None:
    async def use(pool: EnvPool) -> None:
        names = [str(number) for number in range(3)]
        for name in names:
            await pool.reset(name, world())
        pid = await process_of(pool, "0")
        calls = [asyncio.create_task(pool.step(name, do("sleep", 20))) for name in names[:busy]]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(EnvFailure) as caught:
                await call
            assert (caught.value.kind, caught.value.candidates) == ("crashed", busy)
            assert pickle.loads(pickle.dumps(caught.value)).candidates == busy

    with_pool(use)


@pytest.mark.parametrize("kind", but({"AsyncWorld"}, ["World", "AsyncWorld"]))
@pytest.mark.parametrize(
    ("action", "says"),
    [
        (("os._exit", 3), "called os._exit(3): its process exited with status 3"),
        (("kill itself",), "sent itself SIGKILL: its process was killed by SIGKILL"),
        (("segfault",), "had a fault (__init__.py:"),
    ],
)
def test_the_environment_that_ended_its_process_is_named_and_others_are_lost(
    action: tuple[Any, ...], says: str, kind: str
) -> None:
    async def use(pool: EnvPool) -> None:
        for name in ("guilty", "busy", "idle"):
            await pool.reset(name, world(kind=kind))
        busy = asyncio.create_task(told(pool, "busy", "sleep", 20))
        await asyncio.sleep(0.1)
        failed, reason = await told(pool, "guilty", *action)
        neighbour, why = await busy
        if (kind, action[0]) == ("AsyncWorld", "segfault"):  # they share a thread
            assert (failed, neighbour) == ("crashed", "crashed")
            return
        assert (failed, neighbour) == ("crashed", "lost")
        assert reason.startswith(f"it {says}")
        assert why.startswith(f"another environment {says}")
        assert (await told(pool, "idle", "tell"))[0] == "lost"
        assert await outcome(pool.reset("busy", world(5, kind))) == ("ok", "seed 5")

    with_pool(use)


def test_an_environment_that_is_alone_shares_its_fate_with_nobody() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("neighbour", world())
        alone = asyncio.create_task(pool.reset("alone", world(7), alone=True))
        await alone
        assert await process_of(pool, "alone") != await process_of(pool, "neighbour")
        assert (await told(pool, "neighbour", "os._exit", 1))[0] == "crashed"
        assert await told(pool, "alone", "raise", "my own error") == ("raised", "KeyError: 'my own error' (worlds.py:61)")
        await settled(pool)
        assert len(pool.processes) == 1

    with_pool(use, workers=1, per_process=2)


def test_who_is_alone_counts_for_the_limit_of_its_kind() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("first", world(), alone=True)
        second = asyncio.create_task(pool.reset("second", world(2), alone=True))
        await asyncio.sleep(0.2)
        assert not second.done()
        await pool.close_episode("first")
        await second

    with_pool(use, limits={f"{WORLDS}:World": 1})


def test_what_is_known_at_once_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grace is for what may still be on its way: not for a call that hangs in a process which lives, nor for one that
    ended and left a copy of itself."""

    async def use(pool: EnvPool) -> None:
        for action, kind in (("sleep", "deadline"), ("fork and die", "crashed")):
            await pool.reset("a", world())
            arguments = [60] if action == "sleep" else []
            assert (await asyncio.wait_for(told(pool, "a", action, *arguments), 10))[0] == kind

    monkeypatch.setattr("roll.env.env_process._GRACE_S", 30.0)
    with_pool(use, HASTY)


def test_a_process_that_broke_off_gets_no_new_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world())
        breaking = asyncio.create_task(told(pool, "a", "write garbage", *NO_PICKLE))
        (host,) = pool.processes
        await until(lambda: not host.usable)
        assert await outcome(pool.reset("b", world(2))) == ("ok", "seed 2")
        assert (await breaking)[0] == "crashed"

    monkeypatch.setattr("roll.env.env_process._EXIT_STATUS_S", 0.6)
    with_pool(use)


def test_a_process_that_died_idle_harms_no_new_episode() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world())
        os.kill(await process_of(pool, "a"), signal.SIGKILL)
        (host,) = pool.processes
        await until(lambda: not host.usable)
        assert await outcome(pool.reset("b", world(9))) == ("ok", "seed 9")
        assert pool.stats().crashed == 0

    with_pool(use)


def test_a_stopped_process_is_killed_at_the_first_deadline() -> None:
    async def use(pool: EnvPool) -> None:
        for name in ("first", "second"):
            await pool.reset(name, world())
        pid = await process_of(pool, "first")
        os.kill(pid, signal.SIGSTOP)
        assert await asyncio.to_thread(eventually, lambda: state(pid) == "T")
        outcomes = [asyncio.create_task(told(pool, name, "tell")) for name in ("first", "second")]
        assert [kind for kind, _ in await asyncio.gather(*outcomes)] == ["deadline", "deadline"]
        assert gone(pid)
        assert (await outcome(pool.reset("first", world())))[0] == "ok"

    with_pool(use, HASTY)


@pytest.mark.parametrize("then", ["hang", "exit"])
def test_what_an_environment_started_ends_with_its_process(tmp_path: Path, then: str) -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world())
        kind, _ = await told(pool, "a", "leave child", str(tmp_path / "pid"), then)
        assert kind == {"hang": "deadline", "exit": "crashed"}[then]
        assert gone(int((tmp_path / "pid").read_text()))

    with_pool(use, HASTY)


def test_an_environment_that_forks_answers_once() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world(2))
        for _ in range(3):
            assert await told(pool, "a", "fork") == ("ok", "forked")
        assert await told(pool, "a", "tell") == ("ok", "2:1")
        assert pool.stats().restarts == 0

    with_pool(use)


def test_memory_is_limited_for_who_wants_too_much_and_not_for_its_neighbours() -> None:
    async def use(pool: EnvPool) -> None:
        for number in range(100):  # their stacks do not count
            await pool.reset(str(number), world(number))
        pid = await process_of(pool, "0")
        for where in ("call", "environment", "environment"):
            await pool.reset("hog", world())
            kind, reason = await told(pool, "hog", "hog", 500, where)
            assert (kind, "MemoryError" in reason) == ("raised", True)
            await settled(pool)
        assert await told(pool, "7", "tell") == ("ok", "7:1")
        assert await told(pool, "7", "hog", 50, "call") == ("ok", "hogged")
        assert await process_of(pool, "99") == pid

        for number in range(8, 100):  # nor do the stacks of those that have gone make room
            await pool.close_episode(str(number))
        await settled(pool)
        await pool.reset("leak", world())
        waiting = asyncio.create_task(told(pool, "6", "sleep", 20))
        assert (await told(pool, "leak", "hog", 500, "process"))[0] == "raised"
        await settled(pool)
        why = "its process ended, because the environments in it had taken too much memory"
        assert await told(pool, "7", "tell") == ("lost", why)
        assert await waiting == ("lost", why)
        assert await outcome(pool.reset("7", world(8))) == ("ok", "seed 8")

    with_pool(use, memory_mb=200, per_process=128)


def test_an_episode_left_early_is_closed_and_its_slot_is_given_to_another(tmp_path: Path) -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world(end=["touch", str(tmp_path / "a")]))
        waiting = asyncio.create_task(outcome(pool.reset("b", world(2, end=["raise", "oops"]))))
        await asyncio.sleep(0.05)
        assert (pool.stats().open, pool.stats().waiting) == (2, 1)
        await pool.close_episode("a")
        assert await waiting == ("ok", "seed 2")
        assert (tmp_path / "a").exists(), "room is given on when the environment is closed"
        assert pool.stats().waiting == 0
        again = pool.reset("b", world(3, end=["touch", str(tmp_path / "b")]))  # the one before is closed, badly
        assert await outcome(again) == ("ok", "seed 3")
        assert await outcome(pool.step("b", do("give", "bye", 1.0, True, False, {}))) == ("ok", "bye")
        await settled(pool)
        assert (tmp_path / "b").exists(), "an episode that ended is closed by itself"
        for name in ("a", "b", "never"):
            await pool.close_episode(name)

    with_pool(use, per_process=1)


def test_an_environment_that_does_not_close_is_killed() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world(end=["sleep", 60]))
        await pool.reset("b", world())
        pid = await process_of(pool, "b")
        await pool.close_episode("a")
        assert await told(pool, "b", "tell") == ("ok", "0:1")
        assert await asyncio.to_thread(gone, pid, STEP_S + 3)
        await asyncio.sleep(0.1)
        kind, reason = await told(pool, "b", "tell")
        assert (kind, "close of episode 'a' took more than" in reason) == ("lost", True)

    with_pool(use, HASTY)


def test_slots_are_given_in_order_and_not_waited_for_forever() -> None:
    async def use(pool: EnvPool) -> None:
        for name in "ab":
            await pool.reset(name, world())
        order: list[int] = []

        async def play(number: int) -> None:
            await pool.reset(f"late {number}", world(number))
            order.append(number)
            await pool.close_episode(f"late {number}")

        players = [asyncio.create_task(play(number)) for number in range(12)]
        await asyncio.sleep(0)
        players.pop(3).cancel()
        await pool.close_episode("late 5")
        await pool.close_episode("a")
        results = await asyncio.gather(*players, return_exceptions=True)
        assert [str(result) for result in results if result] == [
            "lost: episode 'late 5' was closed while it waited for a slot"
        ]
        assert order == [0, 1, 2, 4, 6, 7, 8, 9, 10, 11]

        await pool.reset("a", world())
        pool._deadlines = Deadlines(admission_s=0.2)
        refused = await outcome(pool.reset("c", world()))
        assert refused == ("lost", "no slot became free within 0.2 s: all 2 slots are in use")
        assert await told(pool, "b", "tell") == ("ok", "0:1")

    with_pool(use, per_process=2)


def test_episodes_are_spread_over_processes() -> None:
    async def use(pool: EnvPool) -> None:
        await asyncio.gather(*(pool.reset(str(number), world(number)) for number in range(12)))
        assert sorted(len(inside) for inside in pool._slots.values()) == [4, 4, 4]
        gone = await process_of(pool, "0")
        os.kill(gone, signal.SIGKILL)
        await until(lambda: len(pool._slots) < 3)
        await settled(pool)
        await asyncio.gather(*(pool.reset(f"new {number}", world()) for number in range(4)))
        assert sorted(len(inside) for inside in pool._slots.values()) == [4, 4, 4]

    with_pool(use, workers=3)


@pytest.mark.parametrize("kind", ["World", "AsyncWorld"])
def test_a_cancelled_call_ends_its_episode_whether_it_waited_or_ran(tmp_path: Path, kind: str) -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world(0, kind, end=["touch", str(tmp_path / "a")]))
        running = asyncio.create_task(pool.step("a", do("sleep", 0.5)))
        waiting = asyncio.create_task(pool.reset("b", world()))
        kept = asyncio.create_task(outcome(pool.reset("c", world(3))))
        await asyncio.sleep(0.05)
        for call in (running, waiting):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert (await told(pool, "a", "tell"))[0] == "lost"
        await asyncio.sleep(0.1)
        assert not (tmp_path / "a").exists(), "it cannot be closed while it acts"
        assert await kept == ("ok", "seed 3")
        assert (tmp_path / "a").exists()
        assert pool.stats().restarts == 0

    with_pool(use, per_process=1)


def test_a_call_that_hangs_after_it_was_cancelled_still_costs_its_process() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world())
        running = asyncio.create_task(pool.step("a", do("spin")))
        await asyncio.sleep(0.05)
        running.cancel()
        assert await outcome(pool.reset("b", world(2))) == ("ok", "seed 2")
        assert pool.stats().restarts == 1

    with_pool(use, HASTY, per_process=1)


def test_a_call_cancelled_at_the_moment_a_slot_frees_passes_it_on() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world())
        first = asyncio.create_task(pool.reset("b", world()))
        second = asyncio.create_task(outcome(pool.reset("c", world(3))))
        await asyncio.sleep(0.05)
        episode, (host,) = pool._episodes["a"], pool._slots
        del pool._episodes["a"]
        pool._free_slot(episode, host)  # to b, which does not run before it is cancelled
        assert pool._episodes["b"].slot_process is host
        first.cancel()
        assert await second == ("ok", "seed 3")

    with_pool(use, per_process=1)


def test_one_call_at_a_time() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", world())
        running = asyncio.create_task(told(pool, "a", "sleep", 0.2))
        await asyncio.sleep(0.05)
        assert await told(pool, "a", "tell") == (
            "invalid",
            "episode 'a' already has a call in flight: make one at a time",
        )
        assert await running == ("ok", "slept")
        running = asyncio.create_task(told(pool, "a", "sleep", 0.2))
        await asyncio.sleep(0.05)
        assert await outcome(pool.reset("a", world(2))) == ("ok", "seed 2")
        assert await running == ("lost", "episode 'a' was closed meanwhile")
        assert await told(pool, "a", "tell") == ("ok", "2:1")

    with_pool(use)


def test_an_answer_that_came_in_time_counts_even_if_the_event_loop_was_held_up() -> None:
    async def use(pool: EnvPool) -> None:
        for number in range(50):
            await pool.reset(str(number), world())
        calls = [asyncio.create_task(told(pool, str(number), "sleep", 0.01)) for number in range(50)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(STEP_S * 1.5)  # noqa: ASYNC251
        assert await asyncio.gather(*calls) == [("ok", "slept")] * 50

    with_pool(use, HASTY)


def test_deadlines_do_not_run_for_calls_that_wait_behind_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: EnvPool) -> None:
        names = [str(number) for number in range(12)]
        await asyncio.gather(*(pool.reset(name, world()) for name in names))
        calls = [asyncio.create_task(told(pool, name, "sleep", 0.3)) for name in names]  # 12 calls, 4 at a time: 0.9 s
        assert await asyncio.gather(*calls) == [("ok", "slept")] * 12
        calls = [asyncio.create_task(told(pool, name, "sleep", 60)) for name in names]
        kinds = [kind for kind, _ in await asyncio.gather(*calls)]
        assert kinds == ["deadline"] + ["lost"] * 11
        await asyncio.gather(*(pool.reset(name, world()) for name in names))
        calls = [asyncio.create_task(told(pool, name, "sleep", 60)) for name in names]
        await asyncio.sleep(0.1)
        os.kill(next(iter(pool.processes)).pid, signal.SIGKILL)
        kinds = [kind for kind, _ in await asyncio.gather(*calls)]
        assert kinds == ["crashed"] * 4 + ["lost"] * 8

    monkeypatch.setattr("roll.env.env_process._MAX_IN_FLIGHT", 4)
    with_pool(use, Deadlines(step_s=0.8))


def test_closing_ends_calls_that_run_or_wait(tmp_path: Path) -> None:
    async def main() -> None:
        pool = EnvPool(deadlines=PATIENT, per_process=3)
        with pytest.raises(RunError, match="not started"):
            await pool.reset("a", world())
        await pool.start()
        for name in "abc":
            await pool.reset(name, world(end=["touch", str(tmp_path / name)]))
        calls = [asyncio.create_task(pool.step("a", do("spin"))), asyncio.create_task(pool.reset("d", world()))]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await pool.close()
        await pool.close()
        assert time.monotonic() - started < 4, "a call under way is not waited for"
        for call in calls:
            with pytest.raises(RunError, match="pool was closed"):
                await asyncio.wait_for(call, 1)
        for late in (pool.step("b", "x"), pool.reset("e", world())):
            with pytest.raises(RunError, match="pool was closed"):
                await late
        await pool.close_episode("b")
        assert [(tmp_path / name).exists() for name in "abc"] == [False, True, True]

    asyncio.run(main())


def test_closing_does_not_wait_for_environments_that_do_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool = EnvPool(deadlines=PATIENT)
        await pool.start()
        await pool.reset("a", world(end=["sleep", 60]))
        await asyncio.wait_for(pool.close(), 10)

    monkeypatch.setattr("roll.env.pool._CLOSE_S", 0.2)
    asyncio.run(main())


def test_a_module_is_imported_once_a_process_under_a_deadline_of_its_own(tmp_path: Path) -> None:
    slowly = f"\nopen({str(tmp_path / 'log')!r}, 'a').write('once ')\ntime.sleep(0.8)\n"
    (tmp_path / "slow.py").write_text(Path(WORLDS).read_text() + slowly)
    (tmp_path / "stuck.py").write_text("import time; time.sleep(60)\n")
    (tmp_path / "dies.py").write_text("import os; os._exit(4)\n")

    async def use(pool: EnvPool) -> None:
        slow = EnvSpec(f"{tmp_path}/slow.py:World", 1)
        outcomes = await asyncio.gather(*(outcome(pool.reset(str(number), slow)) for number in range(5)))
        assert outcomes == [("ok", "seed 1")] * 5
        assert (tmp_path / "log").read_text() == "once "
        shutil.copy(tmp_path / "slow.py", tmp_path / "later.py")
        later = EnvSpec(f"{tmp_path}/later.py:World", 0, {"begin": ["touch", str(tmp_path / "made")]})
        leaving = asyncio.create_task(outcome(pool.reset("leaving", later)))
        await asyncio.sleep(0.02)
        await pool.close_episode("leaving")
        assert await leaving == ("lost", "episode 'leaving' was closed meanwhile")
        assert not (tmp_path / "made").exists()
        stuck = EnvSpec(f"{tmp_path}/stuck.py:World")
        pool._deadlines = Deadlines(start_s=STEP_S)
        calls = [asyncio.create_task(outcome(pool.reset(f"stuck {number}", stuck))) for number in range(2)]
        await asyncio.sleep(0.05)
        pool._deadlines = PATIENT  # for the process that comes next
        failures = await asyncio.gather(*calls)
        assert {kind for kind, _ in failures} == {"deadline"}
        assert "importing environment" in failures[0][1]
        kind, reason = await outcome(pool.reset("dies", EnvSpec(f"{tmp_path}/dies.py:World")))
        assert (kind, reason) == ("crashed", "it called os._exit(4): its process exited with status 4")
        mended = EnvSpec(f"{tmp_path}/mended.py:World")
        assert "there is no file" in (await outcome(pool.reset("m", mended)))[1]
        shutil.copy(WORLDS, tmp_path / "mended.py")
        assert await outcome(pool.reset("m", mended)) == ("ok", "seed 0")

    with_pool(use, Deadlines(reset_s=STEP_S))


def served(*requests: ipc.EnvCall) -> list[ipc.Result]:
    """What the inside of an environment process answers, here."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as answers:
        server = EnvServer(theirs)
        server._factories["guess"] = Guess
        results = []
        for number, request in enumerate(requests):
            server._dispatch(number, request)
            answered = ipc.NO_REQUEST
            while answered == ipc.NO_REQUEST:
                answered, result, _ = pickle.loads(read_payload(answers) or b"")
            assert answered == number
            results.append(result)
        assert not server._runners
    return results


def test_a_process_without_threads_left_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    reset, act, close = ipc.EnvReset(5, "guess", 0, pickle.dumps({"high": 1})), ipc.EnvAct(5, "1"), ipc.EnvClose(5)
    assert served(reset, act, close)[1:] == [Step("Right.", 1.0, terminated=True, info={"success": 1.0}), ipc.EnvReady()]
    monkeypatch.setattr("roll.env.env_server.ThreadRunner", full)
    reason = "its process cannot run more environments: can't start new thread"
    assert served(reset, close) == [ipc.EnvFailed("lost", reason), ipc.EnvReady()]


def test_when_no_process_starts_any_more_calls_fail_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with EnvPool(deadlines=PATIENT, per_process=1) as pool:
            await pool.reset("a", world())
            waiting = asyncio.create_task(pool.reset("b", world()))
            await asyncio.sleep(0.05)
            monkeypatch.setattr("roll.env.env_process.COMMAND", "import os; os._exit(7)")
            assert (await told(pool, "a", "os._exit", 1))[0] == "crashed"
            with pytest.raises(RunError, match=r"no environment process starts any more \(3 tries\): .* status 7"):
                await asyncio.wait_for(waiting, 60)
            with pytest.raises(RunError, match="no environment process starts"):
                await pool.reset("c", world())
        monkeypatch.setattr("roll.env.env_process.COMMAND", "import time; time.sleep(60)")
        with pytest.raises(RunError, match=r"did not start: starting took more than 0\.3 s"):
            await EnvPool(2, deadlines=Deadlines(start_s=0.3)).start()

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    never = "import time; time.sleep(60)"
    monkeypatch.setattr("roll.env.env_process.COMMAND", never)

    async def main() -> None:
        pool = EnvPool(2)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not any(never.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)


ENDS = {
    "tell": {"ok"},
    "raise": {"raised"},
    "nothing": {"invalid"},
    "os._exit": {"crashed"},
    "sleep": {"deadline"},
}
BYSTANDER = {"lost", "crashed"}


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.lists(st.sampled_from([*["tell"] * 12, "raise", "nothing", "os._exit", "sleep", "leave"]), max_size=6),
        min_size=8,
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
def test_every_call_gets_its_own_outcome(episodes: list[list[str]], order: random.Random) -> None:
    """Of many episodes at once over two processes, some of them cancelled: none is lost without being told, swapped with
    another or told twice, and no room is lost."""

    async def play(pool: EnvPool, seed: int, actions: list[str]) -> None:
        name, kind = f"episode {seed}", "World" if seed % 2 else "AsyncWorld"
        result, says = await outcome(pool.reset(name, world(seed, kind)))
        assert (result, says) == ("ok", f"seed {seed}") or result in BYSTANDER
        for number, action in enumerate(actions, 1):
            if result != "ok" or action == "leave":
                return
            await asyncio.sleep(order.random() * 0.05)
            arguments = {"raise": ["oops"], "os._exit": [seed], "sleep": [60]}.get(action, [])
            result, says = await told(pool, name, action, *arguments)
            assert result in ENDS[action] | BYSTANDER, (action, result, says)
            if result == "ok":
                assert says == f"{seed}:{number}"
            if result == "raised":
                assert "oops" in says

    async def play_and_leave(pool: EnvPool, seed: int, actions: list[str]) -> None:
        try:
            await play(pool, seed, actions)
        finally:
            await pool.close_episode(f"episode {seed}")

    async def use(pool: EnvPool) -> None:
        players = [asyncio.create_task(play_and_leave(pool, seed, actions)) for seed, actions in enumerate(episodes)]
        cancelled = {player for player in players if order.random() < 0.15}
        for player in cancelled:
            asyncio.get_running_loop().call_later(order.random() * 0.3, player.cancel)
        results = await asyncio.gather(*players, return_exceptions=True)
        for player, result in zip(players, results, strict=True):
            assert result is None or (isinstance(result, asyncio.CancelledError) and player in cancelled), result
        await settled(pool)
        assert pool.stats().open == 0
        assert not any(pool._slots.values())
        assert await outcome(pool.reset("after", world(1))) == ("ok", "seed 1")

    with_pool(use, HASTY, workers=2, per_process=10)


def hold_many(count: int) -> None:
    async def use(pool: EnvPool) -> None:
        async def play(number: int) -> None:
            opened = await pool.reset(str(number), EnvSpec("guess", number, {"high": 10**6, "tries": 3}))
            assert "1000000" in opened.messages[0]["content"]

        await asyncio.gather(*(play(number) for number in range(count)))
        assert pool.stats().open == count
        steps = await asyncio.gather(*(pool.step(str(number), "0") for number in range(count)))
        assert {str(step.observation) for step in steps} == {"Higher. Tries left: 2."}

    with_pool(use, Deadlines(step_s=20), workers=2, per_process=count // 2)


@pytest.mark.thorough
def test_many_episodes_are_open_at_once() -> None:
    hold_many(1000)


@pytest.mark.slow
def test_ten_thousand_episodes_are_open_at_once() -> None:
    hold_many(10_000)


def test_an_environment_process_does_not_import_the_training_stack() -> None:
    async def use(pool: EnvPool) -> None:
        await pool.reset("a", EnvSpec("guess"))
        await pool.reset("b", world())
        assert await told(pool, "b", "loaded", "torch", "transformers", "pydantic", "ray", "numpy") == ("ok", "")

    with_pool(use)


def test_processes_busy_or_idle_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio
from roll.data.task import EnvSpec
from roll.env.pool import EnvPool

async def main():
    pool = EnvPool(2)
    await pool.start()
    await pool.reset("a", EnvSpec({WORLDS!r} + ":World"))
    asyncio.create_task(pool.step("a", '["spin"]'))
    await asyncio.sleep(0.2)
    print(*(host.pid for host in pool.processes), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    parent, pids = printed_pids(script)
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    os.kill(pids[0], signal.SIGSTOP)  # one that cannot notice by itself
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids)
