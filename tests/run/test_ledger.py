from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.errors import RunError, UserError
from roll.run import ROLLED_BACK, Ledger, Transition

transitions = st.builds(
    Transition,
    sample=st.text(max_size=4),
    state=st.sampled_from(["queued", "kept", "trained"]) | st.text(max_size=3),
    reason=st.text(max_size=4),
    time_s=st.floats(0, 2e9),
    info=st.dictionaries(st.text(max_size=2), st.integers() | st.text(max_size=3) | st.none(), max_size=2),
)
quick = settings(max_examples=30, deadline=None)


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
            assert ledger.cut_bytes == 0


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
                assert ledger.cut_bytes > 0
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
        assert ledger.cut_bytes == 4096
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


events = st.lists(
    st.tuples(st.just("append"), st.sampled_from("abcd"), st.sampled_from(["queued", "kept", "trained"]))
    | st.tuples(st.just("checkpoint"))
    | st.tuples(st.just("roll_back"), st.integers(0, 5), st.booleans()),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
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
                undone = ledger.roll_back(position, step=0)
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
