"""The index of prefixes finds what a search through all sequences finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.data.tokenlog import common_prefix
from roll.engine.prefix_index import TOKEN_BYTES, PrefixIndex, key_of

TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 1 << 24, (1 << 31) - 1]), max_size=6)
"""Numbers whose bytes have another order than they have."""
CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 9), TOKENS), max_size=20)


def sequence(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(changes=CHANGES, query=TOKENS)
def test_the_longest_prefix_is_that_of_a_search_through_all(
    changes: list[tuple[bool, int, list[int]]], query: list[int]
) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    donors: dict[int, list[int]] = {}
    for adds, donor, tokens in changes:
        if donor in donors:
            index.remove(key_of(sequence(donors.pop(donor))), donor)
        if adds:
            index.add(key_of(sequence(tokens)), donor)
            donors[donor] = tokens
    assert len(index) == len({tuple(tokens) for tokens in donors.values()})
    found, shared = index.longest(key_of(sequence(query)))
    lengths = {donor: common_prefix(sequence(tokens), sequence(query)) for donor, tokens in donors.items()}
    assert shared == max(lengths.values(), default=0)
    assert found is None if shared == 0 else lengths[found] == shared  # type: ignore[index]
    whole = [donor for donor, tokens in donors.items() if tokens[: len(query)] == query]
    assert sorted(index.beginning_with(key_of(sequence(query)))) == sorted(whole)


def test_of_equally_long_prefixes_one_whose_tokens_are_all_shared_is_found() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for tokens, name in (([1, 2], "whole"), ([1, 2, 9], "longer"), ([1, 2, 3, 9], "longest")):
        index.add(key_of(sequence(tokens)), name)
    assert index.longest(key_of(sequence([1, 2, 5]))) == ("whole", 2)
    assert index.longest(key_of(sequence([1, 2, 3, 4]))) == ("longest", 3)
    assert index.longest(key_of(sequence([4]))) == (None, 0)


def test_a_key_begins_with_the_keys_of_its_prefixes() -> None:
    tokens = sequence([7, 8, 9])
    assert key_of(tokens)[: 2 * TOKEN_BYTES] == key_of(tokens[:2])
    assert key_of(tokens.astype(np.int64)) == key_of(tokens)
