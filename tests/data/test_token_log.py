"""The token log: append-only, and its columns say what was sampled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.data import TokenLog
from roll.data.batch import LOG_COLUMNS
from roll.data.routes import routes_type, to_signed
from roll.data.tokenlog import branches, common_prefix, share_prefix

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
KINDS = ["response", "observation", "fork"]
TURNS = st.lists(st.tuples(st.sampled_from(KINDS), IDS, st.integers(0, 9)), max_size=6)


def grow(log: TokenLog, kind: str, ids: list[int], version: int) -> None:
    if kind == "response":
        log.respond(ids, [-0.5 - i for i in range(len(ids))], [version] * len(ids))
    elif kind == "fork":
        log.fork(ids or [5])
    else:
        log.observe(ids)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(prompt=IDS, turns=TURNS)
def test_columns_follow_from_the_segments_and_only_grow(
    prompt: list[int], turns: list[tuple[str, list[int], int]]
) -> None:
    log = TokenLog()
    log.prompt(prompt)
    ids, mask, behaviour, versions = list(prompt), [False] * len(prompt), [0.0] * len(prompt), [-1] * len(prompt)
    turn, responses = [-1] * len(prompt), 0
    for kind, tokens, version in turns:
        before = log.segments
        grow(log, kind, tokens, version)
        assert log.segments[:-1] == before  # the very same objects
        sampled = kind == "response"
        tokens = tokens or [5] * (kind == "fork")
        ids += tokens
        mask += [sampled] * len(tokens)
        behaviour += [-0.5 - i if sampled else 0.0 for i in range(len(tokens))]
        versions += [version if sampled else -1] * len(tokens)
        turn += [responses if sampled else -1] * len(tokens)
        if kind == "fork":
            turn[-len(tokens)] = -2
        responses += sampled
    assert len(log) == len(ids)
    assert log.response_tokens == sum(mask)
    for column, expected, dtype in (
        (log.ids, ids, np.int32),
        (log.loss_mask, mask, np.bool_),
        (log.behaviour, behaviour, np.float32),
        (log.versions, versions, np.int32),
        (log.turn, turn, np.int32),
    ):
        assert column.dtype == dtype
        assert column.tolist() == expected
    begins = [0, *(i for i, number in enumerate(turn) if number == -2)]
    assert [span.start for span in branches(log.turn)] == begins
    assert log.context.tolist() == ids[begins[-1] :]
    if not prompt:
        return
    again = TokenLog.from_columns(**{name: getattr(log, name) for name in LOG_COLUMNS})
    assert all(np.array_equal(getattr(again, name), getattr(log, name)) for name in LOG_COLUMNS)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(turns=st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 99), max_size=40)), max_size=12))
def test_columns_that_were_read_keep_their_values_when_the_log_grows(turns: list[tuple[str, list[int]]]) -> None:
    log = TokenLog()
    log.prompt([1, 2])
    read: list[tuple[np.ndarray, list[float]]] = []
    for version, (kind, tokens) in enumerate(turns):
        grow(log, kind, tokens, version)
        columns = (log.ids, log.context, log.loss_mask, log.behaviour, log.versions, log.turn)
        read += [(column, column.tolist()) for column in columns]
    assert all(column.tolist() == values for column, values in read)


def test_the_example_of_the_docstring() -> None:
    log = TokenLog()
    log.prompt(range(5))
    log.respond([7, 8], [-0.1, -0.2], [3, 3])
    log.observe([1, 1, 1, 1])
    log.respond([9], [-0.3], [4])
    assert len(log) == 12
    assert np.flatnonzero(log.loss_mask).tolist() == [5, 6, 11]
    assert log.versions[log.loss_mask].tolist() == [3, 3, 4]
    assert log.turn[log.loss_mask].tolist() == [0, 0, 1]
    assert set(log.versions[~log.loss_mask].tolist()) == set(log.turn[~log.loss_mask].tolist()) == {-1}


def test_an_empty_log_has_empty_columns() -> None:
    log = TokenLog()
    assert len(log) == log.response_tokens == 0
    columns = (log.ids, log.loss_mask, log.behaviour, log.versions, log.turn)
    assert [len(column) for column in columns] == [0] * 5


def test_what_was_appended_cannot_be_changed() -> None:
    source = np.array([1, 2, 3], np.int32)
    log = TokenLog()
    log.prompt(source)
    log.respond(source, np.zeros(3, np.float32), np.zeros(3, np.int32))
    source[:] = 0
    assert log.ids.tolist() == [1, 2, 3, 1, 2, 3]
    prompt, response = log.segments
    for array in (prompt.ids, response.ids, response.logprobs, response.versions):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    with pytest.raises(AttributeError):
        prompt.ids = source  # type: ignore[misc]
    with pytest.raises(AttributeError):
        log.segments = ()  # type: ignore[misc]
    for column in (log.ids, log.context, log.behaviour, log.versions, log.turn):
        with pytest.raises(ValueError, match="read-only"):
            column[:] = 0
    log.loss_mask[:] = False  # this column is a copy
    assert log.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert log.ids.tolist() == [1, 2, 3, 1, 2, 3]


def test_a_log_begins_with_its_prompt() -> None:
    log = TokenLog()
    with pytest.raises(ValueError, match="not with an observation"):
        log.observe([1])
    with pytest.raises(ValueError, match="not with a response"):
        log.respond([1], [0.0], [0])
    assert log.segments == ()
    log.prompt([1])
    with pytest.raises(ValueError, match="later input is an observation"):
        log.prompt([1])
    assert len(log) == 1


@pytest.mark.parametrize(
    ("logprobs", "versions"), [([], [0, 0]), ([0.0], [0, 0]), ([0.0, 0.0], [0]), ([0.0] * 3, [0, 0])]
)
def test_every_response_token_has_a_log_prob_and_a_version(logprobs: list[float], versions: list[int]) -> None:
    log = TokenLog()
    log.prompt([1])
    with pytest.raises(
        ValueError, match=f"2 response tokens with {len(logprobs)} log-probs and {len(versions)} versions"
    ):
        log.respond([1, 2], logprobs, versions)
    assert len(log) == 1


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(a=st.lists(st.integers(0, 1), max_size=6), b=st.lists(st.integers(0, 1), max_size=6), count=st.integers(-1, 7))
def test_sequences_begin_alike_as_far_as_their_common_prefix_goes(a: list[int], b: list[int], count: int) -> None:
    one, other = np.array(a, np.int32), np.array(b, np.int32)
    assert share_prefix(one, other, count) == (common_prefix(one, other) >= count)


@st.composite
def routed_logs(draw: st.DrawFn) -> tuple[TokenLog, list[list[int]]]:
    """A log as an engine's answers make it, and the rows that were recorded, 255 for none."""
    log, expected, width = TokenLog(), list[list[int]](), 3
    log.prompt([1] * draw(st.integers(1, 4)))
    expected += [[255] * width] * len(log)
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=6)):
        begin = len(log) - log.context_tokens
        tokens = draw(st.integers(1, 4))
        if kind != "response":
            grow(log, kind, [2] * tokens, 0)
            expected += [[255] * width] * tokens
            continue
        known = draw(st.integers(0, log.context_tokens + tokens - log.routed_tokens))
        rows = np.array(draw(st.lists(st.integers(0, 250), min_size=known * width, max_size=known * width)), np.uint8)
        first = begin + log.routed_tokens
        expected += [[255] * width] * tokens
        expected[first : first + known] = rows.reshape(known, width).tolist()
        log.respond([3] * tokens, [0.0] * tokens, [0] * tokens, rows.reshape(known, width))
        assert begin + log.routed_tokens == first + known
    return log, expected


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(made=routed_logs())
def test_routes_follow_those_that_are_recorded_and_survive_as_a_column(made: tuple[TokenLog, list[list[int]]]) -> None:
    log, expected = made
    routes = log.routes
    assert len(routes) == len(log)
    if not routes.shape[1]:
        assert all(set(row) == {255} for row in expected)
    else:
        assert routes.tolist() == expected
        assert (to_signed(routes) == np.where(routes == 255, -1, routes.astype(int))).all()
    again = TokenLog.from_columns(**{name: getattr(log, name) for name in LOG_COLUMNS})
    assert np.array_equal(again.routes, routes)
    assert again.routes.dtype == routes.dtype
    assert again.routed_tokens == log.routed_tokens


def test_the_width_of_experts_numbers_leaves_one_for_none() -> None:
    assert [routes_type(experts) for experts in (8, 254, 255, 256, 512)] == [np.uint8, np.uint8, *[np.uint16] * 3]
    assert to_signed(np.array([[0, 65535]], np.uint16)).tolist() == [[0, -1]]


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (np.zeros((5, 2), np.uint8), "routes of 5 tokens from number 2 on, in a log of 5"),
        (np.zeros((1, 3), np.uint8), "routes of 3 uint8 per token follow 2 uint8"),
        (np.zeros((1, 2), np.uint16), "routes of 2 uint16 per token follow 2 uint8"),
    ],
)
def test_routes_that_do_not_continue_the_earlier_ones_are_refused(routes: np.ndarray, said: str) -> None:
    log = TokenLog()
    log.prompt([1, 2])
    log.respond([3], [0.0], [0], np.zeros((2, 2), np.uint8))
    with pytest.raises(ValueError, match=said):
        log.respond([4, 5], [0.0, 0.0], [0, 0], routes)
