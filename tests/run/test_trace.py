"""The trace of random lives: every stage once, no two on one lane at a time, readable wherever it is cut off."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import RunError
from roll.rollout.lifecycle import MOVES
from roll.run import RunFolder, Transition
from roll.run.trace import Trace, _Row, drop_traces, trace_files

Event = dict[str, Any]
ENDS = ("trained", "dropped", "failed")


def life(sample: str, chance: random.Random, moves: int, start_ms: int) -> list[Transition]:
    """A walk along the moves of samples, with what the ledger says of each."""
    state, time_ms, walk = "new", start_ms, []
    for _ in range(moves):
        if not MOVES[state]:
            break
        state = chance.choice([new for new in sorted(MOVES[state]) for _ in range(1 if new in ENDS else 4)])
        time_ms += chance.choice((0, 1, 1, 2, 7, 250))
        info: dict[str, dict[str, Any]] = {
            "queued": {"task": f't"{sample}\n', "group": 1},
            "generating": {"engine": chance.randrange(3), "version": 7},
            "scoring": {"tokens": chance.randrange(100), "finish": "stop", "versions": [6, 7]},
            "scored": {"reward": chance.choice((0.0, 0.25, float("nan")))},
        }
        reason = 'sta"le: ☃' if state in ("dropped", "failed") else ""
        walk.append(Transition(sample, state, reason, time_ms / 1000, info.get(state, {})))
    return walk


@st.composite
def lives(draw: st.DrawFn) -> list[Transition]:
    """Moves of several samples as they might arrive: those of one in order, those of different ones in any."""
    samples = draw(st.integers(1, 8))
    moves = draw(st.integers(1, 14))
    chance = random.Random(draw(st.integers(0, 2**32)))
    walks = [life(f"{number // 2}.{number % 2}", chance, moves, chance.randrange(50)) for number in range(samples)]
    order = [number for number, walk in enumerate(walks) for _ in walk]
    chance.shuffle(order)
    left = [iter(walk) for walk in walks]
    return [next(left[number]) for number in order]


def written(transitions: Iterable[Transition], pending: int = 2048) -> list[Event]:
    with tempfile.TemporaryDirectory() as place, mock.patch("roll.run.trace._PENDING", pending):
        path = Path(place) / "trace.json"
        with Trace(path) as trace:
            for transition in transitions:
                trace.append(transition)
        return events(path.read_text())


def events(text: str) -> list[Event]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> Event:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    found: list[Event] = json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    return found


def complete(found: list[Event]) -> list[Event]:
    return [event for event in found if event["ph"] == "X"]


def row_names(found: list[Event]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}


def on_lanes(found: list[Event]) -> dict[tuple[int, int], list[Event]]:
    lanes = defaultdict(list)
    for event in complete(found):
        lanes[event["pid"], event["tid"]].append(event)
    return {lane: sorted(on, key=lambda event: (event["ts"], event["dur"])) for lane, on in lanes.items()}


def expected_stages(transitions: list[Transition]) -> dict[str, list[tuple[str, int, int]]]:
    """State, begin and end in microseconds of every sample's stages; open ones end with the last move of all."""
    last_us = max(round(transition.time_s * 1e6) for transition in transitions)
    walks = defaultdict(list)
    for transition in transitions:
        walks[transition.sample].append((transition.state, round(transition.time_s * 1e6)))
    return {
        sample: [(a, begin, end) for (a, begin), (_, end) in pairwise([*walk, ("", last_us)]) if a not in ENDS]
        for sample, walk in walks.items()
    }


