"""Starting and stopping the roles of a run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from roll.cluster import Cluster, LocalExecutor, Place
from roll.config.schema import Config
from roll.model.chat import ChatRenderer
from roll.model.loading import find_model, load_tokenizer, stop_ids_of
from roll.reward import RewardSource
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.router import Router
from roll.rollout.runner import SampleRunner, training_sampling
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker
from roll.workers.train import TrainWorker


@dataclass(frozen=True)
class Roles:
    """The running roles, and the renderer that turns tasks into their tokens."""

    actor: Cluster[TrainWorker]
    engines: Cluster[InferWorker]
    rewards: Cluster[RewardWorker]
    reference: Cluster[TrainWorker] | None
    router: Router
    renderer: ChatRenderer
    stop_ids: tuple[int, ...]


@asynccontextmanager
async def start_roles(
    config: Config, reward: RewardSource, *, reference: bool = False, log: Path | None = None
) -> AsyncIterator[Roles]:
    """Every role of the config, running; all of them closed at the end, whatever happens."""
    threads = config.threads or os.cpu_count() or 1
    executor = LocalExecutor()
    try:
        rewards = await Cluster.start(
            executor, lambda place: RewardWorker(place, config.reward, reward, log), [Place("reward")]
        )
        await rewards.call(RewardWorker.start)
        source = find_model(config.model.path)
        tokenizer = load_tokenizer(source, config.model)
        stop_ids = stop_ids_of(tokenizer, source)
        actor = await Cluster.start(
            executor, lambda place: TrainWorker(place, config), [Place("actor_train", threads=threads)]
        )
        engines = await Cluster.start(
            executor, lambda place: InferWorker(place, config), [Place("actor_infer", threads=threads)]
        )
        frozen = None
        if reference:
            frozen = await Cluster.start(
                executor,
                lambda place: TrainWorker(place, config, trainable=False),
                [Place("reference", threads=threads)],
            )
        renderer = ChatRenderer(tokenizer, stop_ids)
        yield Roles(actor, engines, rewards, frozen, Router(engines), renderer, stop_ids)
    finally:
        await executor.close()


def sample_runner(config: Config, roles: Roles, moves: Lifecycle) -> SampleRunner:
    """What drives samples through these roles."""
    return SampleRunner(
        roles.router,
        roles.rewards,
        roles.renderer,
        moves,
        sampling=training_sampling(config.rollout, roles.stop_ids),
        deadline_s=config.rollout.deadline_s,
        seed=config.seed,
    )
