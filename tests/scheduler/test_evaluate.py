"""Evaluation: held-out tasks, evenly, without touching the run's lineage."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import ToyRunner, go, party, tasks, turns, until

from roll.config.errors import RunError
from roll.config.schema import EvalConfig
from roll.data import Sample, Task
from roll.scheduler.evaluate import Evaluation, Evaluator

Outcome = Callable[[Sample], float | str | Exception]


def evaluate(
    held_out: int, outcome: Outcome, step: int = 0, workers: int = 1, **config: Any
) -> tuple[Evaluation | None, list[Sample]]:
    seen: list[Sample] = []

    def note(sample: Sample) -> float | str | Exception:
        seen.append(sample)
        return outcome(sample)

    async def main() -> Evaluation | None:
        pool = await ToyRunner(note).pool(workers)
        try:
            return await Evaluator(tasks(1, held_out).held_out, pool, EvalConfig(**config)).evaluate(step)
        finally:
            assert not pool.tokens._locations

    return go(main()), sorted(seen, key=lambda sample: int(sample.id.rpartition(".")[2]))


def test_nothing_held_out_is_nothing_to_evaluate() -> None:
    assert evaluate(0, lambda s: 1.0) == (None, [])


@given(held_out=st.integers(1, 12), samples=st.integers(1, 40), workers=st.integers(1, 3))
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_answers_are_spread_evenly_over_the_tasks(held_out: int, samples: int, workers: int) -> None:
    evaluation, seen = evaluate(held_out, lambda s: 1.0, workers=workers, samples=samples)
    assert evaluation is not None
    assert len({sample.id for sample in seen}) == len(seen) == samples
    counts = Counter(sample.task.id for sample in seen)
    assert set(counts) <= {f"h{i}" for i in range(held_out)}
    assert len(counts) == min(held_out, samples)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_every_evaluation_asks_the_same_tasks_with_noise_of_its_own() -> None:
    _, before = evaluate(5, lambda s: 1.0, step=0, samples=7)
    _, after = evaluate(5, lambda s: 1.0, step=9, samples=7)
    assert [s.task.id for s in before] == [s.task.id for s in after]
    assert not {s.id for s in before} & {s.id for s in after}


def test_the_reward_is_the_mean_of_what_could_be_judged() -> None:
    rewards: dict[str, float | str] = {"eval.3.0": 1.0, "eval.3.1": "broken", "eval.3.2": 0.0, "eval.3.3": 0.5}
    evaluation, seen = evaluate(2, lambda s: rewards[s.id], step=3, samples=4, show=3, temperature=0.0)
    assert evaluation is not None
    assert (evaluation.reward, evaluation.failed) == (0.5, 1)
    lengths = [s.log.response_tokens for s in seen if s.state == "scored"]
    assert evaluation.tokens_mean == sum(lengths) / 3
    shown = [(answer.question, answer.answer, answer.reward) for answer in evaluation.answers]
    assert shown == [(s.task.question, f"answer to {s.task.id}", s.reward) for s in (seen[0], seen[2])]
    assert all(s.temperature == 0.0 for s in seen)


@pytest.mark.parametrize(
    ("rewards", "name"),
    [((0.0, 1.0), "accuracy"), ((0.0, 0.0), "accuracy"), ((7.5, 7.5), "reward"), ((1.0, 0.5), "reward"),
     ((-1.0, 1.0), "reward"), ((2.0, 0.0), "reward")],
)  # fmt: skip
def test_a_mean_reward_is_an_accuracy_only_where_every_reward_is_0_or_1(rewards: tuple[float, ...], name: str) -> None:
    evaluation, _ = evaluate(2, lambda s: rewards[int(s.id[-1])], samples=2)
    assert evaluation is not None
    assert str(evaluation).startswith(f"held-out {name} {sum(rewards) / 2:.3f} over 2 answers")
    assert evaluation.accuracy == (sum(rewards) / 2 if name == "accuracy" else None)


def test_an_evaluation_nobody_could_judge_names_the_reason() -> None:
    with pytest.raises(RunError, match="no held-out answer could be judged; the first reason: no grader"):
        evaluate(2, lambda s: "no grader", samples=3)


@pytest.mark.parametrize("after", [*range(8), 20, 40, "judging", "judged"])
def test_a_cancelled_evaluation_leaves_nothing_anywhere(after: int | str) -> None:
    async def main() -> None:
        run = await party(2, 2)
        evaluator = Evaluator(tasks(1, 2).held_out, run.pool, EvalConfig(samples=5))
        call = asyncio.create_task(evaluator.evaluate(0))
        await turns(after if isinstance(after, int) else 60)
        if isinstance(after, str):
            assert len(run.running) == 5
            run.judges[0].gate.clear()
            run.toys[0].finish("eval.0.0", [])
            await until(lambda: run.judges[0].judged)
            if after == "judged":
                run.judges[0].gate.set()
                await until(lambda: run.pool._loads == [2, 2])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await turns(20)
        run.assert_empty()

    go(main())


def test_an_error_that_is_nobodys_sample_ends_the_whole_evaluation() -> None:
    async def main() -> None:
        runner = ToyRunner(dies_second, lambda sample: 0.1 if sample.id == "eval.0.1" else 1000)
        pool = await runner.pool(2)
        with pytest.raises(RunError, match="the engine died"):
            await Evaluator(tasks(1, 2).held_out, pool, EvalConfig(samples=4)).evaluate(0)
        await turns(20)
        assert sorted(runner.cancelled) == ["eval.0.0", "eval.0.2", "eval.0.3"]

    def dies_second(sample: Sample) -> float | Exception:
        return RunError("the engine died") if sample.id == "eval.0.1" else 1.0

    go(main())


def test_held_out_samples_go_before_those_to_train_on() -> None:
    async def main() -> None:
        run = await party(1, max_running=1)
        first = run.start(run.group(0, 1), fifo_key=0)
        await until(lambda: run.running)
        second = run.start(run.group(1, 1), fifo_key=1)
        call = asyncio.create_task(Evaluator(tasks(1, 1).held_out, run.pool, EvalConfig(samples=1)).evaluate(0))
        await asyncio.sleep(1)
        for expected in ("0.0", "eval.0.0", "1.0"):
            await until(lambda expected=expected: run.running == {expected})
            run.answer()
        await asyncio.gather(first, second, call)

    go(main())


def test_an_evaluation_survives_the_death_of_a_worker() -> None:
    async def main() -> None:
        run = await party(1, 2, lambda task, response: 1.0, pace_s=1.0, max_attempts=2)
        evaluator = Evaluator(tasks(1, 2).held_out, run.pool, EvalConfig(samples=6, show=6))
        call = asyncio.create_task(evaluator.evaluate(0))
        await asyncio.sleep(1.5)
        run.kill_worker(0)
        evaluation = await call
        assert evaluation is not None
        assert (evaluation.reward, evaluation.failed) == (1.0, 0)
        assert 0 < len(evaluation.answers) <= 6
        await run.revive_worker(0)
        await asyncio.sleep(60)
        run.assert_empty()

    go(main())


def test_answers_that_died_with_their_worker_are_not_shown() -> None:
    async def main() -> None:
        run = await party(1, 2, lambda task, response: 1.0, max_attempts=1)
        evaluator = Evaluator(tasks(1, 2).held_out, run.pool, EvalConfig(samples=4, show=4))
        call = asyncio.create_task(evaluator.evaluate(0))
        await until(lambda: len(run.running) == 4)
        run.answer("eval.0.0", "eval.0.1")  # one at each worker
        await until(lambda: run.pool._loads == [1, 1])
        run.kill_worker(0)
        run.answer()
        evaluation = await call
        assert evaluation is not None
        assert evaluation.failed == 1

    go(main())


# by domain


def of_domains(sizes: dict[str, int]) -> tuple[Task, ...]:
    return tuple(Task.ask(f"{domain}{i}", "?", domain=domain) for domain, size in sizes.items() for i in range(size))


def evaluate_domains(
    sizes: dict[str, int], outcome: Outcome, by_domain: bool = True, **config: Any
) -> tuple[Evaluation, list[Sample]]:
    seen: list[Sample] = []

    def note(sample: Sample) -> float | str | Exception:
        seen.append(sample)
        return outcome(sample)

    async def main() -> Evaluation | None:
        pool = await ToyRunner(note).pool(1)
        return await Evaluator(of_domains(sizes), pool, EvalConfig(**config), by_domain).evaluate(0)

    evaluation = go(main())
    assert evaluation is not None
    return evaluation, seen


@given(sizes=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), samples=st.integers(4, 40))
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_every_domain_is_asked_as_much_and_counts_as_much(sizes: dict[str, int], samples: int) -> None:
    worth = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.0}
    evaluation, seen = evaluate_domains(sizes, lambda s: worth[s.task.domain], samples=samples)
    asked = Counter(sample.task.domain for sample in seen)
    assert set(asked) == set(sizes)
    assert max(asked.values()) - min(asked.values()) <= 1
    for domain, size in sizes.items():
        tasks_asked = Counter(sample.task.id for sample in seen if sample.task.domain == domain)
        assert len(tasks_asked) == min(size, asked[domain])
        assert max(tasks_asked.values()) - min(tasks_asked.values()) <= 1
    assert {name: score.reward for name, score in evaluation.domains.items()} == {name: worth[name] for name in sizes}
    assert evaluation.reward == pytest.approx(sum(worth[name] for name in sizes) / len(sizes))


def test_labels_alone_are_measured_but_every_task_counts_the_same() -> None:
    evaluation, seen = evaluate_domains({"a": 1, "b": 3}, lambda s: float(s.task.domain == "a"), False, samples=8)
    assert Counter(sample.task.domain for sample in seen) == {"a": 2, "b": 6}
    assert evaluation.reward == 0.25
    assert {name: score.reward for name, score in evaluation.domains.items()} == {"a": 1.0, "b": 0.0}
    assert "\n  a: 1.000 over 2 answers, 0 failed\n  b: 0.000 over 6 answers" in str(evaluation)
    assert evaluate_domains({"a": 3}, lambda s: 1.0, False, samples=3)[0].domains == {}


def test_a_domain_nobody_could_judge_is_left_out_of_the_mean() -> None:
    evaluation, _ = evaluate_domains({"a": 2, "b": 2}, lambda s: 0.5 if s.task.domain == "a" else "broken", samples=4)
    assert (evaluation.reward, evaluation.failed, set(evaluation.domains)) == (0.5, 2, {"a"})


def test_parts_of_rewards_are_told_over_the_answers_that_have_them() -> None:
    def outcome(sample: Sample) -> float | str:
        number = int(sample.id.rpartition(".")[2])
        sample.parts = {"success": float(number == 1)} | ({"format": 1.0} if number < 2 else {})
        return "broken" if number == 3 else 0.5

    evaluation, _ = evaluate(2, outcome, samples=4)
    assert evaluation is not None
    assert evaluation.parts == {"success": pytest.approx(1 / 3), "format": 1.0}
    assert ", success 0.333, format 1.000" in str(evaluation)


# several attempts, and several sets


@given(held_out=st.integers(1, 12), attempts=st.integers(1, 5), samples=st.integers(0, 40))
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_every_task_that_is_asked_is_asked_as_often(held_out: int, attempts: int, samples: int) -> None:
    samples = samples and max(samples, attempts)
    evaluation, seen = evaluate(held_out, lambda s: 1.0, attempts=attempts, samples=samples)
    assert evaluation is not None
    counts = Counter(sample.task.id for sample in seen)
    assert set(counts.values()) == {attempts}
    assert len(counts) == min(held_out, samples // attempts if samples else held_out)
    assert evaluation.sets["held_out"].tasks == len(counts)
    assert len(evaluation.answers) == min(len(counts), 3), "of different tasks"


def test_a_task_of_which_too_few_attempts_were_judged_is_left_out_of_pass_at_k() -> None:
    def outcome(sample: Sample) -> float | str:
        sample.answer = "right"
        return "broken" if sample.id == "eval.0.0" else 1.0 if sample.task.id == "h0" else 0.0

    evaluation, seen = evaluate(2, outcome, attempts=2, pass_at=[1, 2], majority_at=[2], samples=4)
    assert evaluation is not None
    found, whole = evaluation.sets["held_out"], seen[2].task.id
    assert (found.pass_at[1].tasks, found.pass_at[2].tasks, found.majority_at[2].tasks) == (2, 1, 1)
    assert found.pass_at[2].value == found.majority_at[2].value == float(whole == "h0")
    assert ", over 1 tasks" in str(evaluation)


def test_pass_at_k_and_majority_at_k_come_from_the_attempts_of_each_task() -> None:
    worth = {"h0": (1, 1, 0, 0), "h1": (0, 0, 0, 1)}
    said = {"h0": ("a", "a", "b", None), "h1": ("x", "x", "y", "z")}
    made: Counter[str] = Counter()

    def outcome(sample: Sample) -> float:
        number = made[sample.task.id]
        made[sample.task.id] += 1
        sample.answer = said[sample.task.id][number]
        return float(worth[sample.task.id][number])

    evaluation, _ = evaluate(2, outcome, attempts=4, pass_at=[1, 2, 4], majority_at=[4], samples=8)
    assert evaluation is not None
    found = evaluation.sets["held_out"]
    assert found.reward.value == found.pass_at[1].value == pytest.approx(3 / 8)
    assert found.pass_at[2].value == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert found.pass_at[4].value == 1.0
    assert found.majority_at[4].value == pytest.approx(0.5), "a is right, x is wrong"


@pytest.mark.parametrize(("solved_at", "share"), [(1.0, 0.5), (0.5, 1.0), (1.1, 0.0)])
def test_a_task_is_solved_from_a_reward_on(solved_at: float, share: float) -> None:
    """0.1 + 0.2 + 0.7 counts as 1."""
    worth = {"h0": 0.1 + 0.2 + 0.7 - 1e-16, "h1": 0.75}
    config = {"attempts": 1, "pass_at": [1], "solved_at": solved_at, "samples": 2}
    evaluation, _ = evaluate(2, lambda s: worth[s.task.id], **config)
    assert evaluation is not None
    assert evaluation.sets["held_out"].pass_at[1].value == share
    assert evaluation.name == "held-out reward"


def test_sets_are_counted_apart_and_drawn_as_each_says() -> None:
    tasks = [Task.ask(f"{name}/{i}", "?", domain=f"eval/{name}") for name in ("easy", "hard") for i in range(4)]
    labels = {task.id: "odd" if task.id[-1] in "13" else "even" for task in tasks}
    sets = {"easy": {"source": "x", "samples": 6}, "hard": {"source": "y", "temperature": 0.25, "attempts": 2}}
    seen: list[Sample] = []

    def outcome(sample: Sample) -> float:
        seen.append(sample)
        return 1.0 if sample.task.domain == "eval/easy" else 5.0 * (labels[sample.task.id] == "odd")

    async def main() -> Evaluation | None:
        pool = await ToyRunner(outcome).pool(1)
        config = EvalConfig.model_validate({"sets": sets, "samples": 8})
        return await Evaluator(tasks, pool, config, labels=labels).evaluate(7)

    evaluation = go(main())
    assert evaluation is not None
    easy, hard = evaluation.sets["easy"], evaluation.sets["hard"]
    assert (easy.reward.value, easy.measure, easy.samples, easy.tasks) == (1.0, "accuracy", 6, 4)
    assert (hard.reward.value, hard.measure, hard.samples, hard.tasks) == (2.5, "reward", 8, 4)
    assert {sample.task.domain: sample.temperature for sample in seen} == {"eval/easy": 1.0, "eval/hard": 0.25}
    assert {name: score.reward for name, score in hard.domains.items()} == {"even": 0.0, "odd": 5.0}
    assert (evaluation.reward, evaluation.samples, evaluation.accuracy) == (1.75, 14, None)
    assert {sample.id.rsplit(".", 1)[0] for sample in seen} == {"eval.7.easy", "eval.7.hard"}
    told = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert told["sets"]["hard"]["reward"]["value"] == 2.5
    assert told["sets"]["hard"]["domains"]["odd"]["reward"] == 5.0
    assert (told["step"], told["measure"]) == (7, "reward")


def test_a_set_of_which_nothing_could_be_judged_is_named() -> None:
    task = Task.ask("x/1", "?", domain="eval/x")

    async def main() -> None:
        pool = await ToyRunner(lambda sample: "no grader").pool(1)
        config = EvalConfig.model_validate({"sets": {"x": "source"}, "samples": 2})
        with pytest.raises(
            RunError, match=r"no held-out answer of eval\.sets\.x could be judged; the first reason: no gr"
        ):
            await Evaluator([task], pool, config).evaluate(0)

    go(main())
