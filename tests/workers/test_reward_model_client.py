"""The roles that give rewards, as a reward worker asks them: turns, deadlines, deaths and queues."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from classifiers import save_liking, save_random

from roll import load_config
from roll.cluster import Cluster, Dispatch, LocalExecutor, Worker, WorkerPlacement, dispatch
from roll.cluster.errors import WorkerDied
from roll.config.schema import Config
from roll.data import Message
from roll.reward.model_reward import JudgeSampling, ScoreTimeout
from roll.strategy.infer.frozen_engine import FrozenEngine
from roll.workers import residency_gate
from roll.workers.judge import JudgeWorker
from roll.workers.reward_model import RewardModelWorker
from roll.workers.reward_model_client import RewardModelClient, ScorerClients

SAID = [Message(role="user", content="Say it.")]
GREEDY = JudgeSampling((1,), 0.0, 8)


def answered(text: str) -> list[Message]:
    return [*SAID, Message(role="assistant", content=text)]


def config(**roles: Any) -> Config:
    names = {"judge": "judge", "reward_model": "reward_model"}
    parts = {name: {"name": name} for role, name in names.items() if role in roles}
    return load_config({"model": "tiny", "threads": 1, "roles": roles, "reward": {"parts": parts}})


def go(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 600))


def models(scorers: RewardModelClient, *, at_once: int = 4, retry_s: float = 20.0) -> ScorerClients:
    made = ScorerClients(replies_at_once=at_once, clients=1, retry_s=retry_s)
    made.connect(scorers)
    return made


async def reward_model(folder: Path) -> Cluster[RewardModelWorker]:
    settings = config(reward_model={"model": str(folder)})
    place = WorkerPlacement("reward_model", threads=1)
    return await Cluster.start(LocalExecutor(), lambda place: RewardModelWorker(place, settings), [place])


async def judge() -> Cluster[JudgeWorker]:
    settings = config(judge={"model": "tiny", "max_running": 4})
    cluster = await Cluster.start(
        LocalExecutor(), lambda p: JudgeWorker(p, settings), [WorkerPlacement("judge", threads=1)]
    )
    await cluster.call(JudgeWorker.start)
    return cluster


def test_a_reward_model_scores_what_waits_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roll.strategy.train.reward_model import RewardModelStrategy

    sizes: list[int] = []
    scores = RewardModelStrategy.scores
    monkeypatch.setattr(RewardModelStrategy, "scores", lambda self, some: sizes.append(len(some)) or scores(self, some))

    async def main() -> None:
        asked = models(RewardModelClient(reward_model=await reward_model(save_liking(tmp_path, "7"))))
        found = await asyncio.gather(*(asked.score(answered(text), 20) for text in ("17", "71", "7", "")))
        assert [score > 0 for score in found] == [True, False, True, False]
        assert sizes == [4]
        stats = asked.take_stats()["reward_model"]
        assert (stats.answers.count, stats.unanswered) == (4, 0)
        assert asked.take_stats()["reward_model"].answers.count == 0

    go(main())


def test_a_conversation_that_is_too_long_can_have_no_score(tmp_path: Path) -> None:
    async def main() -> None:
        asked = models(RewardModelClient(reward_model=await reward_model(save_random(tmp_path))))
        with pytest.raises(ValueError, match=r"has 20\d\d tokens, but the reward model takes 2 to 1024"):
            await asked.score(answered("x" * 2000), 20)

    go(main())


def test_while_a_reward_model_is_away_nobody_runs_out_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_gate, "POLL_S", 0.02)

    async def main() -> None:
        cluster = await reward_model(save_liking(tmp_path, "7"))
        asked = models(RewardModelClient(reward_model=cluster))
        before = await asked.score(answered("7"), 20)
        await cluster.call(RewardModelWorker.set_residency, "none")
        waiting = asyncio.create_task(asked.score(answered("7"), 0.5))
        await asyncio.sleep(1.0)  # twice its deadline
        assert not waiting.done()
        await cluster.call(RewardModelWorker.set_residency, "all")
        assert await waiting == before

    go(main())


def test_a_judge_says_the_same_alone_in_company_and_after_it_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_gate, "POLL_S", 0.02)
    many = JudgeSampling(tuple(range(6)), 1.0, 40)

    async def main() -> None:
        cluster = await judge()
        asked = models(RewardModelClient(judge=cluster), at_once=16)
        alone = await asked.replies(SAID, many, 30)
        assert len(set(alone)) == 6
        (fifth,) = await asked.replies(SAID, JudgeSampling((4,), 1.0, 40), 30)
        assert fifth == alone[4]
        interrupted = asyncio.create_task(asked.replies(SAID, many, 30))
        await asyncio.sleep(0.05)
        await cluster.call(JudgeWorker.set_residency, "none")
        await asyncio.sleep(0.05)
        assert not interrupted.done()
        await cluster.call(JudgeWorker.set_residency, "all")
        assert await interrupted == alone
        await cluster._handles[0]._worker.close()  # type: ignore[attr-defined]

    go(main())


def test_a_judge_that_is_not_done_in_time_is_left_and_goes_on_with_others() -> None:
    async def main() -> None:
        cluster = await judge()
        asked = models(RewardModelClient(judge=cluster))
        with pytest.raises(ScoreTimeout, match=r"the role judge has not answered for 0.01 s"):
            await asked.replies(SAID, JudgeSampling((1,), 1.0, 900), 0.01)
        await asyncio.sleep(0.2)
        worker: JudgeWorker = cluster._handles[0]._worker  # type: ignore[attr-defined]
        assert not worker._pending
        assert len(await asked.replies(SAID, GREEDY, 30)) == 1
        assert asked.take_stats()["judge"].unanswered == 1

    go(main())


def test_a_judge_that_is_shown_too_much_can_say_nothing() -> None:
    async def main() -> None:
        asked = models(RewardModelClient(judge=await judge()))
        with pytest.raises(ValueError, match="leaves none for a reply in its context of 1024"):
            await asked.replies([Message(role="user", content="x" * 1100)], GREEDY, 20)

    go(main())


def test_an_engine_whose_weights_do_not_agree_with_the_probe_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll.config.errors import RunError
    from roll.strategy.train.probe import Probe

    log_probs = Probe.log_probs
    monkeypatch.setattr(Probe, "log_probs", lambda self: log_probs(self) - 1)

    async def main() -> None:
        engine = FrozenEngine(WorkerPlacement("judge", threads=1), config(judge={"model": "tiny"}))
        with pytest.raises(RunError, match="the engine's weights are not"):
            await engine.start()
        with pytest.raises(RunError, match="no weights yet"):
            engine.strategy.submit([])

    go(main())


class Frail(Worker):
    """Dies as often as it is told to, then answers."""

    deaths = 0
    asked = 0

    @dispatch(Dispatch.ONE)
    async def score(self, messages: Sequence[Message]) -> float | None:
        self.asked += 1
        if self.asked <= self.deaths:
            raise WorkerDied(self.placement.name, "killed")
        await asyncio.sleep(0.05)
        return 1.0


async def frail(deaths: int) -> tuple[RewardModelClient, Frail]:
    made: list[Frail] = []

    def make(place: WorkerPlacement) -> Any:
        made.append(Frail(place))
        made[0].deaths = deaths
        return made[0]

    cluster: Any = await Cluster.start(LocalExecutor(), make, [WorkerPlacement("reward_model")])
    return RewardModelClient(reward_model=cluster), made[0]


def test_a_role_that_dies_is_asked_again_while_patience_lasts() -> None:
    async def main() -> None:
        scorers, worker = await frail(2)
        assert await models(scorers).score(SAID, 20) == 1.0
        assert worker.asked == 3
        scorers, worker = await frail(10**9)
        with pytest.raises(ScoreTimeout, match=r"reward_model\[0\] died: killed"):
            await models(scorers, retry_s=0.3).score(SAID, 20)

    go(main())


def test_questions_wait_until_the_role_has_capacity() -> None:
    async def main() -> None:
        scorers, worker = await frail(0)
        asked = models(scorers)
        asked._queues["reward_model"].resize(1, 2)
        tasks = [asyncio.create_task(asked.score(SAID, 20)) for _ in range(5)]
        await asyncio.sleep(0.01)
        assert worker.asked == 2
        await asyncio.gather(*tasks)
        stats = asked.take_stats()["reward_model"]
        assert (worker.asked, stats.answers.count, stats.most_waiting) == (5, 5, 3)

    go(main())
