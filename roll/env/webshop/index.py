"""Full-text search: BM25 over the texts of a catalogue."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from heapq import nsmallest

from roll.env.webshop.text import terms

SATURATION = 1.2
"""BM25's k1: how soon repetitions of a word stop to count."""
LENGTH_WEIGHT = 0.75
"""BM25's b: how much less the words of a long text count."""


class Index:
    """An inverted index. Immutable, so that many threads may search it."""

    def __init__(self, texts: Iterable[str]) -> None:
        """The texts to search, numbered from 0."""
        counts = [Counter(terms(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) if sum(lengths) else 1.0
        postings: dict[str, tuple[array[int], array[float]]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            damping = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length / mean)
            for term, often in count.items():
                numbers, weights = postings.setdefault(term, (array("I"), array("d")))
                numbers.append(number)
                weights.append(often * (SATURATION + 1) / (often + damping))
        self._size = len(counts)
        self._postings = postings
        self.search = lru_cache(maxsize=1024)(self._search)
        """The numbers of the texts with words of the query, best first, up to the limit; ties in order. The latest
        queries are cached: episodes of a group ask the same."""

    def _search(self, query: str, limit: int = 50) -> tuple[int, ...]:
        scores: dict[int, float] = {}
        for term in dict.fromkeys(terms(query)):
            if term not in self._postings:
                continue
            numbers, weights = self._postings[term]
            rarity = math.log(1 + (self._size - len(numbers) + 0.5) / (len(numbers) + 0.5))
            for number, weight in zip(numbers, weights, strict=True):
                scores[number] = scores.get(number, 0.0) + rarity * weight
        return tuple(nsmallest(limit, scores, key=lambda number: (-scores[number], number)))
