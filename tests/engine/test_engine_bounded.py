"""A cache in slots that may not grow without end: requests wait, and have the tokens they have with room for all."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from small_models import CONTEXT, engine, ids, llama, random_ids, request, run, same_bits, tokenizer

from roll.data.tokenlog import IntArray
from roll.engine.cache import SlotCache
from roll.engine.factory import make_engine
from roll.engine.kv_sizing import MEMORY_SHARE, CacheShape, KVBudget, SlotSizing
from roll.engine.request import Completion
from roll.engine.slot_engine import SlotEngine

TOKEN_BYTES = SlotCache(llama().config, torch.float32, torch.device("cpu")).bytes_per_token


@dataclass
class Layers:
    """The layers of caches that are there, and the most bytes they ever had."""

    alive: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    peak: int = 0

    @property
    def bytes(self) -> int:
        return sum(layer.nbytes for ref in self.alive if (layer := ref()) is not None)

    def add(self, layer: torch.Tensor) -> None:
        self.alive = [weakref.ref(layer), *(ref for ref in self.alive if ref() is not None)]
        self.peak = max(self.peak, self.bytes)


@contextmanager
def watched() -> Iterator[Layers]:
    """Sees every layer of a cache from when it is made until it is gone."""
    layers, make = Layers(), SlotCache._layer

    def layer(self: SlotCache, shape: CacheShape) -> torch.Tensor:
        made = make(self, shape)
        layers.add(made)
        return made

    with patch.object(SlotCache, "_layer", layer):
        yield layers


@dataclass(frozen=True)
class Asked:
    """A request: its prompt begins with so many tokens that all have in common, and it comes before this step."""

    shared: int
    own: int
    new_tokens: int
    enters: int

    @property
    def tokens(self) -> int:
        return self.shared + self.own + self.new_tokens


ASKED = st.builds(
    Asked,
    shared=st.sampled_from([0, 0, 9, 40]),
    own=st.integers(1, 12) | st.integers(1, 90),
    new_tokens=st.integers(1, 20),
    enters=st.integers(0, 12),
)
BEGINNING = random_ids(np.random.default_rng(11), 40)


def prompts_of(asked: list[Asked]) -> list[IntArray]:
    """Every third one has the prompt of the one before it, if that is as long."""
    rng = np.random.default_rng(len(asked))
    prompts: list[IntArray] = []
    for number, each in enumerate(asked):
        prompt = np.concatenate([BEGINNING[: each.shared], random_ids(rng, each.own)])
        same = number % 3 == 2 and len(prompts[-1]) == len(prompt)
        prompts.append(prompts[-1] if same else prompt)
    return prompts


def served_all(
    served: SlotEngine, asked: list[Asked], prompts: list[IntArray], temperature: float = 0.0
) -> dict[str, Completion]:
    """What becomes of the requests, each submitted before its step."""
    finished: dict[str, Completion] = {}
    step = 0
    while served.has_work or step <= max(each.enters for each in asked):
        for number, (each, prompt) in enumerate(zip(asked, prompts, strict=True)):
            if each.enters == step:
                served.add(request(str(number), prompt, each.new_tokens, temperature=temperature, seed=number))
        for done in served.step():
            assert done.id not in finished
            finished[done.id] = done
        step += 1
        assert step < 1000, "nothing moves"
    return finished


def assert_same(bounded: dict[str, Completion], free: dict[str, Completion], exact: bool) -> None:
    assert bounded.keys() == free.keys()
    for id, done in bounded.items():
        assert done.ids.tolist() == free[id].ids.tolist()
        assert not exact or same_bits(done, free[id])


@given(
    asked=st.lists(ASKED, min_size=1, max_size=14),
    slots=st.sampled_from([1, 3, 8, 40]),
    kv_tokens=st.integers(150, 700),
    exact=st.booleans(),
)
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_with_a_small_cache_all_finish_with_the_same_tokens_and_it_never_holds_more(
    asked: list[Asked], slots: int, kv_tokens: int, exact: bool
) -> None:
    """Where bits are the same whatever runs, tokens are drawn: equal prompts then become sequences of their own."""
    prompts, temperature = prompts_of(asked), 1.0 if exact else 0.0
    free = served_all(engine(slots, exact=exact), asked, prompts, temperature)
    assert len(free) == len(asked)
    with watched() as layers:
        bounded = served_all(engine(slots, exact=exact, kv_tokens=kv_tokens), asked, prompts, temperature)
    assert_same(bounded, free, exact)
    assert layers.peak <= kv_tokens * TOKEN_BYTES


@given(
    asked=st.lists(ASKED, min_size=1, max_size=16),
    room=st.integers(320, 1500),
    taken=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 300)), max_size=3),
)
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_what_others_leave_of_the_memory_is_shared_with_them(
    asked: list[Asked], room: int, taken: list[tuple[int, int]]
) -> None:
    """On a machine with room for so many tokens, of which others take some when memory is looked at for the n-th time.
    A request that was accepted finishes whatever they take."""
    prompts = prompts_of(asked)
    free = served_all(engine(9), asked, prompts)
    looks = 0

    with watched() as layers:

        def free_bytes(device: torch.device) -> int:
            nonlocal looks
            looks += 1
            others = sum(tokens for when, tokens in taken if looks > when)
            return max(0, (room - others) * TOKEN_BYTES - layers.bytes)

        served = engine(9, free_bytes=free_bytes)
        accepted = [number for number, each in enumerate(asked) if each.tokens <= MEMORY_SHARE["cpu"] * (room - 900)]
        some = [asked[number] for number in accepted]
        bounded = served_all(served, some, [prompts[number] for number in accepted]) if some else {}
    renamed = {str(accepted[int(id)]): done for id, done in bounded.items()}
    assert_same(renamed, {id: free[id] for id in renamed}, exact=False)
    assert len(renamed) == len(accepted)
    longest = max((each.tokens for each in some), default=0)
    assert layers.peak <= max(MEMORY_SHARE["cpu"] * room, longest) * TOKEN_BYTES


@pytest.mark.parametrize("exact", [False, True])
def test_long_requests_run_in_fewer_slots_and_short_ones_in_many_again(exact: bool) -> None:
    rng = np.random.default_rng(0)
    served = engine(12, exact=exact, kv_tokens=600)
    most: dict[str, int] = {}

    def crowd(name: str, length: int) -> None:
        for number in range(12):
            served.add(request(f"{name}{number}", random_ids(rng, length), 6))
        while served.has_work:
            served.step()
            most[name] = max(most.get(name, 0), served.stats().running)

    for name, length in (("short", 20), ("long", 100), ("short again", 20)):
        crowd(name, length)
    assert most == {"short": 12, "long": 3, "short again": 12}


def test_one_that_needs_all_of_the_cache_has_it_to_itself() -> None:
    rng = np.random.default_rng(1)
    others = [request(str(number), random_ids(rng, 20), 10, temperature=0.0) for number in range(5)]
    large = request("large", random_ids(rng, 100), 20, temperature=0.0)
    served = engine(8, kv_tokens=120)
    with watched() as layers:
        finished = run(served, [*others[:3], large, *others[3:]])
    assert layers.peak <= 120 * TOKEN_BYTES
    alone = engine(1)
    for each in (*others, large):
        assert finished[each.id].ids.tolist() == run(alone, [each])[each.id].ids.tolist()


def test_a_few_requests_take_few_slots() -> None:
    served = engine(512)
    rng = np.random.default_rng(2)
    with watched() as layers:
        run(served, [request(str(number), random_ids(rng, 30), 10) for number in range(3)])
        assert layers.peak == 4 * 64 * TOKEN_BYTES
        run(served, [request(str(number), random_ids(rng, 30), 10) for number in range(3, 6)])
        assert layers.bytes == 8 * 64 * TOKEN_BYTES, "what has ended is kept"


def test_what_can_never_run_is_refused_by_name_with_what_to_write() -> None:
    long = random_ids(np.random.default_rng(3), 90)
    served = engine(kv_tokens=100)
    with pytest.raises(ValueError, match=r"'long' may need 101 tokens \(90 of prompt and 11 new\), but the .* holds 100"):
        served.add(request("long", long, 11))
    with pytest.raises(ValueError, match=r"write rollout\.kv_cache_tokens=128"):
        served.add(request("long", long, 11))
    with pytest.raises(ValueError, match=f"the engine's context is {CONTEXT}"):
        served.add(request("long", long, CONTEXT))
    assert len(run(served, [request("long", long, 10)])["long"].ids) == 10
    poor = engine(free_bytes=lambda device: 160 * TOKEN_BYTES)
    with pytest.raises(ValueError, match=r"holds 80, in 50% of .* lower rollout.max_new_tokens or env.max_tokens"):
        poor.add(request("long", long, 1))
    assert len(run(poor, [request("short", long[:70], 10)])["short"].ids) == 10


def test_a_config_s_limit_reaches_the_engine() -> None:
    served = make_engine(llama(), tokenizer(), max_running=4, kv_tokens=64)
    with pytest.raises(ValueError, match="the engine's cache holds 64"):
        served.add(request("long", ids(*range(60)), 5))


def test_memory_is_measured_when_the_shape_may_change_and_not_at_every_step() -> None:
    looks = 0

    def free_bytes(device: torch.device) -> int:
        nonlocal looks
        looks += 1
        return 400 * TOKEN_BYTES

    served = engine(8, free_bytes=free_bytes)
    rng = np.random.default_rng(4)
    for number in range(3):
        served.add(request(str(number), random_ids(rng, 60), 40))
    looks = 0
    for _ in range(30):
        served.step()
    assert (served.stats().running, served.stats().waiting) == (1, 2)
    assert looks <= 2


# the shapes themselves

SIZING = SlotSizing(slots=64, context=2048, layers=30)


def test_the_example_of_the_docstring() -> None:
    shape, fit = SIZING.choose(CacheShape(), [], [100] * 20, 0, 4096)
    assert (shape, fit) == (CacheShape(32, 112), 20)
    assert SIZING.choose(shape, [100] * 3, [1000], 0, 4096) == (shape, 0)
    assert SIZING.choose(shape, [100] * 2, [1000], 0, 4096) == (CacheShape(3, 1024), 1)


def test_what_runs_is_not_moved_where_memory_has_become_too_short_for_copying_it() -> None:
    held, most = CacheShape(4, 128), 450  # others have taken what it could use when it was made
    assert SIZING.choose(held, [100], [200], 0, most) == (held, 0)
    assert SIZING.choose(held, [100], [120, 200], 0, most) == (held, 1)
    assert SIZING.choose(held, [], [190, 190, 190], 0, most) == (CacheShape(2, 192), 2)
    assert SIZING.choose(held, [], [900], 0, most) == (CacheShape(1, 900), 1), (
        "it was accepted, and there is nothing else"
    )


def test_copying_must_be_worth_it() -> None:
    """Slots of 256 for up to 200 tokens; with shorter requests there could be more of them, and shorter ones."""
    held, most = CacheShape(30, 256), 31 * 256
    assert SIZING.choose(held, [200] * 29, [190] * 9, 0, most) == (held, 1)
    assert SIZING.choose(held, [190] * 29, [190] * 9, 0, most) == (held, 1), "40 of 192 are too few more"
    assert SIZING.choose(held, [60] * 29, [60] * 3, 0, most) == (CacheShape(32, 64), 3)
    assert SIZING.choose(held, [60] * 29, [60] * 40, 0, most) == (CacheShape(64, 64), 35)
    assert SIZING.choose(held, [200] * 30, [200] * 3, 0, most + 2 * 256) == (held, 0), "nor are two more"
    assert SIZING.choose(held, [200] * 30, [200] * 3, 0, 2 * most) == (CacheShape(60, 256), 3), "memory has become free"
    assert SIZING.choose(held, [60] * 29, [60], 20, most) == (held, 1), "nor are slots made shorter for what is kept"


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    spans=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    most=st.integers(400, 5000),
    layers=st.integers(1, 30),
    context=st.integers(400, 900),
)
@settings(max_examples=examples(200), derandomize=True, deadline=None)
def test_shapes_hold_what_runs_and_no_more_than_allowed(
    lengths: list[int], spans: list[int], most: int, layers: int, context: int
) -> None:
    """Requests come in order and stay for a while each; nobody waits while nothing runs."""
    sizing = SlotSizing(8, context, layers)
    held, waiting = CacheShape(), list(lengths)
    running: list[tuple[int, int]] = []  # tokens, and rounds left
    kept = rounds = 0
    while waiting or running:
        rounds += 1
        assert rounds < 1000
        lengths_now = [tokens for tokens, _ in running]
        shape, fit = sizing.choose(held, lengths_now, waiting[: 8 - len(running)], kept, most)
        assert fit or running or not waiting
        if shape != held:
            assert not running or sizing.peak(held, shape) <= most
            held = shape
        running += [(tokens, spans[tokens % len(spans)]) for tokens in waiting[:fit]]
        del waiting[:fit]
        assert held.tokens <= most
        assert len(running) <= held.slots <= 8
        assert all(tokens <= held.positions for tokens, _ in running)
        assert held.positions <= max(context, 64)
        left = [(tokens, rounds - 1) for tokens, rounds in running if rounds > 1]
        kept = min(kept + len(running) - len(left), held.slots - len(left))
        running = left


@pytest.mark.parametrize(("kv_tokens", "held", "expected"), [(77, 0, 77), (0, 0, 50), (0, 100, 100)])
def test_a_limit_counts_what_the_cache_has_already_as_free(kv_tokens: int, held: int, expected: int) -> None:
    limit = KVBudget(kv_tokens, 10, torch.device("cpu"), lambda device: 1009)
    assert limit.tokens(held) == expected
