"""Failures in a simulated training run: of graders, of the ledger's process, and of samples that crash their grader."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from roll.cluster import WorkerPlacement
from roll.data.remote_columns import ColumnBlock
from roll.ledger.log import Ledger
from roll.simulation.engine import SimEngine
from roll.simulation.graders import SimGraderPool
from roll.simulation.rollouts import SimRollouts
from roll.simulation.workload import Workload

Fate = Callable[[str, str, int], str]
"""Why a sample of a task, at its n-th try, fails and crashes its grader; empty if it does not."""


class MortalGraders(SimGraderPool):
    """Graders that may be down for a while: their jobs are graded again when they are back."""

    def die(self) -> None:
        self.servers = 0
        for job in list(self._serving.values()):
            self._leave(job)
            self._waiting[job.id] = job

    def restore(self, servers: int) -> None:
        self.servers = servers
        self._serve()


class MortalLedger(Ledger):
    """A ledger whose process may be killed."""

    def kill(self, written: float) -> None:
        """Records that were not flushed are lost, or a share `written` of their bytes is in the file; later ones are
        ignored."""
        if self._descriptor >= 0:
            lost = b"".join(self._buffer)
            os.write(self._descriptor, lost[: int(len(lost) * written)])
            os.close(self._descriptor)
        self._descriptor = -1

    @property
    def lag(self) -> int:
        """Number of records that a kill would lose."""
        return b"".join(self._buffer).count(b"\n")

    def _add(self, records: bytes) -> None:
        if self._descriptor >= 0:
            super()._add(records)


class MortalRollouts(SimRollouts):
    """A rollout worker some of whose samples crash their grader; it records which tokens were masked."""

    def __init__(
        self,
        placement: WorkerPlacement,
        workload: Workload,
        engines: Sequence[SimEngine],
        graders: SimGraderPool,
        fate: Fate,
    ) -> None:
        super().__init__(placement, workload, engines, graders)
        self._fate = fate
        self.masked_below: dict[str, int] = {}

    @property
    def resident_samples(self) -> set[str]:
        """Samples whose tokens are here, or will be."""
        return {sample for progress in self._leases.values() for sample in progress.lease.samples}

    @property
    def running(self) -> set[str]:
        return set(self._running)

    def columns(self, blocks: Sequence[Sequence[str]], mask_below: int = 0) -> list[ColumnBlock]:
        self.masked_below = {sample: mask_below for block in blocks for sample in block}
        return super().columns(blocks, mask_below)

    def _scored(self, id: str) -> None:
        sample = self._running[id]
        lease = sample.progress.lease
        if not (reason := self._fate(lease.task.id, id, lease.tries)):
            super()._scored(id)
            return
        del self._running[id]
        self._move(sample, "failed", reason)
        self._account(sample, kills=1)
