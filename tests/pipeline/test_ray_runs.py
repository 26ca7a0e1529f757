"""The same program on Ray: the same bits, whatever the layout; weights that arrive whole or not at all; nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import EXACT, SMALL, TINY, Remains

from roll import load_config
from roll.cluster import Cluster, Dispatch, Place, parallel
from roll.cluster.ray_executor import RayExecutor
from roll.config import Config, RunError
from roll.config.schema import RayConfig
from roll.pipeline.launch import train
from roll.pipeline.report import SilentReporter
from roll.workers.infer import InferWorker
from roll.workers.publish import publish
from roll.workers.train import TrainWorker

RAY = ("executor=ray", "ray.object_store_gb=0.2", "ray.start_deadline_s=120", "ray.call_deadline_s=120")
LAYOUTS = {
    "colocated": ("roles.actor_train=0-1", "roles.actor_infer=0-1", "offload=always"),
    "disaggregated": ("roles.actor_train=0", "roles.actor_infer=1", "weights=broadcast"),
    "partly shared": (
        *("roles.actor_train=0", "roles.actor_infer=0-1", "roles.actor_infer.replicas=2", "offload=always"),
    ),
}


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    """Ray, started once for the runs of this file."""
    from ray import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # workers cannot import a test
    executor = RayExecutor(RayConfig(object_store_gb=0.2))
    executor.connect()
    yield
    executor.disconnect()
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture(scope="module")
def three_local_steps(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    path = tmp_path_factory.mktemp("local") / "run"
    train(load_config(TINY, [*EXACT, "train.steps=3", f"run={path}"]), reporter=SilentReporter())
    return Remains(path)


@pytest.fixture(scope="module")
def colocated(on_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Remains:
    path = tmp_path_factory.mktemp("colocated") / "run"
    overrides = [*EXACT, *RAY, *LAYOUTS["colocated"], "train.steps=3", "supervise.spare_trainer=false", f"run={path}"]
    train(load_config(TINY, overrides), reporter=SilentReporter())
    return Remains(path)


@pytest.mark.slow
def test_local_and_ray_give_the_same_bits_with_one_engine(colocated: Remains, three_local_steps: Remains) -> None:
    assert_same_bits(colocated, three_local_steps)


@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize("layout", ["partly shared", pytest.param("disaggregated", marks=pytest.mark.slow)])
def test_local_and_ray_give_the_same_bits(
    run_small: Callable[..., Remains], three_local_steps: Remains, layout: str
) -> None:
    """Rollouts included: three steps with two engines, of which one shares the trainer's core and leaves it while the
    trainer works, and with one elsewhere."""
    run = run_small(*RAY, *LAYOUTS[layout], "train.steps=3", "supervise.spare_trainer=false", base=EXACT)
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
def test_bytes_through_the_controller_do_not_grow_with_responses(
    run_small: Callable[..., Remains], colocated: Remains
) -> None:
    longer = run_small(*RAY, *LAYOUTS["colocated"], "train.steps=3", "rollout.max_new_tokens=100", base=EXACT)
    tokens, passed = [], []
    for run in (colocated, longer):
        tokens.append(sum(len(row["ids"]) for row in run.samples()[3]) / len(run.samples()[3]))
        passed.append([row[key] for row in run.metrics() if (key := "data/controller_bytes_a_sample") in row][-1])
    assert tokens[1] > tokens[0] + 30
    # Few samples share a step's own calls, which are more when it takes longer; an id and a log-prob are 8 bytes a token.
    assert passed[1] < passed[0] + 4 * (tokens[1] - tokens[0])


FLIPS = {1: 1, 3: 2, 4: 2}
"""How often a version arrives with a flipped byte."""


class Flipping(InferWorker):
    """An engine; the memory of the one with rank 1 flips a byte of some versions on their way."""

    def __init__(self, place: Place, config: Config) -> None:
        super().__init__(place, config)
        self.left = dict(FLIPS) if place.rank == 1 else {}

    @parallel(Dispatch.ONE)
    def load_bucket(self, bucket: int) -> None:
        super().load_bucket(bucket)
        if bucket == 0:
            self._flip()

    @parallel(Dispatch.ALL)
    async def receive_weights(self, meeting: Any) -> None:
        await super().receive_weights(meeting)
        self._flip()

    def _flip(self) -> None:
        assert self._receiver is not None
        version = self._receiver._begun().version
        if self.left.get(version, 0):
            self.left[version] -= 1
            self._receiver._tensors["model.embed_tokens.weight"].view(torch.uint8)[5, 3] ^= 1


@pytest.mark.usefixtures("on_ray")
def test_a_byte_flipped_on_the_way_is_caught_sent_again_and_then_named() -> None:
    config = load_config(TINY, [*EXACT, *RAY, "weights.bucket_mb=1"])

    async def main() -> None:
        executor = RayExecutor(config.ray)
        try:
            places = [Place("actor_infer", rank, 2, threads=1) for rank in range(2)]
            trainer = Place("actor_train", threads=1)
            executor.reserve([trainer, *places])
            actor, engines = await asyncio.gather(
                Cluster.start(executor, lambda place: TrainWorker(place, config), [trainer]),
                Cluster.start(executor, lambda place: Flipping(place, config), places),
            )
            await publish(actor, engines, 1, "shared_memory")  # flipped once: the second try is whole
            await publish(actor, engines, 2, "broadcast")
            named = r"damaged 2 times .* 'model\.embed_tokens\.weight' at actor_infer\[1\]"
            for version, path in ((3, "shared_memory"), (4, "broadcast")):
                with pytest.raises(RunError, match=rf"version {version} .* {named}"):
                    await publish(actor, engines, version, path)  # type: ignore[arg-type]
                await publish(actor, engines, version, path)  # type: ignore[arg-type]
        finally:
            await executor.close()

    asyncio.run(main())


def _left_in_shared_memory() -> set[Path]:
    """What processes that are gone have left there."""
    files = Path("/dev/shm").glob("roll-*")
    return {file for file in files if not Path(f"/proc/{file.name.split('-')[1]}").exists()}


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = _left_in_shared_memory()
    yield
    assert _left_in_shared_memory() <= before


RAYS_AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""Two small processes of Ray's own that notice a killed head at once but take a minute to leave."""


