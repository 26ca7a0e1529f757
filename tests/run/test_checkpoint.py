from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.atomic_files import file_digest
from roll.config.errors import RunError, UserError
from roll.run import Checkpoint, Checkpoints, RunFolder


def writer(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "model.bin").write_text(content)
        (path / "optimizer").mkdir()
        (path / "optimizer" / "rank-0.bin").write_text(content * 2)

    return write


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints_dir.iterdir())


def save(checkpoints: Checkpoints, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Checkpoint:
    with checkpoints.saving(step, state) as aside:
        write(aside)
    saved = checkpoints.latest()
    assert saved is not None
    return saved


def test_what_is_saved_is_found(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() is None
    state = {"ledger": 123, "nested": {"seed": [1, 2]}, "best": float("inf")}
    saved = save(checkpoints, 10, writer("ten"), state)
    latest = Checkpoints(folder).latest()
    assert latest == saved
    assert latest is not None
    assert (latest.step, latest.state, latest.path.name) == (10, state, "step-000010")
    assert (latest.path / "optimizer" / "rank-0.bin").read_text() == "tenten"
    latest.verify()


def test_the_newest_are_kept(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    for step in (2, 9, 10, 1_000_000):
        save(checkpoints, step, writer(str(step)), {})
    assert names(folder) == ["step-000010", "step-1000000"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1_000_000


def test_every_so_many_steps_and_the_best_are_kept_besides(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder, keep=2, every=100, best=True)
    scores = {20: 0.1, 40: 0.9, 60: 0.3, 80: 0.9, 100: 0.2, 120: float("nan"), 140: None, 200: 0.5, 220: 0.6, 240: 0.7}
    for step, score in scores.items():
        save(checkpoints, step, writer(str(step)), {} if score is None else {"held_out_score": score})
    assert names(folder) == [f"step-{step:06d}" for step in (80, 100, 200, 220, 240)]
    fewer = Checkpoints(folder, keep=1)
    save(fewer, 260, writer("260"), {})
    assert names(folder) == ["step-000260"]


def test_a_checkpoint_that_cannot_be_read_is_not_the_best(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder, keep=1, best=True)
    for step in (1, 2):
        save(checkpoints, step, writer("x"), {"held_out_score": -step})
    (folder.checkpoints_dir / "step-000001" / "state.json").write_text("{")
    save(checkpoints, 3, writer("x"), {})
    assert names(folder) == ["step-000002", "step-000003"]


def test_a_step_before_the_newest_is_not_saved(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder)
    save(checkpoints, 10, writer("ten"), {})
    with pytest.raises(AssertionError, match="checkpoint of step 10"):
        save(checkpoints, 9, writer("nine"), {})


def test_saving_a_step_again_replaces_it(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder)
    for content in ("one", "two", "three"):
        saved = save(checkpoints, 5, writer(content), {"content": content})
        saved.verify()
    assert names(folder) == ["step-000005"]
    assert saved.state == {"content": "three"}


def test_a_writer_that_fails_leaves_nothing(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder)
    save(checkpoints, 1, writer("one"), {})

    def fail(path: Path) -> None:
        (path / "model.bin").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(RunError, match=r"cannot write to .*step-000002: No space left on device"):
        save(checkpoints, 2, fail, {})
    with pytest.raises(TypeError):
        save(checkpoints, 2, writer("two"), {"state": object()})
    assert names(folder) == ["step-000001"]


def test_what_writers_have_hashed_is_not_read_again(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def reading(file: Path) -> str:
        read.append(file.name)
        return file_digest(file)

    monkeypatch.setattr("roll.run.checkpoint.file_digest", reading)
    saving = Checkpoints(folder).begin(3, {"at": 3})
    (saving.folder / "shards").mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (saving.folder / "shards" / name).write_bytes(name.encode())
    (saving.folder / "config.json").write_text("{}")
    assert Checkpoints(folder).latest() is None
    digests = {f"shards/{file.name}": file_digest(file) for file in (saving.folder / "shards").iterdir()}
    saving.finish(digests)
    assert sorted(read) == ["config.json", "state.json"]
    monkeypatch.undo()
    latest = Checkpoints(folder).latest()
    assert latest is not None
    latest.verify()
    (latest.path / "shards" / "__1_0.distcp").write_bytes(b"__1_0.distcq")
    with pytest.raises(UserError, match=r"step-000003/shards/__1_0.distcp is damaged \(its checksum is wrong\)"):
        latest.verify()


@pytest.mark.parametrize("name", ["shards/__1_0.distcp", "shards/.metadata", "model/model.safetensors"])
def test_what_a_trainer_would_read_is_in_the_manifest(folder: RunFolder, name: str) -> None:
    checkpoint = save(Checkpoints(folder), 1, writer("content"), {})
    (checkpoint.path / "notes.txt").write_text("the user's own")
    checkpoint.verify()
    (checkpoint.path / name).parent.mkdir(exist_ok=True)
    (checkpoint.path / name).write_text("from elsewhere")
    with pytest.raises(UserError, match=rf"step-000001/{name} is damaged \(manifest.json does not have it\)"):
        checkpoint.verify()


def test_a_digest_that_was_wrong_when_written_is_found(folder: RunFolder) -> None:
    saving = Checkpoints(folder).begin(3, {})
    (saving.folder / "model.bin").write_text("model")
    saving.finish({"model.bin": "0" * 64})
    latest = Checkpoints(folder).latest()
    assert latest is not None
    with pytest.raises(UserError, match=r"model.bin is damaged"):
        latest.verify()


def test_a_file_that_only_its_writer_sees_is_named(folder: RunFolder) -> None:
    """As on a machine where the run's folder is another disk."""
    saving = Checkpoints(folder).begin(3, {})
    with (
        pytest.raises(RunError, match=r"shards/__1_0.distcp of the checkpoint of step 3 was written, but is not in"),
        saving.dropped_on_error(),
    ):
        saving.finish({"shards/__1_0.distcp": "0" * 64})
    assert names(folder) == []


def test_the_state_is_of_the_moment_it_was_begun(folder: RunFolder) -> None:
    state: dict[str, Any] = {"samples": ["a"]}
    saving = Checkpoints(folder).begin(3, state)
    state["samples"].append("b")
    saving.finish()
    latest = Checkpoints(folder).latest()
    assert latest is not None
    assert latest.state == {"samples": ["a"]}


def test_dropping_waits_for_a_finish_under_way(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever deletes a checkpoint while it gets its name would leave half of it under that name."""
    saving, inside, may_end = Checkpoints(folder).begin(3, {}), threading.Event(), threading.Event()

    def digest(file: Path) -> str:
        inside.set()
        assert may_end.wait(60)
        return file_digest(file)

    monkeypatch.setattr("roll.run.checkpoint.file_digest", digest)
    finishing = threading.Thread(target=saving.finish)
    finishing.start()
    assert inside.wait(60)
    dropping = threading.Thread(target=saving.drop)
    dropping.start()
    may_end.set()
    finishing.join(60)
    dropping.join(60)
    monkeypatch.undo()
    assert names(folder) == ["step-000003"]
    latest = Checkpoints(folder).latest()
    assert latest is not None
    latest.verify()


def test_what_was_dropped_is_not_finished(folder: RunFolder) -> None:
    saving = Checkpoints(folder).begin(3, {})
    saving.drop()
    with pytest.raises(AssertionError, match="was finished or dropped before"):
        saving.finish()
    assert names(folder) == []


def die_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End this process, with nothing cleaned up, before the given one of its calls that change the disk."""
    calls = 0

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, mortal(getattr(os, name)))
    monkeypatch.setattr(Path, "write_text", mortal(Path.write_text))


@pytest.mark.parametrize("step", [30, 20], ids=["new step", "same step again"])
def test_a_death_at_any_moment_leaves_the_old_checkpoint_or_the_new(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    original = folder.path.with_name("original")
    for old in (10, 20):
        save(Checkpoints(folder), old, writer(f"old {old}"), {"content": f"old {old}"})
    shutil.copytree(folder.checkpoints_dir, original)
    seen = []
    for number in range(1, 1000):
        shutil.rmtree(folder.checkpoints_dir)
        shutil.copytree(original, folder.checkpoints_dir)
        child = os.fork()
        if not child:
            try:
                die_at(monkeypatch, number)
                save(Checkpoints(folder), step, writer("new"), {"content": "new"})
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)

        latest = Checkpoints(folder).latest()
        assert latest is not None
        latest.verify()
        assert (latest.path / "model.bin").read_text() == latest.state["content"]
        seen.append(latest.state["content"])

        after = save(Checkpoints(folder), 40, writer("after"), {})
        after.verify()
        assert names(folder) == [f"step-{latest.step:06d}", "step-000040"]
        if status == 0:
            break
    assert len(seen) > 15
    assert seen == sorted(seen, key=["old 20", "new"].index)
    assert set(seen) == {"old 20", "new"}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["model.bin", "optimizer/rank-0.bin", "state.json"])
def test_damage_is_named_with_what_to_do(folder: RunFolder, name: str, damage: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(folder)
    for step in (9, 10):
        checkpoint = save(checkpoints, step, writer("content"), {"key": "value"})
    damage(checkpoint.path / name)
    with pytest.raises(UserError) as error:
        checkpoint.verify()
    for word in (str(checkpoint.path / name), f"roll repair {folder.path}", "step-000009", "restart=True"):
        assert word in str(error.value)

    shutil.rmtree(checkpoint.path)
    older = checkpoints.latest()
    assert older is not None
    assert older.step == 9
    older.verify()


def test_a_flipped_bit_in_a_manifest_is_seen(folder: RunFolder) -> None:
    checkpoint = save(Checkpoints(folder), 1, writer("content"), {})
    manifest = checkpoint.path / "manifest.json"
    whole = manifest.read_bytes()
    for index in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[index] ^= 1
        if damaged.split() == whole.split():
            continue
        manifest.write_bytes(damaged)
        with pytest.raises(UserError, match="start over with restart=True"):
            checkpoint.verify()


def test_damaged_state_is_the_users_error_even_before_verifying(folder: RunFolder) -> None:
    checkpoint = save(Checkpoints(folder), 1, writer("content"), {})
    for content in ("{", "[]"):
        (checkpoint.path / "state.json").write_text(content)
        with pytest.raises(UserError, match=r"state\.json is damaged"):
            Checkpoints(folder).latest()


def test_a_folder_without_a_manifest_is_no_checkpoint(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder)
    save(checkpoints, 1, writer("one"), {})
    (folder.checkpoints_dir / "step-000002").mkdir()
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