@settings(max_examples=examples(100), deadline=None)
@given(lives(), st.sampled_from((2, 8, 2048)))
def test_every_stage_of_every_sample_is_one_event(transitions: list[Transition], pending: int) -> None:
    found = written(transitions, pending)
    stages = defaultdict(list)
    for event in complete(found):
        stages[event["args"]["sample"]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    expected = expected_stages(transitions)
    assert stages == {sample: rows for sample, rows in expected.items() if rows}
    for sample, rows in expected.items():
        walk = [transition for transition in transitions if transition.sample == sample]
        if not any(transition.state == "failed" for transition in walk[:-1]):  # else it was away before its next try
            total = sum(event["dur"] for event in complete(found) if event["args"]["sample"] == sample)
            assert not rows or total == rows[-1][2] - round(walk[0].time_s * 1e6)
    ended = [transition for transition in transitions if transition.state in ("dropped", "failed")]
    instants = [(event["args"]["sample"], event["name"], event["ts"]) for event in found if event["ph"] == "i"]
    assert sorted(instants) == sorted((t.sample, t.state, round(t.time_s * 1e6)) for t in ended)


@settings(max_examples=examples(100), deadline=None)
@given(lives(), st.sampled_from((2, 8, 2048)))
def test_no_two_events_overlap_on_a_lane(transitions: list[Transition], pending: int) -> None:
    for on in on_lanes(written(transitions, pending)).values():
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(on))


def at_different_times(transitions: list[Transition]) -> list[Transition]:
    """The same moves in the order of time, no two at once: so that it is clear who came first."""
    ordered = sorted(transitions, key=lambda transition: transition.time_s)
    return [replace(transition, time_s=moment / 1000) for moment, transition in enumerate(ordered)]


@settings(max_examples=examples(60), deadline=None)
@given(lives())
def test_a_row_is_as_high_as_it_was_busy(transitions: list[Transition]) -> None:
    found = written(at_different_times(transitions))
    rows: dict[int, dict[int, list[Event]]] = defaultdict(dict)
    for (pid, tid), on in on_lanes(found).items():
        rows[pid][tid] = on
    for lanes in rows.values():
        stays = [(lane, begin, end) for lane, on in lanes.items() for begin, end in joined(on)]
        for lane, begin, _ in stays:
            taken = {other for other, since, until in stays if since <= begin < until}
            assert taken >= {lower for lower in lanes if lower < lane}


@settings(max_examples=examples(60), deadline=None)
@given(lives(), st.integers(0, 2**32))
def test_moves_that_arrive_out_of_order_get_the_lanes_they_would_have_got(
    transitions: list[Transition], seed: int
) -> None:
    in_order = at_different_times(transitions)
    chance = random.Random(seed)
    arrivals = sorted(range(len(in_order)), key=lambda moment: moment + chance.uniform(0, 3))
    left = defaultdict(list)
    for transition in reversed(in_order):
        left[transition.sample].append(transition)
    late = [left[in_order[moment].sample].pop() for moment in arrivals]
    assert complete(written(late, pending=16)) == complete(written(in_order))


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32))
def test_a_row_gives_the_lowest_lane_that_was_free_at_the_time(lanes: int, seed: int) -> None:
    chance = random.Random(seed)
    row, free, taken = _Row(1, "waiting"), dict[int, int](), list[int]()
    for number in range(5 * lanes):
        time_us = chance.randrange(10)
        if taken and (len(taken) == lanes or (number > lanes and chance.random() < 0.5)):
            lane = taken.pop(chance.randrange(len(taken)))
            free[lane] = time_us
            row.release(lane, time_us)
        else:
            lowest = min((lane for lane in free if free[lane] <= time_us), default=None)
            assert row.acquire(time_us) == lowest
            taken.append(len(free) + len(taken) if lowest is None else lowest)
            free.pop(taken[-1], None)


def joined(on: list[Event]) -> list[tuple[int, int]]:
    """Begin and end of each sample's stay on a lane, over the stages that follow each other there."""
    stays: list[list[Any]] = []
    for event in on:
        sample, end = event["args"]["sample"], event["ts"] + event["dur"] + event["args"].get("unfinished", False)
        if stays and stays[-1][0] == sample and stays[-1][2] == event["ts"]:
            stays[-1][2] = end
        else:
            stays.append([sample, event["ts"], end])
    return [(begin, end) for _, begin, end in stays]


