"""Which chat templates write every message by itself, and that a conversation's text then is the sum of its parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from test_chat_rendering import (
    ANNOTATES_THE_PAST,
    CHATML,
    FORGETS_THOUGHTS,
    PLAIN,
    TRIMMING,
    TRIMMING_PLAIN,
    bpe_tokenizer,
)

from roll.data.task import Message
from roll.model.chat import ChatRenderer, RenderedTurn, TemplateRewritesHistory, Tools
from roll.model.template import renders_messages_independently

ASKS = "{% if add_generation_prompt %}A:{% endif %}"
DEFAULT_SYSTEM = """
{%- for m in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}S:be kind {% endif %}
{{- m['role'] + ':' + m['content'] }}|
{%- endfor %}"""
DEFAULT_SYSTEM += ASKS
SHOWS_TOOLS = """
{%- set who = 'you' %}
{%- for t in tools or [] %}{{ who }} {{ loop.index }}/{{ loop.length }} {{ t['name'] }};{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- set text = m.content | trim %}U:{{ text }}|
  {%- elif m.role == 'tool' %}T:{{ m.content }}|
  {%- else %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}
    {{- m.role[0] | upper }}:
    {%- for part in m.content.split(' ') %}{{ part }}{% if not loop.last %} {% endif %}{% endfor %}|
  {%- endif %}
{%- endfor %}"""
SHOWS_TOOLS += ASKS
REPEATS_THE_FIRST = PLAIN.replace("m['content'] + ", "m['content'] + messages[0]['content'] + ")
ALONE = [CHATML, PLAIN, TRIMMING, TRIMMING_PLAIN, DEFAULT_SYSTEM, SHOWS_TOOLS, REPEATS_THE_FIRST]
LOOP = "{% for m in messages %}{{ m.content }}%s{% endfor %}" + ASKS
TOGETHER = [
    FORGETS_THOUGHTS,
    ANNOTATES_THE_PAST,
    LOOP.replace("%s", "{{ loop.index }}"),
    LOOP.replace("%s", "{{ loop['last'] }}"),
    LOOP.replace("%s", "{{ messages | length }}"),
    LOOP.replace("%s", "{{ messages[-1].content }}"),
    LOOP.replace("%s", "{{ messages[loop.index0 + 1].content }}"),
    LOOP.replace("%s", "{% if add_generation_prompt %}x{% endif %}"),
    LOOP.replace("%s", "{% for n in messages %}{{ n.role }}{% endfor %}"),
    LOOP.replace("%s", "{% for n in [1] if loop.index %}x{% endfor %}"),
    LOOP.replace("%s", "{% if m.content == 'x' %}{% break %}{% endif %}"),
    LOOP.replace("%s", "{{ strftime_now('%H:%M:%S') }}"),
    LOOP.replace("%s", "{{ ['a', 'b'] | random }}"),
    LOOP.replace("%s", "{% set loop = 1 %}"),
    LOOP.replace("%s", "") + "{{ messages | length }}",
    LOOP.replace("%s", "") + "tail",
    LOOP.replace("%s", "") + LOOP.replace("%s", ""),
    LOOP.replace("%s", "").replace("{% endif %}", "{% else %}.{% endif %}"),
    LOOP.replace("%s", "").replace("{% for m in messages %}", "{% for m in messages if m.content %}"),
    LOOP.replace("%s", "").replace("messages", "messages[1:]"),
    LOOP.replace("%s", "").replace("messages", "messages | reverse"),
    LOOP.replace("%s", "").replace("add_generation_prompt", "messages[-1].role == 'user'"),
    "{% set messages = messages[1:] %}" + LOOP.replace("%s", ""),
    "{% set ns = namespace(n=0) %}" + LOOP.replace("%s", "{% set ns.n = ns.n + 1 %}{{ ns.n }}"),
    "{% macro show(m) %}{{ messages | length }}{% endmacro %}" + LOOP.replace("%s", "{{ show(m) }}"),
    "{% generation %}{% endgeneration %}" + LOOP.replace("%s", ""),
    "{% for m in messages %}",
]


@pytest.mark.parametrize("template", ALONE)
def test_templates_that_write_each_message_alone(template: str) -> None:
    assert renders_messages_independently(template)


@pytest.mark.parametrize("template", TOGETHER)
def test_templates_of_which_that_cannot_be_said(template: str) -> None:
    assert not renders_messages_independently(template)


TEXTS = st.text(max_size=8) | st.sampled_from(["A:", " x ", "assistant", "<|im_end|>\n", "a b  c", "<think>x</think>y"])
SAID = st.lists(st.tuples(st.sampled_from(["user", "tool"]), TEXTS), min_size=1, max_size=2)
TURNS = st.lists(st.tuples(TEXTS, SAID), min_size=1, max_size=4)


@pytest.mark.parametrize("template", [*ALONE, FORGETS_THOUGHTS, ANNOTATES_THE_PAST])
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(opening=st.sampled_from([["user"], ["system", "user"], ["system"]]), text=TEXTS, turns=TURNS, tools=st.booleans())
def test_a_conversation_reads_as_if_it_were_rendered_from_its_beginning(
    template: str, opening: list[str], text: str, turns: list[tuple[str, list[tuple[str, str]]]], tools: bool
) -> None:
    tokenizer = bpe_tokenizer(template)
    chat, plain, shown = ChatRenderer(tokenizer, [2]), ChatRenderer(tokenizer, [2]), [{"name": "look"}] if tools else []
    plain._renders_independently = False
    for first in (text, text + "!", text):  # what siblings have said before is known
        history = [Message(role=role, content=first) for role in opening]
        before = chat._text(history, generate=True, tools=shown)
        for answer, said in turns:
            history.append(Message(role="assistant", content=answer))
            new = [Message(role=role, content=content) for role, content in said]
            for ended in (None, 2):
                expected = _following(plain, history, ended, new, shown, before)
                assert _following(chat, history, ended, new, shown, before) == expected
            if expected is None:
                break
            assert expected.text == chat._text([*history, *new], generate=True, tools=shown)
            history, before = [*history, *new], expected.text


def _following(
    chat: ChatRenderer, history: list[Message], ended: int | None, new: list[Message], tools: Tools, before: str
) -> RenderedTurn | None:
    """None where no tokens can follow."""
    try:
        return chat.follow_up(history, ended, new, tools, before)
    except TemplateRewritesHistory:
        return None
