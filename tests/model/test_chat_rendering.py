"""Conversations as token logs: sampled tokens stay as they were, and the log reads as the template's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from roll.data.task import Message
from roll.data.tokenlog import branches
from roll.model.chat import ChatRenderer, Conversation, TemplateRewritesHistory
from roll.model.tiny import CHARACTERS, character_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "(m['content'] | trim)")
TRIMMING_PLAIN = PLAIN.replace("m['content'] + '\\n'", "(m['content'] | trim) + '\\n\\n'")
FORGETS_THOUGHTS = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])")
ANNOTATES_THE_PAST = CHATML.replace(
    "m['content']", "(('<extra>' if m['role'] == 'assistant' and not loop.last else '') + m['content'])"
)
CORPUS = [
    "user: what is 12 + 30?\n\n42\n\nassistant\nuser\nsystem\n  indented\n\n\n",
    "<think>\nlet me see\n</think>\n\nthe answer is 42.\n\n",
    "x\n x\n. \n! \nassistant: assistant: user: user: ...\n\n",
]


@cache
def bpe_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges of newlines, roles and punctuation, trained on a few lines."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([line[i:] for line in CORPUS for i in range(len(line))], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@cache
def renderer(kind: str) -> ChatRenderer:
    if kind == "character":
        tokenizer = character_tokenizer()
        return ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    tokenizer = bpe_tokenizer({"chatml": CHATML, "plain": PLAIN}[kind])
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))


KINDS = ["character", "chatml", "plain"]
TEXTS = st.text(max_size=12) | st.sampled_from(
    [" ", "\n", "\n\n", " x", "x\n", "ü\u2028\n", "assistant\n", "{{ m }}", "🦜"]
)
READABLE = st.text(CHARACTERS, max_size=12) | st.sampled_from([" leading", "trailing \n", "\n\n", "x"])


@dataclass(frozen=True)
class Turn:
    """A response, as token ids or as text, whether a stop token ends it, and the messages after it."""

    response: list[int] | str
    stopped: bool
    new: list[str]


@st.composite
def conversations(draw: st.DrawFn, texts: st.SearchStrategy[str], responses: st.SearchStrategy[list[int] | str]):
    opening = draw(st.lists(texts, min_size=1, max_size=2))
    turn = st.builds(Turn, responses, st.booleans(), st.lists(texts, min_size=1, max_size=2))
    return opening, draw(st.lists(turn, max_size=4))


def said(texts: Sequence[str], role: str = "user") -> list[Message]:
    return [Message(role=role, content=text) for text in texts]


def respond(conversation: Conversation, ids: Sequence[int], version: int = 0) -> str:
    tokens = np.array(ids, np.int32)
    return conversation.respond(tokens, -np.ones(len(ids), np.float32), np.full(len(ids), version, np.int32))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=conversations(TEXTS, st.lists(st.integers(0, 10**6), max_size=8)), stop=st.integers(0, 1))
def test_sampled_tokens_stay_and_the_log_only_grows(kind: str, case: tuple[list[str], list[Turn]], stop: int) -> None:
    chat = renderer(kind)
    vocabulary, stops = len(chat.tokenizer), sorted(chat.stop_ids)
    opening, turns = case
    conversation = Conversation(chat, said(opening))
    sampled: list[list[int]] = []
    kinds, earlier = ["prompt"], conversation.log.ids.tolist()
    assert earlier == chat.opening(said(opening)).tokens
    for number, turn in enumerate(turns):
        ids = [i % vocabulary for i in turn.response] + [stops[stop % len(stops)]] * turn.stopped
        sampled.append(ids)
        text = respond(conversation, ids, number)
        assert conversation.messages[-1] == Message(role="assistant", content=text)
        assert conversation.log.ids.tolist() == earlier + ids
        conversation.observe(said(turn.new))
        kinds += ["response", "observation"]
        grown = conversation.log.ids.tolist()
        assert grown[: len(earlier) + len(ids)] == earlier + ids
        assert len(grown) > len(earlier) + len(ids)
        earlier = grown
    segments = conversation.log.segments
    assert [segment.kind for segment in segments] == kinds
    assert [segment.ids.tolist() for segment in segments if segment.kind == "response"] == sampled
    mask = [segment.kind == "response" for segment in segments for _ in segment.ids]
    assert conversation.log.loss_mask.tolist() == mask
    assert conversation.log.versions[mask].tolist() == [i for i, ids in enumerate(sampled) for _ in ids]
    assert len(conversation.messages) == len(opening) + sum(1 + len(turn.new) for turn in turns)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=conversations(READABLE, READABLE), system=st.none() | READABLE)
def test_the_log_reads_as_the_template_writes(kind: str, case: tuple[list[str], list[Turn]], system: str | None) -> None:
    chat = renderer(kind)
    tokenizer = chat.tokenizer
    # The token with which the template itself ends a turn, if it has one.
    end = {"character": tokenizer.eos_token_id, "chatml": tokenizer.convert_tokens_to_ids("<|im_end|>"), "plain": None}[
        kind
    ]
    opening, turns = case
    messages = [*([] if system is None else said([system], "system")), *said(opening)]
    conversation = Conversation(chat, messages)
    for turn in turns:
        assert isinstance(turn.response, str)
        ids = tokenizer(turn.response, add_special_tokens=False)["input_ids"]
        assert respond(conversation, ids + [end] * (turn.stopped and end is not None)) == turn.response
        conversation.observe(said(turn.new))
        messages += [*said([turn.response], "assistant"), *said(turn.new)]
        assert conversation.messages == messages
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(conversation.log.ids) == expected


def test_the_example_of_the_docstring() -> None:
    chat = renderer("character")
    tokenizer = chat.tokenizer
    for sampled, follow_up in (
        ("4<|end|>", "<|user|>3+3?<|end|><|assistant|>"),
        ("4", "<|end|><|user|>3+3?<|end|><|assistant|>"),
    ):
        conversation = Conversation(chat, said(["2+2?"]))
        assert tokenizer.decode(conversation.log.ids) == "<|user|>2+2?<|end|><|assistant|>"
        assert respond(conversation, tokenizer(sampled)["input_ids"]) == "4"
        conversation.observe(said(["3+3?"]))
        assert tokenizer.decode(conversation.log.segments[-1].ids) == follow_up


def test_no_merge_reaches_across_a_response() -> None:
    """Tokenised as a whole, the end of the response and the template's text after it would be one token."""
    chat = renderer("plain")
    tokenizer = chat.tokenizer
    newline, double = tokenizer("\n")["input_ids"], tokenizer("\n\n")["input_ids"]
    assert len(newline) == len(double) == 1
    conversation = Conversation(chat, said(["hi"]))
    respond(conversation, tokenizer("42\n")["input_ids"])
    conversation.observe(said(["ok"]))
    whole = tokenizer(tokenizer.decode(conversation.log.ids))["input_ids"]
    assert double[0] in whole
    assert double[0] not in conversation.log.ids
    assert conversation.log.segments[-1].ids[0] != double[0]


