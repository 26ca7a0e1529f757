"""The rollout workers as the controller sees them: groups go out as leases, outcomes come back, tokens stay there.

What always holds: the controller's books (states, ledger) change only here and in the scheduler; each lease is with one
worker and on one engine; what passes through is per sample, never per token.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.cluster import Cluster
from roll.cluster.line import Line
from roll.data.batch import Batch
from roll.data.columns import cut_into_blocks
from roll.data.sample import Sample
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.messages import Fate, Lease, Report
from roll.rollout.router import Router
from roll.rollout.worker import RolloutWorker


@dataclass(frozen=True)
class _Out:
    """A lease that is out."""

    worker: int
    samples: dict[str, Sample]
    lifecycle: Lifecycle
    done: asyncio.Future[None]


class RolloutPool:
    def __init__(self, workers: Cluster[RolloutWorker], router: Router, max_new_tokens: int) -> None:
        self._workers = workers
        self._router = router
        self._max_new_tokens = max_new_tokens
        self._out: dict[str, _Out] = {}
        self._by_sample: dict[str, _Out] = {}
        self._loads = [0] * len(workers)
        """Samples that are with each worker."""
        self._homes: dict[str, tuple[int, str]] = {}
        """Worker and lease of every sample whose tokens are kept."""
        self._lines = [self._line(worker) for worker in range(len(workers))]

    async def run(self, key: str, samples: Sequence[Sample], lifecycle: Lifecycle) -> None:
        """Carries queued samples of one task to their verdicts. Cancelling it ends them where they are."""
        async with self._router.seat(self._max_new_tokens * len(samples)) as engine:
            if key in self._out:
                raise ValueError(f"the lease {key!r} is out already")
            worker = self._loads.index(min(self._loads))
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            out = self._out[key] = _Out(worker, {sample.id: sample for sample in samples}, lifecycle, done)
            self._by_sample.update(dict.fromkeys(out.samples, out))
            self._homes.update({sample.id: (worker, key) for sample in samples})
            self._loads[worker] += len(samples)
            first = samples[0]
            lease = Lease(key, engine, first.task, first.group, first.temperature, tuple(out.samples))
            try:
                self._lines[worker].post(lease)
                await done
            except asyncio.CancelledError:
                for sample in samples:
                    self._homes.pop(sample.id, None)
                if not self._lines[worker].take_back(lease):
                    await self._lines[worker].arrived()
                    await self._workers.call_rank(worker, RolloutWorker.cancel, [key])
                raise
            finally:
                self._loads[worker] -= len(samples)
                del self._out[key]
                for sample in samples:
                    del self._by_sample[sample.id]

    async def batch(self, samples: Sequence[Sample]) -> Batch:
        """A batch of scored samples, in this order. Their tokens stay where they are."""
        lengths = np.array([sample.tokens for sample in samples], np.int64)
        homes = np.array([self._homes[sample.id][0] for sample in samples], np.int64)
        which, starts = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
        asked: list[tuple[int, list[list[str]]]] = []
        count = 0
        for worker in np.unique(homes).tolist():
            own = np.flatnonzero(homes == worker)
            members = [own[block] for block in cut_into_blocks(lengths[own])]
            for block in members:
                which[block], starts[block] = count, np.cumsum(lengths[block]) - lengths[block]
                count += 1
            asked.append((worker, [[samples[i].id for i in block] for block in members]))
        calls = (self._workers.call_rank(worker, RolloutWorker.columns, names) for worker, names in asked)
        blocks = [block for found in await asyncio.gather(*calls) for block in found]
        return Batch.from_blocks(samples, lengths, blocks, which, starts)

    async def texts(self, samples: Sequence[Sample]) -> list[str]:
        """What these samples' responses say: for a few of them, since it brings the text here."""
        homes = [self._homes[sample.id][0] for sample in samples]
        calls = (
            self._workers.call_rank(home, RolloutWorker.texts, [sample.id])
            for home, sample in zip(homes, samples, strict=True)
        )
        return [text for (text,) in await asyncio.gather(*calls)]

    async def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Has the workers write the samples of a step into the run's folder."""
        parts: dict[int, list[Fate]] = {worker: [] for worker in range(len(self._workers))}
        for sample in samples:
            parts[self._homes[sample.id][0]].append(Fate(sample.id, sample.state, sample.reason))
        calls = (self._workers.call_rank(worker, RolloutWorker.write, step, fates) for worker, fates in parts.items())
        await asyncio.gather(*calls)

    async def forget(self, samples: Sequence[Sample]) -> None:
        """Lets the workers drop the tokens of these samples."""
        keys: dict[int, set[str]] = defaultdict(set)
        for sample in samples:
            if (home := self._homes.pop(sample.id, None)) is not None:  # else its lease was cancelled
                keys[home[0]].add(home[1])
        calls = (self._workers.call_rank(worker, RolloutWorker.forget, sorted(some)) for worker, some in keys.items())
        await asyncio.gather(*calls)

    def _line(self, worker: int) -> Line[Lease, Report]:
        async def send(leases: list[Lease]) -> None:
            await self._workers.call_rank(worker, RolloutWorker.take, leases)

        async def ask() -> Report:
            return await self._workers.call_rank(worker, RolloutWorker.report)

        return Line(
            send, ask, take=self._take, fail=lambda error: self._fail(worker, error), busy=lambda: self._busy(worker)
        )

    def _busy(self, worker: int) -> bool:
        return any(out.worker == worker and not out.done.done() for out in self._out.values())

    def _take(self, report: Report) -> None:
        for move in report.moves:
            if (out := self._by_sample.get(move.sample)) is not None:  # else it was cancelled
                out.lifecycle.move(out.samples[move.sample], move.state, move.reason, **move.info)  # type: ignore[arg-type]
        for outcome in report.outcomes:
            if (out := self._by_sample.get(outcome.sample)) is not None:
                sample = out.samples[outcome.sample]
                sample.reward, sample.parts = outcome.reward, outcome.parts
                sample.tokens, sample.response_tokens = outcome.tokens, outcome.response_tokens
                sample.finish = outcome.finish
        for key in report.done:
            if (done := self._out.get(key)) is not None and not done.done.done():
                done.done.set_result(None)

    def _fail(self, worker: int, error: Exception) -> None:
        for out in self._out.values():
            if out.worker == worker and not out.done.done():
                out.done.set_exception(error)
