"""`roll ledger` as a user meets it: its tables, its JSON, and what it says to bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.cli import main
from roll.run import Ledger, RunFolder, Transition

Say = Callable[..., str]


def life(sample: str, task: str, reward: float, begin_s: float, *ends: tuple[str, str]) -> list[Transition]:
    """A sample that waits 1 s, generates for 4 s, and is scored at once."""
    moves = [
        Transition(sample, "queued", time_s=begin_s, info={"task": task, "group": int(sample.split(".")[0])}),
        Transition(sample, "generating", time_s=begin_s + 1),
        Transition(sample, "scored", time_s=begin_s + 5, info={"reward": reward}),
    ]
    return [*moves, *(Transition(sample, state, reason, begin_s + 6) for state, reason in ends)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Group 0 trained; group 1 dropped; group 2 trained, undone and done again; group 3 under way; group 4 undone."""
    folder = RunFolder.create(tmp_path / "run", "seed: 0\n")
    with Ledger.open(folder.ledger_path) as ledger:
        ledger.append_many(life("0.0", "easy", 1.0, 1.7e9, ("kept", ""), ("trained", "")))
        ledger.append_many(life("0.1", "easy", 0.5, 1.7e9, ("kept", ""), ("trained", "")))
        ledger.append_many(life("1.0", "hard", 0.0, 1.7e9 + 10, ("dropped", "no signal: all rewards equal")))
        ledger.append_many(life("1.1", "hard", 0.0, 1.7e9 + 10, ("dropped", "no signal: all rewards equal")))
        position = ledger.position
        ledger.append_many(life("2.0", "easy", 0.0, 1.7e9 + 20, ("trained", "")))
        ledger.append_many(life("4.0", "lost", 1.0, 1.7e9 + 20))
        ledger.roll_back(position, step=1)
        ledger.append_many(life("2.0", "easy", 1.0, 1.7e9 + 30, ("trained", "")))
        ledger.append(Transition("3.0", "queued", time_s=1.7e9 + 40, info={"task": "hard"}))
        ledger.append(Transition("3.0", "failed", "engine died: actor_infer[0]", time_s=1.7e9 + 41))
        ledger.append(Transition("3.0", "queued", "try 2", time_s=1.7e9 + 42, info={"try": 2}))
    return folder.path


