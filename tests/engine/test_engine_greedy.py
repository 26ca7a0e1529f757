"""The engine against `transformers`: the same weights, the same tokens, the same log-probs."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import MIXTURES, SHAPE, build, engine, mixture, plain_llama, random_ids, request, run, under_plans
from thorough import but
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from roll.data.tokenlog import IntArray
from roll.engine.request import Completion
from roll.model.find import find_model
from roll.model.loading import context_of, load_model

NEW_TOKENS = 14


def generated(model: PreTrainedModel, prompt: IntArray) -> list[int]:
    """What `transformers` itself continues the prompt with, greedily."""
    return _generated(model, tuple(prompt.tolist()))


@cache
def _generated(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    whole = torch.tensor(prompt)[None]
    with torch.inference_mode():
        out = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, len(prompt) :].tolist()


def plain_log_probs(model: PreTrainedModel, prompt: IntArray, done: Completion, temperature: float) -> torch.Tensor:
    """The completion's log-probs by one forward pass over the whole sequence."""
    whole = torch.from_numpy(np.concatenate([prompt, done.ids]).astype(np.int64))
    with torch.inference_mode():
        logits = model(whole[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, whole[len(prompt) :, None])[:, 0]


def prompts_of(seed: int, count: int) -> list[IntArray]:
    """Random prompts of 1 to 60 tokens; some begin as another one does."""
    rng = np.random.default_rng(seed)
    prompts = [random_ids(rng, int(rng.integers(1, 60))) for _ in range(count - 3)]
    longest = max(prompts, key=len)
    return [*prompts, longest, np.concatenate([longest[:21], random_ids(rng, 5)]), longest[:17]]


@pytest.mark.parametrize(("slots", "exact"), [(1, False), (3, False), (3, True), (40, True)])
def test_greedy_tokens_are_those_of_generate_however_requests_come_and_go(slots: int, exact: bool) -> None:
    rng = np.random.default_rng(slots)
    prompts = prompts_of(1, 13)
    limits = rng.integers(1, NEW_TOKENS + 1, len(prompts))
    served = engine(slots, exact=exact)
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


@cache
def family(name: str) -> PreTrainedModel:
    """Not to be changed: tests share it, and what it generates."""
    shape = {**SHAPE, "hidden_size": 48, "num_hidden_layers": 3}
    if name in MIXTURES:
        return mixture(name)
    layers = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
    softly = {**shape, "initializer_range": 0.1, "head_dim": 16}  # norms that add one make these sharp enough
    if name == "llama":
        return build(LlamaForCausalLM, LlamaConfig(**{**shape, "num_key_value_heads": 4, "attention_bias": True}))
    if name == "llama, scaled rotary, tied":
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        options = {"num_key_value_heads": 1, "rope_parameters": rope, "tie_word_embeddings": True, "mlp_bias": True}
        return build(LlamaForCausalLM, LlamaConfig(**{**shape, **options}))
    if name == "llama, dynamic rotary":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        return build(LlamaForCausalLM, LlamaConfig(**{**shape, "rope_parameters": rope}))
    if name == "phi3, long rotary":
        factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [4.0] * 6}
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
        options = {"rope_parameters": rope, "original_max_position_embeddings": 80}
        return build(Phi3ForCausalLM, Phi3Config(**{**shape, **options}))
    if name.startswith("mistral"):
        window = 9 if name == "mistral, window" else None
        return build(MistralForCausalLM, MistralConfig(**{**shape, "sliding_window": window, "head_dim": 16}))
    if name == "smollm3":
        return build(SmolLM3ForCausalLM, SmolLM3Config(**shape, no_rope_layers=[1, 0, 1]))
    if name == "gemma":
        return build(GemmaForCausalLM, GemmaConfig(**softly))
    if name == "gemma2":
        options = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 24}
        model = build(Gemma2ForCausalLM, Gemma2Config(**{**softly, **layers, **options}))
        model.set_attn_implementation("eager")  # the only one that caps scores
        return model
    if name == "gemma3":
        return build(Gemma3ForCausalLM, Gemma3TextConfig(**{**softly, **layers, "query_pre_attn_scalar": 24}))
    if name == "qwen2":
        return build(Qwen2ForCausalLM, Qwen2Config(**shape))
    return build(Qwen3ForCausalLM, Qwen3Config(**{**shape, "head_dim": 16}))


FAMILIES = ["llama", "llama, scaled rotary, tied", "mistral", "mistral, window", "smollm3", "gemma", "gemma2", "gemma3"]
FAMILIES += ["qwen2", "qwen3", "llama, dynamic rotary", "phi3, long rotary", *MIXTURES]


