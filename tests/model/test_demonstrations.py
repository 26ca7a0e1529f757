"""Chats as token logs: the loss is on what the assistant says, its end of turn included, and on nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from test_chat_rendering import CHATML, FORGETS_THOUGHTS, PLAIN, READABLE, TRIMMING, bpe_tokenizer, said
from transformers import PreTrainedTokenizerBase

from roll.data.task import Message
from roll.data.tokenlog import NO_VERSION, TokenLog
from roll.model.chat import ChatRenderer, NotTrainable
from roll.model.tiny import character_tokenizer

EMPTY_THOUGHTS = CHATML.replace(
    "m['content']", "(('<think></think>' if m['role'] == 'assistant' and loop.last else '') + m['content'])"
)


def renderer(template: str) -> ChatRenderer:
    if template == "character":
        tokenizer: PreTrainedTokenizerBase = character_tokenizer()
        return ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    tokenizer = bpe_tokenizer(template)
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))


def chat(*texts: str) -> list[Message]:
    """The user and the assistant by turns."""
    return [message for i, text in enumerate(texts) for message in said([text], ("user", "assistant")[i % 2])]


def answers(logs: Sequence[TokenLog], chat: ChatRenderer) -> list[str]:
    return [str(chat.tokenizer.decode(s.ids)) for log in logs for s in log.segments if s.kind == "response"]


messages = st.lists(
    st.builds(lambda role, text: Message(role=role, content=text), st.sampled_from(["user", "assistant"]), READABLE),
    max_size=7,
).map(lambda rest: [*said(["go"]), *rest, *said(["done"], "assistant")])


@pytest.mark.parametrize("template", ["character", CHATML, TRIMMING], ids=["character", "chatml", "trimming"])
@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=messages)
def test_the_log_is_the_templates_text_and_the_loss_is_on_the_answers(template: str, conversation: list[Message]) -> None:
    chat = renderer(template)
    (log,) = chat.demonstrations(conversation)
    shown = chat.tokenizer.apply_chat_template(conversation, tokenize=False)
    assert shown.rstrip("\n") == chat.tokenizer.decode(log.ids)
    end = "<|end|>" if template == "character" else "<|im_end|>"
    contents = [m["content"] for m in conversation if m["role"] == "assistant"]
    wanted = [(text.strip() if template is TRIMMING else text) + end for text in contents]
    assert answers([log], chat) == wanted
    assert log.loss_mask.sum() == log.response_tokens
    assert not log.behaviour.any()
    assert set(log.versions.tolist()) == {NO_VERSION}


def test_what_follows_the_last_answer_is_left_out() -> None:
    chat_renderer = renderer(CHATML)
    ends = chat_renderer.demonstrations([*chat("q", "a"), *said(["and then?"])])
    assert [log.ids.tolist() for log in ends] == [
        log.ids.tolist() for log in chat_renderer.demonstrations(chat("q", "a"))
    ]


@pytest.mark.parametrize(
    ("template", "texts", "expected"),
    [
        (FORGETS_THOUGHTS, ["q", "<think>1</think>a", "r", "<think>2</think>b"], 2),
        (FORGETS_THOUGHTS, ["q", "a", "r", "b", "s", "<think>3</think>c"], 1),
        (FORGETS_THOUGHTS, ["q", "a", "r", "<think>2</think>b", "s", "c", "t", "d"], 2),
        (EMPTY_THOUGHTS, ["q", "a", "r", "b", "s", "c"], 3),
    ],
    ids=["each", "only the last thinks", "from the second on", "empty thoughts"],
)
def test_a_template_that_rewrites_history_makes_samples_of_their_own(
    template: str, texts: list[str], expected: int
) -> None:
    chat_renderer = renderer(template)
    conversation = chat(*texts)
    logs = chat_renderer.demonstrations(conversation)
    assert len(logs) == expected
    said_by_all = answers(logs, chat_renderer)
    assert len(said_by_all) == len(texts) // 2, "every answer is trained on once"
    for text, answer in zip(texts[1::2], said_by_all, strict=True):
        assert answer.removeprefix("<think></think>") == f"{text}<|im_end|>"
    shown = chat_renderer.tokenizer.apply_chat_template(conversation, tokenize=False)
    assert chat_renderer.tokenizer.decode(logs[-1].ids) == shown.rstrip("\n"), "the last one ends as the template does"


def test_templates_that_do_not_show_how_an_answer_ends_or_begins_are_refused() -> None:
    with pytest.raises(NotTrainable, match="none of the tokens that end an answer"):
        renderer(PLAIN).demonstrations(chat("q", "a"))
    with pytest.raises(NotTrainable, match="after a different text than its generation prompt"):
        renderer(CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>model\\n'")).demonstrations(chat("q", "a"))


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(mask=st.lists(st.booleans(), max_size=12))
def test_tokens_and_a_mask_make_the_log_they_came_from(mask: list[bool]) -> None:
    mask = [False, *mask]
    log = TokenLog.from_loss_mask(list(range(len(mask))), mask)
    assert log.ids.tolist() == list(range(len(mask)))
    assert log.loss_mask.tolist() == mask
    kinds = [segment.kind for segment in log.segments]
    assert kinds[0] == "prompt"
    assert all((a == "response") != (b == "response") for a, b in itertools.pairwise(kinds))


def test_a_log_cannot_begin_with_an_answer() -> None:
    with pytest.raises(ValueError, match="begins with its prompt"):
        TokenLog.from_loss_mask([1, 2], [True, False])
