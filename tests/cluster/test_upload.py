"""What of a folder is sent to a cluster: pure functions, and Ray's own packing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from local_ray import start_nodes

from roll.cluster.upload import excluded, too_large_error

MIB = 2**20


def put(path: Path, size: int = 10) -> None:
    """A file of that size, which takes no room on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Code, data, runs wherever they were put, an exported model and what tools leave."""
    for name in (
        "rewards.py",
        "data/train.jsonl",
        "my-model/config.json",
        "experiments/a/config.yaml",
        "[odd] #1/code.py",
    ):
        put(tmp_path / name)
    put(tmp_path / "my-model" / "model.safetensors", 600 * MIB)
    put(tmp_path / "[odd] #1" / "old*.PT", 50 * MIB)
    for run in ("runs/one", "experiments/b", "[odd] #1/run 1"):
        put(tmp_path / run / "config.yaml")
        put(tmp_path / run / "ledger.log", 700 * MIB)
        put(tmp_path / run / "checkpoints" / "step-000010" / "model" / "model.safetensors", 900 * MIB)
    put(tmp_path / ".venv" / "lib" / "libtorch.so", 800 * MIB)
    put(tmp_path / "web" / "node_modules" / "big.js", 800 * MIB)
    return tmp_path


def sent(folder: Path, lines: list[str]) -> list[str]:
    """What Ray would pack."""
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    found: list[str] = []

    def take(path: Path) -> None:
        if path.is_file():
            found.append(path.relative_to(folder).as_posix())

    _dir_travel(folder, [_get_excludes(folder, lines)], take, include_gitignore=True)
    return sorted(found)


def test_runs_exports_and_caches_are_not_sent(project: Path) -> None:
    assert sent(project, excluded(project)) == [
        "[odd] #1/code.py",
        "data/train.jsonl",
        "experiments/a/config.yaml",
        "my-model/config.json",
        "rewards.py",
    ]


def test_weights_are_sent_where_there_is_room_for_them(project: Path) -> None:
    everything = sent(project, excluded(project, most_bytes=10_000 * MIB))
    assert {"my-model/model.safetensors", "[odd] #1/old*.PT"} <= set(everything)
    assert not any("runs/" in name or "experiments/b" in name or "run 1" in name for name in everything)


def test_what_is_too_large_is_named(project: Path) -> None:
    put(project / "data" / "huge.jsonl", 700 * MIB)
    put(project / "video.mp4", 90 * MIB)
    message = str(too_large_error(project, "Package size (1.2GiB) exceeds the maximum size of 500MiB"))
    assert "the largest in it: data (700 MiB), video.mp4 (90 MiB)" in message
    assert "ray.runtime_env={excludes: [/data]}" in message


def test_a_folder_that_is_a_run_itself_is_sent(tmp_path: Path) -> None:
    put(tmp_path / "config.yaml")
    put(tmp_path / "ledger.log")
    put(tmp_path / "code.py")
    assert "code.py" in sent(tmp_path, excluded(tmp_path))


@pytest.mark.thorough
@pytest.mark.ray
def test_an_exported_model_in_the_folder_does_not_stop_a_run_on_a_cluster(
    own_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from roll.cluster import ray_connection
    from roll.config import UserError
    from roll.config.schema import RayConfig

    put(tmp_path / "model" / "model.safetensors", 600 * MIB)
    put(tmp_path / "code.py")
    monkeypatch.chdir(tmp_path)
    nodes = start_nodes(1, num_cpus=1, object_store_memory=10**8)
    try:
        ray_connection.connect(RayConfig(address=nodes.address), str(tmp_path))
        ray.shutdown()
        with (tmp_path / "data.raw").open("wb") as file:
            for _ in range(600):
                file.write(os.urandom(MIB))
        with pytest.raises(UserError, match=r"too large to be sent.*data\.raw \(600 MiB\)"):
            ray_connection.connect(RayConfig(address=nodes.address), str(tmp_path))
    finally:
        ray.shutdown()
        nodes.shutdown()
