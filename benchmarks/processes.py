"""The scheduler beside a barrier with real processes, and what the simulation says of the same run beforehand.

Two engines on CPU cores, one thread each, a small model with fresh weights. Lengths and rewards of the samples are those
of a `roll.simulation.workload.Workload`, so that the same samples go through real and simulated engines:

1. The engines' steps are timed and a `roll.simulation.spec.EngineSpec` fitted to them.
2. With it the simulation says how long every step will take, with the scheduler and with the barrier.
3. Both are run with real engines, rollout workers and graders, a step of one, then the same step of the other:

   - **scheduler**: `RolloutScheduler.next_rollout`, on-policy: a dropped group is replaced at once;
   - **barrier**: all groups of a round are carried to the last verdict, then filtered; what is missing makes the next.

`real_over_barrier` is the barrier's time over the scheduler's, `predicted_over_barrier` the same by the simulation, and
`real_of_predicted` the first over the second: 1 where the simulation is right. Only generating and judging are timed:
training is the same for both.

Two workloads. `deep`: most of an engine's step is shared by the whole batch, as on a GPU, so that a half-empty batch is
dear (a narrow model with many layers, 16 sequences). `tiny`: a step takes longer with every sequence, so that it is not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report
from crew import Crew, TimedEngine, make_model, rollout_config

from roll.data.sample import Group, Sample
from roll.data.task import Task
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import no_signal
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import EpochSampler
from roll.simulation.barrier import run_barrier
from roll.simulation.calibration import Timing, batches_to_time, error_of, fitted
from roll.simulation.clock import run
from roll.simulation.controller import simulate
from roll.simulation.lengths import Lengths
from roll.simulation.spec import EngineSpec
from roll.simulation.workload import RLVR, Workload

PROMPT_TOKENS = 24
FRAME_TOKENS = 3
"""Of a prompt, those that are the chat template's."""
TIMED_STEPS = 24
"""Decoding steps that are timed together."""


@dataclass(frozen=True)
class Trial:
    """A workload and the model that it is run with."""

    workload: Workload
    """The speeds of its engines are measured."""
    layers: int
    hidden: int


REAL = replace(
    RLVR,
    engines=2,
    prompts=Lengths(mean_tokens=PROMPT_TOKENS, sigma=0.0, alike=1.0, max_tokens=PROMPT_TOKENS),
    grading=None,
    train_tokens_per_s=float("inf"),
    publish_s=0.0,
    max_replacements=2.0,
)
"""The lengths' spread and the tasks' difficulty are those of `RLVR`; verdicts, training and publishing take no time."""


def _limits(max_running: int) -> EngineSpec:
    """An engine whose cache is never full."""
    return replace(RLVR.engine, max_running=max_running, kv_tokens=10**9, reserve_tokens=0)


TRIALS = {
    "deep": Trial(
        replace(
            REAL,
            name="deep",
            engine=_limits(16),
            groups_per_step=24,
            group_size=4,
            responses=replace(RLVR.responses, mean_tokens=80, max_tokens=640, min_tokens=4),
        ),
        layers=16,
        hidden=32,
    ),
    "tiny": Trial(
        replace(
            REAL,
            name="tiny",
            engine=_limits(32),
            groups_per_step=48,
            group_size=8,
            responses=replace(RLVR.responses, mean_tokens=75, max_tokens=600, min_tokens=4),
        ),
        layers=5,
        hidden=128,
    ),
}


def tasks_of(prompt_tokens: int) -> list[Task]:
    """Prompts of one length, different from the first tokens on. Whoever says 1 is right."""
    return [Task.ask(str(n), str(n)[::-1].ljust(prompt_tokens - FRAME_TOKENS, "x"), "1") for n in range(10_000)]


async def calibrated(crew: Crew) -> tuple[EngineSpec, float]:
    """The engines as they are, all timed at once, and by what share the spec is off."""
    timings = []
    await _mean_s(crew, [PROMPT_TOKENS] * crew.workload.engine.max_running, TIMED_STEPS)  # everything is warm then
    for contexts in batches_to_time(crew.workload):
        first_s, all_s = await _mean_s(crew, contexts, 1), await _mean_s(crew, contexts, 1 + TIMED_STEPS)
        cached = sum(contexts) + len(contexts) * (TIMED_STEPS + 1) / 2
        timings.append(Timing(len(contexts), cached, (all_s - first_s) / TIMED_STEPS))
    prompt_s = statistics.mean([await _mean_s(crew, [PROMPT_TOKENS], 1) for _ in range(8)])
    spec = fitted(crew.workload.engine, timings, PROMPT_TOKENS / prompt_s)
    return spec, error_of(spec, timings)


async def _mean_s(crew: Crew, contexts: Sequence[int], new_tokens: int) -> float:
    seconds: list[Any] = await crew.engines.call_each(TimedEngine.seconds_of, contexts, new_tokens)
    return float(statistics.mean(seconds))


@dataclass(frozen=True)
class Seconds:
    """Of each step."""

    scheduler: list[float]
    barrier: list[float]

    @property
    def over_barrier(self) -> float:
        return sum(self.barrier) / sum(self.scheduler)


def predicted(workload: Workload, steps: int) -> Seconds:
    with tempfile.TemporaryDirectory() as folder:
        times, _ = run(simulate(workload, steps, Path(folder) / "ledger", workers=1))
    ends = [0.0, *(step.published_s for step in times)]
    barrier = run_barrier(workload, steps)
    return Seconds(np.diff(ends).tolist(), [step.seconds for step in barrier.steps])


