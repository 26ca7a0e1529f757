"""Small calls on a worker in another process, many at once, as rollout workers make them on environments.

`batched` calls travel together, `single` ones each alone. The floor is a bare Ray actor with the same method. Each is
called by as many callers as `--callers`, again and again, and all take turns in one run: microseconds of wall time, and
of CPU time of both processes, a call.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import ray

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.cluster import Cluster, Dispatch, Worker, WorkerPlacement, dispatch
from roll.cluster.ray_executor import RayExecutor
from roll.config.schema import RayConfig

Call = Callable[[int], Awaitable[Any]]


class Echo(Worker):
    @dispatch(Dispatch.ONE)
    def cpu_s(self) -> float:
        return _cpu_s()

    @dispatch(Dispatch.ONE)
    async def single(self, number: int) -> int:
        return number

    @dispatch(Dispatch.ONE, batched=True)
    async def crowded(self, number: int) -> int:
        return number


@ray.remote(num_cpus=0, max_concurrency=1000)
class Bare:
    async def echo(self, number: int) -> int:
        return number

    async def cpu_s(self) -> float:
        return _cpu_s()


def _cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--callers", type=int, default=256)
    options.add_argument("--rounds", type=int, default=20, help="calls of each caller")
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    report(asyncio.run(measure(args.callers, args.rounds, args.repeats)), args.json)


async def measure(callers: int, rounds: int, repeats: int) -> dict[str, Any]:
    executor = RayExecutor(RayConfig())
    executor.connect()
    place = WorkerPlacement("echo", 0, 1, threads=1)
    executor.reserve([place])
    try:
        workers = await Cluster.start(executor, Echo, [place])
        bare: Any = Bare.remote()
        ways: dict[str, tuple[Call, Callable[[], Awaitable[float]]]] = {
            "crowded": (lambda n: workers.call(Echo.crowded, n), lambda: workers.call(Echo.cpu_s)),
            "single": (lambda n: workers.call(Echo.single, n), lambda: workers.call(Echo.cpu_s)),
            "floor": (lambda n: bare.echo.remote(n), lambda: bare.cpu_s.remote()),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for call, cpu_s in ways.values():  # everything is warm then
            await timed(call, cpu_s, callers, 2)
        for _ in range(repeats):
            for name, (call, cpu_s) in ways.items():
                found[name].append(await timed(call, cpu_s, callers, rounds))
    finally:
        await executor.close()
    result: dict[str, Any] = {}
    for name, times in found.items():
        result[f"{name}_us"] = 1e6 * statistics.median(wall for wall, _ in times)
        result[f"{name}_cpu_us"] = 1e6 * statistics.median(cpu for _, cpu in times)
    for name in ("single", "floor"):
        result[f"crowded_of_{name}"] = result["crowded_us"] / result[f"{name}_us"]
    return result


async def timed(call: Call, cpu_s: Callable[[], Awaitable[float]], callers: int, rounds: int) -> tuple[float, float]:
    """Seconds a call, and CPU seconds a call."""

    async def caller(first: int) -> None:
        for number in range(first, first + rounds):
            assert await call(number) == number

    cpu, began_s = await cpu_s() + _cpu_s(), time.perf_counter()
    await asyncio.gather(*(caller(number * rounds) for number in range(callers)))
    wall = time.perf_counter() - began_s
    cpu = await cpu_s() + _cpu_s() - cpu
    return wall / (callers * rounds), cpu / (callers * rounds)


if __name__ == "__main__":
    main()
