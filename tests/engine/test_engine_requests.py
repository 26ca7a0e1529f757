"""Requests coming and going: ends, refusals, versions, shared prompts, and that each ends exactly once."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from small_models import CONTEXT, SHAPE, build, engine, ids, plain_llama, random_ids, request, run, under_plans
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE, WordLevel
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedTokenizerFast

from roll.config.errors import RunError
from roll.engine.paged.engine import PagedEngine
from roll.engine.request import Completion, Request, SamplingParams
from roll.engine.slot_engine import SlotEngine
from roll.engine.stop_strings import hits_stop_string
from roll.model.tiny import character_tokenizer

# ends and refusals


def test_a_stop_token_ends_a_response_and_stays_in_it() -> None:
    prompt = random_ids(np.random.default_rng(0), 9)
    free = run(engine(), [request("a", prompt, 20, temperature=0.0)])["a"]
    assert free.finish == "length"
    end = int(free.ids[7])
    first = free.ids.tolist().index(end)
    stopped = run(engine(), [request("a", prompt, 20, temperature=0.0, stop_ids=(119, end))])["a"]
    assert stopped.finish == "stop"
    assert stopped.ids.tolist() == free.ids[: first + 1].tolist()
    assert len(stopped.ids) == len(stopped.logprobs) == len(stopped.versions)


def test_a_response_that_stops_at_its_last_token_has_stopped() -> None:
    free = run(engine(), [request("a", [5, 6], 1, temperature=0.0)])["a"]
    stopped = run(engine(), [request("a", [5, 6], 1, temperature=0.0, stop_ids=(int(free.ids[0]),))])["a"]
    assert (free.finish, stopped.finish) == ("length", "stop")


@pytest.mark.parametrize("limit", [1, 2, 13])
def test_the_token_limit_is_exact(limit: int) -> None:
    done = run(engine(), [request("a", [1, 2, 3], limit)])["a"]
    assert (len(done.ids), done.finish) == (limit, "length")


def test_a_request_may_fill_the_context_but_not_exceed_it() -> None:
    served = engine(2)
    prompt = random_ids(np.random.default_rng(0), CONTEXT - 10)
    assert len(run(served, [request("fits", prompt, 10)])["fits"].ids) == 10
    with pytest.raises(ValueError, match=rf"'long'.*{CONTEXT + 1} tokens \({CONTEXT - 10} of prompt and 11 new\)"):
        served.add(request("long", prompt, 11))
    assert not served.has_work


def test_a_request_without_tokens_is_refused_by_name() -> None:
    served = engine()
    with pytest.raises(ValueError, match="'nothing' has no tokens"):
        served.add(request("nothing", []))
    assert not served.has_work


ODD = {
    "temperature nan": {"temperature": float("nan")},
    "temperature -1": {"temperature": -1.0},
    "temperature 1e-38": {"temperature": 1e-38},
    "top_p 0": {"top_p": 0.0},
    "top_p 1.5": {"top_p": 1.5},
    "seed -1": {"seed": -1},
    "seed 18446744073709551616": {"seed": 1 << 64},
    "stop_ids": {"stop_ids": (1 << 70,)},
    "stop ('',)": {"stop": ("",)},
    "stop ": {"stop": ("\ud800",)},
}


@pytest.mark.parametrize("kind", [SlotEngine, PagedEngine])
@pytest.mark.parametrize("says", ODD)
def test_what_cannot_be_drawn_by_is_refused_by_name(kind: type[SlotEngine | PagedEngine], says: str) -> None:
    served = kind(under_plans(plain_llama()), character_tokenizer(), max_running=2)
    with pytest.raises(ValueError, match=re.escape(f"request 'odd' asks for {says}")):
        served.add(request("odd", [1, 2], 5, **ODD[says]))
    for token in (-1, 120):
        with pytest.raises(ValueError, match=r"'odd' has tokens .* the model knows 0 to 119"):
            served.add(request("odd", [1, token], 5))
    with pytest.raises(ValueError, match="of which 2 cannot be sampled ones"):
        served.add(Request("odd", ids(1, 2), SamplingParams(5), sampled_tokens=2))
    assert not served.has_work


def test_stepping_without_work_does_nothing() -> None:
    assert engine().step() == []


# stop strings


class Recital(nn.Module):
    """A stand-in for a model that says a fixed text: the token at position p + 1 whatever is at p."""

    def __init__(self, text: list[int], vocab: int) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=vocab, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        self.says = nn.Parameter(torch.nn.functional.one_hot(torch.tensor(text), vocab).float() * 9)

    def get_decoder(self) -> Recital:
        return self

    def get_output_embeddings(self) -> nn.Module:
        return nn.Identity()

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.says[(position_ids + 1) % len(self.says)])


def wrapped(core: Core) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte a token, and some pairs of bytes: characters are cut anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "b"), ("ð", "Ł"), ("æ", "Ĺ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = Core(BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return wrapped(core)


@cache
def space_mark_tokenizer() -> PreTrainedTokenizerFast:
    """Spaces are marked inside tokens, and decoding drops the one before the first token, as SentencePiece does."""
    core = Core(WordLevel({token: i for i, token in enumerate([*"▁abcd", "▁a", "▁b", "?"])}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="never", split=False), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    core.decoder = decoders.Metaspace()
    return wrapped(core)


@cache
def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte a token, and a run of them that is not whole characters decodes to nothing but replacements."""
    core = Core(BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(core)


def recite(tokenizer: PreTrainedTokenizerFast, tokens: list[int], stop: tuple[str, ...]) -> Completion:
    reciter = Recital([0, *tokens], len(tokenizer))
    served = SlotEngine(reciter, tokenizer, max_running=2)  # type: ignore[arg-type]
    return run(served, [request("a", [0], len(tokens), temperature=0.0, stop=stop)])["a"]


def expected_end(tokenizer: PreTrainedTokenizerFast, tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """After how many tokens the text so far has a stop string in it."""
    for count in range(1, len(tokens) + 1):
        said = tokenizer.decode(tokens[:count])
        if any(s in said for s in stop):
            return count
    return None


TEXT = "abba: naïve 日本 🙂 done\n\nthe end ab"


@pytest.mark.parametrize(
    "stop",
    [("b",), ("bb",), (":",), ("ï",), ("日本",), ("本 🙂",), ("🙂",), ("done\n\n",), ("the end ab",), ("z", "end", "本")],
)
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(stop: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer(TEXT)["input_ids"]
    done = recite(tokenizer, tokens, stop)
    count = expected_end(tokenizer, tokens, stop)
    assert done.finish == "stop"
    assert done.ids.tolist() == tokens[:count]
    said = tokenizer.decode(done.ids)
    assert any(s in said for s in stop)


def test_a_stop_string_that_is_not_said_ends_nothing() -> None:
    tokens = byte_tokenizer()(TEXT)["input_ids"]
    done = recite(byte_tokenizer(), tokens, ("never", "baab", "日 本"))
    assert (done.finish, done.ids.tolist()) == ("length", tokens)


PIECES = st.lists(st.sampled_from(["a", "b", " ", "é", "日", "🙂", "\n"]), min_size=1, max_size=12).map("".join)


@given(text=PIECES, stop=st.lists(PIECES.map(lambda s: s[:4]), min_size=1, max_size=2))
@settings(max_examples=examples(60), derandomize=True, deadline=None)
def test_stop_strings_in_random_bytes(text: str, stop: list[str]) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    done = recite(tokenizer, tokens, tuple(stop))
    count = expected_end(tokenizer, tokens, tuple(stop))
    assert (done.finish == "stop") == (count is not None)
    assert done.ids.tolist() == tokens[:count]


@given(text=PIECES, stop=st.lists(PIECES.map(lambda s: s[:4]), min_size=1, max_size=2), cut=st.integers(0, 30))
@settings(max_examples=examples(100), derandomize=True, deadline=None)
def test_stop_strings_are_seen_across_a_cut_by_tokenizers_that_decode_no_broken_character(
    text: str, stop: list[str], cut: int
) -> None:
    """Byte fallback: one byte too few or too many, and none of the bytes beside it is decoded."""
    tokenizer = byte_fallback_tokenizer()
    tokens = list(text.encode())
    expected = expected_end(tokenizer, tokens, tuple(stop))
    said = tokens[:cut]
    found = (n for n in range(cut + 1, len(tokens) + 1) if hits_stop_string(tokenizer, tokens[cut:n], stop, said))
    first = next(found, None)
    if expected is None or expected > cut:
        assert first == expected


@pytest.mark.parametrize("exact", [False, True])
def test_a_stop_string_is_seen_across_a_cut(exact: bool) -> None:
    whole = request("a", random_ids(np.random.default_rng(3), 9), 20, temperature=0.0)
    free = run(engine(2, exact=exact), [whole])["a"].ids
    text = character_tokenizer().decode(free[5:8])
    end = next(n for n in range(1, 21) if text in character_tokenizer().decode(free[:n]))
    for cut in range(end - 3, end):
        sampling = SamplingParams(20 - cut, temperature=0.0, stop=(text,))
        rest = run(engine(2, exact=exact), [Request("a", np.concatenate([whole.ids, free[:cut]]), sampling, cut)])["a"]
        assert (rest.ids.tolist(), rest.finish) == (free[cut:end].tolist(), "stop")


@pytest.mark.parametrize("stop", [" b", "a b", "b ", " "])
@pytest.mark.parametrize("said", [["a", "▁", "b", "c"], ["a", "▁b", "▁", "c"], ["▁", "b", "▁", "b"]])
def test_a_stop_string_may_begin_with_a_space_the_tokenizer_drops(said: list[str], stop: str) -> None:
    tokenizer = space_mark_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(said)
    count = expected_end(tokenizer, tokens, (stop,))
    assert recite(tokenizer, tokens, (stop,)).ids.tolist() == tokens[:count]


# aborting


def test_abort_returns_what_a_running_request_has() -> None:
    served = engine(2)
    for name in "abc":
        served.add(request(name, [3, 4, 5], 20, seed=ord(name)))
    for _ in range(4):
        served.step()
    running, waiting = served.abort("a"), served.abort("c")
    assert running is not None
    assert waiting is not None
    assert (running.id, running.finish, len(running.ids)) == ("a", "abort", 4)
    assert (waiting.id, waiting.finish, len(waiting.ids)) == ("c", "abort", 0)
    assert len(running.logprobs) == len(running.versions) == 4
    assert served.abort("a") is None
    assert served.abort("nobody") is None
    assert set(run(served)) == {"b"}
    assert served.abort("b") is None


def test_a_sequence_that_moves_into_a_freed_slot_goes_on_undisturbed() -> None:
    prompts = [random_ids(np.random.default_rng(i), 10 + i) for i in range(4)]
    requests = [request(str(i), p, 12, temperature=0.0) for i, p in enumerate(prompts)]
    undisturbed = run(engine(4), requests)
    for victim in "012":
        served = engine(4)
        for each in requests:
            served.add(each)
        for _ in range(3):
            served.step()
        served.abort(victim)
        served.add(request("late", prompts[0][:7], 30))
        finished = run(served)
        for each in requests:
            if each.id != victim:
                assert finished[each.id].ids.tolist() == undisturbed[each.id].ids.tolist()


# versions


def test_every_token_carries_the_version_that_drew_it() -> None:
    served = engine(2, version=4)
    served.add(request("a", [1, 2, 3], 6))
    served.add(request("b", [1, 2, 3, 4], 2))
    finished = {done.id: done for _ in range(2) for done in served.step()}
    served.set_version(5)
    served.step()
    served.set_version(7)
    served.add(request("c", [9], 3))
    finished |= run(served)
    assert finished["a"].versions.tolist() == [4, 4, 5, 7, 7, 7]
    assert finished["b"].versions.tolist() == [4, 4]
    assert finished["c"].versions.tolist() == [7, 7, 7]


@pytest.mark.parametrize("exact", [False, True])
def test_prompts_computed_by_older_weights_are_not_shared(exact: bool) -> None:
    other = build(type(plain_llama()), plain_llama().config, seed=1)
    model = under_plans(plain_llama())
    prompt = random_ids(np.random.default_rng(2), 40)
    fresh = run(engine(model=under_plans(other), exact=exact), [request("b", prompt, 8, temperature=0.0)])["b"]
    served = engine(model=model, exact=exact)
    served.add(request("a", prompt, 30))
    served.step()
    model.load_state_dict(other.state_dict())
    served.set_version(1)
    served.add(request("b", prompt, 8, temperature=0.0))
    finished = {done.id: done for _ in range(9) for done in served.step()}
    assert served.stats().shared_prompt_tokens == 0
    assert finished["b"].ids.tolist() == fresh.ids.tolist()
    np.testing.assert_allclose(finished["b"].logprobs, fresh.logprobs, atol=1e-5)
    served.add(request("c", prompt, 2))  # the newer one's prompt, though, is
    served.add(request("d", prompt, 2))
    served.step()
    assert served.stats().computed_prompt_tokens == 2 * len(prompt)
    assert served.stats().shared_prompt_tokens == 2 * len(prompt)


def test_a_prompt_of_which_nothing_is_computed_yet_is_of_the_new_weights() -> None:
    other = build(type(plain_llama()), LlamaConfig(**{**SHAPE, "max_position_embeddings": 400}), seed=1)
    model = under_plans(build(type(plain_llama()), other.config))
    shared = random_ids(np.random.default_rng(2), 300)
    asked = [request(name, np.concatenate([shared, [number]]), 8, temperature=0.0) for number, name in enumerate("ab", 1)]
    fresh = run(engine(model=under_plans(other)), asked)["b"]
    served = engine(model=model)
    for each in asked:
        served.add(each)
    served.step()  # a part of the first one's prompt
    assert served.stats().running == 2
    model.load_state_dict(other.state_dict())
    served.set_version(1)
    done = {each.id: each for _ in range(20) for each in served.step()}["b"]
    assert done.ids.tolist() == fresh.ids.tolist()
    assert set(done.versions.tolist()) == {1}
    np.testing.assert_allclose(done.logprobs, fresh.logprobs, atol=1e-5)


# shared prompts


@pytest.mark.parametrize("exact", [False, True])
def test_a_groups_prompt_is_computed_once(exact: bool) -> None:
    served = engine(4, exact=exact)
    prompt = random_ids(np.random.default_rng(3), 37)
    for i in range(4):
        served.add(request(str(i), prompt, 5, seed=i))
    served.step()
    stats = served.stats()
    assert (stats.computed_prompt_tokens, stats.shared_prompt_tokens) == (37, 3 * 37)
    finished = run(served)
    assert len({tuple(done.ids.tolist()) for done in finished.values()}) > 1


def test_siblings_that_come_later_copy_the_prompt_of_a_running_one() -> None:
    served = engine(2)
    prompt = random_ids(np.random.default_rng(3), 20)
    for i, new_tokens in enumerate([2, 5, 5, 5]):
        served.add(request(str(i), prompt, new_tokens, seed=i))
    run(served)
    stats = served.stats()
    assert (stats.computed_prompt_tokens, stats.shared_prompt_tokens) == (20, 60)


@pytest.mark.parametrize(("exact", "shared"), [(False, 21), (True, 16)])
def test_a_common_beginning_is_computed_once(exact: bool, shared: int) -> None:
    rng = np.random.default_rng(4)
    start = random_ids(rng, 21)
    first, second = np.concatenate([start, ids(1, 2, 3)]), np.concatenate([start, ids(4, 5)])
    served = engine(4, exact=exact)
    served.add(request("a", first, 3))
    served.add(request("b", second, 3))
    served.step()
    stats = served.stats()
    assert stats.shared_prompt_tokens == shared
    assert stats.computed_prompt_tokens == len(first) + len(second) - shared


@pytest.mark.parametrize("exact", [False, True])
def test_a_prompt_that_is_anothers_beginning_computes_its_last_token(exact: bool) -> None:
    long = random_ids(np.random.default_rng(5), 40)
    served = engine(4, exact=exact)
    finished = run(served, [request("long", long, 6), request("short", long[:33], 6, temperature=0.0)])
    alone = run(engine(1, exact=exact), [request("short", long[:33], 6, temperature=0.0)])
    assert finished["short"].ids.tolist() == alone["short"].ids.tolist()
    assert served.stats().shared_prompt_tokens == 32


@pytest.mark.parametrize("exact", [False, True])
def test_requests_with_the_same_tokens_are_decoded_once_until_they_differ(exact: bool) -> None:
    served = engine(4, exact=exact)
    prompt = random_ids(np.random.default_rng(7), 20)
    same = {"temperature": 1.0, "seed": 1}
    requests = [
        request("short", prompt, 3, **same),
        request("long", prompt, 8, **same),
        request("cut", prompt, 8, **same),
    ]
    for each in requests:
        served.add(each)
    finished = {done.id: done for _ in range(5) for done in served.step()}
    cut = served.abort("cut")
    assert cut is not None
    finished |= run(served)
    assert served.stats().decoded_rows == 7
    assert served.stats().generated_tokens == 3 + 5 + 8
    alone = run(engine(1, exact=exact), [requests[1]])["long"]
    for done in (finished["short"], cut, finished["long"]):
        assert done.ids.tolist() == alone.ids[: len(done.ids)].tolist()
        np.testing.assert_allclose(done.logprobs, alone.logprobs[: len(done.ids)], atol=1e-5)
    assert (len(finished["short"].ids), len(cut.ids), len(finished["long"].ids)) == (3, 5, 8)


def test_requests_that_differ_only_in_temperature_have_log_probs_of_their_own() -> None:
    prompt = random_ids(np.random.default_rng(8), 12)
    requests = [request(str(t), prompt, 6, temperature=t, seed=3) for t in (0.0, 0.01, 0.3, 1.0, 1.5)]
    together = run(engine(5), requests)
    for each in requests:
        alone = run(engine(1), [each])[each.id]
        assert together[each.id].ids.tolist() == alone.ids.tolist()
        np.testing.assert_allclose(together[each.id].logprobs, alone.logprobs, atol=1e-5)


# progress, and going on from it


@given(
    news=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    twins=st.integers(1, 3),
    change=st.integers(0, 12),
    exact=st.booleans(),
)
@settings(max_examples=examples(25), derandomize=True, deadline=None)
def test_what_is_told_of_a_request_on_its_way_is_the_beginning_of_what_it_ends_with(
    news: list[int], twins: int, change: int, exact: bool
) -> None:
    """In pieces, each from where the last one ended; also of requests that are one sequence until they differ."""
    served = engine(3, exact=exact)
    prompt = random_ids(np.random.default_rng(8), 9)
    for name in range(twins):
        served.add(request(str(name), prompt, 10, seed=name // 2, temperature=1.0 + name / 4))
    heard: dict[str, list[tuple[int, float, int]]] = {str(name): [] for name in range(twins)}
    assert served.progress({}) == []
    finished: dict[str, Completion] = {}
    for steps in news:
        for _ in range(steps):
            if served.stats().steps == change:
                served.set_version(7)
            finished |= {done.id: done for done in served.step()}
        for told in served.progress({id: len(tokens) for id, tokens in heard.items()}):
            assert told.id not in finished
            assert told.start == len(heard[told.id])
            assert len(told.ids) == len(told.logprobs) == len(told.versions) > 0
            heard[told.id] += list(zip(told.ids.tolist(), told.logprobs.tolist(), told.versions.tolist(), strict=True))
        assert served.progress({id: len(tokens) for id, tokens in heard.items()}) == []
    finished |= run(served)
    for id, tokens in heard.items():
        done = finished[id]
        whole = list(zip(done.ids.tolist(), done.logprobs.tolist(), done.versions.tolist(), strict=True))
        assert tokens == whole[: len(tokens)]


def test_nothing_is_told_of_requests_that_wait_or_have_ended() -> None:
    served = engine(1)
    served.add(request("a", [5, 6], 2, temperature=0.0))
    served.add(request("b", [5, 7], 2, temperature=0.0))
    served.step()
    assert [(told.id, told.start, len(told.ids)) for told in served.progress({"stranger": 3})] == [("a", 0, 1)]
    served.step()
    assert served.progress({}) == []  # the first has ended, and the second has not begun
    served.step()
    assert [told.id for told in served.progress({})] == ["b"]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("after", [1, 5, 11])
def test_a_request_goes_on_exactly_where_another_engine_stopped(exact: bool, after: int) -> None:
    prompt = random_ids(np.random.default_rng(9), 17)
    whole = run(engine(2, exact=exact), [request("a", prompt, 12, seed=3)])["a"]
    first, second = engine(2, exact=exact), engine(2, exact=exact, version=4)
    first.add(request("a", prompt, 12, seed=3))
    for _ in range(after):
        first.step()
    (told,) = first.progress({})
    assert told.ids.tolist() == whole.ids[:after].tolist()
    going_on = Request("a", np.concatenate([prompt, told.ids]), SamplingParams(12 - after, seed=3), after)
    rest = run(second, [going_on])["a"]
    assert [*told.ids.tolist(), *rest.ids.tolist()] == whole.ids.tolist()
    np.testing.assert_allclose([*told.logprobs, *rest.logprobs], whole.logprobs, atol=0 if exact else 1e-4)
    assert (rest.finish, set(rest.versions.tolist())) == (whole.finish, {4})


# a life of many requests


def test_stats_count_what_is_there() -> None:
    served = engine(2)
    for name in "abc":
        served.add(request(name, [ord(name) - 90, 1, 2], 4))
    assert (served.stats().waiting, served.stats().running, served.stats().steps) == (3, 0, 0)
    served.step()
    served.step()
    stats = served.stats()
    assert (stats.waiting, stats.running, stats.steps) == (1, 2, 2)
    assert (stats.generated_tokens, stats.cached_tokens) == (4, 2 * 4)
    run(served)
    stats = served.stats()
    assert (stats.waiting, stats.running, stats.cached_tokens, stats.generated_tokens) == (0, 0, 0, 12)


def test_a_hundred_requests_on_four_slots_each_finish_once_and_no_slot_idles() -> None:
    rng = np.random.default_rng(6)
    limits = rng.integers(1, 9, 100)
    served = engine(4)
    for i, limit in enumerate(limits):
        served.add(request(str(i), random_ids(rng, int(rng.integers(1, 12))), int(limit), seed=i))
    finished: list[Completion] = []
    while served.has_work:
        waiting = served.stats().waiting
        finished += served.step()
        if waiting >= 4:
            assert served.stats().running + len(finished) + served.stats().waiting == 100
    assert sorted(int(done.id) for done in finished) == list(range(100))
    assert all(len(done.ids) == limits[int(done.id)] for done in finished)
    assert served.stats().steps < limits.sum() / 4 + limits.max()


def test_the_cache_is_freed_only_when_nothing_runs() -> None:
    served = engine(2)
    served.add(request("a", [1, 2, 3], 3, temperature=0.0))
    served.step()
    with pytest.raises(RunError, match="1 requests are running"):
        served.release()
    first = run(served)["a"]
    served.release()
    served.release()
    assert run(served, [request("a", [1, 2, 3], 3, temperature=0.0)])["a"].ids.tolist() == first.ids.tolist()


PROMPTS = [random_ids(np.random.default_rng(100 + i), length) for i, length in enumerate([1, 4, 15, 17, 30, 60])]
PROMPTS += [PROMPTS[4], np.concatenate([PROMPTS[5][:30], PROMPTS[0]])]


@cache
def undisturbed(prompt: int) -> list[int]:
    return run(engine(1), [request("a", PROMPTS[prompt], 12, temperature=0.0)])["a"].ids.tolist()


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 3), st.just(0)),
    st.tuples(st.sampled_from(["release", "new version"]), st.just(0), st.just(0)),
)


@given(actions=st.lists(ACTIONS, max_size=30), slots=st.integers(1, 5), exact=st.booleans())
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_whatever_happens_every_request_ends_once_with_its_own_tokens(
    actions: list[tuple[str, int, int]], slots: int, exact: bool
) -> None:
    served = engine(slots, exact=exact)
    asked: list[tuple[int, int]] = []
    ended: dict[int, Completion] = {}

    def end(done: Completion) -> None:
        assert int(done.id) not in ended
        ended[int(done.id)] = done

    for action, first, second in actions:
        if action == "add":
            served.add(request(str(len(asked)), PROMPTS[first], second, temperature=0.0))
            asked.append((first, second))
        elif action == "abort":
            done = served.abort(str(first))
            assert (done is not None) == (first < len(asked) and first not in ended)
            if done is not None:
                end(done)
        elif action == "step":
            for _ in range(first):
                for done in served.step():
                    end(done)
        elif action == "new version":
            served.set_version(served.version + 1)
        elif not served.stats().running:
            served.release()
    for done in run(served).values():
        end(done)
    assert sorted(ended) == list(range(len(asked)))
    for number, (prompt, limit) in enumerate(asked):
        done = ended[number]
        assert done.ids.tolist() == undisturbed(prompt)[: len(done.ids)]
        assert done.finish == "abort" or len(done.ids) == limit
        assert (np.diff(done.versions) >= 0).all()
    assert served.stats().generated_tokens == sum(len(done.ids) for done in ended.values())
