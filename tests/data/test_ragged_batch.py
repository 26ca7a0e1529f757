"""The ragged batch: cutting, joining and choosing lose nothing, for samples of any length, none included."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.data import Batch, Sample, Task
from roll.data.batch import SAMPLE_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS, balanced_split

CASES = settings(max_examples=examples(60), deadline=None, derandomize=True)


@st.composite
def samples(draw: st.DrawFn, played: bool | None = None) -> list[Sample]:
    """Samples that were graded, or `played` in environments: then they have turns, of any rewards."""
    played = draw(st.booleans()) if played is None else played
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2))
    made, recorded = [], draw(st.booleans())
    for i, (prompt, first, seen, second) in enumerate(draw(st.lists(lengths, max_size=8))):
        sample = Sample(f"s{i}", Task.ask(f"task-{i % 3}", "?", domain="d" * (i % 4)), i % 3, 0.5 + i, reward=i / 7)
        token = 100 * i
        sample.log.prompt(range(token, token + prompt))
        routes = None
        if recorded and draw(st.booleans()):  # not of the last token
            routes = np.arange(max(prompt + first - 1, 0) * 2, dtype=np.uint16).reshape(-1, 2) + 100 * i
        sample.log.respond(range(token + 10, token + 10 + first), [-float(n) for n in range(first)], [i] * first, routes)
        if seen:
            sample.log.observe(range(token + 20, token + 20 + seen))
            sample.log.respond(range(token + 30, token + 30 + second), [-9.0] * second, [i + 1] * second)
        sample.turns = 2 if seen else 1
        sample.finish = draw(st.sampled_from(["stop", "length"]))
        if played:
            sample.turn_rewards = [i + 0.1 * turn for turn in range(sample.turns)]
            sample.turn_states = [draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(sample.turns)]
        made.append(sample)
    return made


def full(made: Sequence[Sample]) -> Batch:
    """A batch with every known column."""
    batch = Batch.from_samples(made)
    rng = np.random.default_rng(0)
    turns = {"turn_advantage": rng.normal(size=int(batch["turns"].sum()))} if "turn_reward" in batch else {}
    return batch.with_columns(
        **{name: rng.normal(size=len(batch)) for name in ("advantage", "baseline", "kl")},
        **{name: rng.normal(size=batch.tokens) for name in ("proximal", "ref", "values")},
        **turns,
    )


def assert_same(a: Batch, b: Batch) -> None:
    assert a.offsets.tolist() == b.offsets.tolist()
    assert set(a.columns) == set(b.columns)
    for name in a.columns:
        assert a[name].tolist() == b[name].tolist(), name


@CASES
@given(samples())
def test_a_batch_holds_its_samples(made: list[Sample]) -> None:
    batch = Batch.from_samples(made)
    assert len(batch) == len(made)
    assert batch.tokens == sum(len(s.log) for s in made)
    assert batch.lengths.tolist() == [len(s.log) for s in made]
    for column in ("ids", "loss_mask", "behaviour", "versions", "turn"):
        for row, sample in zip(batch.rows(column), made, strict=True):
            assert row.tolist() == getattr(sample.log, column).tolist()
    width = max((sample.log.routes.shape[1] for sample in made), default=0)
    assert batch["routes"].shape == (batch.tokens, width)
    for row, sample in zip(batch.rows("routes"), made, strict=True):
        recorded = sample.log.routes
        assert row.tolist() == (recorded.tolist() if recorded.shape[1] else [[65535] * width] * len(sample.log))
    assert batch["sample"].tolist() == [s.id for s in made]
    assert batch["task"].tolist() == [s.task.id for s in made]
    assert batch["domain"].tolist() == [s.task.domain for s in made]
    assert batch["group"].tolist() == [s.group for s in made]
    assert batch["reward"].tolist() == [s.reward for s in made]
    assert batch["temperature"].tolist() == [s.temperature for s in made]
    assert batch["truncated"].tolist() == [s.finish == "length" for s in made]
    assert batch["turns"].tolist() == [s.turns for s in made]
    if any(s.turn_rewards for s in made):
        assert [row.tolist() for row in batch.rows("turn_reward")] == [s.turn_rewards for s in made]
        assert [row.tolist() for row in batch.rows("turn_state")] == [s.turn_states for s in made]
    else:
        assert not TURN_COLUMNS.keys() & batch.columns.keys()
    everything = full(made)
    for name in everything.columns:
        values = everything[name]
        expected = np.dtype({**SAMPLE_COLUMNS, **TURN_COLUMNS, **TOKEN_COLUMNS}[name])
        if name == "routes" and width:
            expected = np.dtype(np.uint16)
        assert values.dtype == expected or (expected.kind == "U" and values.dtype.kind == "U"), name


@CASES
@given(samples(), st.data())
def test_selecting_is_choosing_samples(made: list[Sample], data: st.DataObject) -> None:
    batch = full(made)
    chosen = data.draw(st.lists(st.integers(0, len(made) - 1), max_size=10)) if made else []
    picked = batch.select(chosen)
    assert len(picked) == len(chosen)
    for name in batch.columns:
        if name in SAMPLE_COLUMNS:
            assert picked[name].tolist() == [batch[name][i] for i in chosen]
        else:
            assert [r.tolist() for r in picked.rows(name)] == [batch.rows(name)[i].tolist() for i in chosen]
            assert picked[name].tolist() == [value for i in chosen for value in batch.rows(name)[i].tolist()]
    everywhere = batch.token_indices(np.array(chosen, np.int64))
    assert picked.ids.tolist() == batch.ids[everywhere].tolist()
    assert_same(batch.select(range(len(made))), batch)
    assert_same(pickle.loads(pickle.dumps(picked)), picked)


@CASES
@given(samples(), st.integers(1, 10))
def test_split_and_concat_come_back_to_the_batch(made: list[Sample], parts: int) -> None:
    batch = full(made)
    indices = batch.split(parts)
    assert len(indices) == parts
    order = np.concatenate(indices)
    assert sorted(order.tolist()) == list(range(len(made)))
    joined = Batch.concat([batch.select(part) for part in indices])
    assert_same(joined, batch.select(order))
    assert_same(joined.select(np.argsort(order)), batch)


@CASES
@given(st.tuples(samples(False), samples(False)) | st.tuples(samples(True).filter(bool), samples(True).filter(bool)))
def test_concat_is_the_batch_of_all_samples(pair: tuple[list[Sample], list[Sample]]) -> None:
    first, second = pair
    assert_same(
        Batch.concat([Batch.from_samples(first), Batch.from_samples(second)]), Batch.from_samples([*first, *second])
    )


@CASES
@given(samples())
def test_sums_over_tokens_are_per_sample(made: list[Sample]) -> None:
    batch = Batch.from_samples(made)
    assert batch.sum_tokens(batch.loss_mask).tolist() == [s.log.response_tokens for s in made]
    assert batch.sum_tokens(batch.ids).tolist() == [int(s.log.ids.sum()) for s in made]


def ragged(*lengths: int) -> Batch:
    made = []
    for i, length in enumerate(lengths):
        sample = Sample(str(i), Task.ask("t", "?"), 0, 1.0)
        sample.log.prompt(range(length))
        made.append(sample)
    return Batch.from_samples(made)


def test_the_example_of_the_docstring() -> None:
    batch = ragged(3, 2)
    assert batch.offsets.tolist() == [0, 3, 5]
    assert batch.select([1]).ids.tolist() == [0, 1]


def test_a_graded_answer_among_episodes_is_an_episode_of_one_turn() -> None:
    graded = Sample("0", Task.ask("t", "?"), 0, 1.0, reward=0.5, turns=1)
    played = Sample("1", Task.ask("u", "?"), 1, 1.0, reward=3.0, turns=2, turn_rewards=[1.0, 2.0], turn_states=[7, 8])
    for sample in (graded, played):
        sample.log.prompt([1])
    batch = Batch.from_samples([graded, played])
    assert [row.tolist() for row in batch.rows("turn_reward")] == [[0.5], [1.0, 2.0]]
    assert [row.tolist() for row in batch.rows("turn_state")] == [[0], [7, 8]]
    assert batch.turn_offsets.tolist() == [0, 1, 3]


def test_a_sample_whose_turns_do_not_add_up_is_refused() -> None:
    sample = Sample("1", Task.ask("u", "?"), 1, 1.0, turns=3, turn_rewards=[1.0, 2.0], turn_states=[7, 8])
    with pytest.raises(ValueError, match=r"column 'turn_reward' has shape \(2,\), expected \(3,\)"):
        Batch.from_samples([sample])
    with pytest.raises(KeyError, match="no column 'turns'"):
        Batch(np.array([0, 2]), {"turn_reward": np.zeros(2)})


def test_new_columns_leave_the_old_batch_alone() -> None:
    batch = ragged(3, 2)
    other = batch.with_columns(advantage=np.array([1, 2]), ref=np.zeros(5), reward=np.array([8.0, 9.0]))
    assert "ref" in other
    assert "ref" not in batch
    assert other["advantage"].dtype == np.float32
    assert batch["reward"].tolist() == [0.0, 0.0]
    assert other["reward"].tolist() == [8.0, 9.0]
    with pytest.raises(AttributeError):
        batch.offsets = other.offsets  # type: ignore[misc]


@pytest.mark.parametrize(
    ("column", "size", "expected"), [("advantage", 5, 2), ("ref", 2, 5), ("ref", 6, 5), ("ids", 0, 5), ("reward", 3, 2)]
)
def test_a_column_of_the_wrong_length_is_refused(column: str, size: int, expected: int) -> None:
    with pytest.raises(ValueError, match=rf"column '{column}' has shape \({size},\), expected \({expected},\)"):
        ragged(3, 2).with_columns(**{column: np.zeros(size)})
    with pytest.raises(ValueError, match="has shape"):
        ragged(3, 2).with_columns(ref=np.zeros((5, 1)))


def test_unknown_and_missing_columns_are_named() -> None:
    batch = ragged(3, 2)
    with pytest.raises(KeyError, match="unknown column 'advantaged': known are sample, task"):
        batch.with_columns(advantaged=np.zeros(2))
    with pytest.raises(KeyError, match="unknown column 'extra'"):
        Batch(batch.offsets, {"extra": np.zeros(2)})
    with pytest.raises(KeyError, match="no column 'proximal': it has sample, task"):
        batch["proximal"]


def test_concat_needs_batches_of_the_same_columns() -> None:
    batch = ragged(3, 2)
    with pytest.raises(ValueError, match="at least one batch"):
        Batch.concat([])
    with pytest.raises(ValueError, match="differ in their columns: advantage, ref"):
        Batch.concat([batch.with_columns(ref=np.zeros(5)), batch.with_columns(advantage=np.zeros(2))])


def test_a_sample_that_is_not_there_cannot_be_selected() -> None:
    for index in (2, -1, -3):
        with pytest.raises((IndexError, ValueError)):
            ragged(3, 2).select([index])


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 12))
def test_a_balanced_split_is_a_partition_with_even_loads(lengths: list[int], parts: int) -> None:
    pieces = balanced_split(lengths, parts)
    assert len(pieces) == parts
    assert sorted(i for piece in pieces for i in piece) == list(range(len(lengths)))
    assert all(piece.tolist() == sorted(piece) for piece in pieces)
    loads = [sum(lengths[i] for i in piece) for piece in pieces]
    assert max(loads) <= min(loads) + max(lengths, default=0)
    again = balanced_split(np.array(lengths, np.int64), parts)
    assert [piece.tolist() for piece in again] == [piece.tolist() for piece in pieces]


def test_a_split_into_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot split into 0 parts"):
        balanced_split([1, 2], 0)
