"""Models that give rewards: checks them before a run starts, and starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from roll.cluster import Cluster, Executor
from roll.config.errors import UserError
from roll.config.schema import Config
from roll.devices.map import DeviceMap
from roll.devices.residency import ResidencyTable
from roll.model.classifier import load_classifier_config
from roll.model.find import find_model
from roll.model.loading import load_model_config, load_tokenizer
from roll.pipeline.start import join_and_offload, offload_at_start
from roll.strategy.registry import INFER_ROLES, engine_backend_of
from roll.workers.device import DeviceWorker
from roll.workers.judge import JudgeWorker
from roll.workers.reward_model import RewardModelWorker
from roll.workers.reward_model_client import RewardModelClient


def check_scorers(config: Config) -> None:
    """Refuses models that cannot give the rewards that the config asks of them."""
    for role in config.scoring_roles:
        model = getattr(config.roles, role).model
        try:
            source = find_model(model.path)
            load_tokenizer(source, model)
            if role == "reward_model":
                load_classifier_config(source)
            else:
                load_model_config(source)
        except UserError as error:
            raise UserError(f"roles.{role}.{error}") from error  # prefixes the setting with the role
        if role in INFER_ROLES:
            engine_backend_of(config, role).check(config, role)


async def start_scorers(
    config: Config, executor: Executor, map: DeviceMap, residency: ResidencyTable
) -> RewardModelClient:
    """Starts the models of a map that give rewards; one after the other if they may not fit on the devices together."""
    if residency.offloads:
        return RewardModelClient(
            await _reward_model(config, executor, map, residency), await _judge(config, executor, map, residency)
        )
    starts = _reward_model(config, executor, map, residency), _judge(config, executor, map, residency)
    return RewardModelClient(*await asyncio.gather(*starts))  # waits: starts and calls have deadlines


async def _reward_model(
    config: Config, executor: Executor, map: DeviceMap, residency: ResidencyTable
) -> Cluster[RewardModelWorker] | None:
    if "reward_model" not in map.roles:
        return None
    placements = map.roles["reward_model"].placements
    cluster = await Cluster.start(executor, lambda placement: RewardModelWorker(placement, config), placements)
    return await join_and_offload(cluster, RewardModelWorker.set_residency, residency, config.fault_tolerance)


async def _judge(
    config: Config, executor: Executor, map: DeviceMap, residency: ResidencyTable
) -> Cluster[JudgeWorker] | None:
    if "judge" not in map.roles:
        return None
    cluster = await Cluster.start(
        executor, lambda placement: JudgeWorker(placement, config), map.roles["judge"].placements
    )
    await cluster.call(JudgeWorker.start)
    return await offload_at_start(cluster, JudgeWorker.set_residency, residency)


def scorer_peaks(scorers: RewardModelClient) -> dict[str, Coroutine[Any, Any, list[int]]]:
    """Calls that return each role's peak GPU memory per worker."""
    return {cluster.role: cluster.call_each(DeviceWorker.take_peak_bytes) for cluster in scorers.clusters}
