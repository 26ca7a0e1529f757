"""Finds the answer in a text: the search that all rewards share.

First the thinking is removed (`strip_thinking`); it is never judged. In the rest the answer is searched in this order
(`stated_answer`), and the first one that exists decides, whatever its content:

    tag        the last closed `<answer>…</answer>`; if it contains a box, the content of the box
    box        the last closed `\\boxed{…}`
    hashes     the text after the last `####` on its line
    statement  the text after the last "the answer is" or "Answer:" on its line

Without any of these the reward itself decides: `number` takes the last number, and so on.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from roll.reward.time_limit import with_time_limit

AnswerLocation: TypeAlias = Literal["stated", "text", "last_line", "boxed", "answer"]
"""`stated`: the first of tag, box, `####` and final statement that exists, otherwise the whole text; `text`: the whole
text; `last_line`: its last non-empty line; `boxed`: its last `\\boxed{}`; `answer`: its last `<answer>…</answer>`.
Thinking is not part of the text."""

Source: TypeAlias = Literal["tag", "box", "hashes", "statement"]

# Openings of a box, escaped characters and braces: enough to follow the nesting.
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_THINKING = re.compile(r"<(/?)(think|thinking|thought|reasoning)>|\[(/?)(THINK)\]", re.IGNORECASE)
_MARKUP = r"[ \t*_`]{0,4}"
_CLAUSE = r"(?:[^\n.:=?!]|\.(?=\d)){0,60}?"
_STATEMENT = re.compile(
    rf"""\banswers?\b(?:
        {_CLAUSE}\b(?:is|are|was|equals|(?:would|should|must|will)[ ]be)\b(?:[ ]equal[ ]to\b)?{_MARKUP}[:=]?
      | {_CLAUSE}[:=]
    )
    | ^[ \t\#*_]{{0,12}}(?:the[ ])?(?:final[ ])?answer[ \t*_]{{0,12}}$""",
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
"""Introduces an answer: `the answer to this is`, `**Answer:**`, or a heading `Final Answer` above it."""
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_SENTENCE_END = re.compile(r"[.!?]{1,4}[\"')*_`$]{0,4}(?=\s{1,4}[A-Z\\$(*#])")


@dataclass(frozen=True)
class Stated:
    """The answer that a text states, and where it was found."""

    text: str
    source: Source


def strip_thinking(text: str) -> str | None:
    """The text without its thinking; None if it ends while thinking: then there is no answer.

    Thinking is the text between `<think>` and `</think>`; `<thinking>`, `<thought>`, `<reasoning>` and `[THINK]` are
    equivalent. A closing tag without an opening one ends thinking that the prompt began: everything before it is
    thinking.
    """
    if "<" not in text and "[" not in text:
        return text
    pieces: list[str] = []
    at, thinking = 0, ""
    for mark in _THINKING.finditer(text):
        name = (mark[2] or f"[{mark[4]}]").casefold()
        if mark[1] or mark[3]:
            if thinking and thinking != name:
                continue
            if not thinking:
                pieces.clear()
            at, thinking = mark.end(), ""
        elif not thinking:
            pieces.append(text[at : mark.start()])
            thinking = name
    if thinking:
        return None
    return "\n".join([*pieces, text[at:]]).strip() if at else text


def stated_answer(text: str | None) -> Stated | None:
    """The answer that a text without thinking states, or None if it states none."""
    return None if text is None else marked_answer(text) or final_statement(text)


def marked_answer(text: str) -> Stated | None:
    """The answer in a tag, a box or after `####`."""
    tag = last_tag(text, "answer")
    if tag is not None:
        box = last_box(tag)
        return Stated(tag.strip() if box is None else box.strip(), "tag")
    box = last_box(text)
    if box is not None:
        return Stated(box.strip(), "box")
    hashes = _after_hashes(text)
    return None if hashes is None else Stated(hashes, "hashes")


def final_statement(text: str) -> Stated | None:
    """The answer in the last sentence with "the answer is", to the end of its line, without the final punctuation; after
    a heading `Answer`, the next line."""
    if "answer" not in text.lower():  # the search below takes ten times as long
        return None
    end = len(text)
    while end >= 0:  # line by line from the last: no introduction goes over the end of its line
        start = text.rfind("\n", 0, end) + 1
        says_answer = "wer" in text[start:end].lower()  # its `s` may be any that Unicode has
        found = list(_STATEMENT.finditer(text, start, end)) if says_answer else []
        if found:
            return Stated(_line(text[found[-1].end() :]), "statement")
        end = start - 1
    return None


def _line(rest: str) -> str:
    """The first non-empty line of a text, or the formula that begins there, without surrounding markup."""
    rest = rest.lstrip(" \t\r\n*_`:=#>")
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        end = rest.find(closing, 2)
        if rest.startswith(opening) and end >= 0:
            return rest[2:end].strip()
    return trim(rest.partition("\n")[0])


def trim(text: str) -> str:
    """Without surrounding emphasis and final full stop."""
    return text.strip().strip("*`").rstrip("_ ").removesuffix(".").strip("*` \t").rstrip("_")


def first_sentence(text: str) -> str:
    """The first sentence of a line: `5` for `5. I hope this helps`."""
    end = _SENTENCE_END.search(text)
    return trim(text[: end.start()] if end else text)


def _after_hashes(text: str) -> str | None:
    """The text after the last `####` on its line, or on the next if nothing follows on its own. Words followed by more
    text are a Markdown heading, not an answer."""
    if "####" not in text:
        return None
    last = None
    for last in _HASHES.finditer(text):  # noqa: B007 (the last one)
        pass
    if last is None:
        return None
    found, after = last[1].strip(), text[last.end() :].strip()
    if not found:
        return trim(after.partition("\n")[0])
    if after and re.search(r"[^\W\d_]{2}", re.sub(r"\\[a-zA-Z]+", "", found)):
        return None
    inner = final_statement(found)
    return inner.text if inner else trim(found)


def last_tag(text: str, tag: str) -> str | None:
    """The content of the last closed `<tag>…</tag>`, the innermost if they nest, or None."""
    if "</" not in text:
        return None
    start, opened, end = -1, -1, -1
    for mark in re.finditer(rf"<(/?){re.escape(tag)}(?:\s[^<>]{{0,200}})?>", text, re.IGNORECASE):
        if not mark[1]:
            opened = mark.end()
        elif opened >= 0:
            start, end = opened, mark.start()
    return text[start:end] if start >= 0 else None


def last_box(text: str) -> str | None:
    """The content of the last closed `\\boxed{}`, the innermost if they nest, or None."""
    if "box" not in text:
        return None
    opened: list[int | None] = []  # where the content of each open brace starts, if it is a box's
    start, end = -1, -1
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            content = opened.pop()
            if content is not None and content > start:
                start, end = content, match.start()
    return text[start:end] if start >= 0 else None


def check_find(find: str, pattern: str | None) -> None:
    """Raises `ValueError` for an unknown `find` or an invalid pattern."""
    if find not in get_args(AnswerLocation):
        raise ValueError(f"find is {find!r}, but takes {', '.join(get_args(AnswerLocation))}")
    if pattern is not None:
        compile_pattern(pattern)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression, in which a dot also matches newlines."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def extract(text: str, find: AnswerLocation, pattern: str | None = None) -> list[str]:
    """The text that `find` names, without thinking; with a pattern, its last match there (its first group, if it has
    one). Empty if there is none. Two texts if a statement was found, because the whole text may be the answer too."""
    shown = strip_thinking(text)
    if shown is None:
        return []
    texts = _text_at(shown, find)
    if pattern is None:
        return texts
    return [match for each in texts if (match := _last_match(pattern, each)) is not None]


def _last_match(pattern: str, text: str) -> str | None:
    """The last match of a pattern; None if there is none, or the search takes too long."""
    last = with_time_limit(
        lambda: functools.reduce(lambda _, match: match, compile_pattern(pattern).finditer(text), None), None
    )
    if last is None:
        return None
    return last[1] if last.re.groups else last[0]


def _text_at(text: str, find: AnswerLocation) -> list[str]:
    if find == "stated":
        found = stated_answer(text)
        if found is None:
            return [text]
        return [found.text, text] if found.source == "statement" else [found.text]
    if find == "text":
        return [text]
    if find == "boxed":
        match = last_box(text)
    elif find == "answer":
        match = last_tag(text, "answer")
    else:
        match = next((line for line in reversed(text.splitlines()) if line.strip()), None)
    return [] if match is None else [match]


def normalise_text(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    """The text with white space collapsed, and without ignored characters."""
    if ignore_punctuation:
        text = re.sub(r"[^\w\s]|_", " ", text)
    if ignore_case:
        text = text.casefold()
    return " ".join(text.split())
