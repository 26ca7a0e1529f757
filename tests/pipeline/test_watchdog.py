"""The watchdog: silent while something moves, and once in a silence it says who waits on whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from roll.cluster.pending_calls import PendingCall
from roll.cluster.supervisor import WorkerStatus
from roll.ledger.log import Transition
from roll.pipeline.watchdog import Watchdog
from roll.run.state_latency import StateClock


class Cluster:
    def __init__(self, *calls: PendingCall) -> None:
        self._calls = list(calls)

    def pending(self) -> list[PendingCall]:
        return self._calls


def watchdog(said: list[str], silent_s: float) -> tuple[Watchdog, Any]:
    clock = StateClock()
    clock.append(Transition("7.1", "generating", "", 0.0, {"engine": 1, "worker": 0}))
    roles: Any = SimpleNamespace(
        moves=0,
        clusters=[
            Cluster(PendingCall("actor_train[0]", "update", 400.0)),
            Cluster(PendingCall("actor_infer[1]", "results", 2.0)),
        ],
        waiting=lambda: ["3 groups wait for an engine; engines that take some: 0"],
    )
    sick = WorkerStatus("actor_infer[1]", "restarting", 12.0, 13.0, 1, "it died\nits log")
    well = WorkerStatus("rollout[0]", "well", 100.0, 1.0, 0, "")
    supervisor: Any = SimpleNamespace(status=lambda: [sick, well])
    recorder: Any = SimpleNamespace(clock=clock, steps=0)
    return Watchdog(roles, supervisor, recorder, silent_s, said.append), roles


def test_it_names_samples_calls_engines_and_workers() -> None:
    dog, _ = watchdog([], 1.0)
    text = dog.describe_waits(300.0)
    lines = text.splitlines()
    assert lines[0] == "nothing has moved for 300 s. Who waits on whom:"
    assert "sample 7.1 has been generating" in lines[1]
    assert "engine 1, worker 0" in lines[1]
    assert lines[2] == "  3 groups wait for an engine; engines that take some: 0"
    assert lines[3] == "  the controller waits for actor_train[0].update since 400 s"
    assert lines[4] == "  the controller waits for actor_infer[1].results since 2 s"
    assert lines[5:] == ["  actor_infer[1] has been restarting for 12 s: it died"]


def test_it_speaks_once_a_silence_and_not_while_something_moves() -> None:
    async def main() -> None:
        said: list[str] = []
        dog, roles = watchdog(said, 0.08)
        watching = asyncio.create_task(dog.run())
        for _ in range(12):
            await asyncio.sleep(0.02)
            roles.moves += 1
        assert said == []
        await asyncio.sleep(0.4)
        assert len(said) == 1
        roles.moves += 1
        await asyncio.sleep(0.4)
        assert len(said) == 2
        watching.cancel()

    asyncio.run(main())
