from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import RunError, UserError
from roll.ledger import log
from roll.run import ROLLED_BACK, Ledger, Transition, to_json

transitions = st.builds(
    Transition,
    sample=st.text(max_size=4),
    state=st.sampled_from(["queued", "kept", "trained"]) | st.text(max_size=3),
    reason=st.text(max_size=4),
    time_s=st.floats(0, 2e9),
    info=st.dictionaries(st.text(max_size=2), st.integers() | st.text(max_size=3) | st.none(), max_size=2),
)
quick = settings(max_examples=examples(30), deadline=None)


@contextmanager
def ledger_path() -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        yield Path(directory) / "ledger.log"


def write(path: Path, records: list[Transition]) -> list[int]:
    """Write the records; where each of them ends."""
    ends = []
    with Ledger.open(path) as ledger:
        for record in records:
            ledger.append(record)
            ends.append(ledger.position)
    return ends


def read(path: Path) -> list[Transition]:
    return list(Ledger.read(path))


class Color(StrEnum):
    RED = 'r"ed'


numbers = (
    st.integers() | st.floats() | st.booleans() | st.floats(width=32).map(np.float32) | st.integers(0, 9).map(np.int64)
)
values = st.recursive(
    numbers | st.text() | st.none() | st.sampled_from([Color.RED, Path("a/b"), np.array([1.5, float("nan")])]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(MappingProxyType)
    ),
    max_leaves=6,
)


def assert_holds(transition: Transition) -> None:
    """Its record is a line of ASCII with a checksum, and says the same as the JSON encoder's text of its fields, whose
    order it has too."""
    fields: dict[str, Any] = {"sample": transition.sample, "state": transition.state}
    if transition.reason:
        fields["reason"] = transition.reason
    fields["time_s"] = transition.time_s
    if transition.info:
        fields["info"] = transition.info
    record = transition.encode()
    assert record.isascii()
    assert record.index(b"\n") == len(record) - 1
    assert record[:9] == b"%08x " % crc32(record[9:-1])
    assert same(json.loads(record[9:]), json.loads(to_json(fields)))


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, with keys in the same order."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@settings(max_examples=examples(80), deadline=None)
@given(
    st.builds(
        Transition,
        sample=st.text(),
        state=st.text(),
        reason=st.text(),
        time_s=numbers,
        info=st.dictionaries(st.text() | st.integers(0, 3), values, max_size=4),
    )
)
def test_a_record_says_what_json_would_say(transition: Transition) -> None:
    assert_holds(transition)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(max_size=4),
            st.sampled_from(["kept", "trained"]),
            st.sampled_from(["", "why", "wh\u00fd"]),
            st.integers(0, 1),
            st.integers(0, 2),
        ),
        max_size=20,
    ),
    st.lists(st.dictionaries(st.text(max_size=2), values, max_size=2), min_size=3, max_size=3),
)
def test_samples_that_move_together_have_the_records_of_samples_that_move_alone(
    moves: list[tuple[str, str, str, int, int]], infos: list[dict[str, Any]]
) -> None:
    times = [1.7e9, 1.7e9 + 0.25]
    together = [Transition(sample, state, reason, times[t], infos[i]) for sample, state, reason, t, i in moves]
    encoder = log.RecordEncoder()
    assert [encoder.encode(each) for each in together] == [each.encode() for each in together]
    for each in together:
        assert_holds(each)


@pytest.mark.parametrize("odd", ["", "a", '"', "\\", "\n", "\x7f", "é", "\u2028", "😀", "\ud800", "\0", 'a"b\\'])
def test_a_record_escapes_as_json_does(odd: str) -> None:
    transition = Transition(odd, odd, odd, 1e22, {odd: odd, "list": [odd, 1, [2.5, None]], "big": 10**30})
    assert_holds(transition)
    assert Transition.decode(transition.encode()) == transition


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), np.float64("nan"), True, 0, -0.0, 1e-9])
def test_a_record_has_null_for_numbers_that_json_lacks(number: float) -> None:
    transition = Transition("a", "scored", time_s=number, info={"reward": number, "list": [number, {"x": number}]})
    assert_holds(transition)
    assert json.loads(transition.encode()[9:])["time_s"] == (number if np.isfinite(number) else None)


