"""How responses end: whatever the template writes after an answer, the stop token that was sampled is the only one, and
no stop token is in the text that is graded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from test_chat_rendering import CHATML, branch_texts, respond, said
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from roll.data.task import Message
from roll.model.chat import ChatRenderer, Conversation, NotTrainable
from roll.model.tiny import CHARACTERS

SPECIAL = ["<s>", "</s>", "<eot>", "<eom>", "<user>", "<tool>", "<bot>"]
PLAIN = ["<stop>"]
"""Tokens of their own that the tokenizer does not count among its special ones."""


def tokenizer_of(template: str, swallows: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character and per name above; those that it `swallows` take in the white space after them."""
    tokens = [*SPECIAL, *PLAIN, "?", *CHARACTERS.replace("?", "")]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, rstrip=token in swallows, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in PLAIN])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def renderer(template: str, stops: Sequence[str], swallows: Sequence[str] = ()) -> ChatRenderer:
    tokenizer = tokenizer_of(template, swallows)
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)))


def spelled(chat: ChatRenderer, text: str) -> list[int]:
    """The characters of a text, also where it reads like a token."""
    return [chat.tokenizer.convert_tokens_to_ids(character) for character in text]


def following(chat: ChatRenderer, answer: str, end: str | None, new: Sequence[Message] | None = None) -> str:
    """What is observed after an answer that one of the tokens ended, or that was cut off."""
    conversation = Conversation(chat, said(["q"]))
    stop = [] if end is None else [chat.tokenizer.convert_tokens_to_ids(end)]
    assert respond(conversation, [*spelled(chat, answer), *stop]) == answer
    assert conversation.observe(new or said(["r"]))
    prompt, response, observation = conversation.log.segments
    assert (prompt.kind, response.kind, observation.kind) == ("prompt", "response", "observation")
    assert response.ids.tolist() == [*spelled(chat, answer), *stop]
    return str(chat.tokenizer.decode(observation.ids))


def template(assistant: str, user: str = "'<user>' + m.content", ask: str = "'<bot>'", start: str = "") -> str:
    return (
        f"{start}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{{{{ {assistant} }}}}"
        f"{{% elif m.role == 'tool' %}}{{{{ '<tool>' + m.content }}}}"
        f"{{% else %}}{{{{ {user} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {ask} }}}}{{% endif %}}"
    )


