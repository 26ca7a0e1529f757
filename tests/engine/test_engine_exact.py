"""`exact`: a request's tokens and log-probs are the same bits whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from small_models import (
    MIXTURES,
    awkward_llama,
    engine,
    llama,
    mixture,
    random_ids,
    request,
    run,
    same_bits,
    under_plans,
    wide_llama,
)
from thorough import but

from roll.data.tokenlog import IntArray
from roll.engine.request import Completion, Request
from roll.engine.slot_engine import EXACT_ROWS, SlotEngine

MODELS = {"even sizes": llama, "odd sizes": awkward_llama, "wide": wide_llama}
MODELS |= {name: partial(lambda name: under_plans(mixture(name)), name) for name in MIXTURES}
VOCAB = 117


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Neighbour:
    """A request beside the watched one: its prompt begins with `shared` of its tokens, then goes on by itself. A twin
    draws with the same noise."""

    shared: int
    own: int
    twin: bool
    new_tokens: int
    enters: int
    aborted: int | None


@dataclass(frozen=True)
class Scene:
    prompt: int
    new_tokens: int
    enters: int
    slots: int
    kv_tokens: int
    temperature: float
    top_p: float
    neighbours: list[Neighbour]
    seed: int


NEIGHBOUR = st.builds(
    Neighbour,
    shared=st.sampled_from([0, 5, 15, 16, 17, 33, 100]),
    own=st.just(0) | st.integers(0, 20),
    twin=st.booleans(),
    new_tokens=st.integers(1, 12),
    enters=st.integers(0, 10),
    aborted=st.none() | st.integers(0, 15),
)
SCENE = st.builds(
    Scene,
    prompt=st.integers(1, 50),
    new_tokens=st.integers(1, 16),
    enters=st.integers(0, 6),
    slots=st.sampled_from([1, 2, 3, 7, 20]),
    kv_tokens=st.sampled_from([0, 100, 250]),
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    neighbours=st.lists(NEIGHBOUR, max_size=24),
    seed=st.integers(0, 2**32),
)


def play(served: SlotEngine, watched: Request, enters: int, others: list[tuple[Neighbour, Request]]) -> Completion:
    """The watched request's completion, among the others as they come, go and are aborted."""
    step = 0
    while True:
        if step == enters:
            served.add(watched)
        for neighbour, other in others:
            if neighbour.enters == step:
                served.add(other)
            if neighbour.aborted == step:
                served.abort(other.id)
        for done in served.step():
            if done.id == watched.id:
                return done
        step += 1


@pytest.mark.parametrize("model", ["even sizes", "odd sizes"])
@given(scene=SCENE)
@settings(max_examples=examples(25), derandomize=True, deadline=None)
def test_bits_do_not_depend_on_neighbours(model: str, scene: Scene) -> None:
    rng = np.random.default_rng(scene.seed)
    prompt = random_ids(rng, scene.prompt, VOCAB)
    options = {"temperature": scene.temperature, "top_p": scene.top_p, "seed": scene.seed}
    watched = request("watched", prompt, scene.new_tokens, **options)
    others: list[tuple[Neighbour, Request]] = []
    for number, neighbour in enumerate(scene.neighbours):
        start = prompt[: neighbour.shared]
        ids = np.concatenate([start, random_ids(rng, max(neighbour.own, 1 - len(start)), VOCAB)])
        how = options if neighbour.twin else {"seed": number}
        others.append((neighbour, request(f"n{number}", ids, neighbour.new_tokens, **how)))
    alone = run(engine(1, exact=True, model=MODELS[model]()), [watched])["watched"]
    served = engine(scene.slots, exact=True, model=MODELS[model](), kv_tokens=scene.kv_tokens)
    crowded = play(served, watched, scene.enters, others)
    assert same_bits(alone, crowded)


@pytest.mark.parametrize(
    ("model", "thread_count"),
    but(
        {("odd sizes", 1), ("wide", 2), (MIXTURES[0], 1)},
        [("even sizes", 1), ("odd sizes", 1), ("wide", 2), *((name, 1) for name in MIXTURES)],
    ),
)
def test_more_requests_than_rows_of_a_pass_have_the_bits_they_have_alone(model: str, thread_count: int) -> None:
    rng = np.random.default_rng(0)
    start = random_ids(rng, 33, VOCAB)
    prompts = [random_ids(rng, int(rng.integers(1, 40)), VOCAB) for _ in range(EXACT_ROWS)]
    prompts += [np.concatenate([start[: int(n)], random_ids(rng, 3, VOCAB)]) for n in rng.integers(8, 33, 4)]
    prompts += [prompts[3]] * 2
    requests = [request(str(i), p, 1 + i % 9, seed=i) for i, p in enumerate(prompts)]
    with threads(thread_count):
        together = run(engine(len(requests), exact=True, model=MODELS[model]()), requests)
        few_slots = run(engine(5, exact=True, model=MODELS[model]()), requests)
        assert all(same_bits(together[each.id], few_slots[each.id]) for each in requests)
        alone = engine(1, exact=True, model=MODELS[model]())
        for each in requests[::3]:
            assert same_bits(together[each.id], run(alone, [each])[each.id])


