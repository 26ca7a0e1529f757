"""Checkpoints that are written in the background: whole once all writers have ended, or absent."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from roll.atomic_files import file_digest
from roll.cluster.errors import WorkerDied
from roll.config import load_config
from roll.pipeline.recorder import Recorder
from roll.pipeline.report import PlainReporter
from roll.pipeline.state import SFTState
from roll.run import Checkpoints, RunFolder
from roll.run.history import History
from tests.pipeline.small_runs import TINY

DEAD = WorkerDied("actor_train-1", "saved")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "seed: 0\n")


@pytest.fixture
def recorder(folder: RunFolder) -> Iterator[Recorder]:
    config = load_config(TINY, ["run.trace=false", "run.tensorboard=false"])
    with Recorder.open(config, folder, PlainReporter()) as opened:
        yield opened


class Writers:
    """What ranks do: they capture when they are told to save, and write until they may end."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.may_end = asyncio.Event()
        self.waits = asyncio.Event()
        self.fails = fails
        self.shard = Path()

    async def write(self, folder: Path) -> None:
        (folder / "shards").mkdir()
        self.shard = folder / "shards" / "__0_0.distcp"

    async def written(self) -> dict[str, str]:
        self.waits.set()
        await self.may_end.wait()
        if self.fails is not None:
            raise self.fails
        self.shard.write_bytes(b"shard")
        return {"shards/__0_0.distcp": file_digest(self.shard)}


def steps(folder: RunFolder) -> list[int]:
    return sorted(path.step for _, path, _ in Checkpoints(folder).inspect() if path is not None)


def leftovers(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints_dir.iterdir() if not path.name.startswith("step-"))


def test_it_stands_when_all_have_written(recorder: Recorder, folder: RunFolder) -> None:
    async def run() -> None:
        state, writers = SFTState(step=4), Writers()
        await recorder.save(state, writers.write, writers.written)
        captured = recorder.ledger.position
        state.step, state.loss = 5, 0.5  # training continues
        assert steps(folder) == []
        assert Checkpoints(folder).latest() is None
        assert History(folder).newest_saved() is None
        writers.may_end.set()
        await recorder.settle()
        latest = Checkpoints(folder).latest()
        assert latest is not None
        latest.verify()
        assert (latest.step, latest.state["step"], latest.state["loss"]) == (4, 4, SFTState().loss)
        assert latest.state["ledger_position"] == captured
        assert History(folder).newest_saved() == 4

    asyncio.run(run())


def test_the_next_save_waits_for_the_one_before(recorder: Recorder, folder: RunFolder) -> None:
    async def run() -> None:
        first, second = Writers(), Writers()
        await recorder.save(SFTState(step=4), first.write, first.written)
        saving = asyncio.create_task(recorder.save(SFTState(step=8), second.write, second.written))
        await first.waits.wait()
        assert second.shard == Path(), "nothing of the second is captured before the first stands"
        first.may_end.set()
        second.may_end.set()
        await saving
        assert 4 in steps(folder)
        await recorder.settle()
        assert steps(folder) == [4, 8]

    asyncio.run(run())


def test_the_same_step_is_not_saved_twice(recorder: Recorder, folder: RunFolder) -> None:
    async def run() -> None:
        first, second = Writers(), Writers()
        await recorder.save(SFTState(step=4), first.write, first.written)
        first.may_end.set()
        await recorder.save(SFTState(step=4), second.write, second.written)
        assert steps(folder) == [4]
        assert second.shard == Path()

    asyncio.run(run())


def test_an_error_of_a_writer_reaches_the_next_save_and_leaves_nothing(recorder: Recorder, folder: RunFolder) -> None:
    async def run() -> None:
        first, second = Writers(fails=DEAD), Writers()
        await recorder.save(SFTState(step=4), first.write, first.written)
        first.may_end.set()
        with pytest.raises(WorkerDied):
            await recorder.save(SFTState(step=8), second.write, second.written)
        assert steps(folder) == []
        assert leftovers(folder) == []
        second.may_end.set()
        await recorder.save(SFTState(step=8), second.write, second.written)
        await recorder.settle()
        assert steps(folder) == [8]

    asyncio.run(run())


def test_an_error_of_a_writer_ends_the_step_after_it(recorder: Recorder, folder: RunFolder) -> None:
    """Not the next save, which may be due in hours."""

    async def run() -> None:
        writers = Writers(fails=DEAD)
        await recorder.save(SFTState(step=4), writers.write, writers.written)
        await writers.waits.wait()
        recorder.log(5, {"train/loss": 0.5})
        writers.may_end.set()
        assert recorder._saving is not None
        await asyncio.wait([recorder._saving])
        with pytest.raises(WorkerDied):
            recorder.log(6, {"train/loss": 0.5})
        assert leftovers(folder) == []
        recorder.log(6, {"train/loss": 0.5})

    asyncio.run(run())


@pytest.mark.parametrize("writers", [Writers(), Writers(fails=DEAD)], ids=["writing", "died"])
def test_what_is_abandoned_is_absent(recorder: Recorder, folder: RunFolder, writers: Writers) -> None:
    async def run() -> None:
        await recorder.save(SFTState(step=4), writers.write, writers.written)
        await writers.waits.wait()
        if writers.fails is not None:
            writers.may_end.set()
        await recorder.cancel_save()
        assert steps(folder) == []
        assert leftovers(folder) == []
        await recorder.settle()
        await recorder.cancel_save()

    asyncio.run(run())


def test_a_run_that_ends_before_its_writers_leaves_nothing(
    recorder: Recorder, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        writers = Writers()
        await recorder.save(SFTState(step=4), writers.write, writers.written)
        await writers.waits.wait()
        raise KeyError("another error ends the run")

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert steps(folder) == []
    assert leftovers(folder) == []


def test_a_writer_that_dies_with_the_run_is_no_second_message(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(recorder: Recorder) -> None:
        writers = Writers(fails=DEAD)
        await recorder.save(SFTState(step=4), writers.write, writers.written)
        writers.may_end.set()
        assert recorder._saving is not None
        await asyncio.wait([recorder._saving])
        raise KeyError("another error ends the run")

    config = load_config(TINY, ["run.trace=false", "run.tensorboard=false"])
    with suppress(KeyError), Recorder.open(config, folder, PlainReporter()) as recorder:
        asyncio.run(run(recorder))
    del recorder
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_without_writers_in_the_background_it_stands_at_once(recorder: Recorder, folder: RunFolder) -> None:
    async def run() -> None:
        async def write(path: Path) -> None:
            (path / "model.bin").write_text("model")

        await recorder.save(SFTState(step=4), write)
        assert steps(folder) == [4]

    asyncio.run(run())