@settings(max_examples=examples(60), deadline=None)
@given(lives(), st.floats(0, 1), st.integers(1, 400))
def test_what_was_flushed_is_read_wherever_the_file_is_cut_off(
    transitions: list[Transition], share: float, cut: int
) -> None:
    flushed = round(share * len(transitions))
    with tempfile.TemporaryDirectory() as place:
        trace = Trace(Path(place) / "trace.json")
        for transition in transitions[:flushed]:
            trace.append(transition)
        trace.flush()
        text = trace.path.read_text()
        whole = events(text + "]")
        for transition in transitions[flushed:]:
            trace.append(transition)
        trace.close()
        closed = events(trace.path.read_text())
    ended = sum(len(rows) for rows in expected_stages(transitions[:flushed]).values()) if flushed else 0
    left_open = {t.sample: t.state for t in transitions[:flushed]}
    assert len(complete(whole)) == ended - sum(state not in ENDS for state in left_open.values())
    assert closed[: len(whole)] == whole
    torn = text[:-cut].rpartition(",\n")[0] if cut < len(text) else ""
    assert events(torn + "]" if torn else "[]") == whole[: torn.count("\n")]


@settings(max_examples=examples(60), deadline=None)
@given(lives())
def test_stages_lie_on_the_rows_of_who_has_the_sample(transitions: list[Transition]) -> None:
    found = written(transitions)
    names = row_names(found)
    fixed = {"queued": "waiting", "scoring": "graders", "scored": "buffer", "kept": "buffer"}
    engines: dict[str, str] = {}
    for event in complete(found):  # those of one sample are in order
        row, args = names[event["pid"]], event["args"]
        if event["name"] in fixed:
            assert row == fixed[event["name"]]
            engines.pop(args["sample"], None)
        else:
            if "engine" in args:
                engines[args["sample"]] = f"engine {args['engine']}"
            assert row == engines.get(args["sample"], "environments")


def moves(*steps: tuple[Any, ...]) -> list[Transition]:
    return [Transition(sample, state, "", time_s, info) for sample, state, time_s, info in steps]


def test_an_event_says_what_was_said_when_the_stage_began_and_when_it_ended() -> None:
    found = written(
        [
            Transition("3.1", "queued", "engine died: actor_infer[0]", 5.0, {"task": "t☃", "try": 2}),
            Transition("3.1", "generating", "", 6.0, {"engine": 1, "version": 4}),
            Transition("3.1", "scoring", "", 8.5, {"tokens": 12, "finish": "stop", "versions": [3, 4]}),
            Transition("3.1", "scored", "", 8.6, {"reward": float("inf")}),
            Transition("3.1", "dropped", "stale: 3 > 2", 9.0),
        ]
    )
    who = {"sample": "3.1", "task": "t☃"}
    end = {"tokens": 12, "finish": "stop", "versions": [3, 4]}
    assert [event["args"] for event in complete(found)] == [
        {
            **who,
            "reason": "engine died: actor_infer[0]",
            "try": 2,
            "then": {"state": "generating", "engine": 1, "version": 4},
        },
        {**who, "engine": 1, "version": 4, "then": {"state": "scoring", **end}},
        {**who, **end, "then": {"state": "scored", "reward": None}},
        {**who, "reward": None, "then": {"state": "dropped", "reason": "stale: 3 > 2"}},
    ]
    (instant,) = (event for event in found if event["ph"] == "i")
    last = complete(found)[-1]
    assert instant["args"] == {**who, "reason": "stale: 3 > 2"}
    assert (instant["pid"], instant["tid"], instant["s"]) == (last["pid"], last["tid"], "t")


def test_stages_still_open_at_the_end_are_marked() -> None:
    found = written(moves(("a", "queued", 1, {}), ("b", "queued", 2, {}), ("b", "generating", 5, {"engine": 0})))
    open_ones = {event["args"]["sample"]: event for event in complete(found) if event["args"].get("unfinished")}
    assert {sample: (event["name"], event["dur"]) for sample, event in open_ones.items()} == {
        "a": ("queued", 4_000_000),
        "b": ("generating", 0),
    }


