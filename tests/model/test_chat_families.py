"""The renderer against the tokenizers and chat templates of published models.

They are not part of the tree: `make chat-families` fetches them (`chat_families.txt` names them and their versions), and
what is not there is skipped. A family is a template with the tokenizer it was published with or, where the index has only
the template, with another tokenizer that is given the template's tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from fetch_chat_families import folder_of, packages
from jinja2 import TemplateError
from test_chat_rendering import CHATML
from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from roll.config.errors import UserError
from roll.config.schema import ModelConfig
from roll.data.task import Message
from roll.data.tokenlog import branches
from roll.model.chat import ChatRenderer, Conversation, NotTrainable
from roll.model.find import SMOLLM2, _smollm2_file, find_model
from roll.model.loading import load_tokenizer

ROOT = Path(os.environ.get("CHAT_FAMILIES") or Path(__file__).parents[2] / ".chat-families")
VERSIONS = {name.rpartition("/")[2]: version for _, name, version in packages()}

LLAMA2 = (
    "{% set rules = messages[0].content if messages[0].role == 'system' %}"
    "{% for m in messages[1 if rules else 0:] %}"
    "{% if m.role != loop.cycle('user', 'assistant') %}{{ raise_exception('the roles take turns') }}{% endif %}"
    "{% set content = ('<<SYS>>\\n' + rules + '\\n<</SYS>>\\n\\n' if rules and loop.first else '') + m.content.strip() %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + content + ' [/INST]' }}"
    "{% else %}{{ ' ' + content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""In the format that Llama 2's chats were published with."""
