"""Weight sync: publishes the actor's weights as a version that the engines serve.

Invariants: when `publish` returns, every engine has verified that it has the actor's bytes; an engine that is receiving
weights serves nothing until it has verified them. Engines in the actor's process use its parameters, so nothing is
copied; other engines receive the weights in buckets, by the path that suits their placement. If the actor has several
ranks, all of them are called: each adds its shards to every bucket, and rank 0 sends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Literal

from roll.cluster import Cluster, WorkerPlacement
from roll.cluster.errors import WorkerDied
from roll.config.errors import RunError
from roll.weight_sync.broadcast import BroadcastBackend
from roll.weight_sync.rendezvous import SLOTS, Path, Rendezvous, WeightAnnouncement
from roll.weight_sync.stream import stream
from roll.workers.infer import InferWorker
from roll.workers.train import TrainWorker

ATTEMPTS = 2
_GRACE_S = 2.0
"""How long to wait for the other side after one side of a broadcast has failed: its death may be the cause."""

_log = logging.getLogger(__name__)


async def publish(
    actor: Cluster[TrainWorker],
    engines: Cluster[InferWorker],
    version: int,
    path: Path | Literal["auto"] = "auto",
) -> None:
    """Makes the actor's current weights the engines' version `version`; returns once every engine has verified them."""
    if actor.in_process and engines.in_process:
        await engines.call(InferWorker.load_weights, await actor.call(TrainWorker.weights, version))
        return
    path = choose_path(actor.placements[0], engines.placements) if path == "auto" else path
    for attempts_left in reversed(range(ATTEMPTS)):
        announcement = await actor.call(TrainWorker.announce, version, path)
        await engines.call(InferWorker.begin_weights, announcement)
        await _transfer(actor, engines, announcement, path)
        mismatches = await engines.call_each(InferWorker.end_weights, announcement.manifest)
        damaged = {
            f"{placement.name}": names for placement, names in zip(engines.placements, mismatches, strict=True) if names
        }
        if not damaged:
            return
        listed = "; ".join(f"{names[0]!r} at {who}" for who, names in damaged.items())
        if not attempts_left:
            raise RunError(
                f"version {version} of the weights arrived damaged {ATTEMPTS} times by the path {path}: the tensor "
                f"{listed} is not the trainer's. Memory or network corrupts data: check the machine before continuing"
            )
        _log.warning("version %d of the weights arrived damaged (%s): sending it again", version, listed)


def choose_path(sender: WorkerPlacement, engines: Sequence[WorkerPlacement]) -> Path:
    """The transport from the trainer's rank 0, the only rank that sends: `cuda_ipc` if all engines are on its GPU,
    `shared_memory` if they are on its node, else `broadcast`."""
    if any(placement.node != sender.node for placement in engines):
        return "broadcast"
    one_gpu = sender.device != "cpu" and all(placement.device == sender.device for placement in engines)
    return "cuda_ipc" if one_gpu else "shared_memory"


def choose_backend(sender: WorkerPlacement, engines: Sequence[WorkerPlacement]) -> BroadcastBackend:
    """`nccl` if the sender and every engine have a GPU each: NCCL rejects two ranks of a group on one GPU, such as a
    trainer and an engine that time-share it. Else `gloo`, through host memory."""
    placements = [sender, *engines]
    gpus = {(placement.node, placement.device) for placement in placements if placement.device != "cpu"}
    return "nccl" if len(gpus) == len(placements) else "gloo"


async def _transfer(
    actor: Cluster[TrainWorker], engines: Cluster[InferWorker], announcement: WeightAnnouncement, path: Path
) -> None:
    if path == "broadcast":
        await _broadcast(actor, engines)
        return
    ranks = range(len(engines))
    write = partial(actor.call, TrainWorker.write_bucket)
    loads = [partial(engines.call_rank, rank, InferWorker.load_bucket) for rank in ranks]
    await stream(len(announcement.manifest.layout.buckets), SLOTS, write, loads)


async def _broadcast(actor: Cluster[TrainWorker], engines: Cluster[InferWorker]) -> None:
    backend = choose_backend(actor.placements[0], engines.placements)
    ranks = [placement.rank for placement in engines.placements]
    rendezvous: Rendezvous = await actor.call(TrainWorker.open_rendezvous, ranks, backend, actor.deadline_s)
    sending = asyncio.ensure_future(actor.call(TrainWorker.send_weights, rendezvous))
    receiving = asyncio.ensure_future(engines.call(InferWorker.receive_weights, rendezvous))
    both = (sending, receiving)
    try:
        # waits: both are calls with deadlines
        _, pending = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_GRACE_S)
        errors = [error for each in both if each.done() and (error := each.exception()) is not None]
        if errors:
            await actor.call(TrainWorker.leave_group)  # its ranks are synchronized again when it returns
            raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
    finally:
        for each in both:
            each.cancel()