def test_a_sample_keeps_its_lane_while_it_stays_with_an_engine() -> None:
    found = written(
        moves(
            ("a", "generating", 0, {"engine": 0}),
            ("b", "generating", 1, {"engine": 0}),
            ("a", "scoring", 2, {}),
            ("b", "paused", 3, {}),
            ("b", "generating", 4, {"engine": 0}),
            ("c", "generating", 5, {"engine": 0}),
            ("b", "scoring", 6, {}),
            ("c", "scoring", 7, {}),
        )
    )
    engine = next(pid for pid, name in row_names(found).items() if name == "engine 0")
    lanes = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    on = [(e["args"]["sample"], e["name"], lanes[e["tid"]]) for e in complete(found) if e["pid"] == engine]
    assert on == [
        ("a", "generating", "lane 0"),
        ("b", "generating", "lane 1"),
        ("b", "paused", "lane 1"),
        ("b", "generating", "lane 1"),
        ("c", "generating", "lane 0"),
    ]


def test_clocks_that_disagree_make_no_stage_negative_and_change_no_order() -> None:
    found = written(
        moves(
            ("a", "queued", 10.005, {}),
            ("a", "generating", 10.003, {"engine": 0}),
            ("a", "scoring", 10.5, {}),
            ("a", "scored", 10.2, {}),
        )
    )
    assert [(e["name"], e["ts"], e["dur"]) for e in complete(found)] == [
        ("queued", 10_005_000, 0),
        ("generating", 10_005_000, 495_000),
        ("scoring", 10_500_000, 0),
        ("scored", 10_500_000, 0),
    ]


def test_rows_come_in_the_order_of_a_life_and_lanes_have_numbers_of_their_own() -> None:
    found = written(
        moves(
            ("a", "queued", 0, {}),
            ("a", "generating", 1, {"engine": 10}),
            ("b", "generating", 1, {"engine": 2}),
            ("a", "scoring", 2, {}),
            ("a", "scored", 3, {}),
            ("c", "acting", 3, {}),
            ("d", "generating", 3, {}),
            ("d", "anew", 4, {}),
        )
    )
    places = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
    ordered = [name for pid, name in sorted(row_names(found).items(), key=lambda item: places[item[0]])]
    assert ordered[:2] == ["controller", "waiting"]
    assert set(ordered[2:5]) == {"engines", "environments", "other"}
    assert ordered[5:] == ["engine 2", "engine 10", "graders", "buffer"]
    named = [event["tid"] for event in found if event["name"] == "thread_name"]
    assert len(named) == len(set(named)), "viewers name threads by their number alone"
    assert not set(named) & places.keys()


def test_moves_of_samples_the_trace_never_saw_begin_are_taken() -> None:
    """A resumed run goes on with samples that an earlier process began."""
    found = written(
        [
            Transition("1.0", "trained", time_s=1.0, info={"version": 3}),
            Transition("1.1", "dropped", "left behind", time_s=1.0),
            Transition("1.2", "kept", time_s=1.0),
            Transition("1.2", "rolled_back", time_s=2.0),
        ]
    )
    assert [(e["name"], e["ph"]) for e in found if e["ph"] in "Xi"] == [
        ("dropped", "i"),
        ("kept", "X"),
        ("rolled_back", "i"),
    ]


