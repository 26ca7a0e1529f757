"""The roles that give rewards on a GPU: they leave it and come back, and say the same as before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from classifiers import save_random
from test_reward_model_client import SAID, answered, config, models

from roll.cluster import Cluster, LocalExecutor, WorkerPlacement
from roll.reward.model_reward import JudgeSampling
from roll.workers.judge import JudgeWorker
from roll.workers.reward_model import RewardModelWorker
from roll.workers.reward_model_client import RewardModelClient

pytestmark = pytest.mark.gpu


def test_both_leave_the_gpu_and_say_the_same_when_they_are_back(tmp_path: Path) -> None:
    folder = save_random(tmp_path)

    async def main() -> None:
        judged = {"model": {"path": "tiny", "dtype": "fp32"}}  # in bf16 a batch of another size may draw another token
        settings, executor = config(judge=judged, reward_model={"model": str(folder)}), LocalExecutor()
        place = WorkerPlacement("reward_model", device="cuda:0")
        scorer = await Cluster.start(executor, lambda place: RewardModelWorker(place, settings), [place])
        judge = await Cluster.start(
            executor, lambda p: JudgeWorker(p, settings), [WorkerPlacement("judge", device="cuda:0")]
        )
        await judge.call(JudgeWorker.start)
        asked = models(RewardModelClient(scorer, judge), at_once=16)
        drawing = JudgeSampling(tuple(range(8)), 1.0, 40)
        score, replies = await asked.score(answered("abc"), 120), await asked.replies(SAID, drawing, 120)
        resident = torch.cuda.memory_allocated()
        for _ in range(2):
            await scorer.call(RewardModelWorker.set_residency, "none")
            await judge.call(JudgeWorker.set_residency, "none")
            assert torch.cuda.memory_allocated() < resident - (4 << 20)
            await judge.call(JudgeWorker.set_residency, "all")
            await scorer.call(RewardModelWorker.set_residency, "all")
            assert await asked.replies(SAID, drawing, 120) == replies
            assert await asked.score(answered("abc"), 120) == pytest.approx(score, abs=2e-2)
        await executor.close()

    asyncio.run(asyncio.wait_for(main(), 300))
