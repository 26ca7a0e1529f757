"""What an engine still holds of contexts it has seen: siblings share a prompt, turns share a conversation.

What always holds: what is remembered fits beside what runs; the longest unused is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a context may have in common with others, by name: its first tokens with all of its group, and, if it is a
    conversation, everything with its own earlier turns. No group has the name of a conversation."""

    group: str
    group_tokens: int
    conversation: str = ""


class Prefixes:
    def __init__(self) -> None:
        self._tokens: OrderedDict[str, int] = OrderedDict()
        """Tokens held of each group's prompt and each conversation; the longest unused first."""
        self._total = 0

    def shrink(self, room_tokens: int) -> None:
        """Forgets until the rest fits into the room there is."""
        while self._total > room_tokens:
            self._total -= self._tokens.popitem(last=False)[1]

    def known(self, prefix: Prefix) -> int:
        """Tokens held of a context."""
        group = self._tokens.get(prefix.group, 0)
        return max(group, self._tokens.get(prefix.conversation, 0)) if prefix.conversation else group

    def remember(self, prefix: Prefix, tokens: int) -> None:
        """A context of so many tokens was computed."""
        self._hold(prefix.group, prefix.group_tokens)
        if prefix.conversation:
            self._hold(prefix.conversation, tokens)

    def clear(self) -> None:
        self._tokens.clear()
        self._total = 0

    def _hold(self, key: str, tokens: int) -> None:
        held = self._tokens.pop(key, 0)
        self._tokens[key] = max(held, tokens)
        self._total += self._tokens[key] - held
