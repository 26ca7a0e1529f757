"""Repairing: whatever is done to a run's files, they can be read again, and what was lost is said."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import RunError, UserError
from roll.ledger.log import gap, is_gap
from roll.ledger.log_repair import CheckpointMark, repair_log
from roll.run import Checkpoints, Ledger, LedgerIndex, Metrics, RunFolder, Transition, read_samples, write_samples
from roll.run.history import History
from roll.run.repair import Repair, repair
from roll.run.trace import Trace

# Ledgers


def _life(sample: str, task: str, end: str) -> list[Transition]:
    way = ["queued", "generating", "scoring", "scored", *(["kept"] if end == "trained" else []), end]
    reason = "no signal: all rewards equal" if end == "dropped" else ""
    infos = {"queued": {"task": task}, "scored": {"reward": 1.0}}
    return [Transition(sample, state, reason if state == end else "", 1.5, infos.get(state, {})) for state in way]


def write_run(path: Path) -> CheckpointMark:
    """A run that was killed once, went back to its checkpoint, saved again and was killed again: the newest place, with
    two samples under way."""
    with Ledger.open(path) as ledger:
        for group in range(6):
            for number in range(2):
                ledger.append_many(_life(f"{group}.{number}", f"task-{group}", "trained" if group % 2 else "dropped"))
        ledger.flush()
        first = ledger.position
        ledger.append_many(_life("6.0", "task-6", "trained"))
        ledger.roll_back(first, 1)
        for group in (6, 7):
            for number in range(2):
                ledger.append_many(_life(f"{group}.{number}", f"task-{group}", "trained"))
        for sample in ("8.0", "8.1"):
            ledger.append_many(_life(sample, "task-8", "trained")[:4])
        place = CheckpointMark(mark=ledger.mark(), position=ledger.position, in_flight={"8.0": "task-8", "8.1": "task-8"})
        for number in range(2):
            ledger.append_many(_life(f"8.{number}", "task-8", "trained")[4:])
            ledger.append_many(_life(f"9.{number}", "task-9", "trained")[: 2 + number])
    return place


def finish(path: Path, place: CheckpointMark) -> None:
    """What a run does that continues from the place, and ends."""
    with Ledger.open(path) as ledger:
        assert ledger.truncated_bytes == 0
        ledger.roll_back(place.position, 2, place.mark)
        for sample in place.in_flight:
            ledger.append_many(_life(sample, place.in_flight[sample], "trained")[4:])


def assert_balances(path: Path) -> dict[str, str]:
    with LedgerIndex.open(path) as index:
        balance = index.balance()
    path.with_suffix(".sqlite").unlink()
    assert balance.problems == ()
    assert balance.groups.open == balance.tasks.open == 0
    return {sample: last.state for sample, last in Ledger.lineage(path).items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, CheckpointMark]:
    path = tmp_path_factory.mktemp("whole") / "ledger.log"
    place = write_run(path)
    return path.read_bytes(), place


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


Damage = tuple[str, float, float]
damages = st.lists(
    st.tuples(
        st.sampled_from(["flip", "truncate", "delete", "insert", "zeros", "drop line", "repeat line"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
    ),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, some: list[Damage]) -> bytes:
    for kind, where, much in some:
        at = int(where * len(content))
        length = 1 + int(much * min(300, max(len(content) - at, 1)))
        if kind == "flip" and content:
            content = flipped(content, at, int(much * 8))
        elif kind == "truncate":
            content = content[:at]
        elif kind == "delete":
            content = content[:at] + content[at + length :]
        elif kind == "insert":
            content = content[:at] + random.Random(at).randbytes(length) + content[at:]
        elif kind == "zeros":
            content = content[:at] + bytes(len(content[at : at + length])) + content[at + length :]
        else:
            lines = content.splitlines(keepends=True)
            number = int(where * len(lines))
            lines[number : number + 1] = [] if kind == "drop line" else lines[number : number + 1] * 2
            content = b"".join(lines)
    return content


@given(damages)
@example([("drop line", 0.0, 0.0)])
@example([("delete", 0.0, 0.9), ("insert", 0.1, 0.1)])
@example([("truncate", 0.0, 0.0)])
@example([("truncate", 0.5, 0.0)])
@example([("delete", 0.92578125, 0.5)])  # across the place of the checkpoint
@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_done_to_a_ledger_the_run_continues_and_it_balances(
    tmp_path: Path, whole: tuple[bytes, CheckpointMark], some: list[Damage]
) -> None:
    content, place = whole
    path = tmp_path / "ledger.log"
    path.write_bytes(damaged(content, some))
    mended = repair_log(path, place)
    mended.write(path)
    again = repair_log(path, place)
    assert not again.cut_bytes, again
    assert not again.gaps, again
    finish(path, place)
    before = assert_balances(path)
    expected = {"8.0": "trained", "8.1": "trained"}
    assert {sample: state for sample, state in before.items() if sample in expected} == expected


def test_every_flipped_bit_costs_no_more_than_its_sample(tmp_path: Path, whole: tuple[bytes, CheckpointMark]) -> None:
    content, place = whole
    path = tmp_path / "ledger.log"
    path.write_bytes(content)
    finish(path, place)
    undamaged = assert_balances(path)
    chance = random.Random(1)
    for at in sorted(chance.sample(range(len(content)), 200)):
        path.write_bytes(flipped(content, at, chance.randrange(8)))
        mended = repair_log(path, place)
        assert len(mended.gaps) + bool(mended.cut_bytes) == 1
        mended.write(path)
        finish(path, place)
        found = assert_balances(path)
        assert {sample: undamaged[sample] for sample in found} == found
        lost_newline = content[at : at + 1] == b"\n"
        assert len(undamaged.keys() - found.keys()) <= 1 + lost_newline
        assert (undamaged.keys() - found.keys()) <= set(mended.samples)


def test_damage_after_the_checkpoint_costs_nothing(tmp_path: Path, whole: tuple[bytes, CheckpointMark]) -> None:
    content, place = whole
    path = tmp_path / "ledger.log"
    path.write_bytes(content)
    finish(path, place)
    undamaged = assert_balances(path)
    for at in range(place.position, len(content), 7):
        for broken in (flipped(content, at, 3), content[:at], content[:at] + b"\0" * 50):
            path.write_bytes(broken)
            mended = repair_log(path, place)
            mended.write(path)
            assert path.read_bytes()[: place.position] == content[: place.position]
            finish(path, place)
            assert assert_balances(path) == undamaged


def test_a_whole_ledger_is_left_alone(tmp_path: Path, whole: tuple[bytes, CheckpointMark]) -> None:
    path = tmp_path / "ledger.log"
    path.write_bytes(whole[0])
    assert repair_log(path, whole[1]).is_empty


def test_readers_pass_over_gaps(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    lines = [transition.encode() for transition in _life("0.0", "a", "trained")]
    path.write_bytes(gap(40) + lines[0] + gap(100) + b"".join(lines[1:]) + gap(32))
    assert [transition.state for transition in Ledger.read(path)][:2] == ["queued", "generating"]
    assert Ledger.lineage(path)["0.0"].state == "trained"
    with Ledger.open(path) as ledger:
        assert ledger.truncated_bytes == 0
        assert ledger.position == path.stat().st_size
        ledger.append(Transition("1.0", "queued", info={"task": "b"}))
    with LedgerIndex.open(path) as index:
        assert index.states() == {"queued": 1, "trained": 1}
        assert [step.transition.state for step in index.sample("0.0").steps][-1] == "trained"
    assert all(len(gap(size)) == size and is_gap(gap(size)) for size in range(32, 200))


# Whole folders


def nobody(state: object) -> dict[str, str]:
    return {}


@pytest.fixture
def run(folder: RunFolder) -> RunFolder:
    """A run of four steps with checkpoints of the second and the fourth."""
    checkpoints = Checkpoints(folder)
    with (
        Ledger.open(folder.ledger_path) as ledger,
        Metrics(folder) as metrics,
        Trace.open(folder) as trace,
    ):
        for step in range(1, 5):
            for transition in _life(f"{step}.0", f"task-{step}", "trained"):
                ledger.append(transition)
                trace.append(transition)
            metrics.log(step, {"reward": step / 4, "loss": float("nan")})
            write_samples(folder, step, [{"sample": f"{step}.{number}", "text": "…\u2028"} for number in range(3)])
            if step % 2 == 0:
                state = {"ledger_mark": ledger.mark(), "ledger_position": ledger.position}
                with checkpoints.saving(step, state) as aside:
                    (aside / "model.bin").write_text(f"weights {step}")
                History(folder).add("saved", step)
    folder.write_summary({"steps": 4})
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_nothing_to_do_is_said(run: RunFolder) -> None:
    before = contents(run.path)
    done = repair(run.path, nobody)
    assert (done.findings, done.backup_folder, done.can_continue) == ([], None, True)
    assert "continues from step 4" in done.next_step
    assert contents(run.path) == before


def test_a_run_in_use_is_not_repaired(run: RunFolder) -> None:
    with run.lock(), pytest.raises(UserError, match="another process"):
        repair(run.path, nobody)


def break_line(name: str, number: int) -> Callable[[Path], None]:
    def break_it(run: Path) -> None:
        lines = (run / name).read_bytes().splitlines(keepends=True)
        lines[number] = b"{" + lines[number][9:]
        (run / name).write_bytes(b"".join(lines))

    return break_it


def drop_line(name: str, number: int) -> Callable[[Path], None]:
    def drop(run: Path) -> None:
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join(lines[:number] + lines[number + 1 :]))

    return drop


def flip_model(run: Path) -> None:
    path = run / "checkpoints" / "step-000004" / "model.bin"
    path.write_bytes(flipped(path.read_bytes(), 3, 0))


BREAKAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "ledger": (break_line("ledger.log", 7), "ledger.log: ", "continues from step 4"),
    "ledger gone": (lambda run: (run / "ledger.log").unlink(), "bytes of records are lost at byte 0", "step 4"),
    "metrics": (break_line("metrics.jsonl", 1), "metrics.jsonl: 1 of 4 lines are damaged (step 2), taken out", "step 4"),
    "metrics bytes": (
        lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\0\n" + (run / "metrics.jsonl").read_bytes()),
        "metrics.jsonl: 1 of 5 lines are damaged, taken out",
        "step 4",
    ),
    "metrics nesting": (
        lambda run: (run / "metrics.jsonl").write_bytes(b"[" * 100_000 + b"\n" + (run / "metrics.jsonl").read_bytes()),
        "metrics.jsonl: 1 of 5 lines are damaged, taken out",
        "step 4",
    ),
    "format": (lambda run: (run / "format.json").write_text("[]"), "format.json: damaged", "step 4"),
    "samples": (break_line("samples/step-000003.jsonl", 2), "samples/step-000003.jsonl: 1 of 3 lines", "step 4"),
    "samples lack a line": (
        drop_line("samples/step-000003.jsonl", 1),
        "samples/step-000003.jsonl: 1 line that the run wrote is not there any more",
        "step 4",
    ),
    "summary": (lambda run: (run / "summary.json").write_text("{"), "summary.json: damaged", "step 4"),
    "summary nesting": (
        lambda run: (run / "summary.json").write_text("[" * 100_000),
        "summary.json: damaged",
        "step 4",
    ),
    "trace": (break_line("trace.json", 5), "trace.json: 1 of ", "step 4"),
    "history": (break_line("history.jsonl", 0), "history.jsonl: 1 of 2 lines", "step 4"),
    "weights": (flip_model, "checkpoints/step-000004: damaged checkpoint (model.bin: its checksum is wrong)", "step 2"),
    "manifest": (
        lambda run: (run / "checkpoints" / "step-000004" / "manifest.json").unlink(),
        "checkpoints/step-000004: damaged checkpoint (manifest.json: it is missing)",
        "step 2",
    ),
}


def assert_whole(folder: RunFolder) -> None:
    assert repair(folder.path, nobody).findings == []
    Metrics.read(folder.metrics_path)
    for step in range(1, 5):
        read_samples(folder, step)
    folder.read_summary()
    json.loads((folder.path / "trace.json").read_bytes())
    latest = Checkpoints(folder).latest()
    assert latest is not None
    latest.verify()
    with Ledger.open(folder.ledger_path) as ledger:
        ledger.roll_back(latest.state["ledger_position"], latest.step, latest.state["ledger_mark"])
    with LedgerIndex.open(folder.ledger_path) as index:
        assert index.balance().problems == ()


@pytest.mark.parametrize("name", BREAKAGES)
def test_damage_is_said_mended_and_kept_aside(run: RunFolder, name: str) -> None:
    break_it, said, next = BREAKAGES[name]
    break_it(run.path)
    before = contents(run.path)
    looked = repair(run.path, nobody, dry_run=True)
    assert contents(run.path) == before
    done = repair(run.path, nobody)
    assert looked.findings == done.findings
    assert len(done.findings) == 1
    assert said in done.findings[0]
    assert next in done.next_step
    assert History(run).read()[-1]["found"] == done.findings
    changed = {path: content for path, content in before.items() if contents(run.path).get(path) != content}
    changed.pop("history.jsonl", None)
    kept = contents(done.backup_folder) if done.backup_folder else {}
    assert all(kept[path] == content for path, content in changed.items())
    assert_whole(run)


def test_errors_about_damage_name_the_command(run: RunFolder) -> None:
    readers: Iterator[tuple[str, Callable[[], object]]] = iter(
        {
            "ledger": lambda: Ledger.open(run.ledger_path),
            "metrics": lambda: Metrics.read(run.metrics_path),
            "samples": lambda: read_samples(run, 3),
            "summary": run.read_summary,
            "weights": lambda: Checkpoints(run).latest().verify(),  # type: ignore[union-attr]
        }.items()
    )
    for name, read in readers:
        BREAKAGES[name][0](run.path)
        with pytest.raises((RunError, UserError), match=f"`roll repair {run.path}`"):
            read()


def test_without_a_checkpoint_left_the_run_cannot_continue(run: RunFolder) -> None:
    for path in run.checkpoints_dir.iterdir():
        (path / "state.json").write_text("{}")
    done: Repair = repair(run.path, nobody)
    assert not done.can_continue
    assert "start over with restart=True" in done.next_step
    assert len(done.findings) == 2


def test_a_run_without_checkpoints_keeps_what_is_whole(run: RunFolder) -> None:
    shutil.rmtree(run.checkpoints_dir)
    run.history_path.unlink()
    break_line("ledger.log", 3)(run.path)
    done = repair(run.path, nobody)
    assert done.can_continue
    assert "starts from the beginning" in done.next_step
    with Ledger.open(run.ledger_path) as ledger:
        ledger.roll_back(0, 0)
    assert Ledger.lineage(run.ledger_path) == {}


def test_settings_that_cannot_be_read_are_not_made_up(run: RunFolder) -> None:
    run.config_path.write_text("seed: [")
    done = repair(run.path, nobody)
    assert not done.can_continue
    assert "config.yaml: cannot be read" in done.findings[0]
    assert "put config.yaml back" in done.next_step
