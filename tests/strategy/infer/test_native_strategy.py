"""The embedded engine behind the protocol: verified weights first, then every request ends in one completion."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from transformers import LlamaConfig, LlamaForCausalLM

from roll.config.errors import RunError
from roll.config.schema import TrainConfig
from roll.engine.request import Completion, Request, SamplingParams
from roll.model import attention
from roll.model.tiny import character_tokenizer
from roll.strategy.infer.native import NativeStrategy
from roll.strategy.train.single import SingleStrategy
from roll.weight_sync.weights import Weights

TOKENIZER = character_tokenizer()
WAIT_S = 30


def trainer(seed: int = 0) -> SingleStrategy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=len(TOKENIZER), num_key_value_heads=2, initializer_range=0.3, **shape)
        model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(attention.NAME)
    return SingleStrategy(model, TOKENIZER, TrainConfig(), trainable=False)


TRAINER = trainer()


def strategy(max_running: int = 3, weights: Weights | None = None) -> NativeStrategy:
    served = NativeStrategy(TOKENIZER, max_running=max_running, exact=False)
    at_once(served.load_weights(weights or TRAINER.weights(0)))
    return served


def request(id: str, new_tokens: int = 5, seed: int = 0) -> Request:
    return Request(id, np.array([5, 9, 40], np.int32), SamplingParams(new_tokens, seed=seed))


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs what never waits, within an event loop or without one."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


def go(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(coroutine, WAIT_S)

    asyncio.run(bounded())


async def drain(served: NativeStrategy) -> list[Completion]:
    """Everything the strategy still gives."""
    everything: list[Completion] = []
    while results := await served.results():
        everything += results
    return everything


async def turns(count: int = 20) -> None:
    """Lets the other coroutines run for a while."""
    for _ in range(count):
        await asyncio.sleep(0)


# weights


def test_nothing_works_before_weights_were_published() -> None:
    served = NativeStrategy(TOKENIZER, max_running=2, exact=False)
    with pytest.raises(RunError, match="no weights yet"):
        served.submit([request("a")])
    with pytest.raises(RunError, match="no weights yet"):
        asyncio.run(served.results())
    with pytest.raises(RunError, match="no weights yet"):
        served.stats()


def test_another_models_weights_are_refused_and_the_old_ones_go_on() -> None:
    served = strategy()
    with pytest.raises(RunError, match=r"is not the trainer's: version 1"):
        at_once(served.load_weights(trainer().weights(1)))  # equal values, other storage

    async def main() -> None:
        served.submit([request("a")])
        (done,) = await drain(served)
        assert done.versions.tolist() == [0] * 5

    go(main())


def tampered_probe(weights: Weights) -> Weights:
    return replace(weights, log_probs=weights.log_probs - 0.1)


def foreign(weights: Weights) -> Weights:
    return replace(weights, parameters=dict(trainer().model.named_parameters()))


@pytest.mark.parametrize("damage", [tampered_probe, foreign])
def test_weights_that_fail_a_check_are_never_served(damage: Any) -> None:
    served = NativeStrategy(TOKENIZER, max_running=2, exact=False)
    with pytest.raises(RunError, match="version 2"):
        at_once(served.load_weights(damage(TRAINER.weights(2))))
    with pytest.raises(RunError, match="no weights yet"):
        served.submit([request("a")])


def test_after_a_refused_version_nothing_is_served_until_one_is_verified() -> None:
    served = strategy()
    with pytest.raises(RunError, match="probe prompt differ"):
        at_once(served.load_weights(tampered_probe(TRAINER.weights(1))))
    with pytest.raises(RunError, match="after version 0 were refused"):
        served.submit([request("a")])
    at_once(served.load_weights(TRAINER.weights(1)))
    assert served.engine.version == 1


def test_weights_changed_in_place_are_served_as_the_next_version() -> None:
    source = trainer()
    served = strategy(weights=source.weights(0))
    other = trainer(seed=1)

    async def main() -> None:
        served.submit([request("a"), request("long", 40)])
        while served.stats().running != 1:
            served._finished += served.engine.step()
        stale = source.weights(1)
        source.model.load_state_dict(other.model.state_dict())
        with pytest.raises(RunError, match="not the trainer's"):
            at_once(served.load_weights(stale))  # what the probe said of the old values
        at_once(served.load_weights(source.weights(1)))
        served.submit([request("b", 5)])
        finished = {done.id: done for done in await drain(served)}
        assert finished["a"].versions.tolist() == [0] * 5
        assert finished["b"].versions.tolist() == [1] * 5
        assert set(finished["long"].versions.tolist()) == {0, 1}
        fresh = strategy(weights=other.weights(1))
        fresh.submit([request("b", 5)])
        assert finished["b"].ids.tolist() == (await drain(fresh))[0].ids.tolist()

    go(main())


# requests


def test_results_come_as_they_finish() -> None:
    async def main() -> None:
        served = strategy(max_running=2)
        served.submit([request("long", 9), request("short", 2), request("next", 3)])
        order = []
        while results := await served.results():
            order.append([done.id for done in results])
        assert order == [["short"], ["next"], ["long"]]
        assert await served.results() == []

    go(main())


def test_a_request_that_can_never_run_is_refused_by_name() -> None:
    served = strategy()
    with pytest.raises(ValueError, match="'far too long'"):
        served.submit([request("far too long", 10**6)])
    assert asyncio.run(drain(served)) == []


def test_aborted_requests_arrive_among_the_results() -> None:
    async def main() -> None:
        served = strategy(max_running=1)
        served.submit([request("running", 40), request("waiting", 40)])
        waiting = asyncio.create_task(served.results())
        await turns()
        served.abort(["waiting", "running", "nobody"])
        finished = {done.id: done for done in await waiting}
        finished |= {done.id: done for done in await drain(served)}
        assert {id: done.finish for id, done in finished.items()} == {"running": "abort", "waiting": "abort"}
        assert 0 < len(finished["running"].ids) < 40
        assert len(finished["waiting"].ids) == 0
        served.abort(["running"])
        assert await served.results() == []

    go(main())


def test_a_pause_stops_generating_and_loses_nothing() -> None:
    async def main() -> None:
        served = strategy()
        served.submit([request("a", 12, seed=4)])
        waiting = asyncio.create_task(served.results())
        await turns(6)
        await served.pause()
        await turns(2)
        tokens = served.stats().generated_tokens
        assert 0 < tokens < 12
        await turns()
        assert served.stats().generated_tokens == tokens
        assert not waiting.done()
        await served.resume()
        (done,) = await waiting
        undisturbed = strategy()
        undisturbed.submit([request("a", 12, seed=4)])
        assert done.ids.tolist() == (await drain(undisturbed))[0].ids.tolist()

    go(main())


def test_what_was_aborted_in_a_pause_arrives_before_it_ends_and_nothing_else_is_generated() -> None:
    async def main() -> None:
        served = strategy()
        served.submit([request("a", 40), request("b", 40)])
        waiting = asyncio.create_task(served.results())
        await turns(6)
        await served.pause()
        await turns(2)
        tokens = served.stats().generated_tokens
        served.abort(["a"])
        (done,) = await waiting
        assert (done.id, done.finish) == ("a", "abort")
        assert served.stats().generated_tokens == tokens
        await served.resume()
        assert [done.id for done in await drain(served)] == ["b"]

    go(main())


def test_a_paused_engine_takes_requests_while_its_weights_are_not_verified() -> None:
    """New weights may be on their way; what arrives meanwhile waits for them."""

    async def main() -> None:
        served = strategy()
        await served.pause()
        served._verified = False
        served.submit([request("a")])
        waiting = asyncio.create_task(served.results())
        await turns()
        assert not waiting.done()
        at_once(served.load_weights(TRAINER.weights(1)))
        await served.resume()
        (done,) = await waiting
        assert done.versions.tolist() == [1] * 5

    go(main())


def test_progress_is_told_of_running_requests_beyond_what_was_heard() -> None:
    async def main() -> None:
        unready = NativeStrategy(TOKENIZER, max_running=2, exact=False)
        assert unready.progress({}) == []
        served = strategy(max_running=1)
        served.submit([request("a", 12, seed=4), request("b", 12)])
        waiting = asyncio.create_task(served.results())
        await turns(6)
        (told,) = served.progress({})
        assert (told.id, told.start) == ("a", 0)
        assert 0 < len(told.ids) < 12
        assert served.progress({"a": len(told.ids)}) == []
        await turns(3)
        await served.pause()
        (more,) = served.progress({"a": len(told.ids)})  # also of what stands still
        assert more.start == len(told.ids)
        await served.resume()
        (done,) = await waiting
        assert done.ids.tolist()[: len(told.ids) + len(more.ids)] == [*told.ids.tolist(), *more.ids.tolist()]
        await drain(served)
        assert served.progress({}) == []

    go(main())


def test_other_coroutines_run_between_steps() -> None:
    async def main() -> None:
        served = strategy()
        served.submit([request("a", 10)])
        seen: list[int] = []

        async def watch() -> None:
            while served.engine.has_work:
                seen.append(served.stats().generated_tokens)
                await asyncio.sleep(0)

        await asyncio.gather(served.results(), watch())
        assert set(range(1, 10)) <= set(seen)

    go(main())


def test_only_an_idle_engine_lays_its_cache_aside_and_the_next_request_brings_it_back() -> None:
    async def main() -> None:
        served = strategy()
        served.submit([request("a", 5, seed=1)])
        served._finished += served.engine.step()
        with pytest.raises(RunError, match="running"):
            at_once(served.set_residency("weights"))
        (first,) = await drain(served)
        at_once(served.set_residency("weights"))
        at_once(served.set_residency("all"))
        served.submit([request("a", 5, seed=1)])
        (second,) = await drain(served)
        assert first.ids.tolist() == second.ids.tolist()

    go(main())


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.just("wait"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["pause", "resume"]), st.just(0)),
    ),
    max_size=20,
)


@given(actions=ACTIONS, slots=st.integers(1, 4))
@settings(max_examples=examples(25), derandomize=True, deadline=None)
def test_every_submitted_request_ends_in_exactly_one_completion(actions: list[tuple[str, int]], slots: int) -> None:
    async def main() -> None:
        served = strategy(slots)
        ended: list[str] = []
        submitted = 0
        closing = False

        async def collect() -> None:
            while not (closing and not served.engine.has_work and not served._finished):
                ended.extend(done.id for done in await served.results())
                await asyncio.sleep(0)

        collector = asyncio.create_task(collect())
        for action, number in actions:
            if action == "submit":
                served.submit([request(str(submitted + i), 1 + (submitted + i) % 5) for i in range(number)])
                submitted += number
            elif action == "abort":
                served.abort([str(number), str(number + 1)])
            elif action == "wait":
                await turns(number)
            else:
                await getattr(served, action)()
        await served.resume()
        closing = True
        await collector
        assert sorted(ended, key=int) == [str(i) for i in range(submitted)]

    go(main())


def test_the_engine_is_the_trainers_own_storage() -> None:
    served = strategy()
    shared = {p.data_ptr() for p in TRAINER.model.parameters()}
    assert {p.data_ptr() for p in served.engine.model.parameters()} == shared
