"""Publishing to engines on several nodes: whoever is lost, the others are served, and who is back is served first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_runs import EXACT, TINY

from roll.cluster import Cluster, LocalExecutor, WorkerPlacement
from roll.cluster.errors import WorkerDied
from roll.cluster.executor import Handle, LocalHandle
from roll.config import load_config
from roll.pipeline.publisher import Publisher
from roll.pipeline.roles import Roles
from roll.scheduler.router import Router
from roll.workers.infer import InferWorker
from roll.workers.train import TrainWorker


class MortalHandle(LocalHandle):
    """A worker as if it had a process of its own, which can be killed: its connections end, and no call returns."""

    in_process = False
    dead = False

    def kill(self) -> None:
        self.dead = True
        cast(Any, self._worker)._member.close()

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._check()
        result = await super().call(method, args, kwargs)
        self._check()
        return result

    async def ping(self, deadline_s: float) -> None:
        self._check()

    def _check(self) -> None:
        if self.dead:
            raise WorkerDied(self.placement.name, "it was killed")


class Nodes(LocalExecutor):
    """All workers in this process, as if each was on a node of its own."""

    async def start(self, make: Callable[[WorkerPlacement], Any], places: Sequence[WorkerPlacement]) -> list[Handle]:
        await super().start(make, places)
        return [MortalHandle(worker) for worker in self._workers[-len(places) :]]


class Stage:
    """A trainer, three engines and what publishes."""

    def __init__(self) -> None:
        self.config = load_config(TINY, [*EXACT, "weight_sync.bucket_mb=1"])
        self.executor = Nodes(60)
        self.troubled: list[int] = []

    async def start(self) -> None:
        config = self.config
        places = [WorkerPlacement("actor_infer", rank, 3, threads=1, node=f"node {rank}") for rank in range(3)]
        trainer = WorkerPlacement("actor_train", threads=1, node="node 3")
        actor = await Cluster.start(self.executor, lambda place: TrainWorker(place, config), [trainer])
        engines = await Cluster.start(self.executor, lambda place: InferWorker(place, config, own_weights=True), places)
        self.handles = cast(list[MortalHandle], engines._handles)
        self.router = Router(3)
        self.roles = SimpleNamespace(
            actor=actor,
            engines=engines,
            alive={0, 1, 2},
            router=self.router,
            pool=SimpleNamespace(busy=False),
            engine_trouble=lambda rank, why: self.troubled.append(rank),
        )
        self.publisher = Publisher(cast(Roles, self.roles), config)

    async def publish(self, version: int) -> None:
        async with self.publisher.changing():
            await self.publisher.publish(version)

    async def bring_back(self, rank: int) -> None:
        """Another engine in the place of a killed one, as the supervisor does it."""
        config = self.config
        await self.handles[rank].restart(lambda place: InferWorker(place, config, own_weights=True))
        self.handles[rank].dead = False
        assert self.versions()[rank] is None
        await self.publisher.restore(rank)
        self.roles.alive.add(rank)
        self.router.add_engine(rank)

    def versions(self) -> list[int | None]:
        """The version that each engine has received, and all of whose tensors are the trainer's."""
        receivers = [cast(InferWorker, handle._worker)._receiver for handle in self.handles]
        return [None if each is None or each.finish() else each._require_manifest().version for each in receivers]


def on_stage(play: Callable[[Stage], Any]) -> None:
    async def main() -> None:
        stage = Stage()
        try:
            await stage.start()
            await stage.publish(1)
            assert stage.versions() == [1, 1, 1]
            await play(stage)
        finally:
            await stage.executor.close()

    asyncio.run(main())


def test_a_loss_after_a_publish_makes_a_new_group_and_so_does_a_return() -> None:
    async def play(stage: Stage) -> None:
        stage.handles[1].kill()
        stage.roles.alive.discard(1)  # the supervisor has noticed
        await stage.publish(2)
        assert stage.versions()[::2] == [2, 2]
        await stage.bring_back(1)
        assert stage.versions() == [2, 2, 2]
        await stage.publish(3)
        assert stage.versions() == [3, 3, 3]
        assert not stage.troubled

    on_stage(play)


def test_a_loss_that_nobody_has_noticed_goes_on_with_the_others() -> None:
    async def play(stage: Stage) -> None:
        stage.handles[1].kill()
        await stage.publish(2)
        assert stage.versions()[::2] == [2, 2]
        assert stage.troubled == [1]
        assert stage.router.open_engines == {0, 2}

    on_stage(play)


def test_a_loss_in_the_middle_of_a_broadcast_goes_on_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(stage: Stage) -> None:
        victim, receiver = stage.handles[1], cast(Any, stage.handles[1]._worker)._receiver
        receive = receiver.receive

        def dies(group: Any) -> None:
            victim.dead = True
            group.close()
            receive(group)

        monkeypatch.setattr(receiver, "receive", dies)
        await stage.publish(2)
        assert stage.versions()[::2] == [2, 2]
        assert stage.troubled == [1]
        stage.roles.alive.discard(1)
        await stage.bring_back(1)
        await stage.publish(3)
        assert stage.versions() == [3, 3, 3]

    on_stage(play)


def test_a_group_that_breaks_though_everybody_answers_is_formed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(stage: Stage) -> None:
        receiver = cast(Any, stage.handles[2]._worker)._receiver
        receive, broken = receiver.receive, []

        def breaks(group: Any) -> None:
            if not broken:
                broken.append(group)
                group.close()
            receive(group)

        monkeypatch.setattr(receiver, "receive", breaks)
        await stage.publish(2)
        assert broken
        assert stage.versions() == [2, 2, 2]
        assert not stage.troubled

    on_stage(play)


def test_the_end_of_the_trainer_is_told_as_its_own() -> None:
    async def play(stage: Stage) -> None:
        cast(MortalHandle, stage.roles.actor._handles[0]).kill()
        with pytest.raises(WorkerDied, match=r"actor_train\[0\] died"):
            await stage.publish(2)

    on_stage(play)
