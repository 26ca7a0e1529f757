"""The barrier and the bound of the default workloads, and how fast the models themselves run.

Run it as `python benchmarks/simulation.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.simulation.barrier import run_barrier
from roll.simulation.bound import on_policy_bound_s, overlapping_bound_s, step_bounds
from roll.simulation.clock import run
from roll.simulation.engine import SimEngine
from roll.simulation.workload import AGENTIC, RLVR, Workload, needed


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--engines", type=int, default=8)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--speed-engines", type=int, default=1_000, help="engines of the models' own speed")
    options.add_argument("--speed-samples", type=int, default=100_000, help="samples of the models' own speed")
    args = options.parse_args()
    result: dict[str, Any] = {"engines": args.engines, "steps": args.steps}
    for workload in (RLVR, AGENTIC):
        figures = peers(workload.scaled(args.engines), args.steps)
        result |= {f"{workload.name}_{name}": value for name, value in figures.items()}
    result["model_requests_per_s"] = requests_per_s(args.speed_engines, args.speed_samples)
    report(result, args.json)


def peers(workload: Workload, steps: int) -> dict[str, Any]:
    groups = needed(workload, steps)
    parts = step_bounds(workload, groups)
    barrier = run_barrier(workload, steps)
    return {
        "samples_per_step": workload.samples_per_step,
        "barrier_s": barrier.seconds,
        "barrier_utilisation": barrier.utilisation,
        "barrier_rounds": sum(step.rounds for step in barrier.steps) / steps,
        "barrier_tokens": barrier.decoded_tokens,
        "bound_s": overlapping_bound_s(workload, groups),
        "bound_decode_s": sum(part.decode_s for part in parts),
        "bound_longest_s": max(part.longest_s for part in parts),
        "bound_training_s": sum(part.training_s for part in parts),
        "on_policy_bound_s": on_policy_bound_s(workload, groups),
    }


def requests_per_s(engines: int, samples: int) -> float:
    """Requests a second of one core, from submission to the last token, all there at once."""
    episodes = [RLVR.episode(f"{number // 8}.{number % 8}") for number in range(samples)]
    sizes = [(e.sample, e.turns[0].prompt_tokens, e.turns[0].new_tokens) for e in episodes]
    began_s = time.process_time()
    run(_all_done(engines, sizes))
    return samples / (time.process_time() - began_s)


async def _all_done(engines: int, sizes: Sequence[tuple[str, int, int]]) -> None:
    loop = asyncio.get_running_loop()
    all_done = asyncio.Event()
    left = len(sizes)

    def done(id: str, tokens: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            all_done.set()

    pool = [SimEngine(loop, RLVR.engine) for _ in range(engines)]
    for number, size in enumerate(sizes):
        pool[number % engines].submit(*size, done)
    await all_done.wait()


if __name__ == "__main__":
    main()
