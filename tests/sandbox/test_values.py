"""Plain values cross over as they are, and nothing else does."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.sandbox.inside import codec

NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
EXACT = st.decimals(allow_nan=False) | st.fractions()
ODD = st.sampled_from(["\ud800", "😀", "\\ud83d", "\\", '"', "\n\u2028"])
LEAVES = st.none() | st.booleans() | NUMBERS | EXACT | st.text() | ODD | st.binary()
KEYS = st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
        | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


def no_stand_in(value: Any) -> Any:
    raise AssertionError(f"{value!r} is plain")


@given(PLAIN)
def test_plain_values_cross_over(value: Any) -> None:
    line = codec.dump(value, no_stand_in)
    assert line.count(b"\n") == 1
    for load in (codec.load, codec.load_trusted):
        crossed = load(line, no_stand_in)
        assert (crossed, type(crossed)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "crossed"),
    [
        (Counter("aab"), Counter("aab")),
        (OrderedDict(b=1), OrderedDict(b=1)),
        (defaultdict(list, {1: [2]}), defaultdict(list, {1: [2]})),
        (bytearray(b"ab"), bytearray(b"ab")),
        ({1: 2}.keys(), {1: 2}.keys()),
        ({1: 2}.items(), {1: 2}.items()),
        (slice(1, None), slice(1, None)),
        (abs, abs),
        (KeyError, KeyError),
        (date(2024, 2, 29), date(2024, 2, 29)),
        (datetime(2024, 2, 29, 7, 30, tzinfo=UTC), datetime(2024, 2, 29, 7, 30, tzinfo=UTC)),
        (time(7, 30, 0, 5), time(7, 30, 0, 5)),
        (timedelta(-1, 5, 7), timedelta(-1, 5, 7)),
        (range(2, 9, 3), range(2, 9, 3)),
        (int, int),
        (Decimal("1.50"), Decimal("1.50")),
        (Fraction(1, 3), Fraction(1, 3)),
        (-(2**200), -(2**200)),
    ],
)
def test_of_other_types_the_value_crosses_over(value: Any, crossed: Any) -> None:
    arrived = codec.load(codec.dump(value, no_stand_in), no_stand_in)
    assert (arrived, type(arrived)) == (crossed, type(crossed))


def test_items_of_named_tuples_keep_their_names() -> None:
    arrived = codec.load(codec.dump(namedtuple("Point", "x y")(1, 2), no_stand_in), no_stand_in)
    assert arrived == (1, 2)
    assert (arrived.x, arrived.y) == (1, 2)
    again = codec.load(codec.dump(arrived, no_stand_in), no_stand_in)
    assert (again, again.y) == ((1, 2), 2)


def test_values_of_dictionaries_cross_over() -> None:
    arrived = codec.load(codec.dump({1: 2, 3: [4]}.values(), no_stand_in), no_stand_in)
    assert (list(arrived), type(arrived)) == ([2, [4]], type({}.values()))


class Broken(ValueError):
    pass


def test_an_exception_class_crosses_over_with_what_it_is_made_of() -> None:
    line = codec.dump(Broken, lambda value: 7)
    assert codec.load(line, lambda *what: what) == (7, "Broken", [ValueError])


def test_numbers_that_are_none() -> None:
    assert math.isnan(codec.load(codec.dump(math.nan, no_stand_in), no_stand_in))
    assert codec.load(codec.dump([math.inf, -math.inf], no_stand_in), no_stand_in) == [math.inf, -math.inf]


def test_what_is_not_plain_stays_and_a_number_stands_for_it() -> None:
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    loop: list[Any] = []
    loop.append(loop)
    thing = object()
    line = codec.dump([thing, loop, print], keep)
    assert len(kept) == 3
    first, _, last = codec.load(line, kept.__getitem__)
    assert first is thing
    assert last is print


@pytest.mark.parametrize(
    "line",
    [b"", b"[", b"nonsense", b'{"a": 1, "b": 2}', b'{"unknown": 1}', b'{"set": [[1]]}', b'{"dict": [[[], 1]]}',
     b"[" * 100_000,
     b'{"Fraction": "1/0"}', b'{"Fraction": "1e999999999"}', b'{"Decimal": "x"}', b'{"int": 5}', b'{"type": "eval"}',
     b'{"builtin": "eval"}', b'{"builtin": "open"}', b'{"defaultdict": []}', b'{"named": [["a", "b"], [1]]}',
     b'{"date": "x"}', b'{"timedelta": [1e300]}', b'{"keys": [[]]}', b'{"items": [1]}', b'{"exception": [1]}',
     b'{"range": [1, 2, 0]}', b'{"bytes": "zz"}', b'\xff',
     b"1" * 21, b'{"Decimal": "sNaN"}', b'{"Decimal": [0, [1], 2]}', b'{"Fraction": "%s"}' % (b"1" * 9000),
     b'{"iterator": ' * 300 + b"0" + b"}" * 300, b"[" * 300 + b"]" * 300, b'{"kept": "1"}', b'{"kept": 1e400}',
     b'{"named": [[1], [1]]}', b'{"set": "ab"}', b'{"range": ["a"]}', b'{"slice": []}', b'{"items": [[1]]}'],
)  # fmt: skip
def test_what_is_no_value_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        codec.load(line, no_stand_in)


ALIKE = [number * ((1 << 61) - 1) for number in range(1, 1000)]
"""Numbers of one hash: a dictionary compares each with all others."""


@pytest.mark.parametrize("inner", ['{"range": [0, 100000000000]}', '{"keys": {"range": [0, 9]}}', '"text"', "7", "null"])
@pytest.mark.parametrize(
    "outer",
    ['{"keys": %s}', '{"values": %s}', '{"items": %s}', '{"named": [[], %s]}', '{"named": [%s, []]}', '{"tuple": %s}',
     '{"set": %s}', '{"deque": %s}', '{"dict": %s}', '{"dict": [%s]}', '{"Counter": %s}', '{"defaultdict": [null, %s]}',
     '{"iterator": %s}', '{"slice": %s}', '{"range": %s}', '{"timedelta": %s}', '{"exception": [1, "E", %s]}'],
)  # fmt: skip
def test_no_container_is_made_from_what_is_no_list_of_the_line(outer: str, inner: str) -> None:
    with pytest.raises(ValueError):
        codec.load((outer % inner).encode(), no_stand_in)


@pytest.mark.parametrize(
    "value",
    [dict.fromkeys(ALIKE), set(ALIKE), frozenset((0, number) for number in ALIKE), Counter(ALIKE),
     OrderedDict.fromkeys(ALIKE), defaultdict(int, dict.fromkeys(ALIKE)), dict.fromkeys(ALIKE).keys(),
     dict.fromkeys(ALIKE).items(), {"inside": [{float(number): 0 for number in ALIKE[:1]} | dict.fromkeys(ALIKE)]}],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_keys_of_one_hash_are_refused_before_they_are_compared(value: Any) -> None:
    with pytest.raises(ValueError, match="the same hash"):
        codec.load(codec.dump(value, no_stand_in), no_stand_in)


@pytest.mark.parametrize(
    "value",
    [set(range(-3000, 3000)), {(x, y, z) for x in range(-9, 9) for y in range(-9, 9) for z in range(-9, 9)},
     dict.fromkeys([*ALIKE[:60], *map(str, ALIKE)]), {2**number for number in range(-300, 300)},
     {Fraction(1, number) for number in range(1, 3000)}, range(10**11), range(-(2**80), 2**80, 2**70)],
)  # fmt: skip
def test_large_results_of_honest_programs_cross_over(value: Any) -> None:
    assert codec.load(codec.dump(value, no_stand_in), no_stand_in) == value


TAGS = st.sampled_from(
    ["dict", "Counter", "OrderedDict", "keys", "values", "items", "tuple", "set", "frozenset", "deque", "int", "float",
     "bytes", "bytearray", "complex", "range", "slice", "builtin", "Decimal", "Fraction", "date", "time", "datetime",
     "timedelta", "named", "defaultdict", "iterator", "kept", "exception", "unknown"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["sNaN", "NaN", "-inf", "1e999999999", "0x" + "f" * 500, "1/0", "9" * 5000, "len", "eval", "\ud800", "2024-02-29", ""]
)
HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.sampled_from(ALIKE),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TAGS, inner, min_size=1, max_size=1),
    max_leaves=30,
)


@settings(derandomize=True, max_examples=examples(300))
@given(HOSTILE)
def test_whatever_a_program_writes_is_a_value_that_can_be_compared_or_is_refused(data: Any) -> None:
    try:
        value = codec.load(json.dumps(data).encode(), lambda *what: None)
    except ValueError:
        return
    assert (value == object()) is False
    assert (value == Decimal(1)) in (True, False)


@settings(derandomize=True, max_examples=examples(200))
@given(PLAIN, st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_line_is_a_value_or_is_refused(value: Any, flips: list[tuple[int, int]]) -> None:
    line = bytearray(codec.dump(value, no_stand_in))
    for place, byte in flips:
        line[place % len(line)] = byte
    with contextlib.suppress(ValueError):
        codec.load(bytes(line), lambda *what: None)