@pytest.fixture
def say(run: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """What the command prints, with runs of blanks and lines of tables as one blank."""

    def call(*arguments: str) -> str:
        assert main(["ledger", str(run), *arguments]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return " ".join(out.replace("│", " ").split())

    return call


@pytest.fixture
def answer(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*arguments: str) -> Any:
        assert main(["ledger", str(run), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_the_summary_is_a_screen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 40


def test_the_summary(say: Say) -> None:
    said = say()
    assert said.startswith("reward: number 6 samples, ")
    for part in (
        "(42 s)",
        "trained 3 50.0%",
        "dropped 2 33.3%",
        "queued 1 16.7%",
        "groups: 2 trained, 1 dropped, 0 failed, 1 open",
        "tasks: 1 trained, 0 dropped, 0 failed, 1 open",
        "1 more samples were undone",
        "no signal dropped 2 1 2",
        "generating 7 4 4 4 4",
        "It balances",
    ):
        assert part in said


def test_the_summary_as_json(answer: Callable[..., Any]) -> None:
    summary = answer()["summary"]
    assert summary["samples"] == {"queued": 1, "trained": 3, "dropped": 2}
    assert summary["undone"] == 1
    assert summary["balance"]["groups"] == {"trained": 2, "dropped": 1, "failed": 0, "open": 1}
    assert summary["balance"]["problems"] == []
    assert summary["last_s"] - summary["first_s"] == 42


def test_what_ended_twice_is_said(run: Path, say: Say, answer: Callable[..., Any]) -> None:
    with Ledger.open(run / "ledger.log") as ledger:
        for number in range(8):
            ledger.append(Transition(f"9.{number}", "queued", info={"task": "easy"}))
            ledger.append_many([Transition(f"9.{number}", "trained")] * 2)
    said = say()
    assert "It does not balance: 8 samples break a promise." in said
    assert "sample 9.0 ended 2 times" in said
    assert "and 3 more" in said
    assert len(answer()["summary"]["balance"]["problems"]) == 8


def test_what_became_of_a_task(say: Say, answer: Callable[..., Any]) -> None:
    said = say("--task", "easy")
    assert "task easy: 3 samples in 2 groups, 3 of them count" in said
    assert "0.1 reward 0.5 queued 1 → generating 4 → scored 1 → kept 0 → trained" in said
    assert "trained → rolled_back (back to the checkpoint of step 1) → queued 1" in said
    attempts = answer("--task", "easy")["task"]
    assert [(attempt["group"], attempt["sample"]) for attempt in attempts] == [("0", "0.0"), ("0", "0.1"), ("2", "2.0")]
    assert [step["counts"] for step in attempts[2]["steps"]] == [False] * 5 + [True] * 4
    assert attempts[2]["reward"] == 1.0
    assert "does not count" in say("--task", "lost")


def test_a_samples_story(say: Say) -> None:
    said = say("--sample", "3.0")
    assert "sample 3.0 of group 3" in said
    assert "1 1 failed yes engine died: actor_infer[0]" in said
    assert "try=2" in said
    assert "does not count" in say("--sample", "4.0")


def test_why_samples_were_dropped(answer: Callable[..., Any], say: Say) -> None:
    reasons = {(row["state"], row["reason"]): row for row in answer("--dropped")["dropped"]}
    assert reasons["dropped", "no signal"]["samples"] == 2
    assert reasons["dropped", "no signal"]["example"] == "no signal: all rewards equal"
    assert (reasons["failed", "engine died"]["samples"], reasons["failed", "engine died"]["times"]) == (0, 1)
    assert "engine died failed 0 0 1" in say("--dropped")


def test_which_stage_is_slow(answer: Callable[..., Any]) -> None:
    stages = {row["state"]: row for row in answer("--stages")["stages"]}
    assert list(stages) == ["queued", "generating", "scored", "kept", "failed"]
    assert stages["generating"]["p99_s"] == pytest.approx(4, rel=0.011)
    assert stages["generating"]["total_s"] == 28


def test_solve_rates_the_hardest_first(answer: Callable[..., Any], say: Say) -> None:
    rates = answer("--solve-rates")["solve_rates"]
    assert [(rate["task"], rate["samples"], rate["visits"]) for rate in rates] == [("hard", 2, 1), ("easy", 3, 2)]
    assert rates[1]["solve_rate"] == pytest.approx(2.5 / 3)
    assert rates[1]["last_visit_s"] == 1.7e9 + 35
    assert "2 tasks, mean 0.417; 1 at 0, 0 at 1" in say("--solve-rates")


def test_many_questions_at_once(answer: Callable[..., Any]) -> None:
    assert list(answer("--stages", "--dropped", "--task", "hard")) == ["task", "dropped", "stages"]


def test_names_are_shown_as_they_are(run: Path, say: Say) -> None:
    with Ledger.open(run / "ledger.log") as ledger:
        ledger.append_many(life("7.0", "[red]x[/]", 1.0, 1.7e9, ("dropped", "odd: [/bold]")))
    assert "task [red]x[/]" in say("--task", "[red]x[/]")
    assert "odd: [/bold]" in say("--dropped")


def test_a_ledger_file_of_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(tmp_path / "simulated.log") as ledger:
        ledger.append_many(life("0.0", "t", 1.0, 100.0, ("trained", "")))
    assert main(["ledger", str(tmp_path / "simulated.log"), "--solve-rates"]) == 0
    assert "105 s" in capsys.readouterr().out


def test_a_run_that_has_recorded_nothing_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed: 0\n")
    folder.ledger_path.touch()
    assert main(["ledger", str(folder.path)]) == 0
    assert "Nothing is recorded yet" in capsys.readouterr().out
    for question in ("--dropped", "--stages", "--solve-rates", "--json"):
        assert main(["ledger", str(folder.path), question]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no run in nowhere"),
        (["."], "is not a run's folder"),
        (["run", "--task", "haard"], "is of a task 'haard'; did you mean 'hard'?"),
        (["run", "--sample", "0.5"], "has no sample '0.5'; did you mean '0."),
    ],
)
def test_bad_input_is_the_users_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["ledger", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in " ".join(err.split())
