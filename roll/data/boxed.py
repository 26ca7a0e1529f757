"""The last box of a LaTeX solution."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![a-zA-Z])\s*)|\\.|[{}]", re.DOTALL)
_ARGUMENT = re.compile(r"\\[a-zA-Z]+|[^\s{}$.,]")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}` or `\\fbox{}`, including nested braces; for `\\boxed 2` the 2; None without
    one.

    The last box is the one that is closed last: of nested boxes the outer one, and never an unclosed one.
    """
    found: str | None = None
    opened: list[int | None] = []  # for each open brace, where its box begins, if it is a box's
    token = _TOKENS.search(text)
    while token is not None:
        end = token.end()
        if token["box"]:
            if text[end : end + 1] == "{":
                opened.append(end + 1)
                end += 1
            elif bare := _ARGUMENT.match(text, end):
                found = bare[0]
                end = bare.end()
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None:
                found = text[start : token.start()].strip()
        token = _TOKENS.search(text, end)
    return found
