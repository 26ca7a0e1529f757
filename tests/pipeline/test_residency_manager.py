"""Turns on shared devices: who makes room, in which order, and who goes on meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.cluster import Cluster, Dispatch, LocalExecutor, Worker, WorkerPlacement, dispatch
from roll.config import load_config
from roll.devices.inventory import Inventory, Node
from roll.devices.map import make_map
from roll.devices.residency import make_residency_table
from roll.pipeline.residency_manager import ResidencyManager
from roll.pipeline.roles import Roles
from roll.scheduler.router import Router
from roll.strategy.offload import Residency

Moves = list[tuple[str, Residency]]


class Toy(Worker):
    """Notes what it is told to keep; a worker that comes back must find its devices free."""

    moves: Moves

    @dispatch(Dispatch.ALL)
    async def set_residency(self, level: Residency) -> None:
        await asyncio.sleep(0)
        self.moves.append((self.placement.name, level))


class ToyPool:
    """Notes which engines samples are taken off."""

    def __init__(self) -> None:
        self.busy = False
        self.displaced: list[tuple[str, int | None]] = []

    async def requeue_generating(self, reason: str, engine: int | None = None) -> None:
        self.displaced.append((reason, engine))


async def started(roles: dict[str, Any], *, offload: bool = True) -> tuple[ResidencyManager, Roles, Moves]:
    config = load_config({"executor": "ray", "roles": roles, "algorithm": {"kl_coef": 0.1}})
    inventory = Inventory((Node("node0", "", 8, 4, 1 << 40, 1 << 40),))
    map = make_map(config, inventory, roles_in_use={"actor_train", "actor_infer", "reference", "rollout", "reward"})
    residency, moves, executor = make_residency_table(map, offload), [], LocalExecutor()

    def make(place: WorkerPlacement) -> Any:
        toy = Toy(place)
        toy.moves = moves
        return toy

    clusters: dict[str, Any] = {
        role: await Cluster.start(executor, make, map.roles[role].placements)
        for role in ("actor_train", "actor_infer", "reference")
    }
    router = Router(len(clusters["actor_infer"]), deadline_s=20)
    for place in map.roles["actor_infer"].placements:
        if residency.lowest("actor_infer", place.rank) != "all":
            await router.drain(place.rank)
    unused: Any = None
    pool: Any = ToyPool()
    running = Roles(
        executor=executor,
        residency=residency,
        actor=clusters["actor_train"],
        engines=clusters["actor_infer"],
        rewards=unused,
        rollouts=unused,
        reference=clusters["reference"],
        critic=None,
        environments=None,
        router=router,
        pool=pool,
    )
    return ResidencyManager(running), running, moves


def go(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 200))


def test_all_on_one_device_take_turns_and_make_room_first() -> None:
    async def main() -> None:
        turns, roles, moves = await started({"actor_train": 0, "actor_infer": 0, "reference": 0})
        rounds: dict[str, Moves] = {}
        for phase in ("publish", "generate", "reference", "train", "publish", "generate"):
            before = len(moves)
            await turns.enter(phase)  # type: ignore[arg-type]
            rounds[phase] = moves[before:]
            assert roles.router.open_engines == ({0} if phase == "generate" else set())
        assert rounds["generate"] == [("actor_train[0]", "none"), ("actor_infer[0]", "all")]
        assert rounds["reference"] == [("actor_infer[0]", "none"), ("reference[0]", "all")]
        assert rounds["train"] == [("reference[0]", "none"), ("actor_train[0]", "all")]
        assert rounds["publish"] == [("actor_train[0]", "weights"), ("actor_infer[0]", "weights")]

    go(main())


@pytest.mark.parametrize("offload", [False, True])
def test_roles_apart_never_move(offload: bool) -> None:
    async def main() -> None:
        turns, roles, moves = await started({"actor_train": 0, "actor_infer": "1-2", "reference": 3}, offload=offload)
        for phase in ("publish", "generate", "reference", "train", "publish"):
            await turns.enter(phase)  # type: ignore[arg-type]
            assert roles.router.open_engines == {0, 1}
        assert moves == []

    go(main())


def test_an_engine_on_shared_devices_drains_leaves_and_comes_back_while_others_go_on() -> None:
    async def main() -> None:
        turns, roles, moves = await started({"actor_train": 0, "actor_infer": "0-1", "reference": 3})
        router = roles.router
        await turns.enter("publish")
        assert router.open_engines == {1}
        await turns.enter("generate")
        assert router.open_engines == {0, 1}
        seats = [await router.reserve(10), await router.reserve(10)]
        assert [seat.engine for seat in seats] == [0, 1]
        moves.clear()
        training = asyncio.create_task(turns.enter("train"))
        await asyncio.sleep(0.02)
        assert not training.done()
        assert moves == []
        assert router.open_engines == {1}
        other = await router.reserve(1)
        assert other.engine == 1
        router.release(other)
        router.release(seats[0])
        await training
        assert moves == [("actor_infer[0]", "none"), ("actor_train[0]", "all")]
        other = await router.reserve(1)  # the other one generates during training, and its first sample goes on
        assert other.engine == 1
        router.release(other)
        await turns.enter("publish")
        await turns.enter("generate")
        assert router.open_engines == {0, 1}
        assert (await router.reserve(1)).engine == 0
        router.release(seats[1])

    go(main())


def test_what_an_engine_is_at_is_taken_off_it_before_it_leaves() -> None:
    async def main() -> None:
        turns, roles, moves = await started({"actor_train": 0, "actor_infer": "0-1", "reference": 3})
        pool: Any = roles.pool
        await turns.enter("generate")
        await turns.enter("train")
        assert pool.displaced == []  # nothing was with it
        await turns.enter("generate")
        seat = await roles.router.reserve(3)
        assert seat.engine == 0
        pool.busy = True
        moves.clear()
        training = asyncio.create_task(turns.enter("train"))
        await asyncio.sleep(0.02)
        assert [engine for _, engine in pool.displaced] == [0]
        assert moves == []
        roles.router.release(seat)
        await training
        assert moves == [("actor_infer[0]", "none"), ("actor_train[0]", "all")]

    go(main())


def test_an_engine_that_is_dead_is_not_asked_and_takes_its_part_when_it_is_back() -> None:
    async def main() -> None:
        turns, roles, moves = await started({"actor_train": 0, "actor_infer": "0-1", "reference": 3})
        await turns.enter("generate")
        roles.alive.discard(0)
        roles.router.mark_dead(0)
        moves.clear()
        await turns.enter("train")
        assert moves == [("actor_train[0]", "all")]
        assert not await turns.engine_restored(0)  # the device is the trainer's now
        assert moves[1:] == [("actor_infer[0]", "none")]
        roles.alive.add(0)
        await turns.enter("publish")
        await turns.enter("generate")
        assert roles.router.open_engines == {0, 1}
        moves.clear()
        assert await turns.engine_restored(0)
        assert moves == []

    go(main())