SPACED = template("' ' + m.content.strip() + ' ' + eos_token", "bos_token + '[' + m.content + ']'", "''")
CLOSED = template("'<bot>' + m.content + '<eot>'")
WITH_NEWLINE = template("'<bot>' + m.content + '<eot>\\n'")
LONG_END = template("'<bot>' + m.content + '</answer>\\n<eot>'")
OPEN = template("'<bot>' + m.content")
BEGINS_ONCE = template("'<bot>' + m.content + '<eot>'", start="{{ bos_token }}")
TWO_ENDS = WITH_NEWLINE.removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}"
USER_LAST = (
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('a user speaks last') }}{% endif %}" + WITH_NEWLINE
)
IN_TURN = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}{% endfor %}" + SPACED
)
THINKS = template("'<bot>think:' + m.content + '<eot>'", ask="'<bot>think:'")
BETWEEN = template("'<bot>' + m.content + ('' if loop.last else '<eot>\\n')", "'<user>' + m.content + '\\n'")
"""It ends an answer only where something follows."""
OWN_END = template("'<bot>' + m.content + '<stop>'")
ALIKE = template("'<bot>' + m.content + '</s>'", "'</s>' + m.content")
"""The token that ends an answer begins a message, too."""
NAMED = template("'bot: ' + m.content + '\\n'", "'user: ' + m.content + '\\n'", "'bot: '")
CASES = [
    # template, stop tokens, how the response ended, what follows it
    (SPACED, ["</s>"], None, " </s><s>[r]"),
    (SPACED, ["</s>"], "</s>", "<s>[r]"),
    (SPACED, ["</s>", "<eom>"], "<eom>", "<s>[r]"),
    (SPACED, ["</s>", "<stop>"], "<stop>", "<s>[r]"),
    (IN_TURN, ["</s>"], "</s>", "<s>[r]"),
    (IN_TURN, ["</s>", "<eom>"], "<eom>", "<s>[r]"),
    (CLOSED, ["<eot>", "<eom>", "</s>"], None, "<eot><user>r<bot>"),
    (CLOSED, ["<eot>", "<eom>", "</s>"], "<eot>", "<user>r<bot>"),
    (CLOSED, ["<eot>", "<eom>", "</s>"], "<eom>", "<user>r<bot>"),
    (CLOSED, ["<eot>", "<eom>", "</s>"], "</s>", "<user>r<bot>"),
    (CLOSED, ["</s>"], "</s>", "<eot><user>r<bot>"),  # `<eot>` ends no response of this model
    (WITH_NEWLINE, ["<eot>", "</s>"], None, "<eot>\n<user>r<bot>"),
    (WITH_NEWLINE, ["<eot>", "</s>"], "<eot>", "\n<user>r<bot>"),
    (WITH_NEWLINE, ["<eot>", "</s>"], "</s>", "\n<user>r<bot>"),
    (BEGINS_ONCE, ["<eot>", "</s>"], "<eot>", "<user>r<bot>"),
    (BEGINS_ONCE, ["<eot>", "</s>"], "</s>", "<user>r<bot>"),
    (LONG_END, ["<eot>", "<eom>"], None, "</answer>\n<eot><user>r<bot>"),
    (LONG_END, ["<eot>", "<eom>"], "<eot>", "<user>r<bot>"),
    (LONG_END, ["<eot>", "<eom>"], "<eom>", "<user>r<bot>"),
    (TWO_ENDS, ["<eot>", "</s>"], None, "<eot>\n<user>r<bot>"),
    (TWO_ENDS, ["<eot>", "</s>"], "<eot>", "\n<user>r<bot>"),
    (TWO_ENDS, ["<eot>", "</s>"], "</s>", "\n<user>r<bot>"),
    (USER_LAST, ["<eot>", "</s>"], "</s>", "\n<user>r<bot>"),
    (OPEN, ["</s>", "<user>", "<tool>"], None, "<user>r<bot>"),
    (OPEN, ["</s>", "<user>", "<tool>"], "</s>", "<user>r<bot>"),
    (OPEN, ["</s>", "<user>", "<tool>"], "<user>", "r<bot>"),  # the token that begins the next turn is there already
    (OPEN, ["</s>", "<user>", "<tool>"], "<tool>", "<user>r<bot>"),
    (CLOSED, ["<eot>", "<user>"], "<user>", "r<bot>"),
    (CLOSED, ["<eot>", "<stop>"], "<stop>", "<user>r<bot>"),
    (WITH_NEWLINE, ["<eot>", "<user>"], "<user>", "r<bot>"),
    (BETWEEN, ["<eot>", "</s>"], None, "<eot>\n<user>r\n<bot>"),
    (BETWEEN, ["<eot>", "</s>"], "<eot>", "\n<user>r\n<bot>"),
    (BETWEEN, ["<eot>", "</s>"], "</s>", "\n<user>r\n<bot>"),
    (BETWEEN, ["<eot>", "<user>"], "<user>", "r\n<bot>"),
    (OWN_END, ["<stop>", "</s>"], None, "<stop><user>r<bot>"),
    (OWN_END, ["<stop>", "</s>"], "<stop>", "<user>r<bot>"),
    (OWN_END, ["<stop>", "</s>"], "</s>", "<user>r<bot>"),
    (ALIKE, ["</s>"], None, "</s></s>r<bot>"),
    (ALIKE, ["</s>"], "</s>", "</s>r<bot>"),
    (NAMED, ["</s>", ":"], ":", "\nuser: r\nbot: "),
    (NAMED, ["</s>", "\n"], "\n", "user: r\nbot: "),
    (THINKS, ["<eot>", "</s>"], "</s>", "<user>r<bot>think:"),
]


@pytest.mark.parametrize(("shape", "stops", "end", "expected"), CASES)
@pytest.mark.parametrize("answer", ["4", "", " 4", "4 ", "4\n\n", " ", "<eot></s>", "[r]"])
def test_a_response_is_ended_once(shape: str, stops: list[str], end: str | None, expected: str, answer: str) -> None:
    chat = renderer(shape, stops)
    assert following(chat, answer, end) == expected
    assert following(chat, answer, end) == expected, "asked for again"


@pytest.mark.parametrize(
    ("shape", "end", "expected"),
    [
        (OPEN, "<tool>", "3<bot>"),
        (OPEN, "<user>", "<tool>3<bot>"),
        (OPEN, None, "<tool>3<bot>"),
        (CLOSED, "<eot>", "<tool>3<bot>"),
        (CLOSED, "</s>", "<tool>3<bot>"),
        (CLOSED, None, "<eot><tool>3<bot>"),
        (BETWEEN, None, "<eot>\n<tool>3<bot>"),
        (BETWEEN, "</s>", "\n<tool>3<bot>"),
        (BETWEEN, "<tool>", "3<bot>"),
    ],
)
def test_a_tools_result_follows_as_a_users_message_does(shape: str, end: str | None, expected: str) -> None:
    chat = renderer(shape, ["</s>", "<eot>", "<user>", "<tool>"])
    assert following(chat, "4", end, [Message(role="tool", content="3")]) == expected


