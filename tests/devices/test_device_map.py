"""Where roles go on made-up machines, and what is said when they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.cluster.mesh import MeshShape
from roll.config.errors import UserError
from roll.config.schema import Config
from roll.devices.inventory import Inventory
from roll.devices.map import PROCESS_ROLES, DeviceMap, make_map
from roll.strategy.registry import TRAIN_ROLES

ALWAYS = {"actor_train", "actor_infer", "rollout", "reward"}


def machines(*counts: tuple[int, int]) -> Inventory:
    return Inventory.of(
        {"id": f"id-{n}", "cores": cores, "gpus": gpus, "memory_bytes": 64 << 30, "gpu_bytes": 80 << 30}
        for n, (cores, gpus) in enumerate(counts)
    )


CPU = machines((4, 0))
ONE = machines((16, 1))
EIGHT = machines((32, 8))
TWO = machines((32, 8), (32, 8))
THREE = machines((4, 0), (4, 0), (4, 0))


def config(executor: str = "ray", roles: dict[str, Any] | None = None, **settings: Any) -> Config:
    return Config.model_validate({"executor": executor, "roles": roles or {}, **settings})


def mapped(inventory: Inventory, executor: str = "ray", *, reference: bool = False, **settings: Any) -> DeviceMap:
    in_use = ALWAYS | ({"reference"} if reference else set())
    return make_map(config(executor, **settings), inventory, roles_in_use=in_use)


def numbers(made: DeviceMap, role: str) -> list[list[tuple[int, int]]]:
    """(node, index) of every device of every worker."""
    return [[(device.node, device.index) for device in worker] for worker in made.roles[role].workers]


def places(made: DeviceMap, role: str) -> list[tuple[str, int, tuple[int, ...], str]]:
    return [(place.device, place.threads, place.cores, place.node) for place in made.roles[role].placements]


def said(inventory: Inventory, executor: str = "ray", *, reference: bool = False, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        mapped(inventory, executor, reference=reference, **settings)
    return str(caught.value)


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_one_cpu_machine_has_one_free_worker_a_role(executor: str) -> None:
    made = mapped(CPU, executor, reference=True)
    for role in ("actor_train", "actor_infer", "reference"):
        assert places(made, role) == [("cpu", 4, (), "id-0")]
    assert places(made, "rollout") == places(made, "reward") == [("cpu", 1, (), "id-0")]
    assert made.kind == "colocated"
    assert made.one_copy == (executor == "local")
    assert [made.roles[role].strategy for role in made.roles] == ["single", "native", "single", "", ""]


def test_one_gpu_holds_all_models() -> None:
    made = mapped(ONE, "local", reference=True)
    assert {
        place.device for role in ("actor_train", "actor_infer", "reference") for place in made.roles[role].placements
    } == {"cuda:0"}
    assert made.one_copy
    assert places(made, "reward") == [("cpu", 1, (), "id-0")]


def test_auto_on_eight_gpus_trains_on_the_first_and_generates_on_all() -> None:
    made = mapped(EIGHT, reference=True)
    assert numbers(made, "actor_train") == [[(0, 0)]]
    assert numbers(made, "reference") == [[(0, 7)]]
    assert numbers(made, "actor_infer") == [[(0, n)] for n in range(8)]
    assert [place.device for place in made.roles["actor_infer"].placements] == [f"cuda:{n}" for n in range(8)]
    assert {place.world_size for place in made.roles["actor_infer"].placements} == {8}
    assert {place.threads for place in made.roles["actor_infer"].placements} == {4}
    assert made.kind == "partly shared"
    assert not made.one_copy


def test_one_process_uses_the_trainers_gpu_for_the_engine() -> None:
    made = mapped(EIGHT, "local")
    assert numbers(made, "actor_infer") == numbers(made, "actor_train") == [[(0, 0)]]
    assert made.kind == "colocated"
    with pytest.raises(UserError, match=r"on different devices, but in one process .* write executor=ray"):
        mapped(EIGHT, "local", roles={"actor_infer": "1"})


def test_engines_of_vllm_hold_their_weights_on_several_gpus_together() -> None:
    engines = {"devices": "2-7", "strategy": "vllm", "parallel": {"tensor": 2}}
    made = mapped(EIGHT, roles={"actor_infer": engines})
    assert numbers(made, "actor_infer") == [[(0, 2), (0, 3)], [(0, 4), (0, 5)], [(0, 6), (0, 7)]]
    assert [(place.device, place.gpus) for place in made.roles["actor_infer"].placements] == [
        ("cuda:2", (2, 3)),
        ("cuda:4", (4, 5)),
        ("cuda:6", (6, 7)),
    ]
    assert made.kind == "disaggregated"


def test_engines_on_several_gpus_may_lie_beside_other_roles() -> None:
    engines = {"strategy": "vllm", "parallel": {"tensor": 2}}
    beside_single = mapped(EIGHT, roles={"actor_infer": engines})
    assert numbers(beside_single, "actor_infer")[0] == [(0, 0), (0, 1)]
    assert beside_single.kind == "partly shared"
    beside_ranks = mapped(EIGHT, roles={"actor_infer": {**engines, "devices": "0-7"}, "actor_train": "0-7"})
    assert beside_ranks.kind == "colocated"


def test_an_engine_of_vllm_has_weights_of_its_own_also_in_one_process() -> None:
    made = mapped(EIGHT, "local", roles={"actor_infer": {"strategy": "vllm", "devices": "1"}})
    assert made.roles["actor_infer"].strategy == "vllm"
    assert not made.one_copy
    assert not mapped(CPU, "local", roles={"actor_infer": {"strategy": "vllm"}}).one_copy


def test_auto_over_two_nodes() -> None:
    made = mapped(TWO, reference=True)
    assert numbers(made, "actor_train") == [[(0, 0)]]
    assert numbers(made, "reference") == [[(1, 7)]]
    assert len(made.roles["actor_infer"].workers) == 16
    assert [place.node for place in made.roles["actor_infer"].placements] == ["id-0"] * 8 + ["id-1"] * 8
    assert made.roles["actor_infer"].placements[9].device == "cuda:1"
    assert len(mapped(TWO, "local").inventory.nodes) == 1


def test_devices_of_the_whole_run_are_shared_out_as_auto_does() -> None:
    made = mapped(EIGHT, devices="2-5", reference=True)
    assert numbers(made, "actor_train") == [[(0, 2)]]
    assert numbers(made, "reference") == [[(0, 5)]]
    assert numbers(made, "actor_infer") == [[(0, n)] for n in (2, 3, 4, 5)]
    cores = mapped(CPU, devices="0-1", reference=True)
    assert numbers(cores, "actor_train") == numbers(cores, "actor_infer") == numbers(cores, "reference")
    assert places(cores, "reference") == [("cpu", 2, (0, 1), "id-0")]
    assert places(mapped(EIGHT, devices="cpu"), "actor_infer") == [("cpu", 32, (), "id-0")]


def test_disjoint_devices_are_disaggregated() -> None:
    made = mapped(EIGHT, roles={"actor_train": "0", "actor_infer": "1-7"})
    assert made.kind == "disaggregated"
    assert mapped(CPU, roles={"actor_train": "0-1", "actor_infer": "2-3"}).kind == "disaggregated"
    assert mapped(CPU, roles={"actor_train": "0-1", "actor_infer": "1-2"}).kind == "partly shared"


def test_numbered_cores_hold_a_worker_to_them() -> None:
    made = mapped(CPU, roles={"actor_train": "0-2", "actor_infer": {"devices": "0-3", "replicas": 2}}, threads=2)
    assert places(made, "actor_train") == [("cpu", 2, (0, 1, 2), "id-0")]
    assert places(made, "actor_infer") == [("cpu", 2, (0, 1), "id-0"), ("cpu", 2, (2, 3), "id-0")]
    assert places(mapped(CPU, roles={"actor_train": "1"}, threads=3), "actor_train") == [("cpu", 1, (1,), "id-0")]


def test_free_replicas_divide_the_threads() -> None:
    made = mapped(CPU, roles={"actor_infer": {"replicas": 3}})
    assert places(made, "actor_infer") == [("cpu", 1, (), "id-0")] * 3
    assert places(mapped(CPU, roles={"actor_infer": {"replicas": 2}}), "actor_infer")[0][1] == 2
    assert places(mapped(CPU, roles={"actor_infer": {"replicas": 2}}, threads=4), "actor_infer")[0][1] == 4
    assert places(mapped(CPU, roles={"actor_infer": {"replicas": 9}}), "actor_infer")[0][1] == 1
    assert places(mapped(CPU, roles={"actor_infer": {"cpus": 3}}), "actor_infer")[0][1] == 3


def test_deterministic_roles_have_equal_threads() -> None:
    roles = {"actor_train": "0-1", "actor_infer": {"devices": "0-3", "replicas": 4}}
    for threads, expected in ((0, 4), (3, 3)):
        made = mapped(CPU, roles=roles, deterministic=True, threads=threads)
        alone = mapped(CPU, "local", deterministic=True, threads=threads)
        numeric = [
            p.threads for m in (made, alone) for r in ("actor_train", "actor_infer") for p in m.roles[r].placements
        ]
        assert set(numeric) == {expected}


def test_deterministic_roles_have_equal_threads_on_unequal_nodes() -> None:
    made = mapped(machines((4, 0), (8, 0)), roles={"actor_infer": {"replicas": 2}}, deterministic=True, reference=True)
    placed = [place for role in ("actor_train", "actor_infer", "reference") for place in made.roles[role].placements]
    assert {place.node for place in placed} == {"id-0", "id-1"}
    assert {place.threads for place in placed} == {4}


def test_three_nodes_of_cores() -> None:
    made = mapped(THREE, reference=True, roles={"actor_infer": {"replicas": 4}, "rollout": {"replicas": 5, "cpus": 2}})
    assert places(made, "actor_train") == [("cpu", 4, (), "id-0")]
    assert places(made, "reference") == [("cpu", 4, (), "id-2")]
    assert [(p.node, p.threads) for p in made.roles["actor_infer"].placements] == [
        ("id-0", 2),
        ("id-1", 4),
        ("id-2", 4),
        ("id-0", 2),
    ]
    assert [place.node for place in made.roles["rollout"].placements] == ["id-0", "id-1", "id-2", "id-0", "id-1"]
    spread = mapped(THREE, roles={"actor_infer": {"devices": "0-11", "replicas": 3}})
    assert numbers(spread, "actor_infer") == [[(n, c) for c in range(4)] for n in range(3)]
    later = mapped(THREE, devices="4-11", reference=True, roles={"actor_infer": {"replicas": 2}})
    assert numbers(later, "actor_train") == [[(1, c) for c in range(4)]]
    assert numbers(later, "reference") == [[(2, c) for c in range(4)]]


def test_process_roles_go_where_their_cores_are() -> None:
    made = mapped(TWO, roles={"reward": {"devices": "node1:0-3", "replicas": 3}, "rollout": {"replicas": 3}})
    assert places(made, "reward") == [("cpu", 1, (0, 1, 2, 3), "id-1")] * 3
    assert [place.node for place in made.roles["rollout"].placements] == ["id-0", "id-1", "id-0"]
    both = mapped(TWO, roles={"reward": {"devices": "node0:0,node1:0-3", "replicas": 2}})
    assert [place.cores for place in both.roles["reward"].placements] == [(0,), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("inventory", "settings", "parts"),
    [
        (CPU, {"roles": {"critic": "0"}}, ["roles.critic: algorithm grpo has no critic: remove roles.critic"]),
        (
            CPU,
            {"roles": {"judge": {"replicas": 2}}},
            ["no reward asks it: write reward.name=judge, or remove roles.judge"],
        ),
        (
            CPU,
            {"roles": {"reference": "0"}},
            ["roles.reference", "algorithm.kl_coef=0 has no reference", "or write algorithm.kl_coef=0.01"],
        ),
        (
            EIGHT,
            {"roles": {"actor_train": {"devices": "2-3", "strategy": "single"}}},
            [
                "'2-3', which is 2 GPUs, but strategy single computes on one device",
                "write roles.actor_train.strategy=sharded, or roles.actor_train.devices=2",
            ],
        ),
        (
            TWO,
            {"roles": {"actor_train": {"devices": "9-10", "strategy": "single"}}},
            ["or roles.actor_train.devices=node1:1"],
        ),
        (
            CPU,
            {"roles": {"actor_train": {"replicas": 2}}},
            ["single has one worker: remove roles.actor_train.replicas, or write roles.actor_train.strategy=sharded"],
        ),
        (EIGHT, {"roles": {"actor_train": {"replicas": 2}}}, ["single has one worker"]),
        (CPU, {"roles": {"actor_train": {"devices": "0-3", "replicas": 2}}}, ["single has one worker"]),
        (
            THREE,
            {"roles": {"actor_train": "0-5"}},
            ["a worker would span nodes", "such as roles.actor_train.devices=node0:0-3"],
        ),
        (
            THREE,
            {"roles": {"actor_infer": "2-5"}},
            ["node0:2-3,node1:0-1", "span nodes", "write roles.actor_infer.replicas=2 or 4"],
        ),
        (
            CPU,
            {"roles": {"actor_infer": {"devices": "0-3", "replicas": 3}}},
            ["replicas is 3, but the 4 cores 0-3 cannot be shared evenly: write roles.actor_infer.replicas=1, 2 or 4"],
        ),
        (
            EIGHT,
            {"roles": {"actor_infer": {"devices": "0-3", "replicas": 2}}},
            ["replicas is 2, but its 4 GPU(s) make 4 worker(s)", "remove roles.actor_infer.replicas"],
        ),
        (
            EIGHT,
            {"roles": {"actor_infer": {"parallel": {"tensor": 2}}}},
            [
                "parallel.tensor is 2",
                "native keeps the whole model on one device",
                "roles.actor_infer.strategy=vllm",
            ],
        ),
        (CPU, {"roles": {"rollout": {"parallel": {"tensor": 2}}}}, ["rollout has no model"]),
        (
            EIGHT,
            {"roles": {"actor_infer": {"devices": "0-4", "strategy": "vllm", "parallel": {"tensor": 2}}}},
            ["parallel.tensor is 2, but the GPU(s) 0-4 do not make workers of 2 on one node"],
        ),
        (
            EIGHT,
            {"roles": {"actor_infer": {"devices": "0-3", "strategy": "vllm", "parallel": {"tensor": 2}, "replicas": 4}}},
            ["replicas is 4, but its 4 GPU(s) make 2 worker(s) of 2 GPUs each", "write 8 device(s)"],
        ),
        (
            CPU,
            {"roles": {"actor_infer": {"engine_args": {"quantization": "fp8"}}}},
            ["engine_args has 'quantization'", "not computed by vLLM", "or roles.actor_infer.strategy=vllm"],
        ),
        (
            CPU,
            {"roles": {"actor_train": {"strategy": "native"}}},
            ["'native', which generates, but actor_train does not: write roles.actor_train.strategy=single"],
        ),
        (
            CPU,
            {"roles": {"actor_infer": {"strategy": "single"}}},
            ["'single', which trains, but actor_infer does not: write roles.actor_infer.strategy=native or vllm"],
        ),
        (CPU, {"roles": {"reward": {"strategy": "single"}}}, ["reward has no model: remove roles.reward.strategy"]),
        (
            CPU,
            {"roles": {"rollout": {"cpus": 5}}},
            ["has 4 core(s) to run on", "write roles.rollout.cpus=4"],
        ),
        (
            CPU,
            {"roles": {"actor_infer": {"devices": "0-1", "cpus": 1}}},
            ["2 core(s): remove roles.actor_infer.cpus"],
        ),
        (CPU, {"roles": {"actor_infer": "9"}}, ["roles.actor_infer.devices is '9'", "0-3 (cpu cores)"]),
        (CPU, {"devices": "9"}, ["devices is '9'"]),
        (
            CPU,
            {"executor": "local", "roles": {"actor_infer": {"replicas": 2}}},
            ["roles.actor_infer.replicas is 2, but executor local runs one worker a role: write executor=ray"],
        ),
        (CPU, {"executor": "local", "roles": {"reward": {"replicas": 2}}}, ["executor local runs one worker a role"]),
        (
            EIGHT,
            {"executor": "local", "roles": {"actor_infer": "0-1"}},
            ["devices is '0-1', which makes 2 workers, but executor local runs one worker a role"],
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(inventory: Inventory, settings: dict[str, Any], parts: list[str]) -> None:
    message = said(inventory, **settings)
    for part in parts:
        assert part in message


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Inventory, Config]:
    inventory = machines(*draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=3)))
    texts = st.sampled_from(["auto", "cpu", "0", "0-1", "1,3", "0-3", "node0:0", "node1:0-1", "cpu:0-1", "2-5"])

    def role() -> dict[str, Any]:
        return {"devices": draw(texts), "replicas": draw(st.integers(0, 4)), "cpus": draw(st.integers(0, 2))}

    def trainer() -> dict[str, Any]:
        strategy, replicate = draw(st.sampled_from(["auto", "single", "sharded"])), draw(st.sampled_from([1, 1, 2]))
        return {**role(), "strategy": strategy, "parallel": {"replicate": replicate}}

    made = config(
        draw(st.sampled_from(["local", "ray"])),
        {
            **{name: role() for name in ("actor_infer", "rollout", "reward")},
            **{name: trainer() for name in ("actor_train", "reference")},
        },
        devices=draw(texts),
        threads=draw(st.integers(0, 3)),
        deterministic=draw(st.booleans()),
    )
    return inventory, made


@given(layouts())
def test_every_placement_keeps_the_rules(layout: tuple[Inventory, Config]) -> None:
    inventory, made_of = layout
    try:
        made = make_map(made_of, inventory, roles_in_use=ALWAYS | {"reference"})
    except UserError:
        return
    for role, placed in made.roles.items():
        wanted = getattr(made_of.roles, role)
        assert len(placed.workers) == len(placed.placements) >= 1
        if wanted.replicas:
            assert len(placed.workers) == wanted.replicas
        if placed.mesh is not None:
            assert role in TRAIN_ROLES
            assert placed.strategy == "sharded"
            assert {place.mesh for place in placed.placements} == {placed.mesh}
            assert placed.mesh.ranks == len(placed.workers)
            assert list(placed.workers) == sorted(placed.workers), "ranks are in the order of their devices"
        elif role in TRAIN_ROLES or made_of.executor == "local":
            assert len(placed.workers) == 1
        for rank, (worker, place) in enumerate(zip(placed.workers, placed.placements, strict=True)):
            assert len({(device.node, device.kind) for device in worker}) == 1
            node = made.inventory.nodes[worker[0].node]
            assert all(device.index < node.count(device.kind) for device in worker)
            assert (place.role, place.rank, place.world_size, place.node) == (role, rank, len(placed.workers), node.id)
            assert place.threads >= 1
            assert set(place.cores) <= set(range(node.cores))
            if worker[0].kind == "gpu":
                assert role not in PROCESS_ROLES
                assert place.device == f"cuda:{worker[0].index}"
                assert len(worker) == 1
            else:
                assert place.device == "cpu"
                assert place.cores in ((), tuple(device.index for device in worker))
    if made_of.deterministic:
        numeric = [
            p.threads for role, placed in made.roles.items() if role not in PROCESS_ROLES for p in placed.placements
        ]
        assert len(set(numeric)) == 1


SHARDED = {"strategy": "sharded"}


def test_ranks_of_a_sharded_trainer_are_its_gpus_in_order() -> None:
    made = mapped(EIGHT, roles={"actor_train": {**SHARDED, "devices": "5,0-2"}})
    assert numbers(made, "actor_train") == [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 5)]]
    assert [(place.rank, place.device, place.world_size) for place in made.roles["actor_train"].placements] == [
        (0, "cuda:0", 4),
        (1, "cuda:1", 4),
        (2, "cuda:2", 4),
        (3, "cuda:5", 4),
    ]
    assert made.roles["actor_train"].mesh == MeshShape(1, 4)
    assert {placed.mesh for role, placed in made.roles.items() if role != "actor_train"} == {None}


@pytest.mark.parametrize("executor", ["local", "ray"])
@pytest.mark.parametrize("role", ["actor_train", "reference"])
def test_several_gpus_written_for_a_trainer_shard_it(executor: str, role: str) -> None:
    made = mapped(EIGHT, executor, reference=True, roles={role: "2-5"})
    assert made.roles[role].strategy == "sharded"
    assert made.roles[role].mesh == MeshShape(1, 4)
    for one in ({role: "2"}, {role: {"devices": "cpu:0-3"}}, {role: "cpu"}, {}):
        assert mapped(EIGHT, reference=True, roles=one).roles[role].strategy == "single"
    shared_out = mapped(EIGHT, devices="0-3", reference=True)
    assert shared_out.roles[role].strategy == "single", "written for the run, not for the role"


def test_critic_and_reward_model_shard_too() -> None:
    settings = {
        "algorithm": "ppo",
        "reward": "reward_model",
        "roles": {"critic": "8-15", "reward_model": {"model": "m", "devices": "node0:0-1"}},
    }
    made = make_map(config("ray", **settings), TWO, roles_in_use=ALWAYS | {"critic", "reward_model"})
    assert made.roles["critic"].mesh == MeshShape(1, 8)
    assert {place.node for place in made.roles["critic"].placements} == {"id-1"}
    assert made.roles["reward_model"].mesh == MeshShape(1, 2)


def test_replicas_of_the_parameters_are_runs_of_ranks() -> None:
    made = mapped(TWO, roles={"actor_train": {"devices": "0-15", "parallel": {"replicate": 2}}})
    placed = made.roles["actor_train"]
    assert placed.mesh == MeshShape(2, 8)
    assert str(placed.mesh) == "2 replicas of 8 shards"
    assert [place.node for place in placed.placements] == ["id-0"] * 8 + ["id-1"] * 8
    every = mapped(EIGHT, roles={"actor_train": {"devices": "0-7", "parallel": {"replicate": 8}}})
    assert every.roles["actor_train"].mesh == MeshShape(8, 1)
    assert str(every.roles["actor_train"].mesh) == "8 replicas of 1 shard"


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_on_cores_replicas_are_ranks(executor: str) -> None:
    free = mapped(CPU, executor, roles={"actor_train": {**SHARDED, "replicas": 2}})
    assert places(free, "actor_train") == [("cpu", 2, (), "id-0")] * 2
    assert free.roles["actor_train"].mesh == MeshShape(1, 2)
    held = mapped(CPU, executor, roles={"actor_train": {**SHARDED, "devices": "0-3", "replicas": 2}})
    assert places(held, "actor_train") == [("cpu", 2, (0, 1), "id-0"), ("cpu", 2, (2, 3), "id-0")]
    one = mapped(CPU, executor, roles={"actor_train": SHARDED})
    assert one.roles["actor_train"].mesh == MeshShape(1, 1)


def test_ranks_on_cores_of_several_nodes_are_neighbours_on_each() -> None:
    made = mapped(THREE, roles={"actor_train": {**SHARDED, "replicas": 6, "parallel": {"replicate": 3}}})
    assert [place.node for place in made.roles["actor_train"].placements] == ["id-0"] * 2 + ["id-1"] * 2 + ["id-2"] * 2
    numbered = mapped(THREE, roles={"actor_train": {**SHARDED, "devices": "0-11", "replicas": 6}})
    assert [place.cores for place in numbered.roles["actor_train"].placements] == [(0, 1), (2, 3)] * 3


def test_a_sharded_role_without_devices_has_all_gpus_or_as_many_as_ranks() -> None:
    all_of_them = mapped(EIGHT, reference=True, roles={"actor_train": SHARDED, "reference": {**SHARDED, "replicas": 2}})
    assert len(all_of_them.roles["actor_train"].workers) == 8
    assert numbers(all_of_them, "reference") == [[(0, 6)], [(0, 7)]]
    some = mapped(EIGHT, devices="2-5", roles={"actor_train": {**SHARDED, "replicas": 2}})
    assert numbers(some, "actor_train") == [[(0, 2)], [(0, 3)]]
    assert mapped(ONE, "local", roles={"actor_train": SHARDED}).roles["actor_train"].mesh == MeshShape(1, 1)


@pytest.mark.parametrize("infer", [{}, {"devices": "0"}, {"devices": "3"}, {"devices": "cpu"}])
def test_in_one_process_an_engine_beside_ranks_has_weights_of_its_own(infer: dict[str, Any]) -> None:
    made = mapped(EIGHT, "local", roles={"actor_train": "0-1", "actor_infer": infer})
    assert not made.one_copy
    assert len(made.roles["actor_infer"].workers) == 1
    assert not mapped(CPU, "local", roles={"actor_train": {**SHARDED, "replicas": 2}}).one_copy


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_deterministic_ranks_do_not_crowd_the_cores(executor: str) -> None:
    roles = {"actor_train": {**SHARDED, "replicas": 2}}
    made = mapped(CPU, executor, reference=True, roles=roles, deterministic=True)
    assert {p.threads for role in ("actor_train", "actor_infer", "reference") for p in made.roles[role].placements} == {2}
    assert [place.threads for place in made.roles["rollout"].placements] == [1]
    written = mapped(CPU, executor, roles=roles, deterministic=True, threads=4)
    assert {place.threads for place in written.roles["actor_train"].placements} == {4}


@pytest.mark.parametrize(
    ("inventory", "roles", "parts"),
    [
        (
            EIGHT,
            {"actor_train": {"devices": "0-7", "parallel": {"replicate": 3}}},
            [
                "roles.actor_train.parallel.replicate is 3, but its 8 ranks cannot be divided into 3 equal parts",
                "write roles.actor_train.parallel.replicate=1, 2, 4 or 8, or 9 devices in roles.actor_train.devices",
            ],
        ),
        (
            CPU,
            {"actor_train": {**SHARDED, "replicas": 2, "parallel": {"replicate": 4}}},
            ["its 2 ranks cannot be divided into 4", "parallel.replicate=1 or 2, or roles.actor_train.replicas=4"],
        ),
        (
            ONE,
            {"actor_train": {**SHARDED, "parallel": {"replicate": 2}}},
            ["its 1 rank cannot be divided into 2", "parallel.replicate=1, or 2 devices"],
        ),
        (
            EIGHT,
            {"actor_train": {"devices": "0", "parallel": {"replicate": 2}}},
            [
                "roles.actor_train.parallel.replicate is 2, but strategy single computes on one device: write "
                "roles.actor_train.strategy=sharded, or remove roles.actor_train.parallel"
            ],
        ),
        (
            CPU,
            {"actor_train": {"strategy": "single", "parallel": {"replicate": 2}}},
            ["write roles.actor_train.strategy=sharded"],
        ),
        (
            EIGHT,
            {"actor_infer": {"parallel": {"replicate": 2}}},
            ["roles.actor_infer.parallel.replicate is 2, but strategy native keeps", "remove roles.actor_infer.parallel"],
        ),
        (CPU, {"rollout": {"parallel": {"replicate": 2}}}, ["rollout has no model: remove roles.rollout.parallel"]),
        (
            EIGHT,
            {"actor_train": {**SHARDED, "devices": "0-7", "replicas": 4}},
            [
                "roles.actor_train.replicas is 4, but its 8 GPUs 0-7 make a rank each: remove "
                "roles.actor_train.replicas, or write roles.actor_train.devices=0-3"
            ],
        ),
        (
            EIGHT,
            {"actor_train": {"devices": "0-3", "replicas": 6}},
            ["its 4 GPUs 0-3 make a rank each", "or write 6 GPUs in roles.actor_train.devices"],
        ),
        (
            ONE,
            {"actor_train": {**SHARDED, "replicas": 2}},
            [
                "roles.actor_train.replicas is 2, but there is 1 GPU for its ranks: write roles.actor_train.replicas=1, "
                "or roles.actor_train.devices=cpu"
            ],
        ),
        (
            CPU,
            {"actor_train": {**SHARDED, "devices": "0-3", "replicas": 3}},
            ["the 4 cores 0-3 cannot be shared evenly: write roles.actor_train.replicas=1, 2 or 4"],
        ),
        (
            THREE,
            {"actor_train": {**SHARDED, "devices": "2-5"}},
            ["a worker would span nodes: write roles.actor_train.replicas=2 or 4"],
        ),
        (CPU, {"actor_infer": SHARDED}, ["'sharded', which trains, but actor_infer does not", "strategy=native or vllm"]),
        (CPU, {"reward": SHARDED}, ["reward has no model: remove roles.reward.strategy"]),
        (
            EIGHT,
            {"actor_train": {"devices": "0-5", "parallel": {"tensor": 2, "context": 2}}},
            ["parallel has context=2, tensor=2, together 4, which does not divide its 6 ranks", "or 8 devices"],
        ),
        (
            EIGHT,
            {"actor_train": {"devices": "0-7", "parallel": {"replicate": 2, "expert": 8}}},
            ["expert is 8, which does not divide the 4 ranks that hold a copy", "parallel.expert=1, 2 or 4"],
        ),
        (
            EIGHT,
            {"actor_infer": {"strategy": "vllm", "parallel": {"expert": 2}}},
            ["parallel.expert is 2, but an engine divides layers alone: remove roles.actor_infer.parallel.expert"],
        ),
        (
            CPU,
            {"actor_train": {"strategy": "vllm"}},
            ["'vllm', which generates, but actor_train does not: write roles.actor_train.strategy=single or sharded"],
        ),
    ],
)
def test_ranks_that_make_no_mesh_are_refused(inventory: Inventory, roles: dict[str, Any], parts: list[str]) -> None:
    message = said(inventory, roles=roles)
    for part in parts:
        assert part in message


def test_a_judge_is_not_sharded() -> None:
    settings = {"reward": "judge", "roles": {"judge": {"model": "m", **SHARDED}}}
    with pytest.raises(UserError, match=r"which trains, but judge does not: write roles\.judge\.strategy=native or vllm"):
        make_map(config("ray", **settings), CPU, roles_in_use=ALWAYS | {"judge"})


def test_moments_in_8_bits_are_refused_for_ranks() -> None:
    quantised = {"train": {"optimizer": "adamw_8bit"}}
    assert "write train.optimizer=adamw" in said(EIGHT, roles={"actor_train": "0-3"}, **quantised)
    assert mapped(EIGHT, roles={"actor_train": "0"}, **quantised).roles["actor_train"].mesh is None