class Scheduled:
    """Steps of the scheduler."""

    def __init__(self, crew: Crew, workload: Workload) -> None:
        self._pool = crew.for_scheduler
        self._workload = workload
        order = EpochSampler(tasks_of(PROMPT_TOKENS), 0)
        self._scheduler = RolloutScheduler(order, self._pool, Lifecycle(None), rollout_config(workload), no_signal)
        self._steps = 0

    async def step(self) -> None:
        rollout = await self._scheduler.next_rollout()
        kept = {group.index for group in rollout.kept}
        assert kept == {group.index for group in rollout.groups if self._workload.has_signal(group.index)}
        self._steps += 1
        self._scheduler.mark_trained(rollout, self._steps)
        await self._pool.tokens.release(rollout.samples)


class Rounds:
    """Steps of the barrier: the same groups, a round at a time. Engines have all of a round from its beginning."""

    def __init__(self, crew: Crew, workload: Workload) -> None:
        self._pool = crew.for_barrier
        self._workload = workload
        self._order = EpochSampler(tasks_of(PROMPT_TOKENS), 0)
        self._lifecycle = Lifecycle(None)
        self._next_group = 0

    async def step(self) -> None:
        workload, kept, tried = self._workload, 0, 0
        while missing := min(workload.groups_per_step - kept, workload.most_groups_per_step - tried):
            groups = [self._group() for _ in range(missing)]
            await asyncio.gather(*map(self._carry, groups))
            kept += sum(no_signal(group) is None for group in groups)
            tried += missing
            await self._pool.tokens.release([sample for group in groups for sample in group.samples])

    def _group(self) -> Group:
        index, task = self._next_group, self._order.next().task
        self._next_group += 1
        samples = [Sample(id, task, index, 1.0) for id in self._workload.samples_of(index)]
        for sample in samples:
            self._lifecycle.move(sample, "queued")
        return Group(index, task, samples)

    async def _carry(self, group: Group) -> None:
        await self._pool.run(str(group.index), group.samples, self._lifecycle, fifo_key=group.index)


async def measured(crew: Crew, steps: int) -> Seconds:
    small = replace(crew.workload, groups_per_step=2)
    for warm_up in (Scheduled(crew, small), Rounds(crew, small)):
        await warm_up.step()
    scheduled, rounds = Scheduled(crew, crew.workload), Rounds(crew, crew.workload)
    found = Seconds([], [])
    for _ in range(steps):
        found.scheduler.append(await _timed(scheduled.step))
        found.barrier.append(await _timed(rounds.step))
    return found


async def _timed(step: Callable[[], Any]) -> float:
    began_s = time.monotonic()
    await step()
    return time.monotonic() - began_s


async def compared(trial: Trial, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), trial.layers, trial.hidden)
        crew = Crew(trial.workload, Path(folder))
        try:
            await crew.start()
            spec, error = await calibrated(crew)
            said = await asyncio.to_thread(predicted, replace(trial.workload, engine=spec), steps)
            _show_spec(spec, error)
            _show("predicted", said)
            real = await measured(crew, steps)
            _show("real", real)
        finally:
            await crew.executor.close()
    return {
        "workload": trial.workload.name,
        "spec_error": error,
        "predicted_scheduler_s": statistics.mean(said.scheduler),
        "scheduler_s": statistics.mean(real.scheduler),
        "predicted_barrier_s": statistics.mean(said.barrier),
        "barrier_s": statistics.mean(real.barrier),
        "predicted_over_barrier": said.over_barrier,
        "real_over_barrier": real.over_barrier,
        "real_of_predicted": real.over_barrier / said.over_barrier,
    }


def _show_spec(spec: EngineSpec, error: float) -> None:
    alone, full = spec.step_s(1, 100), spec.step_s(spec.max_running, 100 * spec.max_running)
    costs = f"{1e3 * spec.base_s:.2f} ms + {1e6 * spec.per_sequence_s:.0f} µs a sequence"
    print(f"an engine's step: {costs} + {1e9 * spec.per_cached_token_s:.0f} ns a token of context, {error:.0%} off;")
    print(f"  {1e3 * alone:.2f} ms alone, {1e3 * full:.2f} ms with {spec.max_running}, all of 100 tokens")
    print(f"{'':12}{'scheduler':>10}{'barrier':>10}{'over barrier':>14}   s per step, and each step's", flush=True)


def _show(name: str, found: Seconds) -> None:
    means = "".join(f"{statistics.mean(seconds):10.2f}" for seconds in (found.scheduler, found.barrier))
    each = "  ".join(f"{ours:.1f}/{theirs:.1f}" for ours, theirs in zip(found.scheduler, found.barrier, strict=True))
    print(f"{name:12}{means}{found.over_barrier:14.2f}   {each}", flush=True)


def chosen(args: argparse.Namespace) -> Trial:
    trial: Trial = TRIALS[args.workload]
    workload = trial.workload
    if args.groups:
        workload = replace(workload, groups_per_step=args.groups)
    if args.longest:
        mean = workload.responses.mean_tokens * args.longest / workload.responses.max_tokens
        workload = replace(workload, responses=replace(workload.responses, mean_tokens=mean, max_tokens=args.longest))
    return replace(trial, workload=workload)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workload", choices=list(TRIALS), default="deep")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--groups", type=int, help="groups per step, instead of the workload's")
    options.add_argument("--longest", type=int, help="tokens of the longest responses; the others are as much shorter")
    args = options.parse_args()
    report(asyncio.run(compared(chosen(args), args.steps)), args.json)


if __name__ == "__main__":
    main()
