"""Generation without training: runs samples with the current weights and returns their transcripts."""

from __future__ import annotations

from roll.config.schema import Config
from roll.data.sample import Sample
from roll.data.task import Task
from roll.engine.request import seed_of
from roll.process.structured_gather import structured_gather
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.transcript import Transcript
from roll.scheduler.rollout_pool import RolloutPool


async def play(tasks: tuple[Task, ...], pool: RolloutPool, config: Config, episodes: int) -> list[Transcript]:
    """Runs `episodes` samples with the sampling parameters of training, each on a different task if there are enough."""
    order = sorted(tasks, key=lambda task: seed_of("play", task.id))
    chosen = [order[i % len(order)] for i in range(episodes)]
    samples = [
        Sample(f"play.{i}", task, i, config.rollout_of(task.domain).temperature, records=False)
        for i, task in enumerate(chosen)
    ]
    lifecycle = Lifecycle(None)
    for sample in samples:
        lifecycle.move(sample, "queued")
    try:
        await structured_gather(pool.run(sample.id, [sample], lifecycle) for sample in samples)
        return await pool.tokens.transcripts(samples)
    finally:
        await pool.tokens.release(samples)
