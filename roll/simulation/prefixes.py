"""The simulated prefix cache of an engine: siblings share a prompt, turns share a conversation.

Invariants: the cached prefixes fit next to the running requests; the least recently used is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefix:
    """The parts of a context that others share, by name: its first tokens with all of its group, and, if it is a
    conversation, everything with its own earlier turns. No group has the name of a conversation."""

    group: str
    group_tokens: int
    conversation: str = ""


class Prefixes:
    def __init__(self) -> None:
        self._tokens: OrderedDict[str, int] = OrderedDict()
        """Cached tokens of each group's prompt and each conversation; the least recently used first."""
        self._total = 0

    def shrink(self, budget_tokens: int) -> None:
        """Evicts until the rest fits into `budget_tokens`."""
        while self._total > budget_tokens:
            self._total -= self._tokens.popitem(last=False)[1]

    def known(self, prefix: Prefix) -> int:
        """Cached tokens of a context."""
        group = self._tokens.get(prefix.group, 0)
        return max(group, self._tokens.get(prefix.conversation, 0)) if prefix.conversation else group

    def remember(self, prefix: Prefix, tokens: int) -> None:
        """Adds a context of `tokens` computed tokens."""
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
