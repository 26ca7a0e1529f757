"""The live display: what a person sees of a run fits a small terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from roll.cli.display import LiveReporter, print_summary, short
from roll.pipeline.report import HeldOutResult, PlainReporter, Reporter, StepReport
from roll.run.state_latency import StateRow, StateTable

REPORT = StepReport(
    step=7, steps=50, seconds=12.5, seconds_left=3800, measure="reward", value=0.625,
    facts=(("answer length", "812.5 tokens"), ("speed", "15321 tokens/s"), ("groups", "12 kept of 16")),
)  # fmt: skip
STAGES = StateTable(
    (
        StateRow("queued", 1234, 0.41, 2.1),
        StateRow("generating", 2048, 31.25, 14321.0),
        StateRow("paused", 0, 0.0012, 0.0049),
        StateRow("acting", 17, 999.96, 12345.6),
        StateRow("scoring", 3),
        StateRow("scored", 8, 9.999, 4.0),
        StateRow("kept", 40, 2.5, 3.1),
    ),
    waste_share=0.041,
    staleness_mean=0.4,
    staleness_max=2,
)


def shown(*tables: StateTable, steps: int = 50) -> list[str]:
    console = Console(record=True, file=io.StringIO(), width=120)
    with LiveReporter(console) as reporter:
        reporter.started(Path("runs/x"), 50, 0)
        reporter.phase("generating and training")
        for step in range(steps):
            reporter.evaluated(step, HeldOutResult("held-out accuracy", 0.5))
            reporter.stepped(REPORT)
        for table in tables:
            reporter.sample_states(table)
    return [line.rstrip() for line in console.export_text().splitlines()]


def cells(lines: list[str], name: str) -> list[str]:
    (row,) = (line.strip("│ ").split() for line in lines if line.strip("│ ").startswith(name))
    return row[len(name.split()) :]


def test_the_stages_of_samples_are_a_table() -> None:
    lines = shown(StateTable(), STAGES)
    assert cells(lines, "stage") == ["queued", "generating", "paused", "acting", "scoring", "scored", "kept"]
    assert cells(lines, "samples") == ["1234", "2048", "0", "17", "3", "8", "40"]
    assert cells(lines, "mean s") == ["0.41", "31.2", "0", "1000", "·", "10.0", "2.50"]
    assert cells(lines, "p99 s") == ["2.10", "14321", "0", "12346", "·", "4.00", "3.10"]
    assert " ".join(cells(lines, "rollout")) == "4.1% of generated tokens discarded, staleness 0.40 (max 2)"


def test_the_panel_fits_88_columns_and_24_lines() -> None:
    lines = [line for line in shown(STAGES) if line]
    assert {len(line) for line in lines} == {88}
    assert len(lines) <= 23, "and a line for the prompt"
    assert lines[0].startswith("╭─ roll · runs/x")
    assert lines[-1].startswith("╰──")


def test_what_is_not_known_is_not_shown() -> None:
    text = "\n".join(shown())
    assert "rollout" not in text
    assert "mean s" not in text
    assert cells(shown(StateTable(waste_share=0.5)), "rollout")[:4] == ["50.0%", "of", "generated", "tokens"]
    assert cells(shown(StateTable(staleness_mean=1.0)), "rollout") == ["staleness", "1.00"]


def test_columns_of_the_table_stand_under_their_names() -> None:
    lines = shown(STAGES)
    (names,) = (line for line in lines if "generating  paused" in line)
    (counts,) = (line for line in lines if "samples" in line)
    for name, count in (("queued", "1234"), ("generating", "2048"), ("kept", "40")):
        assert names.index(name) + len(name) == counts.index(count) + len(count)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "·"), (0, "0"), (0.0049, "0"), (0.005, "0.01"), (9.994, "9.99"), (9.996, "10.0"), (999.4, "999.4"),
     (999.6, "1000"), (54321.4, "54321")],
)  # fmt: skip
def test_seconds_take_five_characters(seconds: float | None, text: str) -> None:
    assert short(seconds) == text


def test_plain_lines_stay_one_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    reporter: Reporter = PlainReporter()
    reporter.stepped(REPORT)
    reporter.sample_states(STAGES)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 7/50  reward 0.625  answer length 812.5 tokens")
    reporter.evaluated(3, HeldOutResult("held-out loss", 0.25, "and more"))
    assert capsys.readouterr().out == "step 3: held-out loss 0.250, and more\n"


def test_of_episodes_the_summary_tells_what_they_tell(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"parts_before": {"success": 0.1, "turns": 12.0}, "parts_after": {"success": 0.7, "turns": 5.0}}
    summary = {"steps": 9, "seconds": 3.0, "reward_before": -0.5, "reward_after": 0.6, **parts}
    PlainReporter().finished(summary)
    assert "held-out reward -0.500 -> 0.600: success 0.100 -> 0.700: turns 12.000 -> 5.000" in capsys.readouterr().out


def test_answers_to_other_questions_are_not_shown_beside_each_other() -> None:
    """A run that was resumed with other sets to evaluate on."""
    console = Console(record=True, file=io.StringIO(), width=200)
    before = [{"question": "old?", "answer": "a", "reward": 1.0}, {"question": "same?", "answer": "b", "reward": 1.0}]
    after = [{**answer, "set": name} for name, answer in zip(("x", "held_out"), before, strict=True)]
    after[0]["question"] = "new?"
    told = {"measure": "reward", "measures": {"x": "reward", "held_out": "accuracy"}}
    summary = {"run": "x", "steps": 2, "seconds": 3, "curve": None, "answers_before": before, "answers_after": after}
    print_summary(console, summary | told)
    text = console.export_text()
    assert "same?" in text
    assert text.count("✓ b") == 2
    assert "old?" not in text
    assert "new?" not in text


@pytest.mark.parametrize("written", [True, False])
def test_what_to_try_next_names_tensorboard_only_where_there_are_events(tmp_path: Path, written: bool) -> None:
    if written:
        (tmp_path / "tensorboard").mkdir()
    console = Console(record=True, file=io.StringIO(), width=400)
    print_summary(console, {"run": str(tmp_path), "steps": 2, "seconds": 3, "curve": str(tmp_path / "curve.png")})
    text = console.export_text()
    assert f"roll eval {tmp_path}" in text
    assert (f"tensorboard --logdir {tmp_path}/tensorboard" in text) == written
    assert ("tensorboard" in text) == written


def test_commands_to_try_next_can_be_pasted_where_a_path_has_spaces(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    (run / "tensorboard").mkdir(parents=True)
    console = Console(record=True, file=io.StringIO(), width=400)
    print_summary(console, {"run": str(run), "steps": 2, "seconds": 3, "curve": None})
    text = console.export_text()
    assert f"roll eval '{run}'" in text
    assert f"tensorboard --logdir '{run}/tensorboard'" in text


@pytest.mark.parametrize(
    ("measure", "reward", "shown"),
    [("accuracy", 1.0, "✓ said"), ("accuracy", 0.0, "✗ said"), ("reward", 7.5, "[7.5] said"), ("reward", 1.0, "[1] said"),
     ("reward", 0.0, "[0] said"), ("reward", -0.25, "[-0.25] said")],
)  # fmt: skip
def test_answers_have_a_mark_only_where_rewards_say_right_or_wrong(measure: str, reward: float, shown: str) -> None:
    console = Console(record=True, file=io.StringIO(), width=200)
    answers = [{"question": "?", "answer": "said\n", "reward": reward}]
    told = {"reward_before": reward, "reward_after": reward, "measure": measure}
    summary = {"run": "x", "steps": 2, "seconds": 3, "curve": None, "answers_before": answers, "answers_after": answers}
    print_summary(console, summary | told)
    text = console.export_text()
    assert text.count(shown) == 2
    assert f"held-out {measure} {reward:.3f} → {reward:.3f}" in text
    assert ("✓" in text or "✗" in text) == (measure == "accuracy")
