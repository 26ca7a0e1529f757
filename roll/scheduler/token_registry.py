"""The token registry: which rollout worker holds the tokens of each sample.

Invariants: a sample is registered on at most one worker, and on none before its lease is sent and after its worker died;
tokens go from the rollout workers to the trainers or into files, never through the controller.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np

from roll.cluster import Cluster
from roll.cluster.errors import CallTimedOut, WorkerDied
from roll.data.batch import Batch
from roll.data.remote_columns import cut_into_blocks
from roll.data.sample import Group, Sample
from roll.rollout.messages import BufferedGroup, FinalState
from roll.rollout.transcript import Transcript
from roll.rollout.worker import RolloutWorker


class TokenRegistry:
    def __init__(self, workers: Cluster[RolloutWorker], live_workers: AbstractSet[int]) -> None:
        """`live_workers`: the live workers; the pool updates this set."""
        self._workers = workers
        self._live_workers = live_workers
        self._locations: dict[str, tuple[int, str]] = {}
        """Worker and lease of every sample whose tokens are stored."""

    def register(self, samples: Sequence[Sample], worker: int, lease: str) -> None:
        """Records which worker and lease hold these samples."""
        for sample in samples:
            self._locations[sample.id] = (worker, lease)

    def unregister(self, samples: Sequence[Sample]) -> None:
        """Removes samples that their worker no longer holds."""
        for sample in samples:
            self._locations.pop(sample.id, None)

    def worker_died(self, worker: int) -> None:
        """Removes all samples of a dead worker."""
        self._locations = {sample: location for sample, location in self._locations.items() if location[0] != worker}

    def locate(self, sample: Sample) -> int | None:
        """The worker that holds a sample's tokens; None if they are lost or do not exist yet."""
        location = self._locations.get(sample.id)
        return None if location is None else location[0]

    async def batch(self, samples: Sequence[Sample], mask_below: int = 0) -> Batch:
        """A batch of scored samples, in this order; tokens of versions before `mask_below` are masked out of the loss.
        The batch has references: the tokens stay on the workers."""
        lengths = np.array([sample.tokens for sample in samples], np.int64)
        workers = np.array([self._locations[sample.id][0] for sample in samples], np.int64)
        which, starts = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
        requests: list[tuple[int, list[list[str]]]] = []
        count = 0
        for worker in np.unique(workers).tolist():
            here = np.flatnonzero(workers == worker)
            members = [here[block] for block in cut_into_blocks(lengths[here])]
            for block in members:
                which[block], starts[block] = count, np.cumsum(lengths[block]) - lengths[block]
                count += 1
            requests.append((worker, [[samples[i].id for i in block] for block in members]))
        calls = (self._workers.call_rank(worker, RolloutWorker.columns, names, mask_below) for worker, names in requests)
        blocks = [block for found in await asyncio.gather(*calls) for block in found]
        return Batch.from_blocks(samples, lengths, blocks, which, starts)

    async def texts(self, samples: Sequence[Sample]) -> list[str]:
        """The text of these samples' responses. It is fetched to the controller: use it for a few samples only."""
        workers = [self._locations[sample.id][0] for sample in samples]
        calls = (
            self._workers.call_rank(worker, RolloutWorker.texts, [sample.id])
            for worker, sample in zip(workers, samples, strict=True)
        )
        return [text for (text,) in await asyncio.gather(*calls)]

    async def transcripts(self, samples: Sequence[Sample]) -> list[Transcript]:
        """Transcripts of these samples, without those whose tokens are lost. For a few samples only."""
        located = [(worker, sample) for sample in samples if (worker := self.locate(sample)) is not None]
        calls = (self._workers.call_rank(worker, RolloutWorker.transcripts, [sample.id]) for worker, sample in located)
        return [transcript for (transcript,) in await asyncio.gather(*calls)]

    async def write(self, step: int, final_states: Sequence[FinalState], overwrite: bool = False) -> None:
        """Has the workers write the samples of a step into the run's folder. `overwrite` replaces the parts of workers
        that still hold samples of the step; parts of workers that have died since stay as they are."""
        parts: dict[int, list[FinalState]] = {} if overwrite else {worker: [] for worker in self._live_workers}
        for final in final_states:
            location = self._locations.get(final.sample)
            if location is not None and location[0] in self._live_workers:
                parts.setdefault(location[0], []).append(final)
        calls = (
            self._workers.call_rank(worker, RolloutWorker.write, step, final_states)
            for worker, final_states in parts.items()
        )
        _raise_all_but_deaths(await asyncio.gather(*calls, return_exceptions=True))

    async def save(self, folder: Path, parts: Mapping[int, Sequence[str]]) -> None:
        """Has the workers write samples into a checkpoint's folder. The part of a worker that dies is missing."""
        calls = (
            self._workers.call_rank(worker, RolloutWorker.save, folder, samples) for worker, samples in parts.items()
        )
        _raise_all_but_deaths(await asyncio.gather(*calls, return_exceptions=True))

    async def load(self, folder: Path, parts: Mapping[int, Sequence[Group]]) -> None:
        """Has the workers read ready groups from a checkpoint's folder; incomplete groups are not registered."""
        workers = sorted(self._live_workers)
        calls = (self._load(workers[part % len(workers)], folder, part, groups) for part, groups in parts.items())
        # waits: calls have deadlines
        _raise_all_but_deaths(await asyncio.gather(*(calls if workers else ()), return_exceptions=True))

    async def _load(self, worker: int, folder: Path, part: int, groups: Sequence[Group]) -> None:
        by_lease = {f"{group.index} of a checkpoint": group for group in groups}
        wanted = [
            BufferedGroup(lease, group.index, group.task, tuple(sample.id for sample in group.scored))
            for lease, group in by_lease.items()
        ]
        for lease in await self._workers.call_rank(worker, RolloutWorker.load, folder, part, wanted):
            self.register(by_lease[lease].samples, worker, lease)

    async def release(self, samples: Sequence[Sample] | None = None) -> None:
        """Has the workers free the tokens of these samples, or of all."""
        keys: dict[int, set[str]] = defaultdict(set)
        for sample in list(self._locations) if samples is None else [sample.id for sample in samples]:
            if (location := self._locations.pop(sample, None)) is not None:  # None after its lease was cancelled
                keys[location[0]].add(location[1])
        calls = [
            self._workers.call_rank(worker, RolloutWorker.release, sorted(leases))
            for worker, leases in keys.items()
            if worker in self._live_workers
        ]
        _raise_all_but_deaths(await asyncio.gather(*calls, return_exceptions=True))


def _raise_all_but_deaths(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, WorkerDied | CallTimedOut):
            raise result