def test_what_json_cannot_hold_is_an_error_and_not_a_record(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.log") as ledger:
        good, bad = Transition("a", "queued"), Transition("b", "queued", info={"x": object()})
        with pytest.raises(TypeError, match="object cannot be written as JSON"):
            ledger.append(bad)
        with pytest.raises(TypeError):
            ledger.append_many([good, bad])
        assert ledger.position == 0


@quick
@given(st.lists(transitions, max_size=6))
def test_what_is_appended_is_read(records: list[Transition]) -> None:
    with ledger_path() as path:
        ends = write(path, records)
        assert read(path) == records
        assert path.stat().st_size == (ends[-1] if ends else 0)


@quick
@given(st.lists(transitions, min_size=1, max_size=6), st.data())
def test_a_kill_at_any_byte_loses_only_the_record_being_written(records: list[Transition], data: st.DataObject) -> None:
    with ledger_path() as path:
        ends = write(path, records)
        size = data.draw(st.integers(0, ends[-1]))
        garbage = data.draw(st.binary(max_size=4).filter(lambda tail: b"\n" not in tail))
        path.write_bytes(path.read_bytes()[:size] + (garbage if size not in (0, *ends) else b""))
        whole = [record for record, end in zip(records, ends, strict=True) if end <= size]
        assert read(path) == whole
        later = Transition("later", "queued")
        with Ledger.open(path) as ledger:
            assert ledger.position == max([0, *(end for end in ends if end <= size)])
            ledger.append(later)
        assert read(path) == [*whole, later]
        with Ledger.open(path) as ledger:
            assert ledger.truncated_bytes == 0


@quick
@given(st.lists(transitions, min_size=1, max_size=6), st.data())
def test_a_flipped_bit_is_refused_or_cut_off_and_never_read(records: list[Transition], data: st.DataObject) -> None:
    with ledger_path() as path:
        ends = write(path, records)
        content = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        hit = next(index for index, end in enumerate(ends) if bit // 8 < end)
        # Without the newline between them, two records are damaged as one.
        last_damaged = hit + 1 if bit // 8 == ends[hit] - 1 else hit
        if last_damaged < len(records) - 1:
            with pytest.raises(RunError, match=f"line {hit + 1} "):
                read(path)
            with pytest.raises(RunError, match="corrupt"):
                Ledger.open(path)
            assert path.read_bytes() == content
        else:
            assert read(path) == records[:hit]
            with Ledger.open(path) as ledger:
                assert ledger.truncated_bytes > 0
            assert read(path) == records[:hit]


def test_the_case_of_a_checksum_is_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(path, [Transition(str(number), "queued") for number in range(20)])
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if line[:8].upper() != line[:8])
    lines[number] = lines[number][:8].upper() + lines[number][8:]
    path.write_bytes(b"".join(lines[: number + 1]))
    assert len(read(path)) == number


def test_a_page_of_zeros_after_a_power_cut_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(path, [Transition("a", "queued")])
    with path.open("ab") as file:
        file.write(bytes(4096))
    with Ledger.open(path) as ledger:
        assert ledger.truncated_bytes == 4096
    assert len(read(path)) == 1


def test_appends_wait_for_flush(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    ledger = Ledger.open(path)
    ledger.append(Transition("a", "queued"))
    assert read(path) == []
    ledger.flush()
    assert len(read(path)) == 1
    assert ledger.position == path.stat().st_size
    ledger.close()
    ledger.close()


def test_a_full_disk_is_an_error_and_flushing_again_writes_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.log"
    ledger = Ledger.open(path)
    ledger.append(Transition("a", "queued"))
    real = os.write
    calls = iter([lambda fd, data: real(fd, data[:7]), lambda fd, data: os.close(-1)])
    monkeypatch.setattr(os, "write", lambda fd, data: next(calls)(fd, data))
    with pytest.raises(RunError, match=r"cannot write to .*ledger\.log"):
        ledger.flush()
    monkeypatch.undo()
    assert path.stat().st_size == 0
    ledger.close()
    assert [record.sample for record in read(path)] == ["a"]


def test_many_appended_are_as_one_after_the_other(tmp_path: Path) -> None:
    records = [Transition(str(number), "queued", time_s=number) for number in range(50)]
    write(tmp_path / "one.log", records)
    with Ledger.open(tmp_path / "many.log") as ledger:
        ledger.append_many(iter(records[:30]))
        ledger.append_many([])
        ledger.append_many(records[30:])
    assert (tmp_path / "many.log").read_bytes() == (tmp_path / "one.log").read_bytes()


def test_only_rolling_back_writes_rolled_back(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.log") as ledger:
        for add in (ledger.append, lambda transition: ledger.append_many([transition])):
            with pytest.raises(AssertionError):
                add(Transition("a", ROLLED_BACK))


class Disk:
    """`os` with a disk that breaks when it is told to, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: set[str] = set()
        self.synced = 0
        for name in ("write", "fsync", "ftruncate"):
            monkeypatch.setattr(log.os, name, self._breakable(name, getattr(os, name)))

    def _breakable(self, name: str, real: Any) -> Any:
        def call(descriptor: int, *arguments: Any) -> Any:
            if name in self.failing:
                raise OSError(28, "No space left on device")
            self.synced += name == "fsync"
            return real(descriptor, *arguments)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(log, "BUFFER_BYTES", 300)
    return Disk(monkeypatch)


def samples(path: Path) -> list[str]:
    return [record.sample for record in read(path)]


def test_a_full_buffer_is_written_but_not_synced(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        synced = disk.synced
        for number in range(100):
            ledger.append(Transition(str(number), "queued"))
            assert 0 <= ledger.position - path.stat().st_size <= 300
        assert disk.synced == synced
        assert path.stat().st_size > 0
        position = ledger.position
        ledger.flush()
        assert disk.synced == synced + 1
        assert path.stat().st_size == position == ledger.position
        ledger.flush()
        assert disk.synced == synced + 1
    assert samples(path) == [str(number) for number in range(100)]


def test_what_was_written_early_is_synced_though_the_buffer_is_empty(tmp_path: Path, disk: Disk) -> None:
    with Ledger.open(tmp_path / "ledger.log") as ledger:
        ledger.append(Transition("a", "queued", "x" * 400))
        ledger.append(Transition("b", "queued", "x" * 400))
        ledger._write()
        synced = disk.synced
        ledger.flush()
        assert disk.synced == synced + 1


def test_an_append_that_finds_the_disk_full_adds_nothing_and_can_be_done_again(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        disk.failing = {"write"}
        records = [Transition(str(number), "queued") for number in range(20)]
        raised = [bool(raised_by(partial(ledger.append, record))) for record in records]
        added = raised.index(True)
        assert all(raised[added:])
        with pytest.raises(RunError):
            ledger.append_many(records[added:])
        disk.failing = set()
        for record in records[added:]:
            ledger.append(record)
    assert read(path) == records


def test_a_sync_that_fails_is_done_again_with_its_records(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("a", "queued"))
        disk.failing = {"fsync"}
        with pytest.raises(RunError, match="cannot write to"):
            ledger.flush()
        assert path.stat().st_size == 0
        disk.failing = set()
        ledger.append(Transition("b", "queued"))
    assert samples(path) == ["a", "b"]


def test_no_flush_promises_what_a_failed_sync_may_have_lost(tmp_path: Path, disk: Disk) -> None:
    """Records written early are not in memory any more; after a failed sync nobody knows whether the disk has them."""
    path = tmp_path / "ledger.log"
    ledger = Ledger.open(path)
    for number in range(20):
        ledger.append(Transition(str(number), "queued"))
    disk.failing = {"fsync"}
    with pytest.raises(RunError, match="No space left"):
        ledger.flush()
    disk.failing = set()
    for _ in range(2):
        with pytest.raises(RunError, match="may be lost, resume the run"):
            ledger.flush()
    with pytest.raises(RunError, match="may be lost"):
        ledger.close()
    with Ledger.open(path) as ledger:
        ledger.append(Transition("later", "queued"))
    found = samples(path)
    assert found == [*map(str, range(len(found) - 1)), "later"]


def test_a_torn_end_that_cannot_be_cut_off_is_not_written_after(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "ledger.log"
    ledger = Ledger.open(path)
    ledger.append(Transition("a", "queued"))
    disk.failing = {"write", "ftruncate"}
    with pytest.raises(RunError, match="No space left"):
        ledger.flush()
    disk.failing = set()
    with pytest.raises(RunError, match="cannot be repaired"):
        ledger.close()
    assert samples(path) == []


def test_reading_while_the_run_writes_sees_whole_records_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    ledger = Ledger.open(path)
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen = samples(path)
            assert seen == [str(number) for number in range(len(seen))]
            Ledger.lineage(path)

    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: errors.extend(raised_by(look)))
    with patch.object(log, "BUFFER_BYTES", 150):
        thread.start()
        for number in range(3000):
            ledger.append(Transition(str(number), "queued"))
        ledger.close()
    done.set()
    thread.join(30)
    assert errors == []


def raised_by(function: Any) -> list[BaseException]:
    try:
        function()
    except BaseException as error:
        return [error]
    return []


@quick
@given(st.lists(transitions, min_size=1, max_size=8), st.data())
def test_blocks_are_the_records_from_any_boundary_on(records: list[Transition], data: st.DataObject) -> None:
    with ledger_path() as path:
        ends = [0, *write(path, records)]
        first = data.draw(st.integers(0, len(records)))
        last = data.draw(st.integers(first, len(records)))
        size = data.draw(st.integers(1, 300))
        lines = []
        for offset, block in log.record_blocks(path, ends[first], ends[last], size):
            assert offset == ends[first + len(lines)]
            assert block
            lines += block
        assert list(map(Transition.decode, lines)) == records[first:last]


def test_damage_is_named_by_its_line_wherever_reading_begins(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    ends = write(path, [Transition(str(number), "queued") for number in range(5)])
    content = bytearray(path.read_bytes())
    content[ends[2] + 20] ^= 1
    path.write_bytes(content)
    for start in (0, *ends[:3]):
        with pytest.raises(RunError, match="line 4 is damaged"):
            list(log.record_blocks(path, start))
    assert len(list(log.record_blocks(path, ends[3]))) == 1


def test_no_ledger_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "ledger.log")


def states(path: Path) -> dict[str, str]:
    return {sample: transition.state for sample, transition in Ledger.lineage(path).items()}


def test_rolling_back_by_example(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("a", "kept", "why", info={"task": "t"}))
        ledger.append(Transition("b", "trained"))
        checkpoint = ledger.position
        ledger.append(Transition("a", "trained"))
        ledger.append(Transition("c", "queued"))
        ledger.flush()
        assert states(path) == {"a": "trained", "b": "trained", "c": "queued"}
        assert ledger.roll_back(checkpoint, step=3) == ["a", "c"]
        assert ledger.roll_back(checkpoint, step=3) == []
    assert states(path) == {"a": "kept", "b": "trained"}
    assert Ledger.lineage(path)["a"].reason == "why"
    history = read(path)
    assert [record.state for record in history] == ["kept", "trained", "trained", "queued", ROLLED_BACK, ROLLED_BACK]
    assert history[-1].info == {"position": checkpoint, "step": 3}


def test_a_position_the_ledger_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    ends = write(path, [Transition("a", "queued"), Transition("b", "queued")])
    with Ledger.open(path) as ledger:
        for position in (-1, ends[0] - 1, ends[1] + 1):
            with pytest.raises(RunError, match="step 7"):
                ledger.roll_back(position, step=7)
        assert len(read(path)) == 2


def test_rolling_back_reads_only_what_follows_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        for number in range(2000):
            ledger.append(Transition(str(number), "queued"))
        checkpoint = ledger.position
        ledger.append(Transition("7", "kept"))
        ledger.flush()
        starts = []
        real = log.record_blocks
        with patch.object(
            log, "record_blocks", lambda path, start=0, *rest: starts.append(start) or real(path, start, *rest)
        ):
            assert ledger.roll_back(checkpoint, step=1) == ["7"]
        assert set(starts) == {checkpoint}


def test_going_back_to_before_an_earlier_going_back(tmp_path: Path) -> None:
    """Back to the first checkpoint, and then to the second, which was undone by that: its states are there again."""
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("a", "queued"))
        first = ledger.position
        ledger.append(Transition("a", "kept"))
        ledger.append(Transition("b", "queued"))
        second = ledger.position
        ledger.append(Transition("c", "queued"))
        assert ledger.roll_back(first, step=1) == ["a", "b", "c"]
        assert states(path) == {"a": "queued"}
        assert ledger.roll_back(second, step=2) == ["a", "b"]
        assert states(path) == {"a": "kept", "b": "queued"}
        assert ledger.roll_back(second, step=2) == []
        assert ledger.roll_back(first, step=1) == ["a", "b"]
    assert states(path) == {"a": "queued"}


def test_going_back_past_where_a_going_back_went(tmp_path: Path) -> None:
    """The second checkpoint is followed by going back to the first, the third by going back to the second."""
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("a", "queued"))
        first = ledger.position
        ledger.append(Transition("a", "kept"))
        second = ledger.position
        ledger.roll_back(first, step=1)
        third = ledger.position
        ledger.roll_back(second, step=2)
        assert states(path) == {"a": "kept"}
        assert ledger.roll_back(third, step=3) == ["a"]
    assert states(path) == {"a": "queued"}


@pytest.mark.parametrize("odd", ['","state":"rolled_back"', "\\", '"', 'rolled_back"', "é\n"])
def test_rolling_back_finds_samples_of_any_name(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition(odd, "queued", odd, info={odd: odd}))
        checkpoint = ledger.position
        ledger.append(Transition(odd, "kept", odd))
        ledger.append(Transition("a" + odd, "queued", odd))
        assert ledger.roll_back(checkpoint, step=1) == [odd, "a" + odd]
    assert states(path) == {odd: "queued"}


events = st.lists(
    st.tuples(st.just("append"), st.sampled_from("abcd"), st.sampled_from(["queued", "kept", "trained"]))
    | st.tuples(st.just("checkpoint"))
    | st.tuples(st.just("roll_back"), st.integers(0, 5), st.booleans()),
    max_size=25,
)


def changed_since(path: Path, position: int) -> list[str]:
    """The samples whose state is not that at the position, by copying all states at every record."""
    offset = 0
    states: dict[str, int | None] = {}
    at: dict[int, dict[str, int | None]] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        at[offset] = dict(states)
        fields = json.loads(line[9:])
        sample = fields["sample"]
        states[sample] = at[fields["info"]["position"]].get(sample) if fields["state"] == ROLLED_BACK else offset
        offset += len(line)
    at[offset] = dict(states)
    return [sample for sample in sorted(states) if at[position].get(sample) != states[sample]]


@settings(max_examples=examples(40), deadline=None)
@given(events)
def test_the_lineage_is_that_of_a_model_that_copies_everything(events: list[tuple[str, str, str]]) -> None:
    """Against a dictionary copied at each checkpoint; going back may be cut short, torn, and done again."""
    with ledger_path() as path:
        ledger = Ledger.open(path)
        model: dict[str, str] = {}
        checkpoints: list[tuple[int, dict[str, str]]] = [(0, {})]
        for kind, *arguments in events:
            if kind == "append":
                sample, state = arguments
                ledger.append(Transition(sample, state))
                model[sample] = state
            elif kind == "checkpoint":
                ledger.flush()
                checkpoints.append((ledger.position, dict(model)))
            else:
                choice, torn = arguments
                position, saved = checkpoints[int(choice) % len(checkpoints)]
                ledger.flush()
                before = ledger.position
                expected = changed_since(path, position)
                undone = ledger.roll_back(position, step=0)
                assert sorted(undone) == expected
                if torn and undone:
                    ledger.close()
                    os.truncate(path, (before + path.stat().st_size) // 2)
                    ledger = Ledger.open(path)
                    assert set(ledger.roll_back(position, step=0)) <= set(undone)
                assert ledger.roll_back(position, step=0) == []
                model = dict(saved)
            ledger.flush()
            assert states(path) == model
        ledger.close()