def test_a_follow_up_does_not_depend_on_what_was_said() -> None:
    chat = renderer("chatml")
    tails = {
        tuple(chat.follow_up([*said(["q"]), *said([text], "assistant")], None, said(["next"])).tokens)
        for text in ("", "x", "\n", " answer x ", "<think>x</think>", "assistant")
    }
    assert len(tails) == 1


TEMPLATES = [CHATML, PLAIN, TRIMMING, TRIMMING_PLAIN, FORGETS_THOUGHTS, ANNOTATES_THE_PAST]
ANSWERS = st.text(max_size=8) | st.sampled_from(
    ["x", " x", "x ", "x\n", "x\n\n", "x\n\n\n", "<think>x</think>y", "<extra>", "assistant", "x: x\n"]
)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(st.lists(ANSWERS, min_size=1, max_size=3))
def test_what_follows_is_found_at_a_glance_as_by_marking_the_response(template: str, answers: list[str]) -> None:
    tokenizer = bpe_tokenizer(template)
    chat = ChatRenderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    history, before = said(["q"]), None
    for answer in answers:
        history += said([answer], "assistant")
        try:
            expected = chat._tokens(chat._after_marked(history, said(["next"]), ()))
        except TemplateRewritesHistory:
            with pytest.raises(TemplateRewritesHistory):
                chat.follow_up(history, None, said(["next"]), (), before)
            return
        found = chat.follow_up(history, None, said(["next"]), (), before)
        assert found.tokens == expected
        history, before = history + said(["next"]), found.text


def test_a_stop_token_the_template_does_not_write_stays_and_is_the_end_of_the_turn() -> None:
    chat = renderer("chatml")
    tokenizer = chat.tokenizer
    conversation = Conversation(chat, said(["q"]))
    respond(conversation, [*tokenizer("a")["input_ids"], tokenizer.eos_token_id])
    conversation.observe(said(["next"]))
    expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|endoftext|>"
    expected += "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(conversation.log.ids) == expected


def converse(template: str, responses: Sequence[str]) -> Conversation:
    tokenizer = bpe_tokenizer(template)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    conversation = Conversation(ChatRenderer(tokenizer, [stop]), said(["question"]))
    for text in responses:
        respond(conversation, [*tokenizer(text)["input_ids"], stop])
        conversation.observe(said(["go on"]))
    return conversation


