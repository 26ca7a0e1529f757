"""Rollout workers with almost no cost: the cost of a run with them is the controller's.

Every sample takes the same time; a lease reports when it begins, when its responses end and when its verdicts arrive, in
batches like real workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from roll.cluster import Worker, WorkerPlacement
from roll.data.remote_columns import ColumnBlock, RemoteRef
from roll.ledger.log import Transition
from roll.rollout.messages import Lease, Report, SampleResult, WorkerCommand

GENERATE_S, SCORE_S = 60.0, 2.0


class PromptWorker(Worker):
    """Has the methods of `RolloutWorker` that a controller calls by name."""

    def __init__(self, placement: WorkerPlacement) -> None:
        super().__init__(placement)
        self._loop = asyncio.get_running_loop()
        self._report = Report()
        self._transition_added = asyncio.Event()

    def execute(self, commands: Sequence[WorkerCommand]) -> None:
        leases = [command for command in commands if isinstance(command, Lease)]
        self._say(leases, "generating", {"engine": 0, "worker": self.placement.rank, "version": 0})
        self._loop.call_later(GENERATE_S, self._generated, leases)

    def _generated(self, leases: list[Lease]) -> None:
        self._say(leases, "scoring", {"tokens": 1000, "finish": "stop", "versions": [0, 0]})
        self._loop.call_later(SCORE_S, self._scored, leases)

    def _scored(self, leases: list[Lease]) -> None:
        self._say(leases, "scored", {"reward": 1.0})
        for lease in leases:
            for number, id in enumerate(lease.samples):
                self._report.results.append(SampleResult(id, float(number % 2), {}, 1200, 1000, "stop", 0, 0, 1))
            self._report.done_leases.append(lease.key)

    def _say(self, leases: list[Lease], state: str, info: dict[str, object]) -> None:
        now_s = self._loop.time()
        self._report.transitions += [Transition(id, state, "", now_s, info) for lease in leases for id in lease.samples]
        self._transition_added.set()

    async def report(self) -> Report:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._transition_added.wait(), 5.0)
        report, self._report = self._report, Report()
        self._transition_added.clear()
        return report

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def cancel(self, keys: Sequence[str]) -> None: ...

    def release(self, keys: Sequence[str]) -> None: ...

    def columns(self, blocks: Sequence[Sequence[str]], mask_below: int = 0) -> list[ColumnBlock]:
        return [ColumnBlock(RemoteRef(None)) for _ in blocks]
