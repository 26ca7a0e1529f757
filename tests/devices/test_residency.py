"""What is on the devices in each phase, for every kind of layout."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.schema import Config
from roll.devices.inventory import Inventory
from roll.devices.map import DeviceMap, make_map
from roll.devices.residency import NEEDS, Residency, ResidencyTable, make_residency_table


def mapped(executor: str, roles: dict[str, Any], *, reference: bool = False, gpus: int = 4, **rest: Any) -> DeviceMap:
    inventory = Inventory.of([{"id": "", "cores": 8, "gpus": gpus, "memory_bytes": 1 << 36, "gpu_bytes": 1 << 36}])
    config = Config.model_validate({"executor": executor, "roles": roles, **rest})
    in_use = {"actor_train", "actor_infer", "rollout", "reward"} | ({"reference"} if reference else set())
    in_use |= roles.keys() & {"reward_model"}
    return make_map(config, inventory, roles_in_use=in_use)


def shown(table: ResidencyTable) -> dict[str, dict[str, Residency]]:
    return {
        phase: {f"{role}{rank}": level for (role, rank), level in table.levels[phase].items()} for phase in table.phases
    }


def test_without_offloading_everything_stays() -> None:
    table = make_residency_table(mapped("ray", {}, reference=True), offload=False)
    assert table.phases == ("generate", "reference", "train", "publish")
    assert {level for phase in table.phases for level in table.levels[phase].values()} == {"all"}
    assert not table.offloads


def test_colocated_roles_take_turns() -> None:
    table = make_residency_table(mapped("ray", {"actor_train": "0", "actor_infer": "0"}), offload=True)
    assert shown(table) == {
        "generate": {"actor_train0": "none", "actor_infer0": "all"},
        "train": {"actor_train0": "all", "actor_infer0": "none"},
        "publish": {"actor_train0": "weights", "actor_infer0": "weights"},
    }
    assert table.level("publish", "actor_train", 0) == "weights"


def test_in_one_process_the_trainers_weights_never_leave() -> None:
    table = make_residency_table(mapped("local", {}, reference=True, gpus=1), offload=True)
    assert shown(table) == {
        "generate": {"actor_train0": "weights", "actor_infer0": "all", "reference0": "none"},
        "reference": {"actor_train0": "weights", "actor_infer0": "none", "reference0": "all"},
        "train": {"actor_train0": "all", "actor_infer0": "none", "reference0": "none"},
        "publish": {"actor_train0": "weights", "actor_infer0": "weights", "reference0": "none"},
    }


def test_roles_apart_stay_where_they_are() -> None:
    table = make_residency_table(mapped("ray", {"actor_train": "0", "actor_infer": "1-3"}), offload=True)
    assert {level for phase in table.phases for level in table.levels[phase].values()} == {"all"}


def test_only_the_engines_beside_the_trainer_leave() -> None:
    table = make_residency_table(
        mapped("ray", {"actor_train": "0", "actor_infer": "0-1", "reference": "1"}, reference=True), True
    )
    assert shown(table) == {
        "generate": {"actor_train0": "none", "actor_infer0": "all", "actor_infer1": "all", "reference0": "none"},
        "reference": {"actor_train0": "none", "actor_infer0": "all", "actor_infer1": "none", "reference0": "all"},
        "train": {"actor_train0": "all", "actor_infer0": "none", "actor_infer1": "none", "reference0": "all"},
        "publish": {
            "actor_train0": "weights",
            "actor_infer0": "weights",
            "actor_infer1": "weights",
            "reference0": "none",
        },
    }


def test_only_the_ranks_beside_an_engine_leave() -> None:
    table = make_residency_table(mapped("ray", {"actor_train": "0-2", "actor_infer": "1"}), offload=True)
    assert shown(table) == {
        "generate": {"actor_train0": "all", "actor_train1": "none", "actor_train2": "all", "actor_infer0": "all"},
        "train": {"actor_train0": "all", "actor_train1": "all", "actor_train2": "all", "actor_infer0": "none"},
        "publish": {"actor_train0": "all", "actor_train1": "weights", "actor_train2": "all", "actor_infer0": "weights"},
    }


def test_the_ranks_of_a_reward_model_leave_together() -> None:
    roles = {"actor_train": "1", "actor_infer": "2", "reward_model": {"model": "tiny", "devices": "0-1"}}
    table = make_residency_table(mapped("ray", roles, reward="reward_model"), offload=True)
    levels = {phase: {table.level(phase, "reward_model", rank) for rank in (0, 1)} for phase in table.phases}
    assert levels == {"generate": {"all"}, "train": {"none"}, "publish": {"none"}}


def test_an_engine_over_two_gpus_leaves_for_the_ranks_on_both() -> None:
    engines = {"devices": "0-3", "strategy": "vllm", "parallel": {"tensor": 2}}
    table = make_residency_table(mapped("ray", {"actor_train": "1-2", "actor_infer": engines}), offload=True)
    assert shown(table)["train"] == {
        "actor_train0": "all",
        "actor_train1": "all",
        "actor_infer0": "none",
        "actor_infer1": "none",
    }
    assert shown(table)["generate"] == {
        "actor_train0": "none",
        "actor_train1": "none",
        "actor_infer0": "all",
        "actor_infer1": "all",
    }


def test_in_one_process_ranks_leave_the_engines_gpu_altogether() -> None:
    table = make_residency_table(mapped("local", {"actor_train": "0-1", "actor_infer": "0"}), offload=True)
    assert shown(table)["generate"] == {"actor_train0": "none", "actor_train1": "all", "actor_infer0": "all"}


def test_the_least_that_stays() -> None:
    table = make_residency_table(mapped("ray", {"actor_train": "0", "actor_infer": "0-1"}), offload=True)
    assert table.offloads
    assert [table.lowest("actor_train", 0), table.lowest("actor_infer", 0), table.lowest("actor_infer", 1)] == [
        *("none", "none", "all"),
    ]
    in_one_process = make_residency_table(mapped("local", {}, gpus=1), offload=True)
    assert in_one_process.lowest("actor_train", 0) == "weights"


@pytest.mark.parametrize("executor", ["local", "ray"])
@pytest.mark.parametrize("roles", [{}, {"actor_train": "cpu:0-1", "actor_infer": "cpu:1"}, {"reference": "0"}])
def test_who_works_is_there_and_who_does_not_makes_room(executor: str, roles: dict[str, Any]) -> None:
    made = mapped(executor, roles, reference=True)
    table = make_residency_table(made, offload=True)
    for phase in table.phases:
        for (role, rank), level in table.levels[phase].items():
            devices = set(made.roles[role].workers[rank])
            needed = NEEDS[phase].get(role)
            others = (other for other in NEEDS[phase] if other != role and other in made.roles)
            crowded = any(devices & made.devices(other) for other in others)
            if needed is not None:
                assert level in (needed, "all")
            elif crowded:
                assert level == ("weights" if made.one_copy and role == "actor_train" else "none")
