"""The engine's model: the same times as one that takes every step, and what happens to requests on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from naive import Event, NaiveEngine, Result

from roll.simulation.clock import run
from roll.simulation.engine import EngineDead, SimEngine
from roll.simulation.prefixes import Prefix
from roll.simulation.spec import EngineSpec

PLAIN = EngineSpec(
    base_s=1.0,
    per_sequence_s=0.5,
    per_cached_token_s=0.0,
    prefill_tokens_per_s=float("inf"),
    max_running=4,
    kv_tokens=1000,
)


def with_engine(spec: EngineSpec, play: Callable[[SimEngine], Coroutine[Any, Any, None]]) -> SimEngine:
    async def main() -> SimEngine:
        engine = SimEngine(asyncio.get_running_loop(), spec)
        await play(engine)
        return engine

    return run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


class Finished(dict[str, float]):
    """When each request was done."""

    def __call__(self, id: str, tokens: int) -> None:
        assert id not in self
        self[id] = now()


def simulated(spec: EngineSpec, events: list[Event]) -> Result:
    """What the engine makes of events."""

    async def main() -> Result:
        loop = asyncio.get_running_loop()
        engine = SimEngine(loop, spec)
        finished = Finished()
        aborted: dict[str, int] = {}

        def happen(event: Event) -> None:
            if event.kind == "submit":
                size = (event.prompt_tokens, event.new_tokens)
                engine.submit(event.id, *size, finished, event.priority, prefix=event.prefix)
            elif event.kind == "abort" and event.id in engine:
                aborted[event.id] = engine.abort(event.id)
            elif event.kind == "pause":
                engine.pause()
            elif event.kind == "resume":
                engine.resume()

        for event in events:
            loop.call_at(event.at_s, happen, event)
        await asyncio.sleep(1e6)
        stats = vars(engine.stats)
        return Result(dict(finished), aborted, **stats)

    return run(main())


# Times that floating-point numbers hold exactly, so that sums do not depend on their order.
exact_specs = st.builds(
    EngineSpec,
    base_s=st.sampled_from([1 / 64, 1 / 8, 1.0]),
    per_sequence_s=st.sampled_from([0.0, 1 / 1024, 1 / 16]),
    per_cached_token_s=st.sampled_from([0.0, 2.0**-14, 2.0**-8]),
    prefill_tokens_per_s=st.sampled_from([8.0, 256.0, float("inf")]),
    max_running=st.integers(1, 5),
    kv_tokens=st.integers(30, 90),
    reserve_tokens=st.integers(0, 5),
)


times = st.integers(0, 400).map(lambda n: n / 32)
prefixes = st.builds(Prefix, st.sampled_from(["g", "h"]), st.integers(1, 8), st.sampled_from(["", "a", "b"]))


@st.composite
def scripts(draw: st.DrawFn) -> list[Event]:
    submits = [
        Event(
            at_s,
            "submit",
            str(number),
            prompt_tokens=draw(st.integers(1, 15)),
            new_tokens=draw(st.integers(1, 15)),
            priority=draw(st.integers(-1, 1)),
            prefix=draw(st.none() | prefixes),
        )
        for number, at_s in enumerate(sorted(draw(st.lists(times, min_size=1, max_size=12))))
    ]
    aborts = [Event(at_s, "abort", draw(st.sampled_from(submits)).id) for at_s in draw(st.lists(times, max_size=4))]
    pauses = [
        Event(at_s, kind)
        for start_s, length_s in draw(st.lists(st.tuples(times, times), max_size=2))
        for at_s, kind in ((start_s, "pause"), (start_s + length_s, "resume"))
    ]
    return sorted(submits + aborts + pauses, key=lambda event: event.at_s)


@settings(max_examples=examples(120), deadline=None)
@given(exact_specs, scripts())
def test_equals_a_simulation_of_every_step(spec: EngineSpec, events: list[Event]) -> None:
    naive = NaiveEngine(spec, events).run()
    result = simulated(spec, events)
    assert result.finished == pytest.approx(naive.finished, abs=1e-9)
    assert list(result.finished.values()) == sorted(result.finished.values())
    assert result.running_s == pytest.approx(naive.running_s, abs=1e-6)
    assert result.busy_s == pytest.approx(naive.busy_s, abs=1e-6)
    result.finished, result.running_s, result.busy_s = naive.finished, naive.running_s, naive.busy_s
    assert result == naive


@settings(max_examples=examples(50), deadline=None)
@given(
    st.builds(
        EngineSpec,
        base_s=st.floats(1e-3, 1.0),
        per_sequence_s=st.floats(0.0, 0.1),
        per_cached_token_s=st.floats(0.0, 1e-3),
        prefill_tokens_per_s=st.floats(10.0, 1e5),
        max_running=st.integers(1, 6),
        kv_tokens=st.integers(60, 200),
    ),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=15),
)
def test_equals_it_for_any_speed(spec: EngineSpec, sizes: list[tuple[int, int]]) -> None:
    events = [Event(0.0, "submit", str(number), *size) for number, size in enumerate(sizes)]
    naive = NaiveEngine(spec, events).run()
    result = simulated(spec, events)
    assert result.finished == pytest.approx(naive.finished, abs=1e-6)
    assert (result.preemptions, result.recomputed_tokens) == (naive.preemptions, naive.recomputed_tokens)


@settings(max_examples=examples(20), deadline=None)
@given(exact_specs, scripts())
def test_the_same_every_time(spec: EngineSpec, events: list[Event]) -> None:
    assert simulated(spec, events) == simulated(spec, events)


def test_the_docstrings_example() -> None:
    done = Finished()

    async def play(engine: SimEngine) -> None:
        engine.submit("a", 1, 3, done)
        engine.submit("b", 1, 5, done)
        await asyncio.sleep(100)

    engine = with_engine(PLAIN, play)
    assert done == {"a": 6.0, "b": 9.0}
    assert engine.stats.running_s == 6 * 2 + 3
    assert engine.stats.decoded_tokens == 8


def test_counts_within_a_span() -> None:
    async def play(engine: SimEngine) -> None:
        engine.submit("a", 10, 8, Finished())
        engine.submit("b", 10, 8, Finished())
        await asyncio.sleep(5.0)  # two steps of 2 s and half a third
        assert (engine.tokens_of("a"), engine.running, engine.waiting) == (2, 2, 0)
        assert engine.kv_used_tokens == 24
        assert (engine.stats.decoded_tokens, engine.stats.busy_s, engine.stats.kv_high_tokens) == (4, 5.0, 24)

    with_engine(PLAIN, play)


def test_who_arrives_during_a_step_joins_at_its_end() -> None:
    done = Finished()

    async def play(engine: SimEngine) -> None:
        engine.submit("a", 1, 2, done)
        await asyncio.sleep(0.25)
        engine.submit("b", 1, 1, done)
        await asyncio.sleep(100)

    with_engine(PLAIN, play)
    assert done == {"a": 3.5, "b": 3.5}  # one step of 1.5 s, one of 2 s


def test_who_takes_a_freed_seat_in_the_same_moment_loses_no_step() -> None:
    times: list[float] = []

    async def play(engine: SimEngine) -> None:
        def again(id: str, tokens: int) -> None:
            times.append(now())
            if len(times) < 3:
                engine.submit(id, 1, 2, again)

        engine.submit("a", 1, 2, again)
        await asyncio.sleep(100)

    with_engine(PLAIN, play)
    assert times == [3.0, 6.0, 9.0]


def test_higher_priorities_first_then_in_order() -> None:
    done = Finished()

    async def play(engine: SimEngine) -> None:
        for id, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
            engine.submit(id, 1, 1, done, priority)
        await asyncio.sleep(100)

    with_engine(EngineSpec(1.0, 0.0, 0.0, float("inf"), 1, 100), play)
    assert list(done) == ["c", "d", "a", "b"]


def test_abort() -> None:
    done = Finished()

    async def play(engine: SimEngine) -> None:
        for id in "abcde":
            engine.submit(id, 1, 4, done)
        await asyncio.sleep(4.0)  # one step of four, 3 s, and a part of the second
        assert engine.abort("a") == 1
        assert engine.abort("e") == 0
        assert "a" not in engine
        with pytest.raises(KeyError, match="'a' is not on this engine"):
            engine.abort("a")
        engine.submit("a", 2, 1, done)
        await asyncio.sleep(100)

    with_engine(PLAIN, play)
    assert done == {"a": 9.0, "b": 11.5, "c": 11.5, "d": 11.5}


def test_pause_and_resume_keep_what_was_drawn() -> None:
    done = Finished()

    async def play(engine: SimEngine) -> None:
        engine.submit("a", 1, 4, done)
        await asyncio.sleep(2.0)
        engine.pause()
        await asyncio.sleep(10.0)
        assert engine.paused
        assert engine.tokens_of("a") == 2  # the second ended at 3 s
        engine.submit("b", 1, 1, done)
        engine.resume()
        await asyncio.sleep(100)

    engine = with_engine(PLAIN, play)
    assert done == {"b": 14.0, "a": 15.5}
    assert engine.stats.busy_s == 3.0 + 3.5


def test_kill_gives_all_back_and_restore_begins_empty() -> None:
    done = Finished()

    async def play(engine: SimEngine) -> None:
        for id in "abcde":
            engine.submit(id, 1, 4, done)
        await asyncio.sleep(7.0)
        assert engine.kill() == {"a": 2, "b": 2, "c": 2, "d": 2, "e": 0}
        with pytest.raises(EngineDead, match="restore"):
            engine.submit("a", 1, 1, done)
        await asyncio.sleep(10.0)
        assert not done
        engine.restore()
        assert (engine.running, engine.waiting, engine.kv_used_tokens) == (0, 0, 0)
        engine.submit("a", 3, 2, done)
        await asyncio.sleep(100)

    engine = with_engine(PLAIN, play)
    assert done == {"a": 20.0}
    assert engine.stats.decoded_tokens == 8 + 2
    assert engine.stats.busy_s == 7.0 + 3.0


def test_what_ends_unheard_has_a_token_left_to_draw() -> None:
    async def play(engine: SimEngine) -> None:
        left: dict[str, int] = {}
        asyncio.get_running_loop().call_at(4.0, lambda: left.update({"a": engine.abort("a"), **engine.kill()}))
        engine.submit("a", 1, 2, Finished())
        engine.submit("b", 1, 2, Finished())
        await asyncio.sleep(5.0)
        assert left == {"a": 1, "b": 1}

    with_engine(PLAIN, play)


def test_a_full_cache_sends_the_youngest_back() -> None:
    done = Finished()
    spec = EngineSpec(1.0, 0.0, 0.0, 10.0, max_running=4, kv_tokens=20)

    async def play(engine: SimEngine) -> None:
        engine.submit("a", 5, 10, done)
        engine.submit("b", 5, 10, done)
        await asyncio.sleep(100)

    engine = with_engine(spec, play)
    # 1 s for both prompts, 5 steps until 20 tokens are held, 5 more of a alone; then 10 tokens of b again, 5 more steps
    assert done == {"a": 11.0, "b": 17.0}
    assert (engine.stats.preemptions, engine.stats.recomputed_tokens, engine.stats.kv_high_tokens) == (1, 10, 20)


def test_siblings_and_turns_find_their_prefix_until_the_weights_change() -> None:
    spec = EngineSpec(1.0, 0.0, 0.0, 100.0, max_running=4, kv_tokens=2000)

    async def play(engine: SimEngine) -> None:
        async def computed(id: str, prompt_tokens: int, conversation: str) -> int:
            before = engine.stats.prefilled_tokens
            engine.submit(id, prompt_tokens, 10, Finished(), prefix=Prefix("1", 100, conversation))
            await asyncio.sleep(50)
            return engine.stats.prefilled_tokens - before

        assert await computed("1.0/0", 100, "1.0") == 100
        assert await computed("1.1/0", 100, "1.1") == 0
        assert await computed("1.0/1", 130, "1.0") == 20
        assert await computed("1.1/1", 150, "1.1") == 40
        engine.pause()
        engine.resume()
        assert await computed("1.0/2", 160, "1.0") == 160

    with_engine(spec, play)


def test_what_does_not_fit_beside_what_runs_is_forgotten() -> None:
    spec = EngineSpec(1.0, 0.0, 0.0, 1000.0, max_running=4, kv_tokens=200)

    async def play(engine: SimEngine) -> None:
        engine.submit("1.0", 60, 10, Finished(), prefix=Prefix("1", 60))
        await asyncio.sleep(20)
        engine.submit("2.0", 150, 10, Finished())
        engine.submit("3.0", 20, 10, Finished(), prefix=Prefix("3", 20))  # beside 150 there is no room for the 60
        await asyncio.sleep(20)
        engine.submit("1.1", 60, 10, Finished(), prefix=Prefix("1", 60))
        await asyncio.sleep(20)
        assert engine.stats.prefilled_tokens == 60 + 150 + 20 + 60

    with_engine(spec, play)


@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "message"), [(999, 2, "can never fit"), (0, 5, "needs a prompt"), (5, 0, "needs")]
)
def test_refuses_what_can_never_run(prompt_tokens: int, new_tokens: int, message: str) -> None:
    async def play(engine: SimEngine) -> None:
        with pytest.raises(ValueError, match=message):
            engine.submit("a", prompt_tokens, new_tokens, Finished())
        engine.submit("b", 1, 1, Finished())
        with pytest.raises(ValueError, match="'b' is here already"):
            engine.submit("b", 1, 1, Finished())

    with_engine(PLAIN, play)


def test_times_of_a_request_by_its_spec() -> None:
    spec = EngineSpec(1.0, 0.5, 0.25, 100.0, max_running=2, kv_tokens=1000)
    assert spec.step_s(2, 8) == 4.0
    assert spec.alone_s(4, 3) == 3 * 1.5 + 0.25 * (4 + 5 + 6)
    assert spec.share_s(4, 3) == 3 * 1.0 + 0.25 * (4 + 5 + 6)
    done = Finished()

    async def play(engine: SimEngine) -> None:
        engine.submit("a", 4, 3, done)
        await asyncio.sleep(100)

    with_engine(spec, play)
    assert done == {"a": pytest.approx(0.04 + spec.alone_s(4, 3))}