def test_log_probs_of_a_sequence_do_not_depend_on_what_runs() -> None:
    rng = np.random.default_rng(1)
    sequence = random_ids(rng, 45)
    idle, busy = engine(4, exact=True), engine(4, exact=True)
    for i in range(4):
        busy.add(request(str(i), random_ids(rng, 20), 5))
    busy.step()
    assert torch.equal(idle.log_probs_of(sequence), busy.log_probs_of(sequence))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_request_resumed_from_its_prefix_draws_the_same_tokens(seed: int, exact: bool) -> None:
    """Exactly so, or else the log-probs agree as far as kernels do: what it had drawn is computed as a prompt."""
    rng = np.random.default_rng(seed)
    whole = request("a", random_ids(rng, int(rng.integers(1, 30))), 20, seed=seed)
    full = run(engine(2, exact=exact), [whole])["a"]
    for done in (1, 7, 19):
        rest = resumed(whole, full.ids[:done])
        neighbours = [request(f"n{i}", random_ids(rng, 18), 9, seed=i) for i in range(4)]
        finished = run(engine(3, exact=exact), [*neighbours[:2], rest, *neighbours[2:]])["a"]
        assert finished.ids.tolist() == full.ids[done:].tolist()
        np.testing.assert_allclose(finished.logprobs, full.logprobs[done:], atol=1e-4)
        assert not exact or finished.logprobs.tobytes() == full.logprobs[done:].tobytes()


def test_siblings_resumed_at_unlike_places_go_on_with_the_same_bits() -> None:
    rng = np.random.default_rng(7)
    prompt = random_ids(rng, 21)
    whole = [request(str(n), prompt, 16, seed=n % 3, stop=("never said",)) for n in range(6)]
    full = run(engine(6, exact=True), whole)
    cuts = {each.id: int(rng.integers(0, 16)) for each in whole}
    served = engine(4, exact=True)
    for each in whole:
        served.add(resumed(each, full[each.id].ids[: cuts[each.id]]))
    heard: dict[str, list[int]] = {each.id: [] for each in whole}
    finished: dict[str, Completion] = {}
    while served.has_work:
        finished.update((done.id, done) for done in served.step())
        for told in served.progress({id: len(ids) for id, ids in heard.items()}):
            heard[told.id] += told.ids.tolist()
    for each in whole:
        done, cut = finished[each.id], cuts[each.id]
        assert done.ids.tolist() == full[each.id].ids[cut:].tolist()
        assert done.logprobs.tobytes() == full[each.id].logprobs[cut:].tobytes()
        assert len(done.versions) == 16 - cut
        assert heard[each.id] == done.ids[: len(heard[each.id])].tolist()


@pytest.mark.parametrize("exact", [False, True])
def test_an_aborted_request_goes_on_where_it_stopped(exact: bool) -> None:
    whole = request("a", random_ids(np.random.default_rng(5), 25), 20, seed=3, temperature=0.8)
    full = run(engine(2, exact=exact), [whole])["a"]
    served = engine(2, exact=exact)
    served.add(whole)
    for _ in range(6):
        served.step()
    half = served.abort("a")
    assert half is not None
    assert (half.finish, half.ids.tolist()) == ("abort", full.ids[:6].tolist())
    assert half.logprobs.tobytes() == full.logprobs[:6].tobytes()
    rest = run(served, [resumed(whole, half.ids)])["a"]
    assert rest.ids.tolist() == full.ids[6:].tolist()
    assert not exact or rest.logprobs.tobytes() == full.logprobs[6:].tobytes()


def resumed(whole: Request, done: IntArray) -> Request:
    sampling = replace(whole.sampling, max_new_tokens=whole.sampling.max_new_tokens - len(done))
    return Request(whole.id, np.concatenate([whole.ids, done]), sampling, len(done))
