"""Real engines, rollout workers and graders for the samples of a simulation's workload.

Responses end at the workload's lengths, and earn what it says: the model's tokens are drawn, and mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from roll.cluster import Cluster, Dispatch, WorkerPlacement, dispatch
from roll.cluster.ray_executor import RayExecutor
from roll.config.schema import Config, RolloutConfig
from roll.data.sample import Sample
from roll.data.task import Response
from roll.engine.request import Request, SamplingParams
from roll.model.chat import Conversation
from roll.reward import RewardSpec
from roll.rollout.runner import SampleRunner
from roll.rollout.worker import RolloutWorker
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.router import Router
from roll.simulation.workload import Workload
from roll.workers.infer import InferWorker
from roll.workers.publish import publish
from roll.workers.reward import RewardWorker
from roll.workers.train import TrainWorker


class TimedEngine(InferWorker):
    """An engine that can be timed where it is, while nobody has requests there."""

    def __init__(self, place: WorkerPlacement, config: Config) -> None:
        import torch

        # On Arm oneDNN takes over at nine rows and doubles the time of a step this small: no line fits that.
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
        super().__init__(place, config)

    @dispatch(Dispatch.ALL)
    async def seconds_of(self, contexts: Sequence[int], new_tokens: int) -> float:
        """Until requests with prompts of so many tokens each have all drawn so many new ones."""
        chance = np.random.default_rng(0)
        sampling = SamplingParams(new_tokens)
        requests = [
            Request(f"timed/{number}", chance.integers(4, 90, tokens).astype(np.int32), replace(sampling, seed=number))
            for number, tokens in enumerate(contexts)
        ]
        began_s = time.perf_counter()
        self._strategy.submit(requests)
        left = len(requests)
        while left:
            left -= len(await self._strategy.results())
        return time.perf_counter() - began_s


def forced(workload: Workload) -> type[RolloutWorker]:
    """Rollout workers whose responses end at the workload's lengths and nowhere else, and say whether they are right."""

    class ForcedRunner(SampleRunner):
        def sampling_of(self, sample: Sample) -> SamplingParams:
            tokens = workload.episode(sample.id).new_tokens
            return replace(super().sampling_of(sample), max_new_tokens=tokens, stop_ids=())

        async def _respond(self, sample: Sample, conversation: Conversation, siblings: Sequence[Sample]) -> Response:
            response = await super()._respond(sample, conversation, siblings)
            return replace(response, text=f"{workload.reward(sample.id):.0f}")

    class ForcedWorker(RolloutWorker):
        RUNNER = ForcedRunner

    return ForcedWorker


def rollout_config(workload: Workload) -> RolloutConfig:
    return RolloutConfig(
        groups_per_step=workload.groups_per_step,
        group_size=workload.group_size,
        max_new_tokens=workload.responses.max_tokens,
        max_running=workload.engine.max_running,
        max_replacements=workload.max_replacements,
    )


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Fresh weights; heads of 32 numbers, and half as many of keys and values."""
    from transformers import LlamaForCausalLM

    from roll.model.tiny import character_tokenizer, tiny_config

    shape = tiny_config()
    shape.num_hidden_layers = layers
    shape.hidden_size, shape.intermediate_size = hidden, 3 * hidden
    shape.num_attention_heads = hidden // shape.head_dim
    shape.num_key_value_heads = max(shape.num_attention_heads // 2, 1)
    LlamaForCausalLM(shape).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


class Crew:
    """The roles, without training."""

    def __init__(self, workload: Workload, model: Path) -> None:
        self.workload = workload
        self.config = Config.model_validate(
            {
                "model": {"path": str(model), "dtype": "fp32"},
                "executor": "ray",
                "threads": 1,
                "rollout": rollout_config(workload).model_dump(),
            }
        )
        self.executor = RayExecutor(self.config.ray)

    async def start(self) -> None:
        config, executor, engines = self.config, self.executor, self.workload.engines
        executor.connect()
        places = {
            role: [WorkerPlacement(role, rank, count, threads=1) for rank in range(count)]
            for role, count in (("actor_train", 1), ("actor_infer", engines), ("reward", 1), ("rollout", 2))
        }
        executor.reserve([place for some in places.values() for place in some])
        source = RewardSpec.of("number")
        self.rewards = await Cluster.start(
            executor, lambda place: RewardWorker(place, config.reward, source), places["reward"]
        )
        await self.rewards.call(RewardWorker.start)
        self.actor = await Cluster.start(executor, lambda place: TrainWorker(place, config), places["actor_train"])
        self.engines: Cluster[Any] = await Cluster.start(
            executor, lambda place: TimedEngine(place, config), places["actor_infer"]
        )
        await publish(self.actor, self.engines, 0)
        # A rollout worker each: what one pool asks its worker for, the other does not hear.
        bounded, unbounded = Router(engines, max_running=config.rollout.max_running), Router(engines)
        self.for_scheduler = await self._pool(places["rollout"][0], bounded)
        self.for_barrier = await self._pool(places["rollout"][1], unbounded)

    async def _pool(self, place: WorkerPlacement, router: Router) -> RolloutPool:
        make, config = forced(self.workload), self.config
        workers = await Cluster.start(self.executor, lambda place: make(place, config, None), [place])
        await workers.call(RolloutWorker.connect, self.engines, self.rewards)
        return RolloutPool(workers, router)
