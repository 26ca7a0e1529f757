"""What `roll plan` draws: who is where, when, and how full it gets."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from roll.config.schema import Config
from roll.data.sources import load_tasks
from roll.devices.inventory import Inventory
from roll.devices.plan import Plan, make_plan
from roll.devices.render_plan import columns, human, render_plan, title
from roll.devices.run_requirements import rlvr_requirements

GIB = 1 << 30


def planned(nodes: int = 1, cores: int = 8, gpus: int = 0, **settings: Any) -> Plan:
    row = {"cores": cores, "gpus": gpus, "memory_bytes": 64 * GIB, "gpu_bytes": 80 * GIB}
    base = {"model": {"path": "tiny", "dtype": "fp32"}, "tasks": "echo", "reward": "number", "executor": "ray"}
    config = Config.model_validate({**base, **settings})
    requirements = rlvr_requirements(config, load_tasks(config.tasks, None))
    return make_plan(config, requirements, Inventory.of([{"id": "", **row}] * nodes))


def shown(plan: Plan, width: int = 100) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for drawn in render_plan(plan, width):
        console.print(drawn)
    return file.getvalue()


def titles(plan: Plan) -> list[str]:
    return [title(plan, column) for column in columns(plan)]


def test_a_machine_without_gpus_is_one_column() -> None:
    plan = planned(executor="local")
    assert titles(plan) == ["cpu"]
    text = shown(plan)
    assert "actor_train[0]: all" in text
    assert "trainer and engines are colocated" in text
    assert "the actor's parameters" in text
    assert "of 64.0 GiB" in text
    assert "8 groups × 8 = 64" in text


def test_numbered_cores_are_columns() -> None:
    plan = planned(roles={"actor_train": "0-3", "actor_infer": {"devices": "2-7", "replicas": 3}})
    assert titles(plan) == ["cpu0-1", "cpu2-3", "cpu4-5", "cpu6-7"]
    text = shown(plan)
    assert "partly shared" in text
    assert "all of the node:" in text
    assert all(f"actor_infer[{rank}]" in text for rank in range(3))


def test_gpus_alike_are_one_column() -> None:
    plan = planned(gpus=8, algorithm={"kl_coef": 0.1})
    assert titles(plan) == ["gpu0", "gpu1-6", "gpu7"]
    text = shown(plan)
    assert "actor_infer[1-6]:" in text
    assert "reference[0]:" in text
    assert titles(planned(gpus=8, roles={"actor_train": "0", "actor_infer": "2-5"})) == ["gpu0", "gpu2-5"]


def test_columns_of_several_nodes_name_them() -> None:
    plan = planned(nodes=2, gpus=8)
    assert titles(plan) == ["node0:gpu0", "node0:gpu1-7", "node1:gpu0-7"]
    text = shown(plan)
    assert "actor_infer[8-15]" in text
    assert "node0 memory" in text
    assert "node1 memory" in text
    assert titles(planned(nodes=2, roles={"actor_infer": {"replicas": 2}})) == ["node0:cpu", "node1:cpu"]


def test_turns_show_who_left() -> None:
    plan = planned(gpus=1, offload="always")
    (column,) = columns(plan)
    there = {
        phase: {one.role: one.level for one in cell[0]}
        for phase, cell in zip(plan.residency.phases, column.cells, strict=True)
    }
    assert there == {
        "generate": {"actor_infer": "all"},
        "train": {"actor_train": "all"},
        "publish": {"actor_train": "weights", "actor_infer": "weights"},
    }
    text = shown(plan)
    assert "offload is always" in text
    assert "moments, fp32, offloaded" in text


def test_cells_add_up_to_what_a_gpu_holds() -> None:
    plan = planned(gpus=2, algorithm={"kl_coef": 0.1})
    for column in columns(plan):
        for phase, cell in zip(plan.residency.phases, column.cells, strict=True):
            for pool, residents in zip(column.pools, cell, strict=True):
                assert sum(one.bytes for one in residents) == plan.memory.bytes(pool, phase)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("nodes", [1, 2])
def test_tables_fit_the_screen(width: int, gpus: int, nodes: int) -> None:
    text = shown(planned(nodes=nodes, gpus=gpus, algorithm={"kl_coef": 0.1}), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text, "nothing is cut off"
    for role in ("actor_train", "actor_infer", "reference", "rollout", "reward"):
        assert role in text


def test_sizes_are_rounded_for_people() -> None:
    assert human(3 << 29) == "1.5 GiB"
    assert human(5 << 20) == "5 MiB"


ISSUE = {
    "actor_train": {"devices": "0-7", "strategy": "sharded"},
    "actor_infer": {"devices": "0-7", "strategy": "vllm", "parallel": {"tensor": 2}},
    "critic": {"devices": "8-15", "strategy": "sharded"},
}


def test_ranks_are_drawn_with_their_mesh_and_parts() -> None:
    plan = planned(gpus=16, algorithm="ppo", roles=ISSUE)
    assert titles(plan) == ["gpu0-7", "gpu8-15"]
    assert dict(plan.roles)["actor_train"] == "sharded, 8 shards"
    assert dict(plan.roles)["critic"] == "sharded, 8 shards, predicts returns"
    text = shown(plan)
    assert "actor_train[0-7]: all" in text
    assert "actor_infer[0-3]: all" in text
    rows = [line for line in text.splitlines() if "sharded role" in line or "8 shards │ train" in line]
    assert len(rows) == 2
    for part in ("master weights", "optimizer moments", "gathered parameters", "activations of a micro-batch"):
        assert part in text
    assert "each of 8" in text


def test_replicas_are_named() -> None:
    plan = planned(gpus=8, roles={"actor_train": {"devices": "0-7", "parallel": {"replicate": 2}}, "actor_infer": "0-7"})
    assert dict(plan.roles)["actor_train"] == "sharded, 2 replicas of 4 shards"
    assert "2 replicas of 4 shards" in shown(plan)


def test_ranks_on_cores_are_counted_each() -> None:
    one = planned(executor="local", roles={"actor_train": {"strategy": "sharded"}})
    two = planned(executor="local", roles={"actor_train": {"strategy": "sharded", "replicas": 2}})
    (text,) = [line for line in shown(two).splitlines() if "each of 2" in line]
    assert text.split()[-2].replace(",", "").isdigit()
    assert "the actor's parameters" not in shown(two)

    def of_ranks(plan: Plan, what: str) -> list[int]:
        return [
            p.bytes for p in plan.memory.parts[plan.memory.pools[0], "train"] if p.what == what and "train" in p.worker
        ]

    assert len(of_ranks(two, "interpreter and libraries")) == 2, "a process each, beside the controller's"
    masters = of_ranks(two, "master weights, fp32")
    assert len(masters) == 2
    assert masters[0] == pytest.approx(of_ranks(one, "master weights, fp32")[0] / 2, rel=0.01)
    assert any(p.what == "weights in transit" for p in two.memory.parts[two.memory.pools[0], "publish"])


def test_offloaded_ranks_lie_in_their_nodes_memory() -> None:
    plan = planned(nodes=2, gpus=2, offload="always", roles={"actor_train": "0-3", "actor_infer": "0-3"})
    for node, pool in enumerate(pool for pool in plan.memory.pools if pool.gpu is None):
        away = {p.worker for p in plan.memory.parts[pool, "generate"] if p.what == "master weights, fp32, offloaded"}
        assert away == {f"actor_train[{2 * node}]", f"actor_train[{2 * node + 1}]"}
    gpu = next(pool for pool in plan.memory.pools if pool.gpu == 1)
    kept = {p.what for p in plan.memory.parts[gpu, "publish"] if p.worker == "actor_train[1]"}
    assert "master weights, fp32" in kept, "they are what is published"
    assert "optimizer moments, fp32" not in kept


@pytest.mark.parametrize("width", [80, 120])
def test_tables_of_ranks_fit_the_screen(width: int) -> None:
    text = shown(planned(nodes=2, gpus=8, algorithm="ppo", roles=ISSUE), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