@pytest.mark.parametrize("end", [None, "<eot>", "</s>"])
def test_every_turn_of_a_long_conversation_is_ended_once(end: str | None) -> None:
    for shape in (WITH_NEWLINE, LONG_END, TWO_ENDS, USER_LAST):
        chat = renderer(shape, ["<eot>", "</s>"])
        stop = [] if end is None else [chat.tokenizer.convert_tokens_to_ids(end)]
        conversation = Conversation(chat, [Message(role="system", content="s"), *said(["q"])])
        for number in range(4):
            respond(conversation, [*spelled(chat, f"a{number}"), *stop])
            conversation.observe(said([f"o{number}"]))
        (text,) = branch_texts(conversation)
        written = "</answer>\n<eot>" if shape is LONG_END else "<eot>"
        newline = "" if shape is LONG_END else "\n"
        turns = "".join(f"<bot>a{n}{written if end is None else end}{newline}<user>o{n}" for n in range(4))
        assert text == "<user>s<user>q" + turns + "<bot>"


def test_nothing_follows_twice_where_no_message_does() -> None:
    """An environment may have nothing to say."""
    for end, expected in ((None, "<eot>\n<bot>"), ("<eot>", "\n<bot>"), ("</s>", "\n<bot>")):
        chat = renderer(WITH_NEWLINE, ["<eot>", "</s>"])
        stop = [] if end is None else [chat.tokenizer.convert_tokens_to_ids(end)]
        conversation = Conversation(chat, said(["q"]))
        respond(conversation, [*spelled(chat, "4"), *stop])
        assert conversation.observe([])
        assert chat.tokenizer.decode(conversation.log.segments[-1].ids) == expected


def test_a_stop_token_that_takes_in_white_space_has_it_taken_in_behind_a_response_too() -> None:
    chat = renderer(WITH_NEWLINE, ["<eot>"], swallows=["<eot>"])
    for end in (None, "<eot>"):
        stop = [] if end is None else chat.tokenizer.convert_tokens_to_ids([end])
        conversation = Conversation(chat, said(["q"]))
        respond(conversation, [*spelled(chat, "4"), *stop])
        conversation.observe(said(["r"]))
        whole = chat.tokenizer.apply_chat_template(conversation.messages, tokenize=False, add_generation_prompt=True)
        assert conversation.log.ids.tolist() == chat.tokenizer(whole, add_special_tokens=False)["input_ids"]


