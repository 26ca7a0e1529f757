"""A cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_ray import start_nodes
from small_runs import ONE, TINY, Remains, start_roll

RAY = ("executor=ray", "ray.start_deadline_s=600", "ray.call_deadline_s=600")


@pytest.fixture
def three_nodes(own_cluster: None) -> Iterator[str]:
    """A cluster of three nodes of one core each, on this machine."""
    nodes = start_nodes(3, num_cpus=1, object_store_memory=10**8)
    yield nodes.address
    nodes.shutdown()


@pytest.mark.slow
def test_roles_spread_over_three_nodes_learn(run_small: Callable[..., Remains], three_nodes: str) -> None:
    """The trainer on one node, an engine on each of the others, graders and rollout workers everywhere."""
    run = run_small(
        *(*RAY, f"ray.address={three_nodes}", "threads=1", "train.steps=10", "eval.samples=8"),
        *("roles.actor_train=node0:0", "roles.actor_infer=node1:0,node2:0", "roles.actor_infer.replicas=2"),
        *("roles.rollout.replicas=3", "roles.reward.replicas=3", "train.lr=5e-3", "rollout.groups_per_step=4"),
        *("rollout.group_size=12", "rollout.max_running=48"),
    )
    rewards = [row["reward/mean"] for row in run.metrics() if "reward/mean" in row]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    assert len(list((run.path / "samples").glob("step-000010.part-*.jsonl"))) == 3


@pytest.mark.slow
def test_ranks_on_two_nodes_survive_a_kill_and_have_the_bits_of_ranks_on_one(
    three_nodes: str, over_ranks: Remains, tmp_path: Path
) -> None:
    run = Remains(tmp_path / "run")
    settings = (*ONE, *RAY, f"ray.address={three_nodes}", "fault_tolerance.spare_trainer=false")
    ranks = "roles.actor_train={strategy: sharded, replicas: 2, devices: 'node1:0,node2:0'}"
    child = start_roll(["train", TINY, f"run.dir={run.path}", *settings, ranks], tmp_path / "said.txt")
    try:
        child.wait_for(lambda: run.path.is_dir() and run.steps() >= 3)
        log = (run.path / "logs" / "actor_train-1.log").read_text()
        os.kill(int(re.findall(r" is process (\d+) on ", log)[-1]), signal.SIGKILL)
        assert child.end() == 0, child.said
    finally:
        child.kill()
    assert re.search(r"warning: actor_train\[1\] died: .*rolling back to the last checkpoint", child.said)
    assert run.shards() == over_ranks.shards()
    assert len(run.shards()) == 2
