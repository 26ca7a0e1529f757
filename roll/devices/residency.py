"""The stages of a step, and the residency of each worker on its devices in each stage.

Without offloading everything stays on its device. With offloading, a worker keeps its residency unless another role needs
its devices in the stage: then it is offloaded, or, if the stage needs it too, keeps only what the stage needs.

Example: trainer and engine on one GPU, the reference on another:

| stage | actor_train[0] | actor_infer[0] | reference[0] |
| --- | --- | --- | --- |
| generate | none | all | all |
| reference | none | all | all |
| train | all | none | all |
| publish | weights | weights | all |

If the engine uses the trainer's own parameters (`DeviceMap.one_copy`), the trainer's residency is at least `weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from roll.devices.inventory import Device
from roll.devices.map import PROCESS_ROLES, SCORING_ROLES, DeviceMap
from roll.strategy.offload import Residency

Stage = Literal["generate", "reference", "critic", "train", "publish"]
LEVELS: tuple[Residency, ...] = get_args(Residency)
NEEDS: dict[Stage, dict[str, Residency]] = {
    "generate": {"actor_infer": "all", "reward_model": "all", "judge": "all"},
    "reference": {"reference": "all"},
    "critic": {"critic": "all"},
    "train": {"actor_train": "all"},
    "publish": {"actor_train": "weights", "actor_infer": "weights"},
}
"""The roles that work in a stage, and the residency they need. A run has the stages whose roles it has; reward models and
judges work while samples are generated and are optional."""

Name = tuple[str, int]
"""A worker: its role and rank."""


@dataclass(frozen=True)
class ResidencyTable:
    """The residency of every worker of a model role in every stage of a step."""

    stages: tuple[Stage, ...]
    levels: Mapping[Stage, Mapping[Name, Residency]]

    def level(self, stage: Stage, role: str, rank: int) -> Residency:
        return self.levels[stage][role, rank]

    def lowest(self, role: str, rank: int) -> Residency:
        """The lowest residency of the worker over all stages."""
        return min((self.level(stage, role, rank) for stage in self.stages), key=LEVELS.index)

    @property
    def takes_turns(self) -> bool:
        """Whether any worker is offloaded in any stage."""
        return any(level != "all" for stage in self.stages for level in self.levels[stage].values())


def residency(map: DeviceMap, offload: bool) -> ResidencyTable:
    """The residency table of a device map in the steady state, after a full step."""
    workers = {
        # the ranks of a reward model are offloaded and loaded together, because the first commands the others
        (role, place.rank): placement.devices if placement.mesh and role in SCORING_ROLES else frozenset(devices)
        for role, placement in map.roles.items()
        if role not in PROCESS_ROLES
        for place, devices in zip(placement.places, placement.workers, strict=True)
    }
    present = {*map.roles, *SCORING_ROLES}
    stages = tuple(stage for stage in get_args(Stage) if present >= NEEDS[stage].keys())
    if not offload:
        everything: dict[Name, Residency] = dict.fromkeys(workers, "all")
        return ResidencyTable(stages, dict.fromkeys(stages, everything))
    floor: dict[Name, Residency] = dict.fromkeys(workers, "none")
    if map.one_copy:
        floor["actor_train", 0] = "weights"
    state = dict(floor)
    levels: dict[Stage, dict[Name, Residency]] = {}
    for _ in range(2):  # in the second pass every worker starts with the residency the previous step left
        for stage in stages:
            state = levels[stage] = _enter(stage, state, floor, workers)
    return ResidencyTable(stages, levels)


def _enter(
    stage: Stage,
    before: Mapping[Name, Residency],
    floor: Mapping[Name, Residency],
    workers: Mapping[Name, frozenset[Device]],
) -> dict[Name, Residency]:
    needs = NEEDS[stage]
    needing: dict[Device, set[str]] = {}
    for (role, _), devices in workers.items():
        if role in needs:
            for device in devices:
                needing.setdefault(device, set()).add(role)
    after: dict[Name, Residency] = {}
    for name, devices in workers.items():
        needed = needs.get(name[0], "none")
        crowded = any(needing.get(device, set()) - {name[0]} for device in devices)
        after[name] = _highest(needed, floor[name]) if crowded else _highest(needed, floor[name], before[name])
    return after


def _highest(*levels: Residency) -> Residency:
    return max(levels, key=LEVELS.index)
