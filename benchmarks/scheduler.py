"""The rollout scheduler beside a barrier and a bound, on a virtual clock; and what it costs.

The real scheduler, router, pool and ledger (on disk) run against simulated engines (KV limits, speed by batch size,
log-normal lengths with long tails), environments (1 % stragglers of 50×) and graders. Beside them:

- **barrier**: the same samples on the same engines, a stage at a time: all generation, then all scoring, then filtering,
  then refills in whole rounds, then training;
- **bound**: what no scheduler can beat (`roll/simulation/bound.py`, which knows no scheduler).

`over_barrier` is the barrier's time over the scheduler's on-policy, `async_over_barrier` the same with
`max_staleness: 1`: both from the end of the second step on, when the pipeline is full, to the end of the last.
`of_bound` is the bound's time over the scheduler's with `max_staleness: 1`, for the whole run from its first token on:
in a later window the scheduler could train on samples that were drawn before it began, and beat what it was held to.
The smaller of the two workloads' figures is reported under these names, each workload's own beside it.

`samples_per_s` is what one core of the controller can carry, with workers that cost next to nothing, at 1,000, 10,000 and
100,000 samples in flight; the least of the three is reported. `ledger_transitions_per_s` is the ledger alone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.cluster import Cluster, LocalExecutor, WorkerPlacement
from roll.config.schema import RolloutConfig
from roll.data.task import Task
from roll.ledger.log import Ledger, Transition
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import no_signal
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.router import Router
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import EpochSampler
from roll.simulation.barrier import run_barrier
from roll.simulation.bound import on_policy_bound_s, overlapping_bound_s
from roll.simulation.clock import run
from roll.simulation.controller import StepTimes, simulate
from roll.simulation.prompt_workers import PromptWorker
from roll.simulation.workload import AGENTIC, RLVR, Workload

FIRST = 2
"""Steps before the figures begin."""
FOREVER_S = 1e9


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--engines", type=int, help="simulated engines; the step grows along (default: 8)")
    options.add_argument("--workload", choices=["rlvr", "agentic"], help="only this one")
    options.add_argument("--staleness", type=int, default=1)
    options.add_argument("--only", choices=["ratios", "cost"])
    args = options.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "cost":
            workloads = [w for w in (RLVR, AGENTIC) if args.workload in (None, w.name)]
            found |= ratios([w.scaled(args.engines) if args.engines else w for w in workloads], args, Path(folder))
        if args.only != "ratios":
            found |= costs(Path(folder))
    report(found, args.json)


def ratios(workloads: Sequence[Workload], args: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for workload in workloads:
        found |= compared(workload, args.steps, args.staleness, folder)
    for name in ("over_barrier", "async_over_barrier", "of_bound"):
        found[name] = min(found[f"{workload.name}_{name}"] for workload in workloads)
    return found


def compared(workload: Workload, steps: int, staleness: int, folder: Path) -> dict[str, Any]:
    barrier = run_barrier(workload, steps)
    barrier_s = sum(step.seconds for step in barrier.steps[FIRST:])
    on_policy, run_on = run(simulate(workload, steps, folder / f"{workload.name}.0"))
    ahead, run_ahead = run(simulate(workload, steps, folder / f"{workload.name}.k", max_staleness=staleness))
    of_bound = overlapping_bound_s(workload, [step.groups for step in ahead]) / ahead[-1].published_s
    on_of_bound = on_policy_bound_s(workload, [step.groups for step in on_policy]) / on_policy[-1].published_s
    rows = [
        ("barrier", barrier_s, barrier.utilisation, 0.0),
        ("on-policy", _window_s(on_policy), run_on.utilisation, on_of_bound),
        (f"staleness {staleness}", _window_s(ahead), run_ahead.utilisation, of_bound),
    ]
    size = f"{workload.groups_per_step} × {workload.group_size} samples per step"
    print(f"\n{workload.name}: {workload.engines} engines, {size}")
    print(f"{'':14}{'s per step':>10}{'over barrier':>14}{'engines busy':>14}{'of its bound':>14}")
    for name, seconds, busy, part in rows:
        share = f"{part:14.3f}" if part else " " * 14
        print(f"{name:14}{seconds / (steps - FIRST):10.1f}{barrier_s / seconds:14.2f}{busy:14.2f}{share}")
    oldest = max(max(step.ages) for step in ahead)
    print(f"oldest sample trained on: {oldest} versions behind; length bias of the last step {ahead[-1].bias:+.3f}")
    return {
        f"{workload.name}_over_barrier": barrier_s / _window_s(on_policy),
        f"{workload.name}_async_over_barrier": barrier_s / _window_s(ahead),
        f"{workload.name}_of_bound": of_bound,
        f"{workload.name}_on_policy_of_bound": on_of_bound,
    }


def _window_s(steps: Sequence[StepTimes]) -> float:
    return steps[-1].published_s - steps[FIRST - 1].published_s


def costs(folder: Path) -> dict[str, Any]:
    print(f"\n{'in flight':>10}{'samples/s':>12}{'µs a sample':>14}")
    rates: dict[int, float] = {}
    for flying in (1_000, 10_000, 100_000):
        rates[flying] = run(_carried(flying, 100_000, folder / f"cost.{flying}"))
        print(f"{flying:10,}{rates[flying]:12,.0f}{1e6 / rates[flying]:14.1f}")
    transitions = max(_ledger_rate(folder / f"rate.{number}") for number in range(3))
    return {
        **{f"samples_per_s_{flying}": rate for flying, rate in rates.items()},
        "samples_per_s": min(rates.values()),
        "ledger_transitions_per_s": transitions,
    }


async def _carried(flying: int, samples: int, ledger: Path) -> float:
    """Samples a second of CPU time with so many in flight, once the first step has warmed things up."""
    size, clock = 8, asyncio.get_running_loop()
    with Ledger.open(ledger) as record:
        cluster: Any = await Cluster.start(
            LocalExecutor(FOREVER_S), PromptWorker, [WorkerPlacement("rollout", r, 8) for r in range(8)]
        )
        pool = RolloutPool(cluster, Router(128, FOREVER_S), deadline_s=FOREVER_S)
        config = RolloutConfig(groups_per_step=flying // size, group_size=size)
        order = EpochSampler([Task(str(number), ()) for number in range(10_000)], 0)
        scheduler = RolloutScheduler(order, pool, Lifecycle(record, clock.time), config, no_signal)
        began_s = time.process_time()
        steps = max(samples // flying, 2)
        for step in range(steps):
            rollout = await scheduler.next_rollout()
            scheduler.commit(rollout, step + 1)
            record.flush()
        return steps * flying / (time.process_time() - began_s)


def _ledger_rate(path: Path, records: int = 200_000, flush_every: int = 10_000) -> float:
    """Transitions a second onto the disk, in wall time."""
    transitions = [
        Transition(f"{n // 6}.{n % 6}", "scoring", "", 1.7e9 + n, {"tokens": n % 999, "finish": "stop"})
        for n in range(records)
    ]
    with Ledger.open(path) as ledger:
        began_s = time.perf_counter()
        for number, transition in enumerate(transitions):
            ledger.append(transition)
            if number % flush_every == 0:
                ledger.flush()
        ledger.flush()
        return records / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
