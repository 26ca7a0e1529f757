"""The same program on Ray: the same bits, whatever the layout; weights that arrive whole or not at all; nothing left."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from long_runs import LongRun, left_in_shared_memory, long_run
from small_runs import EXACT, SMALL, TINY, Remains
from thorough import but

from roll import load_config
from roll.cluster import Cluster, Dispatch, WorkerPlacement, dispatch
from roll.cluster.executor import Executor, Handle, LocalExecutor, LocalHandle
from roll.cluster.ray_executor import RayExecutor
from roll.config import Config, RunError
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter
from roll.workers.infer import InferWorker
from roll.workers.publish import publish
from roll.workers.train import TrainWorker

pytestmark = pytest.mark.ray

RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=600", "ray.call_deadline_s=600")
LAYOUTS = {
    "colocated": ("roles.actor_train=0-1", "roles.actor_infer=0-1", "offload=always"),
    "disaggregated": ("roles.actor_train=0", "roles.actor_infer=1", "weight_sync=broadcast"),
    "partly shared": (
        *("roles.actor_train=0", "roles.actor_infer=0-1", "roles.actor_infer.replicas=2", "offload=always"),
    ),
}


@pytest.fixture(scope="module")
def on_ray(shared_ray: None) -> Iterator[None]:
    from ray import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # workers cannot import a test
    yield
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture(scope="module")
def three_local_steps(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    path = tmp_path_factory.mktemp("local") / "run"
    train(load_config(TINY, [*EXACT, "train.steps=3", f"run={path}"]), reporter=SilentReporter())
    return Remains(path)


@pytest.fixture(scope="module")
def colocated(on_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Remains:
    path = tmp_path_factory.mktemp("colocated") / "run"
    overrides = [
        *EXACT,
        *RAY,
        *LAYOUTS["colocated"],
        "train.steps=3",
        "fault_tolerance.spare_trainer=false",
        f"run={path}",
    ]
    train(load_config(TINY, overrides), reporter=SilentReporter())
    return Remains(path)


@pytest.mark.slow
def test_local_and_ray_give_the_same_bits_with_one_engine(colocated: Remains, three_local_steps: Remains) -> None:
    assert_same_bits(colocated, three_local_steps)


@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize("layout", but({"disaggregated"}, ["partly shared", "disaggregated"]))
def test_local_and_ray_give_the_same_bits(
    run_small: Callable[..., Remains], three_local_steps: Remains, layout: str
) -> None:
    """Rollouts included: three steps with an engine beside the trainer, and with two, of which one shares the trainer's
    core and leaves it while the trainer works."""
    run = run_small(*RAY, *LAYOUTS[layout], "train.steps=3", "fault_tolerance.spare_trainer=false", base=EXACT)
    assert_same_bits(run, three_local_steps)
    logs = {log.stem for log in (run.path / "logs").iterdir()}
    engines = {"actor_infer-0", "actor_infer-1"} if layout == "partly shared" else {"actor_infer-0"}
    assert {"actor_train-0", "rollout-0", "reward-0"} | engines <= logs


def assert_same_bits(run: Remains, other: Remains) -> None:
    assert run.samples() == other.samples()
    assert run.lineage() == other.lineage()
    assert run.weights() == other.weights()
    assert run.optimizer() == other.optimizer()


@pytest.mark.slow
@pytest.mark.usefixtures("on_ray")
def test_bytes_through_the_controller_do_not_grow_with_responses(run_small: Callable[..., Remains]) -> None:
    """With enough samples a step that its own calls, which are more when it takes longer, weigh little."""
    tokens, passed = [], []
    for longest in (4, 100):
        sizes = ("rollout.groups_per_step=8", "rollout.group_size=8", f"rollout.max_new_tokens={longest}")
        run = run_small(*RAY, *LAYOUTS["colocated"], *sizes, "train.steps=3", base=EXACT, name=f"longest {longest}")
        tokens.append(sum(len(row["ids"]) for row in run.samples()[3]) / len(run.samples()[3]))
        passed.append([row[key] for row in run.metrics() if (key := "controller/bytes_per_sample") in row][-1])
    assert tokens[1] > tokens[0] + 30
    assert passed[1] < passed[0] + 4 * (tokens[1] - tokens[0])  # an id and a log-prob are 8 bytes a token


FLIPS = {1: 1, 3: 2, 4: 2}
"""How often a version arrives with a flipped byte."""


class Flipping(InferWorker):
    """An engine; the memory of the one with rank 1 flips a byte of some versions on their way."""

    def __init__(self, place: WorkerPlacement, config: Config) -> None:
        super().__init__(place, config)
        self.left = dict(FLIPS) if place.rank == 1 else {}

    @dispatch(Dispatch.ONE)
    def load_bucket(self, bucket: int) -> None:
        super().load_bucket(bucket)
        if bucket == 0:
            self._flip()

    @dispatch(Dispatch.ALL)
    async def receive_weights(self, meeting: Any) -> None:
        await super().receive_weights(meeting)
        self._flip()

    def _flip(self) -> None:
        assert self._receiver is not None
        version = self._receiver._require_manifest().version
        if self.left.get(version, 0):
            self.left[version] -= 1
            self._receiver._tensors["model.embed_tokens.weight"].view(torch.uint8)[5, 3] ^= 1


class ApartHandle(LocalHandle):
    """A worker that shares this process and nothing else: calls and results are copies."""

    in_process = False

    async def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        return pickle.loads(pickle.dumps(await super().call(method, args, kwargs)))


class Apart(LocalExecutor):
    async def start(self, make: Callable[[WorkerPlacement], Any], places: Sequence[WorkerPlacement]) -> list[Handle]:
        await super().start(make, places)
        return [ApartHandle(worker) for worker in self._workers[-len(places) :]]


@pytest.mark.parametrize("executor", ["apart", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_byte_flipped_on_the_way_is_caught_sent_again_and_then_named(
    request: pytest.FixtureRequest, executor: str
) -> None:
    config = load_config(TINY, [*EXACT, *RAY, "weight_sync.bucket_mb=1"])
    if executor == "ray":
        request.getfixturevalue("on_ray")

    async def main() -> None:
        workers: Executor = RayExecutor(config.ray) if executor == "ray" else Apart(60)
        try:
            places = [WorkerPlacement("actor_infer", rank, 2, threads=1) for rank in range(2)]
            trainer = WorkerPlacement("actor_train", threads=1)
            workers.reserve([trainer, *places])
            actor, engines = await asyncio.gather(
                Cluster.start(workers, lambda place: TrainWorker(place, config), [trainer]),
                Cluster.start(workers, lambda place: Flipping(place, config), places),
            )
            await publish(actor, engines, 1, "shared_memory")  # flipped once: the second try is whole
            await publish(actor, engines, 2, "broadcast")
            named = r"damaged 2 times .* 'model\.embed_tokens\.weight' at actor_infer\[1\]"
            for version, path in ((3, "shared_memory"), (4, "broadcast")):
                with pytest.raises(RunError, match=rf"version {version} .* {named}"):
                    await publish(actor, engines, version, path)  # type: ignore[arg-type]
                await publish(actor, engines, version, path)  # type: ignore[arg-type]
        finally:
            await workers.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = left_in_shared_memory()
    yield
    assert left_in_shared_memory() <= before


@pytest.fixture
def long(tmp_path: Path) -> Iterator[LongRun]:
    with long_run(tmp_path, *SMALL, *RAY, steps=2) as run:
        yield run


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_behind(long: LongRun) -> None:
    long.child.kill()
    long.end()


@pytest.mark.slow
def test_a_run_that_is_interrupted_twice_leaves_no_process_behind(long: LongRun) -> None:
    for _ in range(2):
        os.kill(long.child.pid, signal.SIGINT)
        time.sleep(0.01)
    status, said = long.end()
    assert status == 128 + signal.SIGINT
    assert "stopped" in said


@pytest.mark.slow
def test_a_run_whose_trainer_dies_for_good_says_so_and_leaves_no_process_behind(tmp_path: Path) -> None:
    with long_run(tmp_path, *SMALL, *RAY, "fault_tolerance.restarts=0", steps=2) as run:
        trainers = _of_log(run.processes(), "actor_train-0.log")
        os.kill(trainers[0], signal.SIGKILL)
        status, said = run.end()
    assert status == 1
    assert "actor_train[0] died" in said


def _of_log(pids: list[int], name: str) -> list[int]:
    """The processes whose output goes to a log: it is a pipe, from which the log's writer reads."""
    writers = [pid for pid in pids if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    read = {os.readlink(f"/proc/{pid}/fd/0") for pid in writers}
    return [pid for pid in pids if pid not in writers and os.readlink(f"/proc/{pid}/fd/1") in read]
