"""What `roll plan` draws: who is where, when, and how full it gets."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from roll.config.schema import Config
from roll.data.sources import load_tasks
from roll.devices.draw import columns, draw, human, title
from roll.devices.inventory import Inventory
from roll.devices.job import rlvr_job
from roll.devices.plan import Plan, make_plan

GIB = 1 << 30


def planned(nodes: int = 1, cores: int = 8, gpus: int = 0, **settings: Any) -> Plan:
    row = {"cores": cores, "gpus": gpus, "memory_bytes": 64 * GIB, "gpu_bytes": 80 * GIB}
    base = {"model": {"path": "tiny", "dtype": "fp32"}, "tasks": "echo", "reward": "number", "executor": "ray"}
    config = Config.model_validate({**base, **settings})
    job = rlvr_job(config, load_tasks(config.tasks, None))
    return make_plan(config, job, Inventory.of([{"id": "", **row}] * nodes))


def shown(plan: Plan, width: int = 100) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for drawn in draw(plan, width):
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
        stage: {one.role: one.level for one in cell[0]}
        for stage, cell in zip(plan.stages.stages, column.cells, strict=True)
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
        for stage, cell in zip(plan.stages.stages, column.cells, strict=True):
            for pool, residents in zip(column.pools, cell, strict=True):
                assert sum(one.bytes for one in residents) == plan.memory.bytes(pool, stage)


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
