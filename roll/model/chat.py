"""Conversations as token logs: a chat template rendered turn by turn.

Invariant: a turn's tokens are appended once and never re-rendered. The opening is the template's own text. After a
response, only the text that the template puts after it is appended (the end of the turn, the new messages, the start of
the next answer), with the tokens it has in that position. If a template would rewrite an earlier turn, or the
conversation is shortened, that is impossible: the log forks, and the next answer follows the conversation as the template
now shows it.

A response that ended with a stop token has ended its turn itself, with whichever stop token the model sampled. The log
keeps that token and leaves out the template's text up to and including its own end token. A response that was cut off (by
its length, by a stop string) is followed by everything the template writes.

Example: after the prompt `<user>2+2?<end><assistant>` and the sampled tokens `4 <end>`, the message `3+3?` appends
`<user>3+3?<end><assistant>`, and the same after `4 <stop>`; had the response been cut off after `4`, it would append
`<end><user>3+3?<end><assistant>`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.data.routes import Routes
from roll.data.task import Message
from roll.data.tokenlog import FloatArray, IntArray, TokenLog
from roll.model.template import renders_messages_independently

V = TypeVar("V")

_SENTINEL, _OTHER = "x", "y"
"""Two dummy answers: the position where their rendered texts differ is the position of an answer."""
_CACHE_SIZE = 4096
"""Size of each cache: of texts, answers and turns."""
_SHORT = 32
"""Answers of up to this many tokens are likely to repeat, and are cached."""
_CONTEXT = 64
"""Characters before a piece of text that may change how its start is tokenised."""

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Functions that the model may call, as JSON schemas. Templates with tool support show them."""


class TemplateRewritesHistory(Exception):
    """The chat template changes earlier turns when a new one follows, so that new tokens cannot be appended to the old
    ones."""


class NotTrainable(Exception):
    """The chat template does not show an answer as the model would generate it."""


@dataclass(frozen=True)
class RenderedTurn:
    """Text of a conversation, and the tokens of it or of its end."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class _Turn:
    """What an answer and the messages after it add to a conversation."""

    prompt: str
    """The generation prompt that the text before ends with."""
    text: str
    """The text that follows, starting with that prompt."""
    tokens: list[int]
    """The tokens since the end of the answer."""


@dataclass(frozen=True)
class _Separator:
    """The text that a template writes between any response and the content of the next message."""

    text: str
    closing: int
    """Length of the part that ends the response: up to and including the template's end token; 0 without one."""
    header: int
    """Length of the part before the next message's content."""

    def after_stop(self, stop: str) -> int:
        """Length of the text to leave out after a response with this stop token: the part that would end the response. If
        the stop token is the one that starts the next message (GLM's models stop at `<|user|>`), it is left out too."""
        if not stop or self.text[: self.closing].endswith(stop):
            return self.closing
        begin = self.text[self.closing : self.header].lstrip()
        return self.header - len(begin) + len(stop) if begin.startswith(stop) else self.closing


