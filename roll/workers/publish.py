"""Publishing: the actor's weights become a version the engines serve."""

from __future__ import annotations

from roll.cluster import Cluster
from roll.workers.infer import InferWorker
from roll.workers.train import TrainWorker


async def publish(actor: Cluster[TrainWorker], engines: Cluster[InferWorker], version: int) -> None:
    """Makes the actor's current weights the engines' version `version`; returns once every engine has verified them."""
    weights = await actor.call(TrainWorker.weights, version)
    await engines.call(InferWorker.load_weights, weights)
