"""The index against what plain Python makes of the record, after any history, kill and order of asking."""

from __future__ import annotations

import math
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.errors import RunError, UserError
from roll.run import ROLLED_BACK, Ledger, LedgerIndex, Transition
from roll.run import ledger_index as index_module
from roll.run.ledger_index import PRECISION, Balance, Ends, Problem, ReasonCount, index_path

ENDED = ("trained", "dropped", "failed")
STATES = ("queued", "generating", "scored", "kept", "trained", "dropped", "failed", 'o"dd\\')
REASONS = ("", "", "stale: two versions", "stale: three", "no signal", 'odd "é": \\')


@dataclass
class Model:
    """What a record says, in the plainest way: each sample's way to each byte, copied at every record."""

    ways: dict[str, list[tuple[int, tuple[Transition, ...]]]] = field(default_factory=lambda: defaultdict(list))
    records: dict[str, list[Transition]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, path: Path) -> Model:
        model, offset = cls(), 0
        for line in path.read_bytes().splitlines(keepends=True):
            move = Transition.decode(line)
            ways = model.ways[move.sample]
            way = ways[-1][1] if ways else ()
            if move.state == ROLLED_BACK:
                before = [way for began, way in ways if began < move.info["position"]]
                way = before[-1] if before else ()
            else:
                way = (*way, move)
            ways.append((offset, way))
            model.records[move.sample].append(move)
            offset += len(line)
        return model

    @cached_property
    def finals(self) -> dict[str, tuple[Transition, ...]]:
        """The way of each sample in the lineage."""
        finals = {sample: ways[-1][1] for sample, ways in self.ways.items()}
        return {sample: way for sample, way in finals.items() if way}

    def states(self) -> dict[str, int]:
        return Counter(way[-1].state for way in self.finals.values())

    def balance(self) -> Balance:
        return Balance(self._ends(group), self._ends(self.task_of), tuple(self.problems()))

    def problems(self) -> Iterator[Problem]:
        for sample, way in sorted(self.finals.items(), key=lambda item: (group(item[0]), item[0])):
            ends = sum(move.state in ("trained", "dropped") for move in way)
            if ends > 1:
                yield Problem(sample, f"ended {ends} times")
            elif self.task_of(sample) is None:
                yield Problem(sample, "is of no task")
            elif way[-1].state in ("dropped", "failed") and not way[-1].reason:
                yield Problem(sample, f"{way[-1].state} without a reason")

    def task_of(self, sample: str) -> str | None:
        tasks = [move.info["task"] for move in self.finals[sample] if "task" in move.info]
        return tasks[-1] if tasks else None

    def _ends(self, key: Any) -> Ends:
        members = defaultdict(list)
        for sample, way in self.finals.items():
            if key(sample) is not None:
                members[key(sample)].append(way[-1].state)
        found = Counter(
            next((state for state in ENDED if state in states), "") if all(state in ENDED for state in states) else "open"
            for states in members.values()
        )
        return Ends(**{state: found[state] for state in (*ENDED, "open")})

    def reasons(self) -> list[ReasonCount]:
        times = Counter(
            (move.state, move.reason.split(":")[0].strip())
            for moves in self.records.values()
            for move in moves
            if move.reason and move.state != ROLLED_BACK
        )
        found = []
        for (state, kind), count in times.items():
            now = {
                sample: way[-1].reason
                for sample, way in self.finals.items()
                if (way[-1].state, way[-1].reason.split(":")[0].strip()) == (state, kind)
            }
            tasks = {self.task_of(sample) for sample in now} - {None}
            found.append(ReasonCount(state, kind, len(now), len(tasks), count, min(now.values(), default=kind)))
        return found

    def seconds(self) -> dict[str, list[float]]:
        spent = defaultdict(list)
        for moves in self.records.values():
            for move, after in pairwise(moves):
                if ROLLED_BACK not in (move.state, after.state):
                    spent[move.state].append(max(0.0, after.time_s - move.time_s))
        return spent

    def solve_rates(self) -> dict[str, tuple[float, int, int, float]]:
        scored = defaultdict(list)
        for sample, way in self.finals.items():
            scores = [move for move in way if move.state == "scored"]
            if scores and "reward" in scores[-1].info and self.task_of(sample) is not None:
                scored[self.task_of(sample)].append((scores[-1].info["reward"], group(sample), scores[-1].time_s))
        return {
            task: (
                statistics.mean(r for r, _, _ in found),
                len(found),
                len({g for _, g, _ in found}),
                max(found, key=last)[2],
            )
            for task, found in scored.items()
        }


