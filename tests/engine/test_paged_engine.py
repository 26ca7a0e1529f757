"""The paged engine: the same tokens as `transformers` and as the engine of slots, whatever else runs, comes and goes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from small_models import CONTEXT, MIXTURES, ids, plain_llama, random_ids, request, run, same_bits, tokenizer, under_plans
from test_engine_greedy import NEW_TOKENS, family, generated, plain_log_probs, prompts_of
from thorough import but
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from roll.config.errors import RunError
from roll.engine.paged import engine, model_runner, sizing
from roll.engine.paged.engine import PagedEngine
from roll.engine.paged.kv_cache import BLOCK
from roll.engine.request import Completion, Request
from roll.engine.slot_engine import SlotEngine

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@cache
def model_on(device: str) -> PreTrainedModel:
    return under_plans(plain_llama()).to(device)


def paged(
    device: str = "cpu",
    max_running: int = 4,
    *,
    model: PreTrainedModel | None = None,
    kv_tokens: int = 0,
    version: int = 0,
) -> PagedEngine:
    return PagedEngine(
        model or model_on(device), tokenizer(), max_running=max_running, kv_tokens=kv_tokens, version=version
    )


@devices
@pytest.mark.parametrize("slots", [1, 3, 40])
def test_greedy_tokens_are_those_of_generate_however_requests_come_and_go(slots: int, device: str) -> None:
    rng = np.random.default_rng(slots)
    prompts = prompts_of(1, 13)
    limits = rng.integers(1, NEW_TOKENS + 1, len(prompts))
    served = paged(device, slots)
    finished: dict[str, Completion] = {}
    waiting = list(range(len(prompts)))
    while waiting or served.has_work:
        for i in waiting[: rng.integers(0, 4)]:
            served.add(request(str(i), prompts[i], int(limits[i]), temperature=0.0))
            waiting.remove(i)
        finished.update((done.id, done) for done in served.step())
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        assert finished[str(i)].ids.tolist() == generated(plain_llama(), prompt)[:limit], f"prompt {i}"
        assert finished[str(i)].finish == "length"


def windowed(name: str) -> PreTrainedModel:
    from small_models import SHAPE, build

    shape = {**SHAPE, "hidden_size": 48, "num_hidden_layers": 3}
    if name == "mistral":
        return build(MistralForCausalLM, MistralConfig(**shape, sliding_window=9, head_dim=12))
    if name == "gemma":
        return build(GemmaForCausalLM, GemmaConfig(**shape, head_dim=16))
    options = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}
    return build(Gemma2ForCausalLM, Gemma2Config(**shape, **options, final_logit_softcapping=8.0))


FAMILIES = ["llama", "llama, scaled rotary, tied", "qwen2", "qwen3", "mistral", "gemma", "gemma2"]
FAMILIES += ["llama, dynamic rotary", "phi3, long rotary", *MIXTURES]


@devices
@pytest.mark.parametrize("name", FAMILIES)
def test_families_go_through_the_same_door(name: str, device: str) -> None:
    model = windowed(name) if name in ("mistral", "gemma", "gemma2") else family(name)
    if name == "gemma2":
        model.set_attn_implementation("eager")  # the only one of its own that caps scores
    served = paged(device, 3, model=under_plans(model).to(device))
    prompts = prompts_of(2, 7)
    finished = run(served, [request(str(i), p, NEW_TOKENS, temperature=0.0) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert finished[str(i)].ids.tolist() == generated(model, prompt)
        expected = plain_log_probs(model, prompt, finished[str(i)], 1.0)
        torch.testing.assert_close(torch.from_numpy(finished[str(i)].logprobs), expected, atol=1e-4, rtol=0)


def mixed_requests(seed: int, count: int) -> list[Request]:
    """Prompts that begin alike, all ways to draw."""
    rng = np.random.default_rng(seed)
    base = random_ids(rng, 70)
    found = []
    for i in range(count):
        prompt = np.concatenate([base[: rng.integers(0, 70)], random_ids(rng, int(rng.integers(1, 30)))])
        sampling = {
            "temperature": float(rng.choice([0.0, 1.0, 0.7])),
            "top_p": float(rng.choice([1.0, 1.0, 0.9])),
            "top_k": int(rng.choice([0, 0, 5])),
            "seed": int(rng.integers(2**63)),
            "stop_ids": tuple(rng.integers(0, 120, 3).tolist()),
        }
        found.append(request(f"r{i}", prompt, int(rng.integers(1, 50)), **sampling))
    return found


MIXED = 30


@cache
def drawn_by_slots(seed: int) -> dict[str, Completion]:
    return run(SlotEngine(model_on("cpu"), tokenizer(), max_running=6), mixed_requests(seed, MIXED))


@devices
@pytest.mark.parametrize("kv_tokens", [0, 200])
@pytest.mark.parametrize("seed", but({0, 2}, range(3)))
def test_it_draws_what_the_engine_of_slots_draws(
    seed: int, kv_tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed == 2:  # prompts in passes of their own, and in several of them
        for name, value in {"LONG": 20, "FEW": 3, "PREFILL_ROWS": 30}.items():
            monkeypatch.setattr(engine, name, value)
    served = paged(device, 6, kv_tokens=kv_tokens)
    found = run(served, mixed_requests(seed, MIXED))
    for id, done in drawn_by_slots(seed).items():
        assert found[id].ids.tolist() == done.ids.tolist()
        assert found[id].finish == done.finish
        np.testing.assert_allclose(found[id].logprobs, done.logprobs, atol=1e-4)
        assert found[id].versions.tolist() == [0] * len(done.ids)
    if kv_tokens:
        assert served._preemptions > 0, "the cache was too small for all of them at once"
    assert served.stats().cached_tokens == 0


@devices
def test_what_stands_in_the_cache_is_not_computed_again(device: str) -> None:
    rng = np.random.default_rng(0)
    served = paged(device, 8)
    prompt = random_ids(rng, 50)
    run(served, [request(f"a{i}", prompt, 20, seed=i) for i in range(8)])
    full = 49 // BLOCK * BLOCK
    assert served.stats().computed_prompt_tokens == full + 8 * (49 - full), "siblings share full blocks"
    first = run(served, [request("turn 1", prompt, 30, seed=3)])["turn 1"]
    before = served.stats().computed_prompt_tokens
    conversation = np.concatenate([prompt, first.ids, random_ids(rng, 10)])
    second = run(served, [request("turn 2", conversation, 10, seed=4)])["turn 2"]
    assert served.stats().computed_prompt_tokens - before == len(conversation) - 1 - 79 // BLOCK * BLOCK
    alone = run(paged(device), [request("turn 2", conversation, 10, seed=4)])["turn 2"]
    assert second.ids.tolist() == alone.ids.tolist()
    np.testing.assert_allclose(second.logprobs, alone.logprobs, atol=1e-4)


@devices
@pytest.mark.parametrize("kept", [0, 20, 79, 80, 85])
def test_a_turn_shares_what_it_goes_on_from_and_no_more(kept: int, device: str) -> None:
    """Under one name: a conversation that goes on, and one whose history was rewritten after `kept` tokens."""
    rng = np.random.default_rng(kept)
    served = paged(device, 8)
    first = run(served, [request("talk", random_ids(rng, 50), 30, seed=3)])["talk"]
    said = np.concatenate([random_ids(np.random.default_rng(kept), 50), first.ids])
    before = served.stats().shared_prompt_tokens
    turn = request("talk", np.concatenate([said[:kept], random_ids(rng, 100 - kept)]), 10, seed=4)
    found = run(served, [turn])["talk"]
    assert served.stats().shared_prompt_tokens - before == min(kept, 79) // BLOCK * BLOCK
    alone = run(paged(device), [turn])["talk"]
    assert found.ids.tolist() == alone.ids.tolist()
    np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-4)


@devices
def test_new_weights_share_nothing_with_old_ones_and_every_token_says_whose_it_is(device: str) -> None:
    model = under_plans(plain_llama()).to(device)
    served = paged(device, 4, model=model, version=3)
    prompt = random_ids(np.random.default_rng(1), 40)
    served.add(request("running", prompt, 30, seed=1))
    served.add(request("done", prompt, 2, seed=2))
    for _ in range(8):
        served.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    drawn = len(served.progress({})[0].ids)
    served.set_version(7)
    drawn_then = len(served.progress({})[0].ids)
    assert drawn <= drawn_then
    shared = served.stats().shared_prompt_tokens
    after = run(served, [request("new", prompt, 5, seed=5)])
    assert served.stats().shared_prompt_tokens == shared
    assert after["running"].versions.tolist() == [3] * drawn_then + [7] * (30 - drawn_then)
    fresh = run(paged(device, model=model), [request("new", prompt, 5, seed=5)])["new"]
    assert after["new"].ids.tolist() == fresh.ids.tolist()
    assert after["new"].versions.tolist() == [7] * 5


@devices
def test_an_aborted_request_has_what_it_drew_and_goes_on_from_there_elsewhere(device: str) -> None:
    prompt = random_ids(np.random.default_rng(2), 20)
    whole = run(paged(device), [request("a", prompt, 40, seed=9)])["a"]
    served = paged(device)
    served.add(request("a", prompt, 40, seed=9))
    served.add(request("waits", prompt, 4))
    for _ in range(10):
        served.step()
    part = served.abort("a")
    assert part is not None
    assert part.finish == "abort"
    assert 5 <= len(part.ids) < 40
    assert part.ids.tolist() == whole.ids[: len(part.ids)].tolist()
    assert served.abort("a") is None
    rest = run(served, [request("a", np.concatenate([prompt, part.ids]), 40 - len(part.ids), seed=9)])["a"]
    assert [*part.ids, *rest.ids] == whole.ids.tolist()
    assert rest.finish == whole.finish


def test_a_waiting_request_is_aborted_with_nothing_and_a_finished_one_once() -> None:
    served = paged(max_running=1)
    served.add(request("a", ids(1, 2), 3))
    served.add(request("b", ids(1, 2), 3))
    for _ in range(3):
        served.step()  # its last step may be in flight
    assert served.abort("b") is not None
    done = served.abort("a")
    rest = run(served)
    assert (done is None) == ("a" in rest)


@devices
def test_stop_strings_end_a_response_and_stay_in_it(device: str) -> None:
    prompt = random_ids(np.random.default_rng(3), 12)
    free = run(paged(device), [request("a", prompt, 40, seed=2)])["a"]
    text = tokenizer().decode(free.ids[5:8].tolist())
    done = run(paged(device), [request("a", prompt, 40, seed=2, stop=(text,))])["a"]
    assert done.finish == "stop"
    assert done.ids.tolist() == free.ids[: len(done.ids)].tolist()
    assert text in tokenizer().decode(done.ids.tolist())
    assert text not in tokenizer().decode(done.ids[:-1].tolist())


@devices
def test_many_requests_on_a_small_cache_all_finish(device: str) -> None:
    rng = np.random.default_rng(4)
    count = 1000 if device == "cuda" else 150  # row by row on a CPU
    requests = [
        request(str(i), random_ids(rng, int(rng.integers(1, 40))), int(rng.integers(1, 12)), seed=i) for i in range(count)
    ]
    served = paged(device, 16, kv_tokens=160)
    finished = run(served, requests)
    assert len(finished) == count
    assert all(len(finished[r.id].ids) == r.sampling.max_new_tokens for r in requests)


def test_what_can_never_run_is_refused_by_name() -> None:
    served = paged(kv_tokens=64)
    with pytest.raises(ValueError, match=rf"'long' may need {CONTEXT + 1} tokens .* the engine's context is {CONTEXT}"):
        served.add(request("long", random_ids(np.random.default_rng(0), CONTEXT - 7), 8))
    with pytest.raises(ValueError, match=r"'wide' may need 65 tokens .* the engine's cache holds 64"):
        served.add(request("wide", random_ids(np.random.default_rng(0), 60), 5))
    with pytest.raises(ValueError, match="'none' has no tokens"):
        served.add(request("none", ids(), 8))
    with pytest.raises(ValueError, match="asks for 0 new tokens"):
        served.add(request("zero", ids(1), 0))
    served.add(request("twice", ids(1), 8))
    with pytest.raises(ValueError, match="'twice' is here already"):
        served.add(request("twice", ids(1), 8))


@devices
def test_a_longer_request_makes_the_cache_larger_and_a_released_one_comes_back(device: str) -> None:
    served = paged(device, 2)
    short = random_ids(np.random.default_rng(5), 5)
    before = run(served, [request("a", short, 5, seed=1)])["a"]
    served.add(request("b", short, 100))
    served.step()
    with pytest.raises(RunError, match="cannot free its cache"):
        served.release()
    assert len(run(served)["b"].ids) == 100
    served.release()
    assert same_bits(before, run(served, [request("a", short, 5, seed=1)])["a"])


@devices
def test_the_cache_grows_under_running_requests(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "SHORTEST", 64)
    rng = np.random.default_rng(3)
    short = [request(f"s{i}", random_ids(rng, 20), 40, seed=i) for i in range(4)]
    long = [request(f"l{i}", random_ids(rng, 70), 40, seed=10 + i) for i in range(3)]
    served = paged(device, 8)
    for each in short:
        served.add(each)
    for _ in range(10):
        assert not served.step()
    before = served._kv_manager.pool.count
    found = run(served, long)
    assert served._kv_manager.pool.count == 2 * (before - 1) + 1
    assert served._preemptions == 0
    expected = run(SlotEngine(model_on("cpu"), tokenizer(), max_running=8), [*short, *long])
    assert {id: done.ids.tolist() for id, done in found.items()} == {id: d.ids.tolist() for id, d in expected.items()}


@devices
def test_log_probs_of_a_sequence(device: str) -> None:
    whole = random_ids(np.random.default_rng(6), 50)
    with torch.inference_mode():
        logits = plain_llama()(torch.from_numpy(whole.astype(np.int64))[None]).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(whole[1:].astype(np.int64))[:, None])[:, 0]
    served = paged(device, max_running=64)
    torch.testing.assert_close(served.log_probs_of(whole), expected, atol=1e-4, rtol=0)
    run(served, [request("a", whole[:20], 3)])  # from now on there are captured steps to compute it by
    used = served.stats().cached_tokens
    for _ in range(2):
        torch.testing.assert_close(served.log_probs_of(whole), expected, atol=1e-4, rtol=0)
    assert served.stats().cached_tokens == used


@devices
def test_damaged_weights_are_noticed(device: str) -> None:
    model = under_plans(plain_llama()).to(device)
    served = paged(device, model=model)
    served.add(request("a", ids(1, 2, 3), 8))
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(RunError, match="not numbers"):
        run(served)


@devices
@pytest.mark.parametrize("failing", ["sample", "prefill"])
def test_after_a_pass_that_failed_requests_begin_anew(failing: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it should have computed is not taken for computed, by those that were in it or by others."""
    monkeypatch.setattr(engine, "LONG", 24)
    monkeypatch.setattr(engine, "FEW", 8)
    prompts = [np.concatenate([random_ids(np.random.default_rng(n // 2), 40), [n]]) for n in range(3)]
    asked = [request(str(n), prompt, 12, seed=n) for n, prompt in enumerate(prompts)]
    alone = {each.id: run(paged(device), [each])[each.id] for each in asked}
    for after in (0, 1, 4):
        served = paged(device)
        served.add(asked[0])
        served.add(asked[1])
        for _ in range(after):
            served.step()
        compute = getattr(model_runner.ModelRunner, failing)
        left = iter([torch.OutOfMemoryError("no room")])

        def fails_once(*args: object, compute: Any = compute, left: Any = left) -> object:
            for error in left:
                raise error
            return compute(*args)

        with monkeypatch.context() as patched:
            patched.setattr(model_runner.ModelRunner, failing, fails_once)
            served.add(asked[2])
            with pytest.raises(torch.OutOfMemoryError):
                run(served)
            finished = run(served)
        for each in asked:
            assert finished[each.id].ids.tolist() == alone[each.id].ids.tolist(), (after, each.id)
            np.testing.assert_allclose(finished[each.id].logprobs, alone[each.id].logprobs, atol=1e-4)
        assert served.stats().running == 0


@pytest.mark.parametrize(("prompt", "new"), [(100, 10), (10, 100)])
def test_a_cache_that_cannot_grow_beside_itself_is_made_anew(
    prompt: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing.PagedSizing, "growable_blocks", lambda self, required, blocks: blocks)
    served = paged(max_running=1)
    run(served, [request("short", ids(1, 2, 3), 5)])
    long = request("long", random_ids(np.random.default_rng(0), prompt), new)
    done = run(served, [long])["long"]
    assert done.ids.tolist() == run(paged(), [long])["long"].ids.tolist()
    assert served.stats().running == 0


@pytest.mark.gpu
def test_an_engine_that_left_its_gpu_often_leaves_as_little_as_one_that_left_it_once() -> None:
    served = paged("cuda", 8)
    left = []
    for round in range(4):
        run(served, [request(str(i), p, NEW_TOKENS) for i, p in enumerate(prompts_of(round, 8))])
        served.release()
        left.append(torch.cuda.memory_allocated())
    assert len(set(left)) == 1
