"""What a summary tells of held-out tasks: what was measured, when, and what it is called."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.errors import UserError
from roll.pipeline.report import PlainReporter, held_out_lines
from roll.pipeline.state import RLVRState, SFTState
from roll.scheduler.estimate import MeanEstimate
from roll.scheduler.evaluate import Evaluation, SetEvaluation


def found(reward: float, binary: bool = True, name: str = "held_out", **more: float) -> Evaluation:
    return Evaluation({name: of_set(reward, binary, name, **more)})


def of_set(reward: float, binary: bool = True, name: str = "held_out", **more: float) -> SetEvaluation:
    passed = {int(of.removeprefix("pass_")): MeanEstimate(value, 0.0, 1.0, 4) for of, value in more.items()}
    mean = MeanEstimate(reward, None, None, 4)
    return SetEvaluation(name, 4, 1, 4, 0, 1.0, 1.0, mean, binary, passed, {}, tokens_mean=3.0)


def told(state: RLVRState | SFTState, **more: Any) -> list[str]:
    return held_out_lines({**state.summary(), "steps": state.step, **more})


def after_steps(*evaluated: tuple[int, Evaluation], steps: int) -> RLVRState:
    state = RLVRState()
    for step, evaluation in evaluated:
        state.step = step
        state.evaluated(evaluation)
    state.step = steps
    return state


def test_a_whole_run_tells_before_and_after() -> None:
    state = after_steps((0, found(0.25)), (10, found(0.5)), (20, found(0.75)), steps=20)
    assert told(state) == ["held-out accuracy 0.250 → 0.750"]
    assert state.summary()["reward_after"] == 0.75


def test_a_stopped_run_does_not_call_an_earlier_evaluation_its_result() -> None:
    state = after_steps((0, found(0.25)), steps=14)
    assert told(state) == ["held-out accuracy 0.250 at step 0, not measured after step 14"]
    summary = state.summary()
    assert summary["reward_after"] is None
    assert (summary["reward_last"], summary["reward_last_step"]) == (0.25, 0)
    assert summary["answers_after"] == []
    state = after_steps((0, found(0.25)), (10, found(0.5)), steps=14)
    assert told(state) == ["held-out accuracy 0.250 → 0.500 at step 10, not measured after step 14"]


def test_a_run_that_was_stopped_does_not_say_that_it_finished(capsys: pytest.CaptureFixture[str]) -> None:
    state = after_steps((0, found(0.25)), steps=14)
    PlainReporter().finished({**state.summary(), "steps": 14, "steps_planned": 20, "stopped": True, "seconds": 3.0})
    said = "stopped after step 14 of 20 in 3 s: held-out accuracy 0.250 at step 0, not measured after step 14\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [(True, True, "accuracy"), (True, False, "reward"), (False, True, "reward"), (False, False, "reward")],
)
def test_it_is_an_accuracy_only_where_every_value_of_both_is_0_or_1(before: bool, after: bool, name: str) -> None:
    state = after_steps((0, found(0.0, before)), (2, found(7.5 if not after else 1.0, after)), steps=2)
    assert told(state)[0].startswith(f"held-out {name} 0.000 → ")
    assert state.summary()["measure"] == name


def test_once_another_value_was_seen_a_mean_of_ones_is_no_accuracy() -> None:
    """A wrong answer may be worth 1."""
    state = after_steps((0, found(7.5, False)), steps=2)
    assert state.evaluated(found(1.0)).name == "held-out reward"
    seen_in_training = RLVRState()
    seen_in_training.saw_other_rewards()
    assert seen_in_training.evaluated(found(0.0)).accuracy is None
    assert seen_in_training.evaluated(found(0.5, name="custom")).accuracy == 0.5, "a set has rewards of its own"


def test_every_set_is_told_before_and_after() -> None:
    before = Evaluation({"easy": of_set(0.5, name="easy", pass_4=0.75), "hard": of_set(3.5, False, "hard")})
    after = Evaluation({"easy": of_set(0.75, name="easy", pass_4=1.0), "hard": of_set(4.5, False, "hard")})
    state = after_steps((0, before), (2, after), steps=2)
    assert told(state) == [
        "held-out reward 2.000 → 2.625",
        "  easy: accuracy 0.500 → 0.750, pass@4 0.750 → 1.000",
        "  hard: reward 3.500 → 4.500",
    ]
    summary = state.summary()
    assert summary["measures"] == {"easy": "accuracy", "hard": "reward"}
    assert summary["sets_after"]["easy"]["pass@4_high"] == 1.0
    state.step = 3
    assert told(state) == ["held-out reward 2.000 → 2.625 at step 2, not measured after step 3"]
    assert state.summary()["sets_after"] == {}


def test_means_over_different_sets_are_not_compared() -> None:
    before, after = (
        found(0.5, name="easy"),
        Evaluation({"easy": of_set(0.6, name="easy"), "hard": of_set(0.1, name="hard")}),
    )
    state = after_steps((0, before), (2, after), steps=2)
    assert told(state) == [
        "held-out accuracy 0.350; before training other sets were evaluated",
        "  easy: accuracy 0.500 → 0.600",
    ]


def test_of_the_runs_own_tasks_what_stands_nowhere_else_is_told() -> None:
    state = after_steps((0, found(0.5, pass_2=0.6)), (2, found(0.75, pass_2=0.8)), steps=2)
    assert told(state) == ["held-out accuracy 0.500 → 0.750", "  pass@2 0.600 → 0.800"]


def test_without_held_out_tasks_nothing_is_told() -> None:
    assert told(RLVRState(step=3)) == []
    assert RLVRState(step=3).summary()["reward_last_step"] is None


def test_supervised_fine_tuning_tells_when_the_loss_was_measured() -> None:
    assert told(SFTState(step=5, loss_before=2.0, loss=1.0, evaluated_step=5)) == ["held-out loss 2.000 → 1.000"]
    stopped = SFTState(step=5, loss_before=2.0, loss=2.0, evaluated_step=0)
    assert told(stopped) == ["held-out loss 2.000 at step 0, not measured after step 5"]
    assert stopped.summary()["loss_after"] is None


def test_a_state_reads_back_equal() -> None:
    state = after_steps((0, found(0.25)), (2, found(0.5, False)), steps=3)
    assert RLVRState.restored(state.to_dict()) == state
    assert RLVRState.restored(RLVRState().to_dict()) == RLVRState()


def test_a_state_of_the_first_version_is_understood() -> None:
    answers = [{"question": "?", "answer": "!", "reward": 1.0}]
    old: dict[str, Any] = {
        "step": 7, "seconds": 3.0, "accuracy_before": 0.1, "accuracy": 0.6, "accuracy_step": 5, "domains_before": {},
        "domains": {}, "parts_before": {"turns": 3.0}, "parts": {"turns": 2.0}, "answers_before": answers, "answers": [],
    }  # fmt: skip
    state = RLVRState.restored(old)
    assert told(state) == ["held-out reward 0.100 → 0.600 at step 5, not measured after step 7"]
    assert state.summary()["answers_before"] == answers
    never = {**old, "accuracy_before": None, "accuracy": None, "accuracy_step": -1}
    assert RLVRState.restored(never).latest is None
    assert RLVRState.restored(never).evaluated_step == -1


def test_a_state_of_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="written by another version of ROLL: its state has colour, which this"):
        RLVRState.restored({"step": 1, "colour": "blue"})
