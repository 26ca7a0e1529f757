"""Words, sentences and paragraphs of a text."""

from __future__ import annotations

import re

_ABBREVIATIONS = re.compile(
    r"mr|mrs|ms|dr|prof|st|sr|jr|vs|etc|e\.?g|i\.?e|al|fig|no|vol|dept|inc|ltd|co|corp|est|approx|ca|cf|a\.m|p\.m|u\.[sk]|ph\.d"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
)
_CONTEXT_CHARS = 80
"""Characters before a full stop that decide whether it ends a sentence."""
_SOMETHING = re.compile(r"\S")
_END = re.compile(r"[.!?…。！？]+[\"'”’)\]*_]*(?=\s|\Z)|[。！？]")


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def capital_words(text: str) -> int:
    """Words in capitals throughout; `A` and `I` are."""
    return sum(word.isupper() for word in re.findall(r"[^\W\d_][\w'’-]*", text))


def sentences(text: str) -> list[str]:
    """Texts up to a full stop, exclamation or question mark before a space; abbreviations, initials and the numbers of
    lists do not end one."""
    found, start = [], 0
    for end in _END.finditer(text):
        if end[0] == "." and _sentence_continues(text, start, end):
            continue
        found.append(text[start : end.end()])
        start = end.end()
    found.append(text[start:])
    return [sentence.strip() for sentence in found if re.search(r"\w", sentence)]


def paragraphs(text: str) -> list[str]:
    """Texts between empty lines."""
    return [paragraph.strip() for paragraph in re.split(r"\n[ \t]*\n", text) if paragraph.strip()]


def split_at(text: str, divider: str) -> list[str]:
    """Texts between dividers. A divider at the beginning or the end divides nothing."""
    found = [part.strip() for part in re.split(divider, text)]
    return found[bool(not found[0]) : len(found) - bool(len(found) > 1 and not found[-1])]


def _sentence_continues(text: str, start: int, end: re.Match[str]) -> bool:
    """Whether a sentence that began at `start` continues after this full stop. Only the text near it is examined."""
    stop = end.start()
    context = text[max(start, stop - _CONTEXT_CHARS) : stop]
    if not context or context[-1].isspace():
        return False
    word = context.split()[-1].lstrip("(\"'“‘[*_").casefold()
    if _ABBREVIATIONS.fullmatch(word) or re.fullmatch(r"[^\W\d_]", word):  # "e.g." or "J. S. Bach"
        return _SOMETHING.search(text, end.end()) is not None
    _, line_end, line = context.rpartition("\n")
    begins_here = bool(line_end) or len(context) == stop - start
    return begins_here and re.fullmatch(r"\s*(?:\d+|[a-z])", line, re.IGNORECASE) is not None  # "1. First"