def _alive(marker: str) -> list[int]:
    """Processes that have the marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = marker.encode() in (folder / "environ").read_bytes()
            if ours and not (folder / "cmdline").read_bytes().startswith(RAYS_AGENTS):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _names(marker: str) -> list[bytes]:
    return [Path(f"/proc/{pid}/cmdline").read_bytes()[:80].strip(b"\0") for pid in _alive(marker)]


def _gone(marker: str, within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while _alive(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@dataclass(frozen=True)
class LongRun:
    """`roll train` on a Ray of its own, some steps into a run that takes very long."""

    process: subprocess.Popen[bytes]
    output: Path
    marker: str

    def end(self) -> tuple[int, str]:
        """Exit status and output, once all its processes are gone."""
        status = self.process.wait(60)
        assert _gone(self.marker), _names(self.marker)
        return status, self.output.read_text()


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[LongRun]:
    path, output = tmp_path / "run", tmp_path / "out"
    marker = f"ROLL_TEST_{os.getpid()}_{tmp_path.name}"
    arguments = ["train", TINY, *SMALL, *RAY, f"run={path}", "train.steps=100000", "--plain"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "roll.cli", *arguments], stdout=file, stderr=file, env={**os.environ, marker: "1"}
        )
    run = LongRun(process, output, marker)
    try:
        deadline = time.monotonic() + 120
        while len(list(path.glob("samples/step-*.jsonl"))) < 2:
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        assert len(_alive(marker)) > 8, "the run, its actors, its graders and Ray's own processes"
        yield run
    finally:
        process.kill()
        process.wait()
        for pid in _alive(marker):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_behind(long_run: LongRun) -> None:
    long_run.process.kill()
    long_run.end()


def test_an_interrupted_run_saves_and_leaves_no_process_behind(long_run: LongRun) -> None:
    long_run.process.send_signal(signal.SIGINT)
    status, said = long_run.end()
    assert status == 0
    assert "go on with" in said


@pytest.mark.slow
def test_a_run_that_is_interrupted_twice_leaves_no_process_behind(long_run: LongRun) -> None:
    for _ in range(2):
        long_run.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    status, said = long_run.end()
    assert status == 1
    assert "stopped" in said


@pytest.mark.slow
def test_a_run_whose_trainer_dies_says_so_and_leaves_no_process_behind(long_run: LongRun) -> None:
    trainers = [pid for pid in _alive(long_run.marker) if _has_open(pid, "actor_train-0.log")]
    os.kill(trainers[0], signal.SIGKILL)
    status, said = long_run.end()
    assert status == 1
    assert "actor_train[0] died" in said


def _has_open(pid: int, name: str) -> bool:
    try:
        return any(os.readlink(file).endswith(name) for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