class _LRUCache(Generic[V]):
    """An LRU cache: samples of a group in the same environment often produce and observe the same."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], V]) -> V:
        values = self._values
        if key in values:
            values.move_to_end(key)
            return values[key]
        value = values[key] = make()
        if len(self._values) > _CACHE_SIZE:
            self._values.popitem(last=False)
        return value


class ChatRenderer:
    """Text and tokens of messages under one tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        spelled = {stop: self._decoded([stop], skip_special=False) for stop in sorted(self.stop_ids)}
        self._stops = {stop: text for stop, text in spelled.items() if text}
        template = tokenizer.chat_template
        self._renders_independently = isinstance(template, str) and renders_messages_independently(template)
        self._separators: dict[str, _Separator] = {}
        self._ending = ""
        """What the template wrote after the last answer without a following message."""
        self._token_cache: _LRUCache[list[int]] = _LRUCache()
        self._beginning_cache: _LRUCache[tuple[str, str]] = _LRUCache()
        self._turn_cache: _LRUCache[_Turn | None] = _LRUCache()
        self._answer_cache: _LRUCache[str] = _LRUCache()
        self._last_opening: tuple[object, RenderedTurn] = (None, RenderedTurn("", []))

    def opening(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedTurn:
        """The start of a conversation, up to where the model's next answer starts."""
        requested = (list(messages), list(tools))
        if requested != self._last_opening[0]:  # the samples of a group request the same one in turn
            text = self._text(messages, generate=True, tools=tools)
            self._last_opening = (requested, RenderedTurn(text, self._tokens(text)))
        return self._last_opening[1]

    def follow_up(
        self,
        history: Sequence[Message],
        ended: int | None,
        new: Sequence[Message],
        tools: Tools = (),
        before: str | None = None,
    ) -> RenderedTurn:
        """The text up to where the next response starts, and its tokens since the end of the last response.

        `history` ends with that response; `ended` is the stop token it was sampled with, None if it was cut off; `before`
        is the text up to where it started, if known. Raises `TemplateRewritesHistory` if no tokens can follow it.
        """
        if not history or history[-1]["role"] != "assistant":
            raise ValueError("a follow-up comes after an assistant's message")
        if before is None:
            before = self._text(history[:-1], generate=True, tools=tools)
        if self._renders_independently and len(history) > 2:
            turn = self._turn(history[0], history[-1], ended, new, tools)
            if turn is not None and before.endswith(turn.prompt):
                return RenderedTurn(before.removesuffix(turn.prompt) + turn.text, turn.tokens)
        whole = self._text([*history, *new], generate=True, tools=tools)
        return RenderedTurn(whole, self._new_tokens(before, whole, history, ended, new, tools))

    def _turn(
        self, first: Message, answer: Message, ended: int | None, new: Sequence[Message], tools: Tools
    ) -> _Turn | None:
        """What a turn adds if the template writes every message independently. It is rendered after the first message
        alone; otherwise the cost of a turn would grow with the conversation. None if the template does not behave so
        after all."""
        known = (_key_of(first), repr(tools) if tools else "")

        def make() -> _Turn | None:
            opening, prompt = self._beginning_cache.of(known, lambda: self._beginning(first, tools))
            added = self._text([first, answer, *new], generate=True, tools=tools)
            if not added.startswith(opening):
                return None
            tokens = self._new_tokens(opening + prompt, added, [first, answer], ended, new, tools)
            return _Turn(prompt, added.removeprefix(opening), tokens)

        return self._turn_cache.of((*known, _key_of(answer), ended, *map(_key_of, new)), make)

    def _beginning(self, first: Message, tools: Tools) -> tuple[str, str]:
        """The text of a conversation's first message alone, and the generation prompt after it."""
        opening, requested = (self._text([first], generate=generate, tools=tools) for generate in (False, True))
        return opening, requested.removeprefix(opening)

    def _new_tokens(
        self,
        before: str,
        whole: str,
        history: Sequence[Message],
        ended: int | None,
        new: Sequence[Message],
        tools: Tools,
    ) -> list[int]:
        """The tokens since the end of the answer, which started after `before`."""
        after = _after(before, whole, history[-1]["content"])
        role = new[0]["role"] if new else ""
        separator = self._separators.get(role) or self._find_separator(history, role, tools)
        if after is None or not separator.text or not after.startswith(separator.text):
            after = self._after_marked(history, new, tools)
            if not after.startswith(separator.text):  # in this conversation the template writes something else there
                separator = self._find_separator(history, role, tools)
        if ended is None:
            return self._tokens_after(_SENTINEL, after)
        stop = self._stops.get(ended, "")
        return self._tokens_after(stop, after[separator.after_stop(stop) :])

    def _find_separator(self, history: Sequence[Message], role: str, tools: Tools) -> _Separator:
        """The seam after the answer that `history` ends with; without a role, that before the next answer."""
        messages_after = [[Message(role=role, content=text)] if role else [] for text in (_SENTINEL, _OTHER)]
        one, other = (self._after_marked(history, new, tools) for new in messages_after)
        text = _common(one, other)
        ending = self._find_ending(history[:-1], tools)
        closing = self._first_stop(text if ending is None else _common(text, ending))
        if not closing:  # some templates end an answer only if something follows it
            closing = self._first_stop(_common(text, self._before_header(history, tools)))
        self._separators[role] = _Separator(text, closing, len(text) if one != other else closing)
        return self._separators[role]

    def _find_ending(self, before: Sequence[Message], tools: Tools) -> str | None:
        """What the template writes after an answer without a following message: the end of the answer, and nothing of a
        next message. None if the template refuses to end with an answer."""
        try:
            one, other = (
                self._text([*before, Message(role="assistant", content=text)], generate=False, tools=tools)
                for text in (_SENTINEL, _OTHER)
            )
        except (TemplateError, TypeError, ValueError):
            return None
        return one[len(_common(one, other)) + len(_SENTINEL) :]

    def _before_header(self, history: Sequence[Message], tools: Tools) -> str:
        """What the template writes between an answer and the start of a user's message. That start is found by rendering
        the same message as the opening of a conversation. Empty if the template accepts no user's message there."""
        one, other = (Message(role="user", content=text) for text in (_SENTINEL, _OTHER))
        try:
            after = _common(*(self._after_marked(history, [new], tools) for new in (one, other)))
            opening = _common(*(self._text([new], generate=True, tools=tools) for new in (one, other)))
        except (TemplateError, TypeError, ValueError, TemplateRewritesHistory):
            return ""
        return after[: len(after) - len(_common(after[::-1], opening[::-1]))]

    def _first_stop(self, text: str) -> int:
        """The position after the first stop token in the text; 0 if there is none."""
        found = [(text.find(stop), -len(stop)) for stop in self._stops.values() if stop in text]
        if not found:
            return 0
        where, length = min(found)
        return where - length

    def _after_marked(self, history: Sequence[Message], new: Sequence[Message], tools: Tools) -> str:
        """The text after a response, independent of its content. The response is replaced by a marker, because the
        position of an empty one is not visible, and templates strip white space from some."""
        marked = [*history[:-1], Message(role="assistant", content=_SENTINEL)]
        self._check_history_unchanged(history, new, tools)
        self._check_history_unchanged(marked, new, tools)
        opening = self._text(history[:-1], generate=True, tools=tools)
        rest = self._text([*marked, *new], generate=True, tools=tools)[len(opening) :]
        return rest[rest.index(_SENTINEL) + len(_SENTINEL) :]

    def demonstrations(self, messages: Sequence[Message], tools: Tools = ()) -> list[TokenLog]:
        """The conversation as one log in which the assistant's answers are the responses, each up to the token that ends
        it. If the template rewrites what came before an answer, the answer has a log of its own, with the rewritten turns
        as its prompt."""
        logs: list[TokenLog] = []
        written = ""
        for end in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
            opening = self._text(messages[:end], generate=True, tools=tools)
            answer = self._answer_text(opening, messages[: end + 1], tools)
            if logs and opening.startswith(written):
                logs[-1].observe(self._tokens_after(written[-_CONTEXT:], opening[len(written) :]))
            else:
                logs.append(TokenLog())
                logs[-1].prompt(self._tokens(opening))
            logs[-1].imitate(self._tokens_after(opening[-_CONTEXT:], answer))
            written = opening + answer
        return logs

    def _answer_text(self, opening: str, messages: Sequence[Message], tools: Tools) -> str:
        """The text of the answer that `messages` end with, as the model would generate it after `opening`: up to the
        first stop token that the template puts after it."""
        shown = self._text(messages, generate=False, tools=tools)
        if not shown.startswith(opening):
            raise NotTrainable("the chat template shows an answer after a different text than its generation prompt")
        rest = shown[len(opening) :]
        if not self._first_stop(self._ending) or not rest.endswith(self._ending):
            self._ending = self._find_ending(messages[:-1], tools) or ""
        end = self._first_stop(self._ending)
        if not end or not any(stop in rest for stop in self._stops.values()):
            named = ", ".join(map(repr, self._stops.values())) or "none"
            raise NotTrainable(f"the chat template puts none of the tokens that end an answer ({named}) after one")
        if not rest.endswith(self._ending):  # it ends this answer differently from others
            return rest[: max(rest.rfind(stop) + len(stop) for stop in self._stops.values() if stop in rest)]
        return rest[: len(rest) - len(self._ending) + end]

    def text(self, ids: Sequence[int] | IntArray) -> str:
        """The text of a response: its tokens without the stop token that ended it, whether or not the tokenizer counts
        that one as special, and without special tokens. Text that only looks like a stop token stays."""
        if len(ids) and int(ids[-1]) in self.stop_ids:
            ids = ids[:-1]
        if len(ids) > _SHORT:
            return self._decoded(ids)
        return self._answer_cache.of(np.asarray(ids, np.int32).tobytes(), lambda: self._decoded(ids))

    def _decoded(self, ids: Sequence[int] | IntArray, skip_special: bool = True) -> str:
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return decoded

    def _check_history_unchanged(self, history: Sequence[Message], new: Sequence[Message], tools: Tools) -> None:
        opening = self._text(history[:-1], generate=True, tools=tools)
        whole = self._text([*history, *new], generate=True, tools=tools)
        unchanged = whole.startswith(opening) and whole[len(opening) :].strip().startswith(history[-1]["content"].strip())
        if not unchanged:
            raise TemplateRewritesHistory(
                "the chat template rewrites earlier turns when a new message follows, so the tokens sampled there "
                "would not be the tokens the model sees"
            )

    def _text(self, messages: Sequence[Message], generate: bool, tools: Tools = ()) -> str:
        """The template's text for these messages. Raises `TemplateError` if the template refuses them or fails."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
            )
            text.encode()  # tokenizers would give a less helpful error
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise TemplateError(
                f"a message has half a character in it, {half!r}: read its text with errors='replace'"
            ) from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return text

    def _tokens(self, text: str) -> list[int]:
        return self._token_cache.of(text, lambda: self._tokenised(text))

    def _tokens_after(self, context: str, text: str) -> list[int]:
        """The tokens of a text in the context of the text before it. Some tokenizers put a space before the first word,
        and some special tokens absorb adjacent white space, so a text by itself may have different tokens than in its
        place. If a token would span both texts, the text is tokenised by itself."""

        def make() -> list[int]:
            first, both = self._tokens(context), self._tokenised(context + text)
            return both[len(first) :] if both[: len(first)] == first else self._tokenised(text)

        return self._token_cache.of((context, text), make)

    def _tokenised(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Conversation:
    """A token log and the messages it represents, which grow together.

    With a `window` the model sees the opening and that many of the turns before the current one, a turn being an answer
    and the environment's reply; without, it sees all of them.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        log: TokenLog | None = None,
        *,
        tools: Tools = (),
        window: int = 0,
    ) -> None:
        self._renderer = renderer
        self._tools = tools
        self._window = window
        self.messages: list[Message] = list(messages)
        self._turn_cache: list[int] = []
        """The index of each answer in the messages."""
        self._seen = 0
        """The first turn that the log's last branch shows."""
        self.log = log if log is not None else TokenLog()
        self._ended: int | None = None
        self._opening = len(self.messages)
        opening = renderer.opening(messages, tools)
        self._written = opening.text
        """The text up to where the last response started."""
        self.log.prompt(opening.tokens)

    def respond(self, ids: IntArray, logprobs: FloatArray, versions: IntArray, routes: Routes | None = None) -> str:
        """Appends a sampled response and returns its text."""
        self.log.respond(ids, logprobs, versions, routes)
        last = int(ids[-1]) if len(ids) else None
        self._ended = last if last in self._renderer.stop_ids else None
        text = self._renderer.text(ids)
        self._turn_cache.append(len(self.messages))
        self.messages.append(Message(role="assistant", content=text))
        return text

    def observe(self, messages: Sequence[Message], longest: int | None = None) -> bool:
        """Appends the environment's reply: as an observation or, if that cannot follow the earlier tokens, as the start
        of a branch. Returns False, with nothing changed, if the model would then see `longest` tokens or more."""
        first = max(0, len(self._turn_cache) - self._window) if self._window else 0
        if first == self._seen:
            try:
                shown = self._shown(first)
                following = self._renderer.follow_up(shown, self._ended, messages, self._tools, self._written)
            except TemplateRewritesHistory:
                pass
            else:
                if longest is not None and self.log.context_tokens + len(following.tokens) >= longest:
                    return False
                self.log.observe(following.tokens)
                self._written = following.text
                self.messages.extend(messages)
                return True
        opening = self._renderer.opening([*self._shown(first), *messages], self._tools)
        if longest is not None and len(opening.tokens) >= longest:
            return False
        self.messages.extend(messages)
        self._written = opening.text
        self.log.fork(opening.tokens)
        self._seen = first
        return True

    def _shown(self, first: int) -> list[Message]:
        """The conversation as the model sees it, from that turn on."""
        return [*self.messages[: self._opening], *self.messages[self._turn_cache[first] :]]


def _key_of(message: Message) -> Hashable:
    return tuple(message.items())


def _after(before: str, whole: str, response: str) -> str | None:
    """The text after a response that follows `before` verbatim in the whole text; None if the response is not found
    there."""
    rest = whole[len(before) :]
    if not response.strip() or not whole.startswith(before) or not rest.startswith(response):
        return None
    return rest[len(response) :]


def _common(one: str, other: str) -> str:
    """The common prefix."""
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