@pytest.mark.parametrize(("name", "exact"), but({(name, False) for name in FAMILIES}, product(FAMILIES, (False, True))))
def test_other_families_go_through_the_same_door(name: str, exact: bool) -> None:
    model = family(name)
    served = engine(3, model=under_plans(model), exact=exact)
    prompts = prompts_of(2, 7)
    finished = run(served, [request(str(i), p, NEW_TOKENS, temperature=0.0) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert finished[str(i)].ids.tolist() == generated(model, prompt)
        expected = plain_log_probs(model, prompt, finished[str(i)], 1.0)
        torch.testing.assert_close(torch.from_numpy(finished[str(i)].logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3, long rotary", *MIXTURES])
def test_a_model_folder_is_loaded_ready_for_the_engine(name: str, tmp_path: Path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path)
    served = engine(3, model=load_model(find_model(str(tmp_path)), torch.float32, 0))
    prompt = prompts_of(3, 4)[0]
    finished = run(served, [request("a", prompt, NEW_TOKENS, temperature=0.0)])
    assert finished["a"].ids.tolist() == generated(model, prompt)


def test_a_model_whose_angles_depend_on_the_longest_sequence_takes_none_that_change_them(tmp_path: Path) -> None:
    family("phi3, long rotary").save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    model = load_model(source, torch.float32, 0)
    assert context_of(source) == engine(3, model=model).context == 80
    with pytest.raises(ValueError, match=r"81 tokens .*, but the engine's context is 80"):
        engine(3, model=model).add(request("a", range(70), 11))
    assert model.config.rope_parameters["rope_type"] == "longrope"  # as it is saved


@pytest.mark.parametrize("name", ["llama, dynamic rotary", "phi3, long rotary"])
def test_angles_do_not_depend_on_the_longest_sequence(name: str, tmp_path: Path) -> None:
    family(name).save_pretrained(tmp_path)
    rotary = load_model(find_model(str(tmp_path)), torch.float32, 0).get_decoder().rotary_emb
    states = torch.zeros(1, 1, 48)
    short, _ = rotary(states, torch.arange(80)[None])
    long, _ = rotary(states, torch.arange(400)[None])
    assert torch.equal(short, long[:, :80])


@pytest.mark.parametrize(("temperature", "exact"), [(0.7, False), (1.0, True), (1.6, False)])
def test_log_probs_are_those_of_a_plain_forward_pass(temperature: float, exact: bool) -> None:
    prompts = prompts_of(4, 9)
    sampling = {"temperature": temperature, "seed": 5}
    finished = run(engine(3, exact=exact), [request(str(i), p, 12, **sampling) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        expected = plain_log_probs(plain_llama(), prompt, finished[str(i)], temperature)
        torch.testing.assert_close(torch.from_numpy(finished[str(i)].logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [2, 16, 17, 100])
def test_log_probs_of_a_sequence(length: int, exact: bool) -> None:
    sequence = random_ids(np.random.default_rng(length), length)
    whole = torch.from_numpy(sequence.astype(np.int64))
    with torch.inference_mode():
        logits = plain_llama()(whole[None]).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, whole[1:, None])[:, 0]
    served = engine(2, exact=exact)
    served.add(request("running", [1, 2, 3], 3))
    served.step()
    before = served.stats()
    torch.testing.assert_close(served.log_probs_of(sequence), expected, atol=1e-4, rtol=0)
    assert served.stats() == before


def test_a_long_prompt_is_computed_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.engine.slot_engine.PROMPT_ROWS", 24)
    prompts = prompts_of(1, 13)
    finished = run(engine(5), [request(str(i), p, 6, temperature=0.0) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert finished[str(i)].ids.tolist() == generated(plain_llama(), prompt)[:6]


def test_requests_draw_a_token_every_step_while_a_long_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.engine.slot_engine.PROMPT_ROWS", 20)
    rng = np.random.default_rng(11)
    short, long = random_ids(rng, 5), random_ids(rng, 100)
    served = engine(2)
    served.add(request("short", short, NEW_TOKENS, temperature=0.0))
    served.step()
    served.add(request("long", long, 3, temperature=0.0))
    for step in range(1, 6):
        served.step()
        assert {told.id: len(told.ids) for told in served.progress({})} == {"short": 1 + step}
        assert served.stats().computed_prompt_tokens == 5 + 19 * step  # one row of the pass decodes
    finished = run(served)
    assert finished["short"].ids.tolist() == generated(plain_llama(), short)
    assert finished["long"].ids.tolist() == generated(plain_llama(), long)[:3]


def test_a_prompt_aborted_half_way_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.engine.slot_engine.PROMPT_ROWS", 20)
    long = random_ids(np.random.default_rng(12), 70)
    served = engine(2)
    served.add(request("a", long, 4, temperature=0.0))
    served.step()
    aborted = served.abort("a")
    assert aborted is not None
    assert (aborted.finish, len(aborted.ids)) == ("abort", 0)
    assert not served.has_work
    finished = run(served, [request("b", long, 4, temperature=0.0)])["b"]
    assert served.stats().computed_prompt_tokens == 70
    assert finished.ids.tolist() == generated(plain_llama(), long)[:4]


@pytest.mark.parametrize("call", [0, 5, 10_000])
def test_sequences_of_any_lengths_decode_together(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the attention is cut: each slot by itself, in runs, all in one."""
    monkeypatch.setattr("roll.engine.cache._CALL", call)
    prompts = prompts_of(5, 12)
    served = engine(6)
    finished = run(served, [request(str(i), p, 2 + i, temperature=0.0) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert finished[str(i)].ids.tolist() == generated(plain_llama(), prompt)[: 2 + i]
