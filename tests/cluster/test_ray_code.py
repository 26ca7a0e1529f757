"""How the user's code reaches the workers of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_ray import start_nodes

from roll.config.schema import RayConfig
from roll.config.user_code import SENT_FOLDER, load_user_code

pytestmark = pytest.mark.ray


@pytest.fixture
def address(own_cluster: None) -> Iterator[str]:
    """A cluster on this machine, of whose folders a run knows nothing."""
    import ray

    nodes = start_nodes(1, num_cpus=1, object_store_memory=10**8)
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [True, False])
def test_a_worker_finds_code_from_the_root_that_its_node_does_not_have(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """The working directory is sent if the root is in it, with code that lies beside the root, or else the root."""
    import ray

    from roll.cluster.ray_connection import connect

    project = tmp_path / "project"
    (project / "configs").mkdir(parents=True)
    (project / "near.py").write_text("def near(): return 3\n")
    (project / "configs" / "mine.py").write_text("def mine(): return 4\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(project if inside else tmp_path / "elsewhere")

    def judged(name: str, root: str) -> Any:
        """In a worker: what a function of the user's returns."""
        return load_user_code(name, what="reward", root=root)(), os.getcwd()

    connect(RayConfig(address=address), str(project / "configs"))
    ask = ray.remote(num_cpus=0)(judged)
    hidden = project.rename(tmp_path / "hidden")  # as on a node that never had it
    monkeypatch.chdir(hidden)
    found, folder = ray.get(ask.remote("mine.py:mine", str(project / "configs")), timeout=120)
    assert found == 4
    assert not Path(folder).is_relative_to(tmp_path)
    if inside:
        assert ray.get(ask.remote("../near.py:near", str(project / "configs")), timeout=120)[0] == 3


def test_what_the_user_says_of_the_workers_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roll.cluster.ray_connection import _with_code

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a" / "code").mkdir(parents=True)
    usual = _with_code({"env_vars": {"A": "1"}}, "")
    assert usual["working_dir"] == str(tmp_path)
    assert usual["env_vars"] == {SENT_FOLDER: str(tmp_path), "A": "1"}
    own = _with_code({"working_dir": "/theirs"}, "")
    assert own["working_dir"] == "/theirs"
    assert SENT_FOLDER not in own["env_vars"]
    # What is never sent with the working directory is sent by itself; of the code that a run keeps, all of it.
    kept = tmp_path / "runs" / "a" / "code"
    assert _with_code({}, str(kept))["working_dir"] == str(kept)
    other = tmp_path / "mine" / "code"
    (other / "files" / "configs").mkdir(parents=True)
    (other / "manifest.json").write_text("{}")
    assert _with_code({}, str(other / "files" / "configs"))["working_dir"] == str(other / "files")