IM = ("<|im_start|>", "<|im_end|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
PHI = ("<|endoftext|>", "<|end|>", "<|assistant|>", "<|system|>", "<|user|>")
COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


@dataclass(frozen=True)
class Family:
    name: str
    tokenizer: str
    """The package it is in."""
    end: str | None
    """The token with which the template ends an answer."""
    stops: tuple[str, ...]
    """The tokens that end a response: the model's settings for generation name them."""
    template: str = ""
    """A file of the package `trl`, or a template; without one, the tokenizer's own."""
    added: tuple[str, ...] = ()
    """Tokens that the model has and the package's tokenizer does not."""
    eager: bool = False
    """Whether the added tokens take in the white space after them."""

    def __str__(self) -> str:
        return self.name


FAMILIES = [
    Family("Llama 2", "llama2", "</s>", ("</s>",), LLAMA2),
    Family("Phi-3", "llama2", "<|end|>", PHI[:3], "phi3", added=PHI, eager=True),
    Family("Phi-3.5", "llama2", "<|end|>", PHI[:3], "phi3_5", added=PHI, eager=True),
    Family("Llama 3", "llama3_2", "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>"), "llama3"),
    Family("Llama 3.1", "llama3_2", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "llama3_1"),
    Family("Llama 3.2", "llama3_2", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
    Family("gpt-oss", "llama3_2", None, ("<|return|>", "<|call|>"), "gptoss", added=HARMONY),
    Family("Qwen2.5", "qwen2_5", "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    Family("LFM2", "qwen2_5", "<|im_end|>", ("<|im_end|>",), "lfm2"),
    Family("GLM-4.5", "qwen2_5", None, ("<|endoftext|>", "<|user|>", "<|observation|>"), "glm4moe", added=GLM),
    Family("Qwen3", "qwen3", "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    Family("Qwen3-2507", "qwen3", "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), "qwen3_instruct_2507"),
    Family("Qwen3.5", "qwen3", "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), "qwen3_5_think"),
    Family("Nemotron 3 Nano", "qwen3", "<|im_end|>", ("<|im_end|>",), "nemotron_3_nano"),
    Family("Mistral Nemo", "mistral_nemo", "</s>", ("</s>",)),
    Family("Gemma 2", "gemma3", "<end_of_turn>", ("<eos>", "<end_of_turn>"), "gemma"),
    Family("Gemma 3", "gemma3", "<end_of_turn>", ("<eos>", "<end_of_turn>")),
    Family("DeepSeek-V3", "deepseek_v3", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",)),
    Family("DeepSeek-R1", "deepseek_v3", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), "deepseek_r1_distill"),
    Family("Yi", "yi", "<|im_end|>", ("<|endoftext|>", "<|im_end|>"), CHATML, added=IM),
    Family("InternLM2", "internlm2", "<|im_end|>", ("</s>", "<|im_end|>")),
    Family("Command R+", "command_r_plus", "<|END_OF_TURN_TOKEN|>", ("<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")),
    Family("Tiny Aya", "command_r_plus", "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), "cohere2", added=COHERE),
    Family("SmolLM2", SMOLLM2, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
]  # fmt: skip
NOT_IMITABLE = {"GLM-4.5", "DeepSeek-R1", "Nemotron 3 Nano"}
"""Without an end token after an answer, or with another beginning of an answer than the template asks for one with."""

SHAPES = {
    "one turn": ("user",),
    "two turns": ("user", "assistant", "user"),
    "three turns": ("user", "assistant", "user", "assistant", "user"),
    "system": ("system", "user", "assistant", "user"),
    "tool": ("user", "assistant", "tool", "assistant", "user"),
    "two messages": ("user", "assistant", "user", "user"),
}
"""Who speaks in a conversation; whoever comes after the last is the assistant. Some templates refuse some of them."""
SAID = {
    "system": ["Be brief."],
    "user": ["What is 2 + 2?", "And 3 + 3?", "Thanks."],
    "assistant": ["4.", "It is six,\nI think."],
    "tool": ['{"sum": 4}'],
}
ANSWERS = [
    "",
    " ",
    "4",
    " 4",
    "4 ",
    "\n4\n\n",
    "so: 4 , 5 !",
    "<think>\nhm\n</think>\n\n4",
    "vier, 四 🦜",
    "[/INST] </s> 4",
]


@lru_cache(maxsize=1)
def published(package: str) -> PreTrainedTokenizerBase:
    if package == SMOLLM2:
        try:
            _smollm2_file()
        except UserError as error:
            pytest.skip(str(error))
        return load_tokenizer(find_model(SMOLLM2), ModelConfig())
    folder = folder_of(ROOT, f"tokenizer-{package}", VERSIONS[f"tokenizer-{package}"])
    if not folder.is_dir():
        pytest.skip(f"{folder.name} is not in {ROOT.name}: run `make chat-families`")
    return PreTrainedTokenizerFast.from_pretrained(folder)


@lru_cache(maxsize=1)
def own_template(package: str) -> object:
    """Asked for before the families of a package put their own in its place."""
    return published(package).chat_template


@lru_cache(maxsize=1)
def renderer(family: Family) -> ChatRenderer:
    tokenizer = published(family.tokenizer)
    own_template(family.tokenizer)
    tokenizer.add_tokens([AddedToken(t, rstrip=family.eager, normalized=False, special=True) for t in family.added])
    if not family.template:
        tokenizer.chat_template = own_template(family.tokenizer)
    elif "{" in family.template:
        tokenizer.chat_template = family.template
    else:
        templates = folder_of(ROOT, "trl", VERSIONS["trl"])
        if not templates.is_dir():
            pytest.skip(f"{templates.name} is not in {ROOT.name}: run `make chat-families`")
        tokenizer.chat_template = (templates / f"{family.template}.jinja").read_text()
    stops = tokenizer.convert_tokens_to_ids(list(family.stops))
    assert tokenizer.convert_ids_to_tokens(stops) == list(family.stops)
    return ChatRenderer(tokenizer, stops)


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """All tests of a family come together, as do those of a tokenizer."""
    return request.param


def messages_of(roles: Sequence[str]) -> list[Message]:
    said = {role: iter(texts) for role, texts in SAID.items()}
    return [Message(role=role, content=next(said[role])) for role in roles]


def shown(chat: ChatRenderer, messages: Sequence[Message], generate: bool = True) -> str:
    return str(chat.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generate))


def tokens(chat: ChatRenderer, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def conversations(chat: ChatRenderer) -> Iterator[tuple[str, list[Message]]]:
    """Those that the template takes."""
    for name, roles in SHAPES.items():
        messages = messages_of(roles)
        try:
            for end in range(1, len(messages) + 1):
                if messages[end - 1]["role"] != "assistant" and messages[end - 1 : end + 1][-1]["role"] == "assistant":
                    shown(chat, messages[:end])
            shown(chat, messages)
        except TemplateError:
            continue
        yield name, messages


def place(chat: ChatRenderer, messages: Sequence[Message], answer: int) -> tuple[int, int] | None:
    """Where an answer stands in the text of a conversation; None where the template shows another one in its place."""
    before, whole = shown(chat, messages[:answer]), shown(chat, messages)
    text = messages[answer]["content"].strip()
    begin = len(before) + len(whole[len(before) :]) - len(whole[len(before) :].lstrip())
    kept = whole.startswith(before) and whole.startswith(text, begin)
    return (begin, begin + len(text)) if kept else None


def sampled(chat: ChatRenderer, messages: Sequence[Message], answer: int) -> list[int]:
    """The tokens of an answer in the place where the template shows it."""
    found = place(chat, messages, answer)
    if found is None:
        return tokens(chat, messages[answer]["content"])
    before, whole = shown(chat, messages[:answer]), shown(chat, messages)
    first, both = tokens(chat, before), tokens(chat, whole[: found[1]])
    assert both[: len(first)] == first
    return both[len(first) :]


def play(chat: ChatRenderer, messages: Sequence[Message], end: int | None) -> tuple[Conversation, list[int | None]]:
    """The conversation with its answers as sampled tokens, each ended by this token or cut off; and which token ends each
    of them in the last branch: None where it is shown there as the template writes it."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    conversation = Conversation(chat, messages[: answers[0] if answers else len(messages)])
    ends: list[int | None] = []
    for number, answer in enumerate(answers):
        following = answers[number + 1] if number + 1 < len(answers) else len(messages)
        ids = [*sampled(chat, messages[:following], answer), *([] if end is None else [end])]
        respond(conversation, ids)
        assert conversation.log.segments[-1].ids.tolist() == ids
        before = len(branches(conversation.log.turn))
        assert conversation.observe(messages[answer + 1 : following])
        forked = len(branches(conversation.log.turn)) > before
        rewritten = place(chat, messages[:following], answer) is None
        assert forked == rewritten, "a branch begins where the template rewrites an answer, and only there"
        ends = [None] * (number + 1) if forked else [*ends, end]
    return conversation, ends


def respond(conversation: Conversation, ids: Sequence[int]) -> str:
    tokens = np.array(ids, np.int32)
    return conversation.respond(tokens, -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32))


def as_written(chat: ChatRenderer, family: Family, messages: Sequence[Message], ends: Sequence[int | None]) -> list[int]:
    """The tokens of the template's text, with what it writes to end each answer replaced by the token sampled there."""
    text = shown(chat, messages)
    written = tokens(chat, text)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for answer, end in reversed(list(zip(answers, ends, strict=True))):
        found = place(chat, messages, answer)
        if end is None or found is None:
            continue
        through = tokens(chat, text[: found[1]])
        assert written[: len(through)] == through
        rest = written[len(through) :]
        if family.end is not None:
            rest = rest[rest.index(chat.tokenizer.convert_tokens_to_ids(family.end)) + 1 :]
        elif rest[0] == end:
            rest = rest[1:]
        written = [*through, end, *rest]
    return written


def test_a_conversation_has_the_tokens_that_the_template_writes(family: Family) -> None:
    """Whether its answers were cut off or ended, and with whichever of the model's stop tokens."""
    chat = renderer(family)
    held = dict(conversations(chat))
    assert {"one turn", "two turns", "three turns"} <= held.keys()
    for messages in held.values():
        for end in (None, *sorted(chat.stop_ids)):
            conversation, ends = play(chat, messages, end)
            log = conversation.log
            assert log.ids[branches(log.turn)[-1]].tolist() == as_written(chat, family, messages, ends)
            graded = [message["content"].strip() for message in conversation.messages]
            assert graded == [message["content"] for message in messages]


def test_what_follows_an_answer_does_not_depend_on_what_it_says(family: Family) -> None:
    chat = renderer(family)
    asked, following = messages_of(["user"]), Message(role="user", content="And 3 + 3?")
    noise = np.random.default_rng(3).integers(0, len(chat.tokenizer), (40, 6)).tolist()
    noise = [[token for token in ids if token not in chat.stop_ids] for ids in noise]
    for end in (None, *sorted(chat.stop_ids)):
        seen = set()
        for said in (*(tokens(chat, text) for text in ANSWERS), *noise):
            conversation = Conversation(chat, asked)
            ids = [*said, *([] if end is None else [end])]
            respond(conversation, ids)
            conversation.observe([following])
            segments = conversation.log.segments
            assert segments[1].ids.tolist() == ids
            if segments[2].kind == "observation":
                seen.add(tuple(segments[2].ids.tolist()))
        assert len(seen) <= 1


def test_no_stop_token_is_in_the_text_that_is_graded(family: Family) -> None:
    chat = renderer(family)
    spelled = [f"say {stop} now{stop}" for stop in family.stops]
    for text in (*ANSWERS, *spelled):
        ids = chat.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert chat.tokenizer.decode(ids).strip() == text.strip()
        for end in chat.stop_ids:
            assert chat.text([*ids, end]) == chat.text(ids) == chat.tokenizer.decode(ids)


def test_demonstrations_are_the_templates_text_up_to_its_end_token(family: Family) -> None:
    chat = renderer(family)
    messages = messages_of(["user", "assistant", "user", "assistant"])
    if family.name in NOT_IMITABLE:
        with pytest.raises(NotTrainable):
            chat.demonstrations(messages)
        return
    logs = chat.demonstrations(messages)
    text, ids = shown(chat, messages, generate=False), logs[-1].ids.tolist()
    written, opening = tokens(chat, text), tokens(chat, shown(chat, messages[:-1]))
    if written[: len(opening)] == opening:  # else a token would reach from the prompt into the answer
        assert written[: len(ids)] == ids
    else:
        assert text.startswith(chat.tokenizer.decode(ids))
    for log in logs:
        for segment in log.segments:
            if segment.kind == "response":
                end = chat.tokenizer.convert_tokens_to_ids(family.end or "<|return|>")
                assert segment.ids.tolist().count(end) == 1
                assert segment.ids[-1] == end
                assert not chat.stop_ids & set(segment.ids[:-1].tolist())
