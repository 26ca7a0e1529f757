"""One sample's way to its verdict, and every way it can fail on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from toys import (
    END,
    TOKENIZER,
    Moves,
    ToyEngine,
    ToyRewards,
    engines,
    failure,
    go,
    rewards,
    right,
    spoken,
    turns,
    until,
)

from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data import Message, Response, Sample, Task
from roll.engine.request import Sampling, seed_of
from roll.model.character import character_tokenizer
from roll.model.chat import ChatRenderer
from roll.rollout.door import EngineDoor
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.runner import SampleRunner, run_all, training_sampling

SAMPLING = Sampling(max_new_tokens=8, stop_ids=(END,), stop=("!",), top_k=5, top_p=0.9)


class Setting:
    """A runner over one toy engine, and the ledger of its moves."""

    def __init__(
        self, runner: SampleRunner, toy: ToyEngine, judges: list[ToyRewards], life: Lifecycle, moves: Moves
    ) -> None:
        self.runner, self.toy, self.judges, self.moves, self._life = runner, toy, judges, moves, life

    def sample(self, task: Task | None = None, id: str = "4.2", temperature: float = 0.7) -> Sample:
        sample = Sample(id, task or Task.ask("t", "2+2", "4"), 4, temperature)
        self._life.move(sample, "queued")
        return sample


async def setting(
    judge: Callable[[Task, Response], float] = right, deadline_s: float = 20, says: str | None = "4"
) -> Setting:
    cluster, (toy,) = await engines(1)
    if says is not None:
        toy.says = lambda request: spoken(says)
    moves: Any = Moves()
    life = Lifecycle(moves)
    renderer = ChatRenderer(TOKENIZER, (END,))
    options = {"sampling": SAMPLING, "deadline_s": deadline_s, "seed": 11}
    judges, made = await rewards(judge)
    runner = SampleRunner(EngineDoor(cluster, "tests"), judges, renderer, life, **options)  # type: ignore[arg-type]
    return Setting(runner, toy, made, life, moves)


def test_a_sample_is_generated_judged_and_recorded() -> None:
    async def main() -> None:
        run = await setting()
        sample = run.sample()
        await run.runner.run(sample, 0)
        assert run.moves.of("4.2") == ["queued", "generating", "scoring", "scored"]
        assert (sample.state, sample.reward, sample.parts) == ("scored", 1.0, {"length": 2.0})
        assert sample.response == Response("4", 2, "stop")
        prompt = TOKENIZER("<|user|>2+2<|end|><|assistant|>")["input_ids"]
        assert sample.log.ids.tolist() == prompt + spoken("4")
        assert (sample.tokens, sample.response_tokens, sample.finish) == (len(prompt) + 2, 2, "stop")
        assert sample.log.loss_mask.tolist() == [False] * len(prompt) + [True, True]
        assert sample.log.behaviour.tolist() == [0.0] * len(prompt) + [-0.5, -0.5]
        assert sample.log.versions.tolist() == [-1] * len(prompt) + [3, 3]
        assert run.moves.records[2].info == {"tokens": 2, "finish": "stop"}
        assert run.moves.records[3].info == {"reward": 1.0}

    go(main())


def test_noise_comes_from_the_runs_seed_and_the_samples_id_and_nothing_else_changes() -> None:
    async def main() -> None:
        run = await setting(says=None)
        for id in ("4.2", "4.3"):
            call = asyncio.create_task(run.runner.run(run.sample(id=id, temperature=0.3), 0))
            await turns()
            asked = run.toy.running[id]
            assert asked.sampling.seed == seed_of(11, id)
            assert asked.sampling.temperature == 0.3
            rest = (asked.sampling.max_new_tokens, asked.sampling.top_k, asked.sampling.top_p, asked.sampling.stop)
            assert rest == (8, 5, 0.9, ("!",))
            run.toy.finish(id, [END])
            await call

    go(main())


def test_a_sample_that_generates_too_long_fails_and_is_aborted() -> None:
    async def main() -> None:
        run = await setting(says=None, deadline_s=0.02)
        sample = run.sample()
        await run.runner.run(sample, 0)
        assert (sample.state, sample.reason) == ("failed", "generation took more than 0.02 s")
        assert run.moves.of("4.2") == ["queued", "generating", "failed"]
        assert run.toy.aborted == ["4.2"]
        assert sample.response is None

    go(main())


def test_a_request_the_engine_refuses_fails_its_sample_by_name() -> None:
    async def main() -> None:
        run = await setting()
        run.toy.context = 5
        sample = run.sample()
        await run.runner.run(sample, 0)
        assert (sample.state, sample.reason) == ("failed", "request '4.2' is too long")

    go(main())


def test_an_answer_that_cannot_be_judged_fails_with_the_graders_reason() -> None:
    def broken(task: Task, response: Response) -> float:
        raise failure("KeyError: 'answer' (mine.py:3)")

    async def main() -> None:
        run = await setting(judge=broken)
        sample = run.sample()
        await run.runner.run(sample, 0)
        assert (sample.state, sample.reason) == ("failed", "reward raised: KeyError: 'answer' (mine.py:3)")
        assert run.moves.of("4.2") == ["queued", "generating", "scoring", "failed"]
        assert sample.response is not None
        assert sample.reward == 0.0

    go(main())


def test_an_empty_response_is_judged_too() -> None:
    async def main() -> None:
        run = await setting(says=None)
        sample = run.sample(Task.ask("t", "say nothing", ""))
        call = asyncio.create_task(run.runner.run(sample, 0))
        await turns()
        run.toy.finish("4.2", [], "length")
        await call
        assert (sample.state, sample.reward, sample.response) == ("scored", 1.0, Response("", 0, "length"))

    go(main())


def test_an_engine_that_breaks_is_not_the_samples_fault() -> None:
    async def main() -> None:
        run = await setting(says=None)
        call = asyncio.create_task(run.runner.run(run.sample(), 0))
        await turns()
        run.toy.break_down(RunError("the engine died"))
        with pytest.raises(RunError, match="the engine died"):
            await call

    go(main())


def test_a_cancelled_sample_is_aborted_on_its_engine() -> None:
    async def main() -> None:
        run = await setting(says=None)
        call = asyncio.create_task(run.runner.run(run.sample(), 0))
        await turns()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert run.toy.aborted == ["4.2"]

    go(main())


def test_a_task_the_chat_template_refuses_fails_its_samples() -> None:
    async def main() -> None:
        run = await setting()
        tokenizer = character_tokenizer()
        tokenizer.chat_template = "{{ raise_exception('system messages are not supported') }}"
        run.runner._renderer = ChatRenderer(tokenizer, (END,))
        sample = run.sample(Task("t", (Message(role="system", content="be brief"),)))
        await run.runner.run(sample, 0)
        assert sample.state == "failed"
        assert "system messages are not supported" in sample.reason

    go(main())


@pytest.mark.parametrize("error", [None, KeyError("one of them")])
def test_samples_run_side_by_side_are_cancelled_once_and_clean_up_in_peace(error: Exception | None) -> None:
    cleaned: list[str] = []

    async def run(sample: Sample) -> None:
        number = int(sample.id)
        try:
            await turns(5 if number == 3 else 1000)
            if error is not None:
                raise error
            await turns(1000)
        finally:
            await turns(number)
            cleaned.append(sample.id)

    async def main() -> None:
        samples = [Sample(str(number), Task.ask("t", "?"), 0, 1.0) for number in range(8)]
        call = asyncio.create_task(run_all(run, samples))
        await turns(20 if error is None else 0)
        if error is None:
            call.cancel()
        with pytest.raises(asyncio.CancelledError if error is None else KeyError):
            await call
        assert sorted(cleaned) == [str(number) for number in range(8)]

    go(main())


def test_training_samples_are_drawn_as_the_config_says() -> None:
    config = RolloutConfig(max_new_tokens=9, temperature=0.8, top_p=0.9, top_k=4, stop=("\n\n",))
    expected = Sampling(9, 0.8, top_p=0.9, top_k=4, stop=("\n\n",), stop_ids=(1, 2))
    assert training_sampling(config, (1, 2)) == expected


def test_the_tokens_trained_on_are_the_tokens_sampled_even_if_they_would_be_tokenised_otherwise() -> None:
    async def main() -> None:
        run = await setting(says=None)
        sample = run.sample()
        call = asyncio.create_task(run.runner.run(sample, 0))
        await turns()
        odd = [*TOKENIZER("4")["input_ids"], TOKENIZER.unk_token_id, END, END]
        run.toy.finish("4.2", odd)
        await call
        assert sample.log.ids[sample.log.loss_mask].tolist() == odd
        assert np.isfinite(sample.log.behaviour).all()

    go(main())


def test_samples_go_to_the_engine_they_are_given_and_graders_take_turns() -> None:
    async def main() -> None:
        cluster, toys = await engines(2)
        for toy in toys:
            toy.says = lambda request: spoken("4")
        judges, made = await rewards(right, 3)
        moves: Any = Moves()
        life = Lifecycle(moves)
        options: Any = {"sampling": SAMPLING, "deadline_s": 20, "seed": 0, "grader": 2}
        runner = SampleRunner(EngineDoor(cluster, "tests"), judges, ChatRenderer(TOKENIZER, (END,)), life, **options)
        for number in range(4):
            sample = Sample(f"0.{number}", Task.ask("t", "2+2", "4"), 0, 1.0, state="queued")
            await runner.run(sample, number % 2)
            assert sample.state == "scored"
        assert [toy.submitted for toy in toys] == [["0.0", "0.2"], ["0.1", "0.3"]]
        assert [judge.judged for judge in made] == [1, 1, 2]

    go(main())


def test_a_sample_cancelled_while_it_is_judged_asks_nothing_of_its_engine() -> None:
    async def main() -> None:
        run = await setting(judge=right)
        run.judges[0].gate.clear()
        call = asyncio.create_task(run.runner.run(run.sample(), 0))
        await until(lambda: run.judges[0].judged)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert run.moves.of("4.2") == ["queued", "generating", "scoring"]
        assert run.toy.aborted == []

    go(main())
