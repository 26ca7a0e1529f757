"""CPU time of rewards that only compare short texts: microseconds per response.

The texts are generated, and are of the kind that a model of 135M parameters gives for the sum of two numbers before it is
trained: equations and sentences with many numbers, about 190 characters each. The floor is the comparison of the last
digits, found by one regular expression. `worker_number` is `number` as a run calls it, through the reward worker and the
pool; `worker_length`, whose reward costs nearly nothing, is what the way to a reward costs. All take turns.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.cluster import WorkerPlacement
from roll.config.schema import RewardConfig
from roll.data.task import Response, Task
from roll.reward import RewardSpec, make
from roll.workers.reward import RewardWorker

SENTENCES = (
    "{a} + {b} = {n}.", "{a} + {b} = {n}\n", "{a} + {b} is {n} + {b}, so {a} + {b} = {m}.", "Adding {a} gives {n}.",
    "To find {a} + {b}, we first add {m} to {a}, which gives us {n}.", "The sum of {a} and {b} is {n}.", "{n}\n",
    "In mathematics, {a} and {b} are two numbers that cannot be added without leaving a remainder.", "So we get {n}.",
    "Now adding them again, we have {m} + {n} = {b}.", "That is a valuable skill to have, isn't it?", "{n}.",
    "Multiply {a} by {m} and add {b}, which gives you {n}.", "Only the whole number counts, not the fraction.",
    "I hope this helps!", "Here is a simple way to look at it: {a} * {m} = {n}.", "The answer is {n}.", "\n\n",
)  # fmt: skip
REWARDS = {"number": {}, "exact": {}, "fuzzy": {}, "repetition": {}, "length": {"target": 50}}
THROUGH_WORKER = ("number", "length")

Judge = Callable[[Task, Response], object]
Jobs = Sequence[tuple[Task, Response]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--groups", type=int, default=64)
    options.add_argument("--samples", type=int, default=8, help="of each group")
    options.add_argument("--characters", type=int, default=190, help="of a response, mean")
    options.add_argument("--repeats", type=int, default=15)
    args = options.parse_args()

    jobs = attempts(args.groups, args.samples, args.characters)
    judges: dict[str, Judge] = {name: make(name, options) for name, options in REWARDS.items()}
    judges["floor"] = last_digits
    times = asyncio.run(measure(judges, jobs, args.repeats))
    result = {f"{name}_us": min(took) for name, took in times.items()}
    result["number_over_floor"] = result["number_us"] / result["floor_us"]
    report(result, args.json)


def attempts(groups: int, samples: int, characters: int) -> Jobs:
    """Responses to sums of two-digit numbers, in groups."""
    chance = random.Random(0)
    jobs = []
    for group in range(groups):
        a, b = chance.randrange(10, 100), chance.randrange(10, 100)
        task = Task.ask(f"sum/{group}", f"What is {a} + {b}? Answer with just the number.", a + b)
        jobs += [(task, rambling(chance, a, b, characters)) for _ in range(samples)]
    return jobs


def rambling(chance: random.Random, a: int, b: int, characters: int) -> Response:
    text = ""
    length = chance.expovariate(1 / characters)
    while not text or len(text) < length:
        numbers = {"n": chance.choice((a + b, chance.randrange(300))), "m": chance.randrange(20)}
        text += chance.choice(SENTENCES).format(a=a, b=b, **numbers) + " "
    return Response(text.strip(), len(text) // 4, "stop")


def last_digits(task: Task, response: Response) -> float:
    found = re.findall(r"-?\d+", response.text)
    return float(bool(found) and int(found[-1]) == task.answer)


async def measure(judges: dict[str, Judge], jobs: Jobs, repeats: int) -> dict[str, list[float]]:
    """Microseconds of CPU time per response, of every repetition."""
    times: dict[str, list[float]] = {name: [] for name in (*judges, *(f"worker_{name}" for name in THROUGH_WORKER))}
    workers = {name: await started_worker(name) for name in THROUGH_WORKER}
    for _ in range(repeats):
        for name, judge in judges.items():
            began_s = time.process_time()
            for task, response in jobs:
                judge(task, response)
            times[name].append(1e6 * (time.process_time() - began_s) / len(jobs))
        for name, worker in workers.items():
            began_s = time.process_time()
            for task, response in jobs:
                await worker.score(task, response)
            times[f"worker_{name}"].append(1e6 * (time.process_time() - began_s) / len(jobs))
    for worker in workers.values():
        await worker.close()
    return times


async def started_worker(name: str) -> RewardWorker:
    config = RewardConfig(name=name, options=REWARDS[name], workers=1)
    worker = RewardWorker(WorkerPlacement("reward", 0, 1), config, RewardSpec.of_config(config))
    await worker.start()
    return worker


if __name__ == "__main__":
    main()
