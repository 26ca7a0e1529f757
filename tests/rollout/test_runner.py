"""One sample's way to its verdict: in one response or an environment, on one engine or several, and how it fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_toys import (
    END,
    TOKENIZER,
    Mortal,
    Moves,
    ToyEngine,
    ToyEnvs,
    ToyRewards,
    engines,
    environments,
    episode_of,
    failure,
    go,
    logprob_of,
    of,
    rewards,
    right,
    some_time,
    spoken,
    timings,
    turns,
    undisturbed,
    until,
)

from roll.config.errors import RunError
from roll.config.schema import Config, RolloutConfig
from roll.data import Message, Response, Sample, Task
from roll.data.task import EnvSpec
from roll.data.tokenlog import branches
from roll.engine.request import Request, SamplingParams, seed_of
from roll.env import EnvFailure, ResetResult, Step
from roll.env.state_key import state_of
from roll.model.chat import ChatRenderer
from roll.model.tiny import character_tokenizer
from roll.reward import ScoreFailure
from roll.rollout.early_stop import EarlyStop, RunningResponse
from roll.rollout.engine_client import EngineClient
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.messages import EngineAssignment, SampleCommand
from roll.rollout.runner import Backends, EngineAssignments, SampleRunner, training_sampling
from roll.workers.infer import PROGRESS_S

PROMPT = TOKENIZER("<|user|>2+2<|end|><|assistant|>")["input_ids"]


@dataclass
class Setting:
    """A runner over toys, and the ledger of its moves."""

    runner: SampleRunner
    assignments: EngineAssignments
    handles: list[Mortal]
    toys: list[ToyEngine]
    judges: list[ToyRewards]
    graders: list[Mortal]
    envs: list[ToyEnvs]
    worlds: list[Mortal]
    env_log: list[str]
    moves: Moves
    life: Lifecycle

    @property
    def toy(self) -> ToyEngine:
        return self.toys[0]

    def sample(
        self, task: Task | None = None, id: str = "4.2", temperature: float = 0.7, engine: int | None = 0
    ) -> Sample:
        """A queued sample with a seat."""
        sample = Sample(id, task or Task.ask("t", "2+2", "4"), 4, temperature)
        self.life.move(sample, "queued")
        if engine is not None:
            self.assignments.assign(EngineAssignment(id, engine, 3))
        return sample

    def start(self, sample: Sample, *siblings: Sample) -> asyncio.Task[None]:
        return asyncio.create_task(self.runner.run(sample, siblings))

    def kill_engine(self, rank: int) -> None:
        self.handles[rank].kill()
        for task in self.handles[rank].worker._tasks.values():
            task.cancel()


async def setting(
    judge: Callable[[Task, Response], float] = right,
    says: str | None = "4",
    *,
    engine_count: int = 1,
    graders: int = 1,
    envs: int = 1,
    worker: int = 0,
    early_stop: EarlyStop | None = None,
    max_turns: int = 16,
    env: dict[str, Any] | None = None,
    domains: dict[str, Any] | None = None,
    **rollout: Any,
) -> Setting:
    drawn = {"max_new_tokens": 8, "stop": ("!",), "top_k": 5, "top_p": 0.9, "train_on_truncated": True, "deadline_s": 20}
    acting = {"max_turns": max_turns, **(env or {})}
    sections = {"rollout": {**drawn, **rollout}, "env": acting, "domains": domains or {}}
    config = Config.model_validate({**sections, "seed": 11})
    cluster, toys = await engines(engine_count)
    for toy in toys:
        if says is not None:
            toy.says = lambda request: spoken(says)
    handles = [Mortal(handle) for handle in cluster._handles]
    moves: Any = Moves()
    life, assignments = Lifecycle(moves), EngineAssignments()
    renderer = ChatRenderer(TOKENIZER, (END,))
    judging, judges = await rewards(judge, graders)
    acting, playing, log = await environments(envs)
    runner = SampleRunner(
        EngineClient(of("toys", handles), "tests"),
        Backends(judging, acting),
        renderer,
        life,
        assignments,
        config,
        stop_ids=(END,),
        context=1024,
        worker=worker,
        early_stop=early_stop,
    )
    graders_of: Any = judging._handles
    worlds: Any = acting._handles
    return Setting(runner, assignments, handles, toys, judges, graders_of, playing, worlds, log, moves, life)


# one response


def test_a_sample_is_generated_judged_and_recorded() -> None:
    async def main() -> None:
        run = await setting(worker=5)
        sample = run.sample()
        await run.runner.run(sample)
        assert run.moves.of("4.2") == ["queued", "generating", "scoring", "scored"]
        assert (sample.state, sample.reward, sample.parts) == ("scored", 1.0, {"length": 2.0})
        assert sample.response == Response("4", 2, "stop")
        assert sample.log.ids.tolist() == PROMPT + spoken("4")
        assert (sample.tokens, sample.response_tokens, sample.finish) == (len(PROMPT) + 2, 2, "stop")
        assert sample.log.loss_mask.tolist() == [False] * len(PROMPT) + [True, True]
        assert sample.log.behaviour.tolist() == [0.0] * len(PROMPT) + [logprob_of(token) for token in spoken("4")]
        assert sample.log.versions.tolist() == [-1] * len(PROMPT) + [3, 3]
        assert (sample.oldest, sample.newest, sample.turns, sample.tries) == (3, 3, 1, 1)
        _, generating, scoring, scored = run.moves.records
        assert generating.info == {"engine": 0, "worker": 5, "version": 3}
        assert scoring.info == {"tokens": 2, "finish": "stop", "versions": [3, 3]}
        assert scored.info == {"reward": 1.0}

    go(main())


def test_noise_comes_from_the_runs_seed_and_the_samples_id_and_nothing_else_changes() -> None:
    async def main() -> None:
        run = await setting(says=None)
        for id in ("4.2", "4.3"):
            call = run.start(run.sample(id=id, temperature=0.3))
            await until(lambda id=id: id in run.toy.running)
            asked = run.toy.running[id]
            assert asked.sampling.seed == seed_of(11, id)
            assert asked.sampling.temperature == 0.3
            rest = (asked.sampling.max_new_tokens, asked.sampling.top_k, asked.sampling.top_p, asked.sampling.stop)
            assert rest == (8, 5, 0.9, ("!",))
            run.toy.finish(id, [END])
            await call

    go(main())


def test_a_domain_has_limits_of_its_own() -> None:
    domains = {"short": {"tasks": "echo", "max_new_tokens": 3, "stop": ["?"]}, "plain": {"tasks": "echo"}}

    async def main() -> None:
        run = await setting(says=None, domains=domains)
        for domain, limits in {"short": (3, ("?",)), "plain": (8, ("!",)), "nobody's": (8, ("!",))}.items():
            sampling = run.runner.sampling_of(run.sample(Task.ask("t", "2+2", domain=domain), engine=None))
            assert (sampling.max_new_tokens, sampling.stop, sampling.temperature) == (*limits, 0.7)

    go(main())


def test_a_sample_that_generates_too_long_fails_and_is_aborted() -> None:
    async def main() -> None:
        run = await setting(says=None, deadline_s=0.02)
        sample = run.sample()
        await run.runner.run(sample)
        assert (sample.state, sample.reason) == ("failed", "generation took more than 0.02 s")
        assert run.moves.of("4.2") == ["queued", "generating", "failed"]
        assert run.toy.aborted == ["4.2"]
        assert sample.response is None

    go(main())


@pytest.mark.parametrize(("waits_s", "state"), [(2.9, "scored"), (3.1, "failed")])
def test_what_engines_spent_on_a_response_counts_and_what_it_waited_for_them_does_not(waits_s: float, state: str) -> None:
    async def main() -> None:
        run = await setting(says=None, deadline_s=5)
        sample = run.sample()
        call = run.start(sample)
        await asyncio.sleep(2.0)
        run.toy.draw("4.2", *spoken("4")[:1])
        run.runner.stop(SampleCommand("4.2", "requeue", "the trainer needs the device"))
        await until(lambda: sample.state == "queued")
        await asyncio.sleep(1000.0)
        run.assignments.assign(EngineAssignment("4.2", 0, 3))
        await until(lambda: sample.state == "generating")
        await asyncio.sleep(waits_s)
        if state == "scored":
            run.toy.finish("4.2", spoken("4")[1:])
        await call
        assert sample.state == state
        assert sample.reason == ("" if state == "scored" else "generation took more than 5 s")

    go(main())


def test_a_sample_that_gets_no_assignment_in_time_fails() -> None:
    async def main() -> None:
        run = await setting(deadline_s=5)
        sample = run.sample(engine=None)
        await run.runner.run(sample)
        assert (sample.state, sample.reason) == ("failed", "no engine had a free slot for it for 1800 s")
        assert run.moves.of("4.2") == ["queued", "failed"]

    go(main())


def test_a_request_the_engine_refuses_fails_its_sample_by_name() -> None:
    async def main() -> None:
        run = await setting()
        run.toy.context = 5
        sample = run.sample()
        await run.runner.run(sample)
        assert (sample.state, sample.reason) == ("failed", "request '4.2' is too long")

    go(main())


@pytest.mark.parametrize(("kind", "kills"), [("raised", 0), ("deadline", 1), ("crashed", 1)])
def test_an_answer_that_cannot_be_judged_fails_at_once_with_the_graders_reason(kind: Any, kills: int) -> None:
    def broken(task: Task, response: Response) -> float:
        raise ScoreFailure(kind, "KeyError: 'answer' (mine.py:3)")

    async def main() -> None:
        run = await setting(judge=broken)
        sample = run.sample()
        await run.runner.run(sample)
        assert (sample.state, sample.reason) == ("failed", f"reward {kind}: KeyError: 'answer' (mine.py:3)")
        assert run.moves.of("4.2") == ["queued", "generating", "scoring", "failed"]
        assert sample.response is not None
        assert (sample.reward, sample.kills, sample.tries) == (0.0, kills, 1)

    go(main())


def test_an_empty_response_is_judged_too() -> None:
    async def main() -> None:
        run = await setting(says=None)
        sample = run.sample(Task.ask("t", "say nothing", ""))
        call = run.start(sample)
        await until(lambda: run.toy.running)
        run.toy.finish("4.2", [], "length")
        await call
        assert (sample.state, sample.reward, sample.response) == ("scored", 1.0, Response("", 0, "length"))
        assert (sample.oldest, sample.newest) == (None, None)
        assert run.moves.records[2].info == {"tokens": 0, "finish": "length"}

    go(main())


def test_an_engine_in_this_process_that_breaks_is_not_the_samples_fault() -> None:
    async def main() -> None:
        run = await setting(says=None)
        call = run.start(run.sample())
        await until(lambda: run.toy.running)
        run.toy.break_down(RunError("the engine died"))
        with pytest.raises(RunError, match="the engine died"):
            await call

    go(main())


def test_a_cancelled_sample_is_aborted_on_its_engine() -> None:
    async def main() -> None:
        run = await setting(says=None)
        call = run.start(run.sample())
        await until(lambda: run.toy.running)
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
        await run.runner.run(sample)
        assert sample.state == "failed"
        assert "system messages are not supported" in sample.reason

    go(main())


def test_training_samples_are_drawn_as_the_config_says() -> None:
    config = RolloutConfig(max_new_tokens=9, temperature=0.8, top_p=0.9, top_k=4, stop=("\n\n",))
    expected = SamplingParams(9, 0.8, top_p=0.9, top_k=4, stop=("\n\n",), stop_ids=(1, 2))
    assert training_sampling(config, (1, 2)) == expected


def test_the_tokens_trained_on_are_the_tokens_sampled_even_if_they_would_be_tokenised_otherwise() -> None:
    async def main() -> None:
        run = await setting(says=None)
        sample = run.sample()
        call = run.start(sample)
        await until(lambda: run.toy.running)
        odd = [*TOKENIZER("4")["input_ids"], TOKENIZER.unk_token_id, END, END]
        run.toy.finish("4.2", odd)
        await call
        assert sample.log.ids[sample.log.loss_mask].tolist() == odd
        assert np.isfinite(sample.log.behaviour).all()

    go(main())


@pytest.mark.parametrize("ended", ["~", "<|end|>", ""])
def test_graders_and_environments_see_no_stop_token_special_or_not(ended: str) -> None:
    """`~` is an ordinary character of the tokenizer, and a stop token here."""

    async def main() -> None:
        seen: list[str] = []

        def judge(task: Task, response: Response) -> float:
            seen.append(response.text)
            return 1.0

        run = await setting(judge)
        tilde = TOKENIZER.convert_tokens_to_ids("~")
        run.runner._renderer = ChatRenderer(TOKENIZER, (END, tilde))
        said = TOKENIZER(f"4 - 1{ended}")["input_ids"]
        run.toy.says = lambda request: said
        sample = run.sample()
        await run.runner.run(sample)
        assert seen == ["4 - 1"]
        assert sample.log.ids[sample.log.loss_mask].tolist() == said
        played = run.sample(episode_of(0.5, 1.0), "5.0")
        await run.runner.run(played)
        assert [line for line in run.env_log if line.startswith("step")] == ["step 5.0.1 4 - 1"] * 2
        assert played.log.ids[played.log.loss_mask].tolist() == [*said, *said]
        whole = str(TOKENIZER.decode(played.log.ids))
        assert whole.count("<|end|>") == {"~": 2, "<|end|>": 4, "": 3}[ended], "the last answer is followed by nothing"

    go(main())


def test_samples_go_to_the_engine_they_are_given_and_graders_take_turns() -> None:
    async def main() -> None:
        run = await setting(engine_count=2, graders=3, worker=2)
        for number in range(4):
            sample = run.sample(id=f"0.{number}", engine=number % 2)
            await run.runner.run(sample)
            assert sample.state == "scored"
        assert [toy.submitted for toy in run.toys] == [["0.0", "0.2"], ["0.1", "0.3"]]
        assert [judge.judged for judge in run.judges] == [1, 1, 2]

    go(main())


def test_a_sample_cancelled_while_it_is_judged_asks_nothing_of_its_engine() -> None:
    async def main() -> None:
        run = await setting()
        run.judges[0].gate.clear()
        call = run.start(run.sample())
        await until(lambda: run.judges[0].judged)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert run.moves.of("4.2") == ["queued", "generating", "scoring"]
        assert run.toy.aborted == []

    go(main())


# graders that die


def test_a_grader_that_dies_is_not_waited_for_and_the_next_one_judges() -> None:
    async def main() -> None:
        run = await setting(graders=2)
        run.judges[0].gate.clear()
        sample = run.sample()
        call = run.start(sample)
        await until(lambda: run.judges[0].judged)
        run.graders[0].kill()
        await call
        assert (sample.state, sample.reward, sample.tries, sample.kills) == ("scored", 1.0, 1, 0)
        assert [judge.judged for judge in run.judges] == [1, 1]
        assert run.moves.of("4.2") == ["queued", "generating", "scoring", "scored"]

    go(main())


def test_the_only_grader_is_asked_again_when_it_is_back() -> None:
    async def main() -> None:
        run = await setting()
        run.graders[0].kill()
        sample = run.sample()
        call = run.start(sample)
        await asyncio.sleep(10)
        assert sample.state == "scoring"
        judging, judges = await rewards(right)
        run.runner.reconnect(Backends(judging, None))
        await call
        assert (sample.state, judges[0].judged) == ("scored", 1)

    go(main())


def test_graders_that_stay_dead_fail_the_sample_after_its_deadline() -> None:
    async def main() -> None:
        run = await setting(deadline_s=30)
        run.graders[0].kill()
        sample = run.sample()
        began = asyncio.get_running_loop().time()
        await run.runner.run(sample)
        assert (sample.state, sample.reason) == ("failed", "grader died: rewards[0]")
        assert 30 < asyncio.get_running_loop().time() - began < 40
        assert sample.kills == 0  # it was not this sample's doing, as far as anyone knows

    go(main())


# engines that die


def test_a_sample_whose_engine_dies_resumes_elsewhere_from_its_reported_tokens() -> None:
    async def main() -> None:
        run = await setting(says=None, engine_count=2)
        sample = run.sample(engine=0)
        call = run.start(sample)
        await until(lambda: run.toys[0].running)
        run.toys[0].draw("4.2", 11, 12, 13)
        await asyncio.sleep(PROGRESS_S + 0.1)
        run.toys[0].draw("4.2", 14)  # nobody hears of it
        run.kill_engine(0)
        await until(lambda: sample.state == "queued")
        assert run.assignments.engine("4.2") is None
        assert not run.toys[1].running
        run.toys[1].version = 4
        run.assignments.assign(EngineAssignment("4.2", 1, 4))
        await until(lambda: run.toys[1].running)
        asked = run.toys[1].running["4.2"]
        assert asked.ids.tolist() == [*PROMPT, 11, 12, 13]
        assert asked.sampling.max_new_tokens == 8 - 3
        assert asked.sampling.seed == seed_of(11, "4.2")
        run.toys[1].finish("4.2", spoken("4"))
        await call
        assert sample.log.ids.tolist() == [*PROMPT, 11, 12, 13, *spoken("4")]
        assert sample.log.versions.tolist()[len(PROMPT) :] == [3, 3, 3, 4, 4]
        logprobs = [logprob_of(token) for token in (11, 12, 13, *spoken("4"))]
        assert sample.log.behaviour.tolist()[len(PROMPT) :] == logprobs
        assert sample.log.loss_mask.tolist() == [False] * len(PROMPT) + [True] * 5
        assert (sample.oldest, sample.newest, sample.tries, sample.turns) == (3, 4, 1, 1)
        assert (sample.response_tokens, sample.finish) == (5, "stop")
        assert run.moves.of("4.2") == ["queued", "generating", "queued", "generating", "scoring", "scored"]
        assert run.moves.reasons("4.2")[2] == ("queued", "engine died: toys[0]")
        assert run.moves.infos("4.2")[2][1] == {"tokens": 3, "lost_engine": 0}
        assert run.moves.infos("4.2")[3][1] == {"engine": 1, "worker": 0, "version": 4}
        assert run.moves.infos("4.2")[4][1] == {"tokens": 5, "finish": "stop", "versions": [3, 4]}

    go(main())


def test_a_response_that_reached_its_limit_before_its_engine_died_is_complete() -> None:
    async def main() -> None:
        run = await setting(says=None, engine_count=2)
        sample = run.sample(engine=0)
        call = run.start(sample)
        await until(lambda: run.toys[0].running)
        run.toys[0].draw("4.2", *range(11, 19))  # all that it may have
        await asyncio.sleep(PROGRESS_S + 0.1)
        run.kill_engine(0)
        await call
        assert (sample.state, sample.finish, sample.response_tokens) == ("scored", "length", 8)
        assert run.moves.of("4.2") == ["queued", "generating", "scoring", "scored"]
        assert run.toys[1].asked == []

    go(main())


def test_an_engine_that_dies_while_its_samples_are_paused() -> None:
    async def main() -> None:
        run = await setting(says=None, engine_count=2)
        sample = run.sample(engine=0)
        call = run.start(sample)
        await until(lambda: run.toys[0].running)
        run.life.move(sample, "paused")
        run.kill_engine(0)
        await until(lambda: sample.state == "queued")
        run.assignments.assign(EngineAssignment("4.2", 1, 4))
        await until(lambda: run.toys[1].running)
        run.toys[1].finish("4.2", spoken("4"))
        await call
        expected = ["queued", "generating", "paused", "queued", "generating", "scoring", "scored"]
        assert run.moves.of("4.2") == expected

    go(main())


@given(seed=st.integers(0, 10**6), new_tokens=st.integers(1, 12))
@timings(120)
def test_whenever_engines_die_a_response_is_what_it_would_have_been(seed: int, new_tokens: int) -> None:
    """Nothing is lost or doubled: the tokens are those of an undisturbed response, drawn in pieces or not."""

    async def main() -> None:
        rng = random.Random(seed)
        run = await setting(says=None, engine_count=2, max_new_tokens=new_tokens, deadline_s=10_000)
        for toy in run.toys:
            toy.pace_s = 0.2
        at, version = 0, 3
        sample = run.sample(id=f"{seed}.0", engine=at)
        call = run.start(sample)
        deaths = 0
        while not call.done() and deaths < 4:
            await asyncio.sleep(rng.choice([0.0, 0.1, 0.3, 0.6, 1.1, 2.5]))
            await turns(rng.randrange(8))
            if call.done() or (sample.state not in ("generating", "queued")):
                break
            run.kill_engine(at)
            deaths += 1
            version += rng.randrange(2)
            await until(lambda: sample.state == "queued" or call.done())
            cluster, (toy,) = await engines(1)  # in the place of the dead one
            run.handles[at].replace(cluster._handles[0])
            toy.pace_s, toy.version = 0.2, version
            run.toys[at] = toy
            at = rng.randrange(2)
            run.toys[at].version = version
            run.assignments.assign(EngineAssignment(sample.id, at, version))
        await call
        asked = Request(sample.id, np.array(PROMPT, np.int32), SamplingParams(new_tokens, seed=seed_of(11, sample.id)))
        response = undisturbed(asked)
        assert sample.log.ids.tolist() == [*PROMPT, *response]
        assert sample.log.behaviour[len(PROMPT) :].tolist() == [logprob_of(token) for token in response]
        versions = sample.log.versions[len(PROMPT) :].tolist()
        assert versions == sorted(versions)
        assert (sample.oldest, sample.newest) == (versions[0], versions[-1])
        assert sample.finish == ("stop" if END in response else "length")
        assert (sample.tries, sample.kills) == (1, 0)
        path = run.moves.of(sample.id)
        again = len(path) // 2 - 2
        assert path == ["queued", "generating"] * (1 + again) + ["scoring", "scored"]
        assert again <= deaths
        heard = [info["tokens"] for state, info in run.moves.infos(sample.id) if "lost_engine" in info]
        assert heard == sorted(heard)

    go(main())


# interfering


def test_a_response_that_is_ended_is_judged_with_what_it_has() -> None:
    async def main() -> None:
        run = await setting(says=None)
        sample = run.sample()
        call = run.start(sample)
        await until(lambda: run.toy.running)
        run.toy.draw("4.2", *spoken("4")[:1])
        run.runner.stop(SampleCommand("4.2", "end", "by hand"))
        await call
        assert (sample.state, sample.reward, sample.finish) == ("scored", 1.0, "ended")
        assert sample.response == Response("4", 1, "ended")
        assert sample.ended == "by hand"
        assert run.moves.reasons("4.2")[2] == ("scoring", "by hand")
        assert run.moves.infos("4.2")[2][1] == {"tokens": 1, "finish": "ended", "versions": [3, 3]}

    go(main())


def test_a_response_that_is_requeued_resumes_from_its_prefix() -> None:
    async def main() -> None:
        run = await setting(says=None, engine_count=2)
        sample = run.sample(engine=0)
        call = run.start(sample)
        await until(lambda: run.toys[0].running)
        run.toys[0].draw("4.2", 11, 12)
        run.runner.stop(SampleCommand("4.2", "requeue", "another is more urgent"))
        await until(lambda: sample.state == "queued")
        assert run.toys[0].aborted == ["4.2"]
        assert run.moves.reasons("4.2")[2] == ("queued", "another is more urgent")
        assert run.moves.infos("4.2")[2][1] == {"tokens": 2}
        run.assignments.assign(EngineAssignment("4.2", 1))
        await until(lambda: run.toys[1].running)
        asked = run.toys[1].running["4.2"]
        assert (asked.ids.tolist(), asked.sampling.max_new_tokens) == ([*PROMPT, 11, 12], 6)
        run.toys[1].finish("4.2", spoken("4"))
        await call
        assert (sample.finish, sample.ended, sample.response_tokens) == ("stop", "", 4)
        assert not run.runner._commands

    go(main())


def test_a_response_that_ends_by_itself_before_it_could_be_stopped_is_whole() -> None:
    async def main() -> None:
        run = await setting(says=None)
        for how in ("end", "requeue"):
            sample = run.sample(id=f"1.{how}")
            call = run.start(sample)
            await until(lambda: run.toy.running)
            run.toy.finish(sample.id, spoken("4"))
            run.runner.stop(SampleCommand(sample.id, how, "too late"))  # type: ignore[arg-type]
            await call
            assert (sample.state, sample.finish, sample.ended) == ("scored", "stop", "")
            assert run.moves.reasons(sample.id)[2] == ("scoring", "")
        assert not run.runner._commands

    go(main())


@pytest.mark.parametrize("how", ["end", "requeue"])
def test_only_what_is_being_generated_can_be_stopped(how: Any) -> None:
    async def main() -> None:
        run = await setting()
        run.judges[0].gate.clear()
        run.runner.stop(SampleCommand("9.9", how, "unknown"))
        waiting = run.sample(id="1.0", engine=None)
        judged = run.sample(id="2.0")
        calls = [run.start(waiting), run.start(judged)]
        await until(lambda: run.judges[0].judged)
        for id in ("1.0", "2.0"):
            run.runner.stop(SampleCommand(id, how, "why"))
        run.judges[0].gate.set()
        run.assignments.assign(EngineAssignment("1.0", 0))
        await asyncio.gather(*calls)
        assert [(s.state, s.finish, s.ended) for s in (waiting, judged)] == [("scored", "stop", "")] * 2
        assert not run.runner._commands

    go(main())


# ending early


def test_a_predicate_ends_a_response_and_is_told_of_its_siblings() -> None:
    seen: list[tuple[str, list[int], str, list[int]]] = []

    def predicate(running: RunningResponse) -> str | None:
        seen.append((running.task.id, running.ids.tolist(), running.text(), list(running.finished_siblings)))
        return "said enough" if len(running.ids) >= 2 else None

    async def main() -> None:
        run = await setting(says=None, early_stop=predicate)
        done, sample = run.sample(id="4.1"), run.sample()
        done.response_tokens, done.finish = 7, "stop"
        call = run.start(sample, done, sample)
        await until(lambda: run.toy.running)
        four, more = spoken("4")[0], spoken("7")[0]
        run.toy.draw("4.2", four)
        await asyncio.sleep(PROGRESS_S + 0.1)
        run.toy.draw("4.2", more)
        await call
        assert seen == [("t", [four], "4", [7]), ("t", [four, more], "47", [7])]
        assert (sample.state, sample.finish, sample.ended, sample.reward) == ("scored", "ended", "said enough", 0.0)
        assert run.moves.reasons("4.2")[2] == ("scoring", "said enough")

    go(main())


def test_a_predicate_sees_what_was_drawn_on_earlier_engines_too() -> None:
    seen: list[list[int]] = []

    def predicate(running: RunningResponse) -> str | None:
        seen.append(running.ids.tolist())
        return None

    async def main() -> None:
        run = await setting(says=None, engine_count=2, early_stop=predicate)
        sample = run.sample(engine=0)
        call = run.start(sample)
        await until(lambda: run.toys[0].running)
        run.toys[0].draw("4.2", 11, 12)
        await asyncio.sleep(PROGRESS_S + 0.1)
        run.kill_engine(0)
        run.assignments.remove("4.2")
        await until(lambda: sample.state == "queued")
        run.assignments.assign(EngineAssignment("4.2", 1))
        await until(lambda: run.toys[1].running)
        run.toys[1].draw("4.2", 13)
        await asyncio.sleep(PROGRESS_S + 0.1)
        run.toys[1].finish("4.2", [END])
        await call
        assert seen == [[11, 12], [11, 12, 13]]

    go(main())


def test_a_response_that_ended_by_itself_was_not_ended_early_whatever_a_predicate_wanted() -> None:
    async def main() -> None:
        run = await setting(says=None, early_stop=lambda running: "too late")
        sample = run.sample()
        call = run.start(sample)
        await until(lambda: run.toy.running)
        run.toy.abort = lambda ids: None  # type: ignore[method-assign]
        run.toy.draw("4.2", spoken("4")[0])
        await asyncio.sleep(PROGRESS_S + 0.1)
        run.toy.finish("4.2", [END])  # in the moment it is told to end
        await call
        assert (sample.finish, sample.reward) == ("stop", 1.0)
        assert sample.ended == ""
        assert run.moves.reasons("4.2")[2] == ("scoring", "")

    go(main())


# environments


def test_an_episode_goes_turn_by_turn_and_only_responses_are_trained_on() -> None:
    async def main() -> None:
        run = await setting()
        sample = run.sample(episode_of(0.25, 0.5, 1.0))
        await run.runner.run(sample)
        turn = ["generating", "acting"]
        assert run.moves.of("4.2") == ["queued", "acting", *turn * 3, "scoring", "scored"]
        assert [info["turn"] for state, info in run.moves.infos("4.2") if state == "acting"] == [0, 1, 2, 3]
        assert (sample.reward, sample.turns, sample.parts) == (1.75, 3, {"turns": 3.0})
        assert run.moves.infos("4.2")[-1][1] == {"reward": 1.75}
        opening = TOKENIZER("<|user|>begin<|end|><|assistant|>")["input_ids"]
        follow_up = TOKENIZER("<|user|>you said 4<|end|><|assistant|>")["input_ids"]
        answer = spoken("4")
        whole = [*opening, *answer, *follow_up, *answer, *follow_up, *answer]
        assert sample.log.ids.tolist() == whole
        masked = [False] * len(follow_up) + [True] * 2
        assert sample.log.loss_mask.tolist() == [False] * len(opening) + [True] * 2 + masked * 2
        assert (sample.tokens, sample.response_tokens, sample.finish) == (len(whole), 6, "stop")
        assert run.moves.infos("4.2")[-2][1] == {"tokens": 6, "finish": "stop", "versions": [3, 3]}
        steps = ["step 4.2.1 4"] * 3
        assert run.env_log == ["reset 4.2.1", *steps]  # the last one closed it
        assert not run.envs[0].episodes
        assert run.judges[0].judged == 0
        assert [asked.sampling.seed for asked in run.toy.asked] == [seed_of(11, "4.2")] * 3
        assert [len(asked.ids) for asked in run.toy.asked] == [
            len(whole) - 2 - k * (len(follow_up) + 2) for k in (2, 1, 0)
        ]

    go(main())


def test_the_chat_template_is_shown_an_environments_tools_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    text = ChatRenderer._text

    def watched(self: ChatRenderer, messages: Any, generate: bool, tools: Any = ()) -> str:
        shown.append(tuple(tools))
        return text(self, messages, generate, tools)

    async def main() -> None:
        run = await setting()
        spec = EnvSpec("toy", 0, {"rewards": [0.0, 1.0], "tools": ({"name": "add"},)})
        await run.runner.run(run.sample(replace(episode_of(1.0), environment=spec)))

    monkeypatch.setattr(ChatRenderer, "_text", watched)
    go(main())
    assert len(shown) >= 2
    assert all(tools == ({"name": "add"},) for tools in shown)


def test_an_episode_says_what_each_turn_earned_and_in_which_state_it_began() -> None:
    async def main() -> None:
        run = await setting()
        shown, named = episode_of(0.25, 0.5, 1.0), episode_of(0.25, 0.5, 1.0, states=["hall", 2, "hall", "out"])
        samples = [run.sample(task, id=f"4.{i}") for i, task in enumerate((shown, named, named))]
        for sample in samples:
            await run.runner.run(sample)
        assert [sample.turn_rewards for sample in samples] == [[0.25, 0.5, 1.0]] * 3
        begin, said = ({"role": "user", "content": text} for text in ("begin", "you said 4"))
        assert samples[0].turn_states == [state_of(ResetResult((begin,))), *[state_of(ResetResult((said,)))] * 2]
        hall, two = state_of(Step("", info={"state": "hall"})), state_of(Step("", info={"state": 2.0}))
        assert samples[1].turn_states == samples[2].turn_states == [hall, two, hall]

    go(main())


def test_a_sample_without_an_environment_has_no_turns_to_tell_of() -> None:
    async def main() -> None:
        run = await setting()
        sample = run.sample()
        await run.runner.run(sample)
        assert (sample.turns, sample.turn_rewards, sample.turn_states) == (1, [], [])

    go(main())


def test_an_episode_ends_after_the_last_turn_it_may_have() -> None:
    async def main() -> None:
        run = await setting(max_turns=2)
        sample = run.sample(episode_of(1.0, 2.0, 4.0, 8.0))
        await run.runner.run(sample)
        assert (sample.state, sample.turns, sample.reward) == ("scored", 2, 3.0)
        assert (sample.turn_rewards, len(sample.turn_states)) == ([1.0, 2.0], 2)
        assert sample.log.ids.tolist()[-2:] == spoken("4")  # nothing after the last response
        assert run.env_log[-1] == "close 4.2.1"

    go(main())


def test_the_tasks_own_messages_come_before_the_environments() -> None:
    async def main() -> None:
        run = await setting()
        task = episode_of(1.0)
        said = Task("t", (Message(role="user", content="2+2"),), environment=task.environment)
        sample = run.sample(said)
        await run.runner.run(sample)
        opening = TOKENIZER("<|user|>2+2<|end|><|user|>begin<|end|><|assistant|>")["input_ids"]
        assert sample.log.ids.tolist() == [*opening, *spoken("4")]

    go(main())


@pytest.mark.parametrize("kind", ["lost", "deadline", "crashed"])
@pytest.mark.parametrize("at", ["reset", "step"])
def test_an_episode_that_was_lost_or_crashed_its_process_starts_again(kind: Any, at: str) -> None:
    async def main() -> None:
        run = await setting(max_attempts=3)
        failures = 0

        def trouble(method: str, episode: str) -> None:
            nonlocal failures
            if method == at and failures < 2:
                failures += 1
                raise EnvFailure(kind, "boom")

        run.envs[0].trouble = trouble
        sample = run.sample(episode_of(0.5, 0.5))
        call = run.start(sample)
        while not call.done():
            await asyncio.sleep(0.1)
            if sample.state == "queued":
                assert run.assignments.engine("4.2") is None  # of its last try
                run.assignments.assign(EngineAssignment("4.2", 0))
            elif sample.state == "acting" and run.assignments.engine("4.2") is None:
                run.assignments.assign(EngineAssignment("4.2", 0))
        await call
        assert (sample.state, sample.reward, sample.turns, sample.tries) == ("scored", 1.0, 2, 3)
        assert (sample.turn_rewards, len(sample.turn_states)) == ([0.5, 0.5], 2)
        assert sample.kills == (0 if kind == "lost" else 2)
        assert [reason for state, reason in run.moves.reasons("4.2") if state == "failed"] == [
            f"environment {kind}: boom"
        ] * 2
        again = [info for state, info in run.moves.infos("4.2")[1:] if state == "queued"]
        assert again == [{"try": 2}, {"try": 3}]
        assert [entry for entry in run.env_log if entry.startswith("reset")] == [f"reset 4.2.{n}" for n in (1, 2, 3)]
        assert [entry for entry in run.env_log if entry.startswith("close")] == [f"close 4.2.{n}" for n in (1, 2)]
        assert run.envs[0].alone == {"4.2.1": False, "4.2.2": False, "4.2.3": True}  # none but itself can fail it now
        assert sample.log.response_tokens == 4  # of the last try alone
        assert not run.envs[0].episodes

    go(main())


@pytest.mark.parametrize(("kind", "tries"), [("lost", 3), ("deadline", 3), ("crashed", 3), ("raised", 1), ("invalid", 1)])
def test_an_episode_fails_when_its_tries_are_used_up_or_it_was_the_environments_fault(kind: Any, tries: int) -> None:
    def trouble(method: str, episode: str) -> None:
        raise EnvFailure(kind, "boom")

    async def main() -> None:
        run = await setting(max_attempts=3)
        run.envs[0].trouble = trouble
        sample = run.sample(episode_of(1.0))
        await run.runner.run(sample)
        assert (sample.state, sample.reason, sample.tries) == ("failed", f"environment {kind}: boom", tries)
        assert sample.kills == (tries if kind in ("deadline", "crashed") else 0)
        assert run.moves.of("4.2").count("failed") == tries
        assert not run.envs[0].episodes

    go(main())


def test_a_crash_that_others_may_have_caused_is_blamed_on_all_of_them_in_parts() -> None:
    def trouble(method: str, episode: str) -> None:
        raise EnvFailure("crashed", "boom", candidates=4)

    async def main() -> None:
        run = await setting(max_attempts=3)
        run.envs[0].trouble = trouble
        sample = run.sample(episode_of(1.0))
        await run.runner.run(sample)
        assert (sample.tries, sample.kills) == (3, 0.75)

    go(main())


@pytest.mark.parametrize("at", ["reset", "step"])
def test_the_episodes_of_an_environment_worker_that_dies_start_again(at: str) -> None:
    async def main() -> None:
        run = await setting(envs=2, max_attempts=1)
        run.envs[0].trouble = lambda method, episode: run.worlds[0].kill() if method == at else None
        sample = run.sample(episode_of(0.5, 0.5))
        call = run.start(sample)
        await until(lambda: run.moves.of("4.2").count("queued") == 2)
        run.assignments.assign(EngineAssignment("4.2", 0))
        await call
        assert (sample.state, sample.reward, sample.kills, sample.tries) == ("scored", 1.0, 0, 1)
        assert ("failed", "environment worker died: env[0]") in run.moves.reasons("4.2")
        assert run.env_log.count("reset 4.2.1") == 2
        assert list(run.envs[1].episodes) == []

    go(main())


def test_an_episode_fails_when_no_environment_worker_is_back_in_the_time_that_a_response_may_take() -> None:
    async def main() -> None:
        run = await setting(deadline_s=0.2)
        run.worlds[0].kill()
        sample = run.sample(episode_of(1.0))
        await run.runner.run(sample)
        assert (sample.state, sample.reason, sample.tries) == ("failed", "environment worker died: env[0]", 1)

    go(main())


def test_an_engine_that_dies_during_an_episode_costs_no_turn() -> None:
    async def main() -> None:
        run = await setting(engine_count=2)
        run.toys[0].says = None
        sample = run.sample(episode_of(0.5, 0.5), engine=0)
        call = run.start(sample)
        await until(lambda: run.toys[0].running)
        run.toys[0].draw("4.2", spoken("4")[0])
        await asyncio.sleep(PROGRESS_S + 0.1)
        run.kill_engine(0)
        await until(lambda: sample.state == "queued")
        run.toys[1].says = lambda request: [END]
        run.assignments.assign(EngineAssignment("4.2", 1))
        await call
        assert (sample.state, sample.turns, sample.tries, sample.reward) == ("scored", 2, 1, 1.0)
        path = ["queued", "acting", "generating", "queued", "generating", "acting", "generating", "acting"]
        assert run.moves.of("4.2") == [*path, "scoring", "scored"]
        assert run.env_log[:2] == ["reset 4.2.1", "step 4.2.1 4"]

    go(main())


def test_a_turn_that_is_ended_goes_to_the_environment_as_it_is() -> None:
    async def main() -> None:
        run = await setting(says=None)
        sample = run.sample(episode_of(0.5, 0.5))
        call = run.start(sample)
        await until(lambda: run.toy.running)
        run.toy.draw("4.2", *spoken("47")[:2])
        run.runner.stop(SampleCommand("4.2", "end", "long enough"))
        await until(lambda: "step 4.2.1 47" in run.env_log and run.toy.running)
        run.toy.finish("4.2", spoken("4"))
        await call
        assert (sample.state, sample.turns, sample.finish) == ("scored", 2, "stop")
        follow_up = TOKENIZER("<|end|><|user|>you said 47<|end|><|assistant|>")["input_ids"]
        ids = sample.log.ids.tolist()
        assert ids[-len(follow_up) - 2 : -2] == follow_up  # the template ends the turn that was cut off

    go(main())


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15, 0.25, 0.45, 0.6])
@pytest.mark.parametrize("how", ["cancelled", "refused"])
def test_an_episode_is_always_closed(after_s: float, how: str) -> None:
    async def main() -> None:
        run = await setting(says=None, deadline_s=100)
        run.toy.pace_s = 0.05
        sample = run.sample(episode_of(*[0.5] * 50))
        call = run.start(sample)
        await asyncio.sleep(after_s)
        if how == "cancelled":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            run.toy.context = 0
            await call
            assert (sample.state, sample.reason) == ("failed", "request '4.2' is too long")
        await turns(20)
        assert not run.envs[0].episodes
        assert run.env_log[-1] == "close 4.2.1" or run.env_log == []
        assert not run.toy.running

    go(main())


def test_a_template_that_rewrites_the_past_forks_and_engines_see_the_last_branch_alone() -> None:
    async def main() -> None:
        run = await setting()
        tokenizer = character_tokenizer()
        tokenizer.chat_template = "{{ messages[-1]['content'] }}<|assistant|>"
        run.runner._renderer = ChatRenderer(tokenizer, (END,))
        sample = run.sample(episode_of(0.5, 0.5))
        await run.runner.run(sample)
        assert (sample.state, sample.turns, sample.reward) == ("scored", 2, 1.0)
        shown = [TOKENIZER(f"{text}<|assistant|>")["input_ids"] for text in ("begin", "you said 4")]
        assert [asked.ids.tolist() for asked in run.toy.asked] == shown
        spans = branches(sample.log.turn)
        assert [sample.log.ids[span].tolist() for span in spans] == [[*ids, *spoken("4")] for ids in shown]

    go(main())


def test_a_window_leaves_old_turns_out() -> None:
    async def main() -> None:
        run = await setting(env={"window": 1})
        sample = run.sample(episode_of(*[0.5] * 4))
        await run.runner.run(sample)
        opening, turn = "<|user|>begin<|end|><|assistant|>", "4<|end|><|user|>you said 4<|end|><|assistant|>"
        shown = [TOKENIZER(opening + turn * seen)["input_ids"] for seen in (0, 1, 1, 1)]
        assert [asked.ids.tolist() for asked in run.toy.asked] == shown
        assert len(branches(sample.log.turn)) == 3, "the first two turns are one"
        assert sample.log.turn[sample.log.loss_mask].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]

    go(main())


def test_an_episode_ends_where_its_context_does() -> None:
    async def main() -> None:
        opening = len(TOKENIZER("<|user|>begin<|end|><|assistant|>")["input_ids"])
        follow_up = len(TOKENIZER("<|user|>you said 4<|end|><|assistant|>")["input_ids"])
        longest = opening + 2 * (2 + follow_up)
        run = await setting(env={"max_tokens": longest})
        sample = run.sample(episode_of(*[0.5] * 9))
        await run.runner.run(sample)
        assert (sample.state, sample.turns, sample.reward) == ("scored", 2, 1.0)
        assert sample.ended == f"the conversation has reached {longest} tokens"
        assert [asked.sampling.max_new_tokens for asked in run.toy.asked] == [8, min(8, 2 + follow_up)]
        assert sample.tokens == len(sample.log) < longest, "what nobody could answer is not in the log"
        assert sample.log.loss_mask[-1]
        assert not run.envs[0].episodes

    go(main())


def test_a_template_that_cannot_follow_a_conversation_fails_the_sample_by_name() -> None:
    async def main() -> None:
        run = await setting()
        tokenizer = character_tokenizer()
        tokenizer.chat_template = (
            "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
            "{{ messages[-1]['content'] }}<|assistant|>"
        )
        run.runner._renderer = ChatRenderer(tokenizer, (END,))
        sample = run.sample(episode_of(0.5, 0.5))
        await run.runner.run(sample)
        assert sample.state == "failed"
        assert sample.reason.startswith("the chat template cannot follow the conversation")
        assert not run.envs[0].episodes

    go(main())


def test_a_new_try_starts_without_what_the_last_one_left() -> None:
    async def main() -> None:
        run = await setting(says=None, max_attempts=2)
        failed = False

        def trouble(method: str, episode: str) -> None:
            nonlocal failed
            if method == "step" and not failed:
                failed = True
                raise EnvFailure("lost", "gone")

        run.envs[0].trouble = trouble
        sample = run.sample(episode_of(1.0))
        call = run.start(sample)
        await until(lambda: run.toy.running)
        run.toy.draw("4.2", 11)
        run.runner.stop(SampleCommand("4.2", "end", "of the first try"))
        await until(lambda: sample.tries == 2)
        run.assignments.assign(EngineAssignment("4.2", 0))
        await until(lambda: run.toy.running)
        run.toy.finish("4.2", spoken("4"))
        await call
        assert (sample.state, sample.finish, sample.turns, sample.reward) == ("scored", "stop", 1, 1.0)
        assert sample.ended == ""
        assert run.moves.reasons("4.2")[-2] == ("scoring", "")

    go(main())


def test_what_cannot_be_judged_by_a_reward_function_that_raises_is_named() -> None:
    def broken(task: Task, response: Response) -> float:
        raise failure("ZeroDivisionError")

    async def main() -> None:
        run = await setting(judge=broken)
        sample = run.sample()
        await run.runner.run(sample)
        assert sample.reason == "reward raised: ZeroDivisionError"

    go(main())


def test_random_troubles_of_environments_never_leave_an_episode_open() -> None:
    @given(seed=st.integers(0, 10**6), tries=st.integers(1, 3))
    @timings(60)
    def holds(seed: int, tries: int) -> None:
        async def main() -> None:
            rng = random.Random(seed)
            run = await setting(max_attempts=tries, envs=2, says=None, deadline_s=500)
            run.toy.pace_s = 0.1
            run.toy.context = 10**6

            def trouble(method: str, episode: str) -> None:
                if rng.random() < 0.15:
                    raise EnvFailure(rng.choice(["lost", "deadline", "crashed", "raised", "invalid"]), "boom")

            for env in run.envs:
                env.trouble = trouble
            samples = [run.sample(episode_of(*[1.0] * rng.randint(1, 4)), id=f"4.{i}") for i in range(3)]
            calls = [run.start(sample) for sample in samples]
            while not all(call.done() for call in calls):
                await some_time(rng)
                for sample in samples:
                    if sample.state == "queued" and run.assignments.engine(sample.id) is None:
                        run.assignments.assign(EngineAssignment(sample.id, 0))
            await asyncio.gather(*calls)
            for sample in samples:
                assert sample.state in ("scored", "failed")
                assert sample.tries <= tries
                assert run.moves.of(sample.id).count("failed") == sample.tries - (sample.state == "scored")
                if sample.state == "scored":
                    assert sample.reward == sample.turns == len(sample.task.environment.options["rewards"])  # type: ignore[union-attr]
                    assert sample.log.response_tokens == sample.response_tokens
            assert not any(env.episodes for env in run.envs)
            resets = [entry.removeprefix("reset ") for entry in run.env_log if entry.startswith("reset")]
            closes = [entry.removeprefix("close ") for entry in run.env_log if entry.startswith("close")]
            assert len(set(resets)) == len(resets)
            ended = {f"{sample.id}.{sample.tries}" for sample in samples if sample.state == "scored"}
            assert set(resets) - set(closes) == ended  # their last step closed them

        go(main())

    holds()