def words_tokenizer(template: str, prepend: str) -> PreTrainedTokenizerFast:
    """Words with the space before them, as SentencePiece has them: the first word of all is given one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    core.decoder = decoders.Metaspace(prepend_scheme=prepend)
    lines = ["q r 4 [ ] x [q] [r] answers and questions " * 3]
    core.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=90, special_tokens=["<s>", "</s>", "<eom>"], show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<eom>"],
        chat_template=template,
    )


@pytest.mark.parametrize("prepend", ["first", "always", "never"])
@pytest.mark.parametrize("shape", [SPACED, SPACED.replace("bos_token + ", "")])
def test_what_follows_has_the_tokens_that_it_has_in_the_templates_text(shape: str, prepend: str) -> None:
    tokenizer = words_tokenizer(shape, prepend)
    chat = ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(["</s>", "<eom>"]))
    messages = [*said(["q"]), *said(["4"], "assistant"), *said(["r"])]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    written, opening, through = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole, before, before + " 4")
    )
    assert written[: len(through)] == through
    rest = written[len(through) :]
    for end in (None, "</s>", "<eom>"):
        conversation = Conversation(chat, said(["q"]))
        stop = [] if end is None else [tokenizer.convert_tokens_to_ids(end)]
        respond(conversation, [*through[len(opening) :], *stop])
        conversation.observe(said(["r"]))
        after = rest if end is None else [*stop, *rest[rest.index(tokenizer.eos_token_id) + 1 :]]
        assert conversation.log.ids.tolist() == [*through, *after]
    (log,) = chat.demonstrations(messages)
    shown = tokenizer(before + " 4 </s>", add_special_tokens=False)["input_ids"]
    assert log.ids.tolist() == shown


def test_a_template_that_thinks_for_the_model_and_forgets_it_forks() -> None:
    """Its prompt ends with the beginning of a thought, which it does not show again."""
    shape = template("'<bot>' + m.content.split('</think>')[-1] + '<eot>'", ask="'<bot><think>'")
    chat = renderer(shape, ["<eot>", "<eom>"])
    for end in (None, "<eot>", "<eom>"):
        stop = [] if end is None else chat.tokenizer.convert_tokens_to_ids([end])
        conversation = Conversation(chat, said(["q"]))
        respond(conversation, [*spelled(chat, "hm</think>4"), *stop])
        conversation.observe(said(["r"]))
        ended = "<user>q<bot><think>hm</think>4" + (end or "")
        assert branch_texts(conversation) == [ended, "<user>q<bot>4<eot><user>r<bot><think>"]


IDS = st.text(CHARACTERS, max_size=40) | st.sampled_from(["say <stop> now", "<stop>", "</s>", "4<eot>", "a , b ! n't"])


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(text=IDS, stop=st.sampled_from(["</s>", "<eot>", "<stop>", "#"]))
def test_the_text_is_what_was_said_without_the_token_that_ended_it(text: str, stop: str) -> None:
    """Special or not, or an ordinary character: what only reads like it stays."""
    chat = renderer(CLOSED, ["</s>", "<eot>", "<stop>", "#"])
    ids = [token for token in spelled(chat, text) if token not in chat.stop_ids]
    text = "".join(character for character in text if character != "#")
    assert chat.text(ids) == text
    assert chat.text([*ids, chat.tokenizer.convert_tokens_to_ids(stop)]) == text
    conversation = Conversation(chat, said(["q"]))
    assert respond(conversation, [*ids, chat.tokenizer.convert_tokens_to_ids(stop)]) == text
    assert conversation.messages[-1] == Message(role="assistant", content=text)


def test_spaces_before_punctuation_are_not_tidied_away() -> None:
    chat = renderer(CLOSED, ["<eot>"])
    chat.tokenizer.clean_up_tokenization_spaces = True
    assert chat.text(spelled(chat, "f ( x ) = 4 . 5 , it 's")) == "f ( x ) = 4 . 5 , it 's"


def test_a_stop_token_that_the_tokenizer_has_no_text_for_ends_nothing_in_the_template() -> None:
    chat = ChatRenderer(tokenizer_of(CLOSED), [2, 100_000])
    assert following(chat, "4", "<eot>") == "<user>r<bot>"
    (log,) = chat.demonstrations([*said(["q"]), *said(["4"], "assistant")])
    assert chat.tokenizer.decode(log.ids) == "<user>q<bot>4<eot>"


@pytest.mark.parametrize(
    ("shape", "stops", "expected"),
    [
        (WITH_NEWLINE, ["<eot>", "</s>"], "4<eot>"),
        (TWO_ENDS, ["<eot>", "</s>"], "4<eot>"),  # not `4<eot>\n</s>`: nobody samples more after `<eot>`
        (TWO_ENDS, ["</s>"], "4<eot>\n</s>"),
        (LONG_END, ["<eot>"], "4</answer>\n<eot>"),
        (SPACED, ["</s>"], " 4 </s>"),
    ],
)
def test_an_answer_to_imitate_ends_with_the_first_stop_token(shape: str, stops: list[str], expected: str) -> None:
    chat = renderer(shape, stops)
    for _ in range(2):
        (log,) = chat.demonstrations([*said(["q"]), *said(["4"], "assistant")])
        assert chat.tokenizer.decode(log.segments[-1].ids) == expected


def test_an_answer_to_imitate_may_read_like_a_stop_token() -> None:
    chat = renderer(WITH_NEWLINE, ["<eot>", "</s>"])
    (log,) = chat.demonstrations([*said(["q"]), *said(["write </s> or <eot>"], "assistant")])
    assert chat.tokenizer.decode(log.segments[-1].ids) == "write </s> or <eot><eot>"
    with pytest.raises(NotTrainable, match="none of the tokens that end an answer"):
        renderer(OPEN, ["<eot>"]).demonstrations([*said(["q"]), *said(["write <eot>"], "assistant")])


def test_chatml_with_either_stop_token() -> None:
    """The template ends a turn with one of the two; the model may end it with the other one."""
    shape = CHATML.replace("<|im_start|>", "<user>").replace("<|im_end|>", "<eot>")
    for end in ("<eot>", "</s>"):
        assert following(renderer(shape, ["<eot>", "</s>"]), "4", end) == "\n<user>user\nr<eot>\n<user>assistant\n"
