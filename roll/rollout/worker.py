"""The rollout role: drives leased samples through engines and graders, and keeps what they said.

What always holds: a lease that was taken is reported done once, unless it is cancelled; the tokens of its samples stay
here, for whoever trains on them, until they are forgotten; what the controller hears does not grow with their length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.cluster import Cluster, Dispatch, Place, Worker, parallel
from roll.config.schema import Config
from roll.data.batch import token_block
from roll.data.columns import Block
from roll.data.sample import Sample
from roll.model.chat import ChatRenderer
from roll.model.loading import find_model, load_tokenizer, stop_ids_of
from roll.rollout.door import EngineDoor
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.messages import Fate, Lease, Outcome, Report
from roll.rollout.runner import SampleRunner, run_all, training_sampling
from roll.run import RunFolder, Transition, write_samples
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker

POLL_S = 5.0
"""How long `report` waits before it says that nothing happened."""
GATHER_S = 0.25
"""How long moves wait for company; a lease that is done is reported at once."""


@dataclass
class _Held:
    """A lease, its samples and their runner."""

    lease: Lease
    samples: list[Sample]
    running: asyncio.Task[None] | None = None


@dataclass
class _Outbox:
    """What the next report will say."""

    report: Report = field(default_factory=Report)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    urgent: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, transition: Transition) -> None:
        self.report.moves.append(transition)
        self.news.set()

    def forget(self, samples: set[str], keys: set[str]) -> None:
        report = self.report
        report.moves = [move for move in report.moves if move.sample not in samples]
        report.outcomes = [outcome for outcome in report.outcomes if outcome.sample not in samples]
        report.done = [key for key in report.done if key not in keys]

    def take(self) -> Report:
        report, self.report = self.report, Report()
        self.news.clear()
        self.urgent.clear()
        return report


class RolloutWorker(Worker):
    def __init__(self, place: Place, config: Config, run: Path | None) -> None:
        super().__init__(place)
        source = find_model(config.model.path)
        tokenizer = load_tokenizer(source, config.model)
        self._config = config
        self._stop_ids = stop_ids_of(tokenizer, source)
        self._renderer = ChatRenderer(tokenizer, self._stop_ids)
        self._outbox = _Outbox()
        self._runner: SampleRunner | None = None
        self._held: dict[str, _Held] = {}
        self._home: dict[str, Sample] = {}
        self._run = None if run is None else RunFolder(run)
        self._part = None if place.world_size == 1 else place.rank
        self._error: Exception | None = None

    @parallel(Dispatch.ALL)
    def connect(self, engines: Cluster[InferWorker], rewards: Cluster[RewardWorker]) -> None:
        """Names the engines and graders that samples will go through."""
        self._runner = SampleRunner(
            EngineDoor(engines, client=self.place.name),
            rewards,
            self._renderer,
            Lifecycle(self._outbox),
            sampling=training_sampling(self._config.rollout, self._stop_ids),
            deadline_s=self._config.rollout.deadline_s,
            seed=self._config.seed,
            grader=self.place.rank,
        )

    @parallel(Dispatch.ONE)
    def take(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            samples = [Sample(id, lease.task, lease.group, lease.temperature, state="queued") for id in lease.samples]
            held = self._held[lease.key] = _Held(lease, samples)
            self._home.update({sample.id: sample for sample in samples})
            held.running = asyncio.create_task(self._carry(held))

    @parallel(Dispatch.ONE)
    async def report(self) -> Report:
        """What happened since the last call; waits a while for something."""
        box = self._outbox
        with suppress(TimeoutError):
            await asyncio.wait_for(box.news.wait(), POLL_S)
            await asyncio.wait_for(box.urgent.wait(), GATHER_S)
        report = box.take()
        if self._error is not None:
            error, self._error = self._error, None
            for held in self._held.values():  # all who wait for a lease of this worker hear the error, and wait no more
                if held.running is not None:
                    held.running.cancel()
            raise error
        return report

    @parallel(Dispatch.ALL)
    async def cancel(self, keys: Sequence[str]) -> None:
        """Ends leases and forgets them; what is not here is none of this worker's."""
        for held in [self._held[key] for key in keys if key in self._held]:
            if held.running is not None:
                held.running.cancel()
                await asyncio.gather(held.running, return_exceptions=True)
        self.forget(keys)

    @parallel(Dispatch.ONE)
    def columns(self, blocks: Sequence[Sequence[str]]) -> list[Block]:
        """The tokens of samples, a block for each list of them."""
        return [token_block([self._home[sample] for sample in samples]) for samples in blocks]

    @parallel(Dispatch.ONE)
    def texts(self, samples: Sequence[str]) -> list[str]:
        """What the samples' responses say."""
        responses = [self._home[sample].response for sample in samples]
        return [response.text if response is not None else "" for response in responses]

    @parallel(Dispatch.ONE)
    def write(self, step: int, fates: Sequence[Fate]) -> None:
        """Writes the samples of a step, whole, into the run's folder: one part of them, where there are more workers."""
        assert self._run is not None, "a worker without a run's folder has nowhere to write samples"
        write_samples(self._run, step, (_row(self._home[fate.sample], fate) for fate in fates), part=self._part)

    @parallel(Dispatch.ONE)
    def forget(self, keys: Sequence[str]) -> None:
        gone = {key: held for key in keys if (held := self._held.pop(key, None)) is not None}
        samples = {sample.id for held in gone.values() for sample in held.samples}
        for sample in samples:
            self._home.pop(sample, None)
        self._outbox.forget(samples, set(gone))

    async def close(self) -> None:
        await self.cancel(list(self._held))

    async def _carry(self, held: _Held) -> None:
        try:
            runner = self._runner
            assert runner is not None, "a rollout worker is connected before it takes leases"
            await run_all(lambda sample: runner.run(sample, held.lease.engine), held.samples)
        except Exception as error:  # the engines' or the graders' end: the controller must hear of it, whoever asks next
            self._error = self._error or error
            self._outbox.news.set()
        else:
            self._outbox.report.outcomes.extend(map(_outcome, held.samples))
            self._outbox.report.done.append(held.lease.key)
            self._outbox.news.set()
        self._outbox.urgent.set()


def _outcome(sample: Sample) -> Outcome:
    return Outcome(sample.id, sample.reward, sample.parts, sample.tokens, sample.response_tokens, sample.finish)


def _row(sample: Sample, fate: Fate) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "task": sample.task.id,
        "group": sample.group,
        "state": fate.state,
        "reason": fate.reason,
        "question": sample.task.question,
        "answer": sample.task.answer,
        "response": sample.response.text if sample.response else None,
        "finish": sample.finish,
        "reward": sample.reward,
        "parts": sample.parts,
        "ids": sample.log.ids.tolist(),
        "loss_mask": sample.log.loss_mask.astype(int).tolist(),
        "logprobs": [round(float(x), 6) for x in sample.log.behaviour],
        "versions": sample.log.versions.tolist(),
        "seconds": {state: round(seconds, 4) for state, seconds in sample.seconds.items()},
    }