def last(scored: tuple[float, str, float]) -> float:
    return scored[2]


def group(sample: str) -> str:
    return sample.rsplit(".", 1)[0] if "." in sample else sample


def nearest_rank(values: list[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


def check(path: Path, index: LedgerIndex) -> None:
    """Everything that can be asked, against the model."""
    model = Model.of(path)
    assert index.states() == model.states() == Counter(move.state for move in Ledger.lineage(path).values())
    assert index.undone() == len(model.ways) - len(model.finals)
    assert index.span() == (
        min((way[0].time_s for way in model.finals.values()), default=0.0),
        max((moves[-1].time_s for moves in model.records.values() if moves[-1].state != ROLLED_BACK), default=0.0),
    )
    assert index.balance() == model.balance()
    assert sorted(index.reasons(), key=str) == sorted(model.reasons(), key=str)
    check_stages(index, model.seconds())
    rates = {rate.task: (rate.solve_rate, rate.samples, rate.visits, rate.last_visit_s) for rate in index.solve_rates()}
    assert {task: pytest.approx(rate) for task, rate in model.solve_rates().items()} == rates
    for sample, moves in model.records.items():
        story = index.sample(sample)
        assert [step.transition for step in story.steps] == moves
        way = model.ways[sample][-1][1]
        assert [step.transition for step in story.steps if step.counts] == list(way)
        assert (story.state, story.reason) == ((way[-1].state, way[-1].reason) if way else (None, ""))
    check_tasks(index, model)


def check_stages(index: LedgerIndex, seconds: dict[str, list[float]]) -> None:
    stages = {stage.state: stage for stage in index.stages()}
    assert stages.keys() == seconds.keys()
    for state, values in seconds.items():
        stage = stages[state]
        assert stage.times == len(values)
        assert stage.max_s == max(values)
        assert stage.total_s == pytest.approx(sum(values))
        assert stage.mean_s == pytest.approx(statistics.mean(values))
        assert stage.p50_s == pytest.approx(nearest_rank(values, 0.5), rel=PRECISION * 1.0001, abs=0)
        assert stage.p99_s == pytest.approx(nearest_rank(values, 0.99), rel=PRECISION * 1.0001, abs=0)


def check_tasks(index: LedgerIndex, model: Model) -> None:
    """Every record of a sample belongs to the task that it was last queued for, on the way that it then was on."""
    moves: dict[str, list[Transition]] = defaultdict(list)
    for sample, records in model.records.items():
        before: tuple[Transition, ...] = ()
        for move, (_, way) in zip(records, model.ways[sample], strict=True):
            tasks = [each.info["task"] for each in (before if move.state == ROLLED_BACK else way) if "task" in each.info]
            if tasks:
                moves[tasks[-1]].append(move)
            before = way
    for task, expected in moves.items():
        attempts = index.task(task)
        assert sorted(str(step.transition) for each in attempts for step in each.steps) == sorted(map(str, expected))
        finals = {sample for sample, way in model.finals.items() if any(move.info.get("task") == task for move in way)}
        assert {attempt.sample for attempt in attempts if attempt.state is not None} == finals


SAMPLES = ("0.0", "0.1", "1.0", "2.0", 'o"d.0', "lone")
SECONDS = (-0.5, 0.0, 0.001, 1.0, 3.0, 1000.0)
TASKS = ("a", "b", 'é"c', None)
REWARDS = (0.0, 0.5, 1, -1e-7, None)
BLOCKS = (100, 300, 1000, 2**20)

moves = st.tuples(st.just("move"), *map(st.sampled_from, (SAMPLES, STATES, REASONS, SECONDS, TASKS, REWARDS)))
histories = st.lists(
    moves
    | moves
    | moves
    | st.tuples(st.just("checkpoint"))
    | st.tuples(st.just("roll_back"), st.integers(0, 5))
    | st.tuples(st.just("kill"), st.floats(0, 1))
    | st.tuples(st.just("ask"), st.sampled_from(BLOCKS)),
    max_size=30,
)


def long_history(random: Random) -> Iterator[tuple[Any, ...]]:
    for _ in range(200):
        kind = random.choices(["move", "checkpoint", "roll_back", "kill", "ask"], [90, 4, 3, 1, 4])[0]
        if kind == "move":
            yield kind, *map(random.choice, (SAMPLES, STATES, REASONS, SECONDS, TASKS, REWARDS))
        else:
            arguments = {"roll_back": random.randrange(6), "kill": random.random(), "ask": random.choice(BLOCKS)}
            yield (kind, arguments[kind]) if kind in arguments else (kind,)


@contextmanager
def ledger_path() -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        yield Path(directory) / "ledger.log"


def transition(sample: str, state: str, reason: str, time_s: float, task: str | None, reward: float | None) -> Transition:
    info: dict[str, Any] = {"queued": {"task": task, "group": 1}, "scored": {"reward": reward}}.get(state, {})
    info = {key: value for key, value in info.items() if value is not None}
    if task == "b":
        info = dict(reversed(info.items()))
    return Transition(sample, state, reason, time_s, info)


def play(history: Iterable[tuple[Any, ...]]) -> None:
    """Live through a history and, whenever it says so, ask everything."""
    with ledger_path() as path:
        ledger = Ledger.open(path)
        now, checkpoints = 1000.0, [0]
        for kind, *arguments in [*history, ("ask", 2**20)]:
            if kind == "move":
                sample, state, reason, seconds, task, reward = arguments
                now += seconds
                ledger.append(transition(sample, state, reason, now, task, reward))
            elif kind == "checkpoint":
                checkpoints.append(ledger.position)
            elif kind == "roll_back":
                ledger.roll_back(checkpoints[arguments[0] % len(checkpoints)], step=0)
            elif kind == "kill":
                ledger.close()
                os.truncate(path, int(path.stat().st_size * arguments[0]))
                ledger = Ledger.open(path)
                checkpoints = [position for position in checkpoints if position <= ledger.position]
            else:
                ledger.flush()
                with patch.object(index_module, "BLOCK_BYTES", arguments[0]), LedgerIndex.open(path) as index:
                    check(path, index)
        ledger.close()


@settings(max_examples=25, deadline=None)
@given(histories)
def test_after_any_history_it_is_what_plain_python_makes_of_the_record(history: list[tuple[Any, ...]]) -> None:
    play(history)


@pytest.mark.parametrize("seed", range(6))
def test_after_a_long_history_it_is_what_plain_python_makes_of_the_record(seed: int) -> None:
    play(long_history(Random(seed)))


def lives(count: int, start: int = 0) -> list[Transition]:
    states = ("queued", "generating", "scored", "trained")
    return [
        Transition(f"{number // 4}.{number % 4}", state, time_s=number + 0.1, info={"task": f"t{number % 7}"})
        for number in range(start, start + count)
        for state in states
    ]


def write(path: Path, records: list[Transition]) -> None:
    with Ledger.open(path) as ledger:
        ledger.append_many(records)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.log"
    write(path, lives(60))
    return path


def asked(path: Path) -> LedgerIndex:
    with LedgerIndex.open(path) as index:
        check(path, index)
    return index


def test_a_half_written_tail_is_left_for_later(path: Path) -> None:
    whole = path.read_bytes()
    for cut in (1, 30, 100):
        path.write_bytes(whole[:-cut])
        with LedgerIndex.open(path) as index:
            assert sum(index.states().values()) == 60
            assert index.states()["trained"] < 60
    path.write_bytes(whole)
    assert asked(path)


def test_nothing_new_is_not_read_again(path: Path) -> None:
    asked(path)
    with patch.object(index_module, "_Block", side_effect=AssertionError):
        asked(path)


def test_only_what_is_new_is_read(path: Path) -> None:
    asked(path)
    size = path.stat().st_size
    write(path, lives(10, start=500))
    taken = []
    real = index_module._Block.take

    def take(block: Any, start: int, lines: list[bytes]) -> None:
        taken.append((start, len(lines)))
        real(block, start, lines)

    with patch.object(index_module._Block, "take", take):
        asked(path)
    assert taken == [(size, 40)]


@pytest.mark.parametrize("damage", ["deleted", "garbage", "empty", "cut", "other program's", "older", "journal"])
def test_a_damaged_index_is_made_anew(path: Path, damage: str) -> None:
    asked(path)
    file = index_path(path)
    if damage == "deleted":
        file.unlink()
    elif damage in ("garbage", "empty"):
        file.write_bytes(b"no database" * 500 if damage == "garbage" else b"")
    elif damage == "cut":
        os.truncate(file, 5000)
    elif damage == "journal":
        Path(f"{file}-journal").write_bytes(b"torn")
    else:
        with closing(sqlite3.connect(file, isolation_level=None)) as database:
            database.execute("DROP TABLE samples" if damage == "older" else "DROP TABLE stages")
            database.execute("PRAGMA user_version = 0")
    asked(path)


def test_another_record_makes_it_anew(path: Path) -> None:
    asked(path)
    path.unlink()
    write(path, lives(3))
    asked(path)
    path.unlink()
    write(path, lives(90, start=1000))
    asked(path)


def test_a_record_that_lost_its_end_and_grew_again_makes_it_anew(path: Path) -> None:
    """As after a power cut: the beginning is the same, and far longer than what is compared of it."""
    asked(path)
    assert path.stat().st_size > 3 * index_module._CHECKED_BYTES
    os.truncate(path, path.stat().st_size - 500)
    write(path, lives(20, start=700))
    asked(path)


def test_a_folder_that_cannot_be_written_has_a_temporary_one(path: Path) -> None:
    def connect(name: str, **options: Any) -> sqlite3.Connection:
        if name:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return real(name, **options)

    real = sqlite3.connect
    with patch.object(index_module.sqlite3, "connect", connect):
        asked(path)
    assert not index_path(path).exists()


def test_one_that_is_locked_for_too_long_is_the_users_to_wait_for(path: Path) -> None:
    asked(path)
    with closing(sqlite3.connect(index_path(path), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with (
            patch.object(index_module, "_WAIT_S", 0.05),
            pytest.raises(UserError, match="by another process: ask again later"),
        ):
            LedgerIndex.open(path)
    asked(path)


def test_a_disk_that_takes_no_index_at_all_is_an_error(path: Path) -> None:
    with (
        patch.object(index_module.sqlite3, "connect", side_effect=sqlite3.OperationalError("disk is full")),
        pytest.raises(RunError, match=r"cannot make an index of .*: disk is full"),
    ):
        LedgerIndex.open(path)


def test_a_corrupt_record_is_refused_and_leaves_the_index_as_it_was(path: Path) -> None:
    asked(path)
    size = path.stat().st_size
    write(path, lives(10, start=500))
    content = bytearray(path.read_bytes())
    content[size + 250] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="corrupt"):
        LedgerIndex.open(path)
    os.truncate(path, size)
    asked(path)


def test_no_record_is_the_users_error_and_makes_no_index(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        LedgerIndex.open(tmp_path / "ledger.log")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_record_has_empty_answers(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    path.touch()
    with LedgerIndex.open(path, progress=lambda done, size: pytest.fail("nothing to read")) as index:
        assert index.states() == {}
        assert index.span() == (0.0, 0.0)
        assert index.balance() == Balance(Ends(0, 0, 0, 0), Ends(0, 0, 0, 0), ())
        assert index.reasons() == index.stages() == index.solve_rates() == []


def test_progress_is_told_up_to_the_end(path: Path) -> None:
    told: list[tuple[int, int]] = []
    with patch.object(index_module, "BLOCK_BYTES", 6_000):
        LedgerIndex.open(path, lambda done, size: told.append((done, size))).close()
    size = path.stat().st_size
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == (size, size)


def test_names_that_are_near_are_proposed(path: Path) -> None:
    with LedgerIndex.open(path) as index:
        with pytest.raises(UserError, match=r"is of a task 't33'; did you mean 't3'"):
            index.task("t33")
        with pytest.raises(UserError, match=r"no sample '3,1'; did you mean '3.1'"):
            index.sample("3,1")
        with pytest.raises(UserError, match=r"of a task 'zzz'$"):
            index.task("zzz")


def test_text_that_no_database_holds_is_stored_with_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("1.0", "queued", "half \ud800", info={"task": "half \ud800"}))
        ledger.roll_back(0, step=0)
        ledger.append(Transition("1.0", "queued", "half \ud800", info={"task": "half \ud800"}))
    with LedgerIndex.open(path) as index:
        assert [(attempt.sample, attempt.reason) for attempt in index.task("half ?")] == [("1.0", "half ?")]


def test_any_value_is_a_task(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(path, [Transition("1.0", "queued", info={"task": 7}), Transition("2.0", "queued", info={"task": ""})])
    with LedgerIndex.open(path) as index:
        assert [attempt.sample for attempt in index.task("7")] == ["1.0"]
        assert [attempt.sample for attempt in index.task("")] == ["2.0"]
        assert index.balance().problems == ()


def test_times_that_are_unknown_are_in_no_stage(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(
        path, [Transition("1.0", state, time_s=s) for state, s in (("queued", 1.0), ("kept", math.nan), ("trained", 2.0))]
    )
    with LedgerIndex.open(path) as index:
        assert index.stages() == []
        assert index.states() == {"trained": 1}


def test_a_sample_that_is_done_again_for_another_task_is_an_attempt_at_both(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        ledger.append(Transition("1.0", "queued", time_s=1, info={"task": "first"}))
        ledger.append(Transition("1.0", "trained", time_s=2))
        ledger.roll_back(0, step=0)
        ledger.append(Transition("1.0", "queued", time_s=3, info={"task": "second"}))
        ledger.append(Transition("1.0", "trained", time_s=4))
    with LedgerIndex.open(path) as index:
        (first,), (second,) = index.task("first"), index.task("second")
        assert [step.transition.state for step in first.steps] == ["queued", "trained", ROLLED_BACK]
        assert first.state is None
        assert [step.counts for step in second.steps] == [True, True]
        assert index.balance() == Balance(Ends(1, 0, 0, 0), Ends(1, 0, 0, 0), ())


def test_trained_twice_is_a_problem_unless_it_was_undone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger.open(path) as ledger:
        for sample in ("1.0", "2.0"):
            ledger.append(Transition(sample, "queued", info={"task": "t"}))
        position = ledger.position
        ledger.append(Transition("1.0", "trained"))
        ledger.roll_back(position, step=1)
        for sample in ("1.0", "2.0", "2.0"):
            ledger.append(Transition(sample, "trained"))
    with LedgerIndex.open(path) as index:
        assert index.balance().problems == (Problem("2.0", "ended 2 times"),)


ASK = """
import sys, pathlib
from roll.run import ledger_index
ledger_index.BLOCK_BYTES = 10_000
with ledger_index.LedgerIndex.open(pathlib.Path(sys.argv[1])) as index:
    print(index.states(), index.balance(), index.reasons(), index.stages(), index.solve_rates())
"""


def test_processes_that_ask_at_once_get_the_same_answers_though_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    write(path, lives(2000))
    with ExitStack() as stack:
        asking = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", ASK, str(path)], stdout=subprocess.PIPE))
            for _ in range(3)
        ]
        deadline = time.monotonic() + 30
        while not index_path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        asking[0].kill()
        said = [process.communicate(timeout=60)[0].decode() for process in asking]
    assert [process.returncode for process in asking[1:]] == [0, 0]
    assert said[1] == said[2]
    assert said[1].startswith("{'trained': 2000}")
    with LedgerIndex.open(path) as index:
        assert index.states() == {"trained": 2000}
        assert index.balance() == Model.of(path).balance()


def test_asking_while_the_run_writes(path: Path) -> None:
    ledger = Ledger.open(path)
    done = threading.Event()

    def run() -> None:
        for start in range(1000, 3000, 10):
            ledger.append_many(lives(10, start))
            ledger.flush()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    samples = 0
    while not done.is_set():
        with LedgerIndex.open(path) as index:
            now = sum(index.states().values())
            assert now >= samples
            samples = now
    thread.join(30)
    ledger.close()
    with LedgerIndex.open(path) as index:
        assert index.states() == {"trained": 2060}