def branch_texts(conversation: Conversation) -> list[str]:
    """The text of each branch, special tokens and all."""
    ids, turn = conversation.log.ids, conversation.log.turn
    return [conversation._renderer.tokenizer.decode(ids[span]) for span in branches(turn)]


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def test_a_template_that_forgets_thoughts_forks_the_log() -> None:
    conversation = converse(FORGETS_THOUGHTS, ["<think>hm</think>42", "plain", "<think>oh</think>43"])
    asked, again = ("user", "question"), ("user", "go on")
    assert branch_texts(conversation) == [
        chatml(asked) + "<think>hm</think>42<|im_end|>",
        # a plain answer is kept as it is, so the next turn follows it; the one after it does not
        chatml(asked, ("assistant", "42"), again, ("assistant", "plain"), again) + "<think>oh</think>43<|im_end|>",
        chatml(asked, ("assistant", "42"), again, ("assistant", "plain"), again, ("assistant", "43"), again),
    ]
    log = conversation.log
    assert list(log.turn[log.loss_mask]) == sorted(log.turn[log.loss_mask]), "turns are counted through branches"
    assert conversation._renderer.tokenizer.decode(log.context) == branch_texts(conversation)[-1]
    responses = [conversation._renderer.tokenizer.decode(s.ids) for s in log.segments if s.kind == "response"]
    assert responses == ["<think>hm</think>42<|im_end|>", "plain<|im_end|>", "<think>oh</think>43<|im_end|>"]


@pytest.mark.parametrize("response", ["42", "", " "])
def test_a_template_that_adds_to_the_past_forks_the_log(response: str) -> None:
    conversation = converse(ANNOTATES_THE_PAST, [response, "next"])
    assert len(branch_texts(conversation)) == 3
    assert branch_texts(conversation)[-1].count("<extra>") == 2
    tokenizer = conversation._renderer.tokenizer
    with pytest.raises(TemplateRewritesHistory, match="rewrites earlier turns when a new message follows"):
        ChatRenderer(tokenizer, [0]).follow_up([*said(["q"]), *said([response], "assistant")], None, said(["next"]))


def test_a_window_shows_the_opening_and_the_last_turns_in_branches_of_their_own() -> None:
    tokenizer = bpe_tokenizer(CHATML)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    conversation = Conversation(ChatRenderer(tokenizer, [stop]), said(["question"]), window=1)
    for number in range(4):
        respond(conversation, [*tokenizer(f"a{number}")["input_ids"], stop])
        conversation.observe(said([f"o{number}"]))
    asked = ("user", "question")
    shown = [chatml(asked, ("assistant", f"a{i}"), ("user", f"o{i}")) for i in range(4)]
    assert branch_texts(conversation) == [
        shown[0] + "a1<|im_end|>",  # nothing was left out yet
        shown[1] + "a2<|im_end|>",
        shown[2] + "a3<|im_end|>",
        shown[3],
    ]


@pytest.mark.parametrize("window", [0, 1])
def test_an_observation_without_room_for_an_answer_changes_nothing(window: int) -> None:
    tokenizer = bpe_tokenizer(CHATML)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    conversation = Conversation(ChatRenderer(tokenizer, [stop]), said(["question"]), window=window)
    for number in range(3):
        respond(conversation, [*tokenizer(f"a{number}")["input_ids"], stop])
        ids, messages = conversation.log.ids.tolist(), list(conversation.messages)
        assert not conversation.observe(said([f"o{number}"]), 10)
        assert (conversation.log.ids.tolist(), conversation.messages) == (ids, messages)
        assert conversation.observe(said([f"o{number}"]), 1000)
        tokens = conversation.log.context_tokens
        assert tokens == len(conversation.log.context)
        again = Conversation(ChatRenderer(tokenizer, [stop]), said(["question"]), window=window)
        for earlier in range(number):
            respond(again, [*tokenizer(f"a{earlier}")["input_ids"], stop])
            again.observe(said([f"o{earlier}"]))
        respond(again, [*tokenizer(f"a{number}")["input_ids"], stop])
        assert not again.observe(said([f"o{number}"]), tokens), "the limit is a token more than what may be seen"
        assert again.observe(said([f"o{number}"]), tokens + 1)


def test_tools_are_shown_where_the_template_knows_of_them() -> None:
    template = "{% for t in tools or [] %}<tool>{{ t['name'] }}</tool>{% endfor %}" + CHATML
    tokenizer = bpe_tokenizer(template)
    chat = ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    conversation = Conversation(chat, said(["question"]), tools=[{"name": "add"}])
    respond(conversation, [*tokenizer("call")["input_ids"], *chat.stop_ids])
    conversation.observe([Message(role="tool", content="3")])
    expected = "<tool>add</tool>" + chatml(("user", "question"), ("assistant", "call"), ("tool", "3"))
    assert branch_texts(conversation) == [expected]
    assert chat.opening(said(["question"])) != chat.opening(said(["question"]), [{"name": "add"}])


def test_a_template_that_trims_is_not_refused() -> None:
    tokenizer = bpe_tokenizer(TRIMMING)
    conversation = converse(TRIMMING, ["  42 \n", "", " \n", "x "])
    texts = [tokenizer.decode(s.ids) for s in conversation.log.segments if s.kind == "response"]
    assert texts == ["  42 \n<|im_end|>", "<|im_end|>", " \n<|im_end|>", "x <|im_end|>"]
    follow_up = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert {tokenizer.decode(s.ids) for s in conversation.log.segments if s.kind == "observation"} == {follow_up}


def test_a_follow_up_comes_after_a_response() -> None:
    for history in ([], said(["q"])):
        with pytest.raises(ValueError, match="comes after an assistant's message"):
            renderer("character").follow_up(history, None, said(["next"]))
