"""What `roll plan` says a run will write, beside what runs wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from thorough import but

from roll.config import Config, UserError, load_config
from roll.devices.disk_estimate import DiskEstimate, check_disk, disk_warning, free_bytes
from roll.devices.plan import make_plan
from roll.pipeline.entrypoints import train
from roll.pipeline.prepare import prepare
from roll.pipeline.report import SilentReporter

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
GIB = 2**30


def writes_of(config: Config) -> DiskEstimate:
    pipeline = prepare(config)
    return make_plan(pipeline.config, pipeline.requirements).writes


def size(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


@pytest.mark.parametrize(
    "more", but([[], ["algorithm=ppo"]], [[], ["model.lora=4"], ["model.dtype=bf16"], ["algorithm=ppo"]])
)
def test_a_runs_folder_is_what_was_planned(tmp_path: Path, more: list[str]) -> None:
    """Checkpoints within a tenth; the rest is an upper estimate, and no more than six times what was written."""
    run = tmp_path / "run"
    settings = ["threads=1", "train.steps=4", "run.checkpoint_every=1", "rollout.groups_per_step=2", "eval.samples=4"]
    settings += ["rollout.group_size=8", "eval.every=0", "run.curve=false", f"run={run}", *more]
    config = load_config(TINY, settings)
    planned = writes_of(config)
    train(config, reporter=SilentReporter())
    assert planned.checkpoints == 2
    assert size(run / "checkpoints") == pytest.approx(2 * planned.checkpoint_bytes, rel=0.1)
    files = {"ledger": "ledger.log", "samples": "samples", "trace": "trace.json", "metrics": "metrics.jsonl"}
    for what, planned_bytes in planned.lasting:
        written = size(run / files[what]) + (size(run / "tensorboard") if what == "metrics" else 0)
        assert planned_bytes / 6 <= written <= 1.5 * planned_bytes, what


def test_what_is_kept_is_what_counts() -> None:
    base = ["train.steps=1000", "run.checkpoint_every=10"]
    few, many = (writes_of(load_config(TINY, [*base, *more])) for more in ([], ["run.keep.checkpoints_every=100"]))
    assert (few.checkpoints, many.checkpoints) == (2, 12)
    short = writes_of(load_config(TINY, [*base, "run.keep.samples=10", "run.trace=false"]))
    assert dict(short.lasting)["samples"] * 100 == dict(few.lasting)["samples"]
    assert "trace" not in dict(short.lasting)


def test_a_disk_that_is_too_small_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = DiskEstimate(checkpoint_bytes=2 * GIB, checkpoints=2, lasting=(("samples", GIB),))
    place = tmp_path / "not" / "there" / "yet"
    assert free_bytes(place) > 0
    for free, remark, refused in ((8 * GIB, False, False), (3 * GIB, True, False), (GIB, True, True)):
        monkeypatch.setattr("roll.devices.disk_estimate.free_bytes", lambda folder, free=free: free)
        said = disk_warning(writes, place)
        assert (said is not None) == remark
        assert not remark or "up to about 7.0 GiB" in str(said)
        if refused:
            with pytest.raises(UserError, match=r"a checkpoint has 2\.0 GiB, but 1\.0 GiB are free"):
                check_disk(writes, place)
        else:
            check_disk(writes, place)
