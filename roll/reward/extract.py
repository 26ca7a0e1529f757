"""Where in a text its answer stands."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

from roll.reward.maths import last_box

Place: TypeAlias = Literal["text", "last_line", "boxed", "answer"]
"""All of the text; its last line that is not empty; its last `\\boxed{}`; its last `<answer>…</answer>`."""


def check_place(place: str, pattern: str | None) -> None:
    """`ValueError` if there is no such place or the pattern is none."""
    if place not in get_args(Place):
        raise ValueError(f"find is {place!r}, but takes {', '.join(get_args(Place))}")
    if pattern is not None:
        compiled(pattern)


def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression, in which a point matches line ends too."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def extract(text: str, place: Place, pattern: str | None = None) -> str | None:
    """What stands at the place; of that, where there is a pattern, its last match (its first group, if it has one)."""
    found = _at(text, place)
    if found is None or pattern is None:
        return found
    last = None
    for match in compiled(pattern).finditer(found):
        last = match
    if last is None:
        return None
    return last[1] if last.re.groups else last[0]


def last_tag(text: str, tag: str) -> str | None:
    """What the last closed `<tag>…</tag>` of the text holds, the innermost if they nest, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def _at(text: str, place: Place) -> str | None:
    if place == "boxed":
        return last_box(text)
    if place == "answer":
        return last_tag(text, "answer")
    if place == "last_line":
        return next((line for line in reversed(text.splitlines()) if line.strip()), None)
    return text


def plain(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    """The text with runs of white space as one space, and without what is to be ignored."""
    if ignore_punctuation:
        text = re.sub(r"[^\w\s]|_", " ", text)
    if ignore_case:
        text = text.casefold()
    return " ".join(text.split())