def test_spans_and_counters(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        trace.span("train", "controller", 10, 14.5, step=3, loss=float("nan"))
        trace.span("step", "controller", 8, 16)
        trace.span("publish", "controller", 16, 17)
        trace.span("reset", "environments", 11, 12)
        trace.counter('queue "x"', 12.25, 7)
    found = events(trace.path.read_text())
    spans = [(e["name"], row_names(found)[e["pid"]], e["ts"], e["dur"], e["args"]) for e in complete(found)]
    assert spans == [
        ("train", "controller", 10_000_000, 4_500_000, {"step": 3, "loss": None}),
        ("step", "controller", 8_000_000, 8_000_000, {}),
        ("publish", "controller", 16_000_000, 1_000_000, {}),
        ("reset", "environments", 11_000_000, 1_000_000, {}),
    ]
    train, step, publish, _ = (event["tid"] for event in complete(found))
    assert (train != step, publish) == (True, train)
    (point,) = (event for event in found if event["ph"] == "C")
    assert (point["name"], point["ts"], point["args"]) == ('queue "x"', 12_250_000, {"value": 7})


def test_open_stages_last_until_the_last_that_was_heard_of_anything(tmp_path: Path) -> None:
    for kind in ("counter", "span"):
        with Trace(tmp_path / f"{kind}.json") as trace:
            trace.append(Transition("a", "queued", time_s=1.0))
            if kind == "counter":
                trace.counter("queue/queued", 9.0, 1)
            else:
                trace.span("train", "controller", 7.0, 9.0)
        (stage,) = (event for event in events(trace.path.read_text()) if event["name"] == "queued")
        assert stage["dur"] == 8_000_000


def test_a_full_trace_says_so_and_holds_nothing(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json", max_bytes=50_000) as trace:
        for number in range(2000):
            trace.append(Transition(f"{number}.0", "queued", time_s=number, info={"task": "t"}))
            trace.append(Transition(f"{number}.0", "generating", time_s=number + 1.5))
            if number % 100 == 0:
                trace.flush()
        assert trace.full
        assert held(trace) == 0
        trace.counter("late", 1.0, 1)
        trace.flush()
    text = trace.path.read_text()
    assert 49_000 < len(text) <= 50_000
    *_, last = events(text)
    assert re.fullmatch("the trace ends here: .* limit of 50000 bytes", last["name"])


def test_a_full_trace_keeps_within_its_limit(tmp_path: Path) -> None:
    for limit in range(4096, 4200, 5):
        with Trace(tmp_path / f"{limit}.json", max_bytes=limit) as trace:
            for number in range(60):
                trace.counter("x", number, number)
        assert trace.full
        assert trace.path.stat().st_size <= limit
        assert "the trace ends here" in events(trace.path.read_text())[-1]["name"]


def test_memory_holds_open_samples_only(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        most = 0
        for number in range(1500):
            for state in ("queued", "generating", "scoring", "scored", "dropped" if number % 2 else "kept"):
                trace.append(Transition(f"{number}.0", state, time_s=number))
            if number % 2 == 0:
                trace.append(Transition(f"{number}.0", "trained", time_s=number))
            most = max(most, held(trace))
        trace.flush()
        assert most < 2 * 2048
        assert held(trace) == 0
    lanes = [event for event in events(trace.path.read_text()) if event["name"] == "thread_name"]
    assert len(lanes) == 4, "one sample at a time needs one lane on each row"


def held(trace: Trace) -> int:
    return len(trace._open) + len(trace._moved_us) + len(trace._pending)


def test_long_traces_are_written_before_they_are_flushed(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        for number in range(4000):
            trace.span("train", "controller", number, number + 1)
        assert trace.path.stat().st_size > 300_000


def test_a_resumed_run_begins_a_new_file(folder: RunFolder) -> None:
    names: list[str] = []
    for _ in range(3):
        with Trace.open(folder) as trace:
            trace.counter("x", 0, len(names))
        names.append(trace.path.name)
    assert names == ["trace.json", "trace-2.json", "trace-3.json"]
    points = [events((folder.path / name).read_text())[-1]["args"]["value"] for name in names]
    assert points == [0, 1, 2]
    with pytest.raises(FileExistsError):
        Trace(folder.path / "trace.json")


def test_a_trace_of_nothing_is_whole(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.close()
    trace.close()
    text = trace.path.read_text()
    assert row_names(events(text)) == {1: "controller"}
    trace.append(Transition("late", "queued"))
    trace.counter("late", 0, 0)
    trace.flush()
    assert (trace.path.read_text(), held(trace)) == (text, 0)


def test_a_disk_that_is_full_ends_the_trace_with_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.append(Transition("a", "queued", time_s=1.0))

    def refuse(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr("roll.run.trace.os.write", refuse)
        with pytest.raises(RunError, match=r"trace\.json: No space left"):
            trace.flush()
    trace.append(Transition("a", "generating", time_s=2.0))
    trace.flush()
    trace.close()
    assert held(trace) == 0
    assert trace.path.read_text() == "", "nothing follows what may have been torn"


def test_writes_that_take_less_than_they_were_given_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("roll.run.trace.os.write", lambda descriptor, data: write(descriptor, data[:50]))
    with Trace(tmp_path / "trace.json") as trace:
        trace.span("train", "controller", 0, 1, note="x" * 300)
    assert complete(events(trace.path.read_text()))[0]["args"] == {"note": "x" * 300}


def test_old_traces_are_deleted_and_the_next_has_a_number_of_its_own(folder: RunFolder) -> None:
    for number in range(1, 5):
        with Trace.open(folder) as trace:
            assert trace.path.name == (f"trace-{number}.json" if number > 1 else "trace.json")
            trace.counter("queue", 1.0, number)
    (folder.path / "trace-notes.json").write_text("mine")
    size = (folder.path / "trace-4.json").stat().st_size
    drop_traces(folder, 2 * size + 10)
    assert [path.name for path in trace_files(folder)] == ["trace-3.json", "trace-4.json"]
    drop_traces(folder, 0)
    assert [path.name for path in trace_files(folder)] == ["trace-4.json"]
    assert (folder.path / "trace-notes.json").exists()
    with Trace.open(folder) as trace:
        assert trace.path.name == "trace-5.json"


def test_a_trace_goes_on_in_other_files_and_no_stage_is_lost_or_doubled(folder: RunFolder) -> None:
    names = [f"{number}.0" for number in range(300)]
    with Trace.open(folder, max_bytes=8192) as trace:
        for number, name in enumerate(names):
            trace.append(Transition(name, "queued", time_s=float(number), info={"task": "t"}))
            trace.append(Transition(name, "generating", time_s=number + 20.5, info={"engine": number % 3}))
            trace.append(Transition(name, "trained", time_s=number + 50.5))
            trace.flush()
    files = trace_files(folder)
    assert len(files) > 10
    assert all(file.stat().st_size <= 8192 for file in files)
    every = [event for file in files for event in json.loads(file.read_text())]
    stages = [(event["args"]["sample"], event["name"]) for event in every if event["ph"] == "X"]
    assert sorted(stages) == sorted((name, state) for name in names for state in ("queued", "generating"))
    assert not any("unfinished" in event["args"] for event in every if event["ph"] == "X")
    for file in files:
        mine = json.loads(file.read_text())
        named = {event["tid"] for event in mine if event["name"] == "thread_name"}
        assert {event["tid"] for event in mine if event["ph"] == "X"} <= named, "each file says the names of its lanes"


def test_only_so_much_of_a_trace_is_kept_and_a_resumed_run_counts_what_is_there(folder: RunFolder) -> None:
    for _ in range(3):
        with Trace.open(folder, max_bytes=8192, keep_bytes=4 * 8192) as trace:
            for number in range(1000):
                trace.counter("queue/queued", number, number)
        assert sum(file.stat().st_size for file in trace_files(folder)) <= 4 * 8192
        assert len(trace_files(folder)) >= 3


def test_an_event_that_no_file_has_room_for_is_left_out(folder: RunFolder) -> None:
    with Trace.open(folder, max_bytes=4096) as trace:
        trace.span("x" * 5000, "controller", 0.0, 1.0)
        trace.span("train", "controller", 1.0, 2.0)
    every = [event for file in trace_files(folder) for event in json.loads(file.read_text())]
    assert [event["name"] for event in every if event["ph"] == "X"] == ["train"]
