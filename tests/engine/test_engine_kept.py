"""What is kept of sequences that ended: next turns, resumed requests and late siblings compute only what is new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from small_models import build, engine, plain_llama, random_ids, request, run, same_bits, under_plans

from roll.data.tokenlog import IntArray
from roll.engine.request import Completion
from roll.engine.slot_engine import SlotEngine


def computed(served: SlotEngine) -> int:
    return served.stats().computed_prompt_tokens


def next_turn(prompt: IntArray, done: Completion, observation: IntArray) -> IntArray:
    return np.concatenate([prompt, done.ids, observation])


def test_a_second_turn_computes_only_its_new_tokens() -> None:
    rng = np.random.default_rng(0)
    served = engine(3)
    prompt = random_ids(rng, 30)
    first = run(served, [request("a", prompt, 9, seed=1)])["a"]
    turn = next_turn(prompt, first, random_ids(rng, 7))
    before = computed(served)
    second = run(served, [request("a", turn, 8, temperature=0.0)])["a"]
    assert computed(served) - before == 1 + 7  # the last token of the first turn was drawn, and not computed
    alone = run(engine(1), [request("a", turn, 8, temperature=0.0)])["a"]
    assert second.ids.tolist() == alone.ids.tolist()
    np.testing.assert_allclose(second.logprobs, alone.logprobs, atol=1e-5)
    third = next_turn(turn, second, random_ids(rng, 5))
    before = computed(served)
    run(served, [request("a", third, 2)])
    assert computed(served) - before == 1 + 5


def test_exact_shares_whole_tiles_of_the_first_prompt_and_no_answer() -> None:
    rng = np.random.default_rng(0)
    served = engine(3, exact=True)
    prompt = random_ids(rng, 37)
    first = run(served, [request("a", prompt, 12, seed=1)])["a"]
    turn = next_turn(prompt, first, random_ids(rng, 3))
    before = computed(served)
    second = run(served, [request("a", turn, 8, seed=2)])["a"]
    assert computed(served) - before == len(turn) - 32
    assert same_bits(second, run(engine(1, exact=True), [request("a", turn, 8, seed=2)])["a"])


@pytest.mark.parametrize("exact", [False, True])
def test_a_late_sibling_computes_nothing_of_the_prompt(exact: bool) -> None:
    served = engine(2, exact=exact)
    prompt = random_ids(np.random.default_rng(1), 21)
    run(served, [request("a", prompt, 3, seed=0)])
    before = computed(served)
    late = run(served, [request("b", prompt, 5, seed=4)])["b"]
    assert computed(served) == before
    assert late.ids.tolist() == run(engine(1, exact=exact), [request("b", prompt, 5, seed=4)])["b"].ids.tolist()


def test_an_aborted_request_resumes_without_computing_again() -> None:
    served = engine(2)
    prompt = random_ids(np.random.default_rng(2), 25)
    served.add(request("a", prompt, 20, seed=3))
    for _ in range(6):
        served.step()
    half = served.abort("a")
    assert half is not None
    before = computed(served)
    rest = run(served, [request("a", np.concatenate([prompt, half.ids]), 14, seed=3)])["a"]
    assert computed(served) - before == 1
    whole = run(engine(1), [request("a", prompt, 20, seed=3)])["a"]
    assert [*half.ids, *rest.ids] == whole.ids.tolist()


@pytest.mark.parametrize("when", ["after it ended", "while it ran"])
def test_nothing_of_older_weights_is_kept(when: str) -> None:
    model = under_plans(plain_llama())
    served = engine(2, model=model)
    prompt = random_ids(np.random.default_rng(3), 30)
    served.add(request("a", prompt, 6))
    for _ in range(6 if when == "after it ended" else 3):
        served.step()
    other = build(type(plain_llama()), plain_llama().config, seed=1)
    model.load_state_dict(other.state_dict())
    served.set_version(1)
    run(served)
    before = computed(served)
    again = run(served, [request("b", prompt, 6, temperature=0.0)])["b"]
    assert computed(served) - before == len(prompt)
    fresh = run(engine(1, model=under_plans(other)), [request("b", prompt, 6, temperature=0.0)])["b"]
    assert again.ids.tolist() == fresh.ids.tolist()


def test_nothing_is_kept_of_memory_that_was_freed() -> None:
    served = engine(2)
    prompt = random_ids(np.random.default_rng(4), 30)
    first = run(served, [request("a", prompt, 6, temperature=0.0)])["a"]
    served.release()
    again = run(served, [request("b", prompt, 6, temperature=0.0)])["b"]
    assert computed(served) == 2 * len(prompt)
    assert again.ids.tolist() == first.ids.tolist()


def test_what_was_unused_for_longest_goes_first() -> None:
    rng = np.random.default_rng(5)
    served = engine(3)
    prompts = {name: random_ids(rng, 20) for name in "abcd"}
    for name in "abc":
        run(served, [request(name, prompts[name], 2)])
    run(served, [request("a again", np.append(prompts["a"], 1), 2)])  # used: b is now the oldest
    run(served, [request("d", prompts["d"], 2)])
    for name, expected in (("a", 1), ("c", 1), ("b", 20)):
        before = computed(served)
        run(served, [request(f"{name} at last", np.append(prompts[name][:19], [7]), 1)])
        assert computed(served) - before == expected, name


def test_when_every_slot_is_wanted_what_a_request_can_use_is_dropped_last() -> None:
    rng = np.random.default_rng(6)
    served = engine(2)
    prompts = [random_ids(rng, 20) for _ in range(3)]
    first = run(served, [request(str(i), prompts[i], 3, seed=i) for i in range(2)])
    turn = next_turn(prompts[0], first["0"], random_ids(rng, 4))
    before = computed(served)
    run(served, [request("new", prompts[2], 3), request("turn", turn, 3)])
    assert computed(served) - before == 20 + 5


def test_what_is_kept_moves_along_when_a_longer_request_comes() -> None:
    rng = np.random.default_rng(8)
    served = engine(8)
    prompts = {name: random_ids(rng, 30) for name in "abc"}
    first = run(served, [request(name, prompt, 9, seed=1) for name, prompt in prompts.items()])
    served.add(request("b", next_turn(prompts["b"], first["b"], random_ids(rng, 3)), 15, temperature=0.0))
    served.step()
    served.add(request("long", random_ids(rng, 100), 30))
    served.step()
    for name in "ac":
        turn = next_turn(prompts[name], first[name], random_ids(rng, 7))
        before = computed(served)
        served.add(request(name, turn, 8, temperature=0.0))
        served.step()
        assert computed(served) - before == 1 + 7
    finished = run(served)
    assert sorted(finished) == ["a", "b", "c", "long"]


TURNS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=14
)


@given(turns=TURNS, slots=st.integers(1, 4), kv_tokens=st.sampled_from([0, 130, 260]), exact=st.booleans())
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_conversations_that_take_turns_have_the_tokens_they_have_alone(
    turns: list[tuple[int, int, int, int]], slots: int, kv_tokens: int, exact: bool
) -> None:
    """Conversations go on, fork and wait for each other; some turns end in the middle."""
    rng = np.random.default_rng(7)
    served, alone = engine(slots, exact=exact, kv_tokens=kv_tokens), engine(1, exact=exact)
    beginning = random_ids(rng, 18)
    talks = [np.concatenate([beginning[: 4 * i], random_ids(rng, 3 + 5 * i)]) for i in range(5)]
    asked: dict[str, IntArray] = {}

    def end(done: Completion) -> None:
        alone.release()  # keeps nothing from the last one
        expected = run(alone, [request(done.id, asked[done.id], max(len(done.ids), 1), temperature=0.0)])[done.id]
        assert done.ids.tolist() == expected.ids.tolist()[: len(done.ids)]
        talk = int(done.id.split(".")[0])
        talks[talk] = np.concatenate([asked[done.id], done.ids])[:100]

    for number, (talk, new_tokens, said, steps) in enumerate(turns):
        id = f"{talk}.{number}"
        asked[id] = np.concatenate([talks[talk], random_ids(rng, said)])
        served.add(request(id, asked[id], new_tokens, temperature=0.0))
        for _ in range(steps):
            for done in served.step():
                end(done)
        if steps == 3 and (aborted := served.abort(id)) is not None:
            end(aborted)
    for done in run(served).values():
        end(done)
