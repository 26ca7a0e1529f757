"""Whatever messages an environment or a task brings: they are refused in a sentence, or the log holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from jinja2 import TemplateError

from roll.data.task import Message
from roll.data.tokenlog import TokenLog
from roll.env.base import ResetResult, Step, parse_reset, parse_step
from roll.model.chat import ChatRenderer, Conversation
from roll.model.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
RENDERER = ChatRenderer(TOKENIZER, [TOKENIZER.eos_token_id])
ODD = st.sampled_from(
    ["", " ", "\x00", "\ud800", "\udfff\ud800", "{{ 7 * 7 }}", "{% for %}", "<|end|>", "<|assistant|>", "\u0301" * 50,
     "ﷺ", "\u202e", "a" * 5000, "\r\n\x85\u2028", "😀"]
)  # fmt: skip
TEXTS = ODD | st.text(max_size=20)
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "", "<|end|>", "\ud800"]) | TEXTS
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), max_size=4)
NAMES = st.sampled_from(["role", "content", "tools", "success"]) | TEXTS | st.integers()
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=4) | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tools", "success"]) | TEXTS | st.integers(), inner, max_size=4
        )
    ),
    max_leaves=8,
)
PLAIN = (str, float, int)
ANSWER = np.array([5, TOKENIZER.eos_token_id])


def messages_of(said: ResetResult | Step) -> list[Message]:
    for message in said.messages:
        assert set(message) == {"role", "content"}
        for text in (message["role"], message["content"]):
            assert type(text) is str
            text.encode()
    assert all(type(name) is str and type(value) in PLAIN for name, value in said.info.items())
    return list(said.messages)


@settings(derandomize=True, max_examples=examples(150), deadline=None)
@given(ANYTHING | MESSAGES | st.tuples(MESSAGES, ANYTHING))
def test_what_reset_returns_is_refused_or_can_be_shown(returned: Any) -> None:
    try:
        said = parse_reset(returned)
    except ValueError:
        return
    assert Conversation(RENDERER, messages_of(said), TokenLog()).messages


@settings(derandomize=True, max_examples=examples(150), deadline=None)
@given(st.tuples(TEXTS | MESSAGES | ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING) | ANYTHING)
def test_what_step_returns_is_refused_or_can_be_shown(returned: Any) -> None:
    try:
        said = parse_step(returned)
    except ValueError:
        return
    assert abs(said.reward) <= 1e6
    messages_of(said)


@settings(derandomize=True, max_examples=examples(150), deadline=None)
@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=4), MESSAGES)
def test_messages_are_refused_or_stand_in_the_log(first: list[Message], new: list[Message]) -> None:
    log = TokenLog()
    try:
        conversation = Conversation(RENDERER, first, log)
        conversation.respond(ANSWER, np.full(2, -1.0, np.float32), np.zeros(2, np.int64))
        conversation.observe([*new, Message(role="user", content="?")], 100_000)
    except (TemplateError, ValueError):
        return
    assert len(log) > 0


def test_half_a_character_is_named() -> None:
    with pytest.raises(TemplateError, match=r"half a character in it, '\\ud800'"):
        RENDERER.opening([Message(role="user", content="a\ud800b")])


def test_a_template_that_breaks_on_a_message_is_a_template_that_refuses_it() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] + messages[0]['name'] + 5 }}"
    with pytest.raises(TemplateError):
        ChatRenderer(tokenizer, [tokenizer.eos_token_id]).opening([Message(role="user", content="hi")])
