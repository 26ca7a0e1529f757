"""The phases of a step, and the residency of each worker on its devices in each phase.

Without offloading everything stays on its device. With offloading, a worker keeps its residency unless another role needs
its devices in the phase: then it is offloaded, or, if the phase needs it too, keeps only what the phase needs.

Example: trainer and engine on one GPU, the reference on another:

| phase | actor_train[0] | actor_infer[0] | reference[0] |
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

Phase = Literal["generate", "reference", "critic", "train", "publish"]
LEVELS: tuple[Residency, ...] = get_args(Residency)
NEEDS: dict[Phase, dict[str, Residency]] = {
    "generate": {"actor_infer": "all", "reward_model": "all", "judge": "all"},
    "reference": {"reference": "all"},
    "critic": {"critic": "all"},
    "train": {"actor_train": "all"},
    "publish": {"actor_train": "weights", "actor_infer": "weights"},
}
"""The roles that work in a phase, and the residency they need. A run has the phases whose roles it has; reward models and
judges work while samples are generated and are optional."""

Name = tuple[str, int]
"""A worker: its role and rank."""


@dataclass(frozen=True)
class ResidencyTable:
    """The residency of every worker of a model role in every phase of a step."""

    phases: tuple[Phase, ...]
    levels: Mapping[Phase, Mapping[Name, Residency]]

    def level(self, phase: Phase, role: str, rank: int) -> Residency:
        return self.levels[phase][role, rank]

    def lowest(self, role: str, rank: int) -> Residency:
        """The lowest residency of the worker over all phases."""
        return min((self.level(phase, role, rank) for phase in self.phases), key=LEVELS.index)

    @property
    def offloads(self) -> bool:
        """Whether any worker is offloaded in any phase."""
        return any(level != "all" for phase in self.phases for level in self.levels[phase].values())


def make_residency_table(map: DeviceMap, offload: bool) -> ResidencyTable:
    """The residency table of a device map in the steady state, after a full step."""
    workers = {
        # the ranks of a reward model are offloaded and loaded together, because the first commands the others
        (role, placement.rank): role_placement.devices
        if role_placement.mesh and role in SCORING_ROLES
        else frozenset(devices)
        for role, role_placement in map.roles.items()
        if role not in PROCESS_ROLES
        for placement, devices in zip(role_placement.placements, role_placement.workers, strict=True)
    }
    roles_of_run = {*map.roles, *SCORING_ROLES}
    phases = tuple(phase for phase in get_args(Phase) if roles_of_run >= NEEDS[phase].keys())
    if not offload:
        everything: dict[Name, Residency] = dict.fromkeys(workers, "all")
        return ResidencyTable(phases, dict.fromkeys(phases, everything))
    floor: dict[Name, Residency] = dict.fromkeys(workers, "none")
    if map.one_copy:
        floor["actor_train", 0] = "weights"
    current = dict(floor)
    levels: dict[Phase, dict[Name, Residency]] = {}
    for _ in range(2):  # in the second pass every worker starts with the residency the previous step left
        for phase in phases:
            current = levels[phase] = _enter(phase, current, floor, workers)
    return ResidencyTable(phases, levels)


def _enter(
    phase: Phase,
    before: Mapping[Name, Residency],
    floor: Mapping[Name, Residency],
    workers: Mapping[Name, frozenset[Device]],
) -> dict[Name, Residency]:
    needs = NEEDS[phase]
    roles_by_device: dict[Device, set[str]] = {}
    for (role, _), devices in workers.items():
        if role in needs:
            for device in devices:
                roles_by_device.setdefault(device, set()).add(role)
    after: dict[Name, Residency] = {}
    for name, devices in workers.items():
        needed = needs.get(name[0], "none")
        contended = any(roles_by_device.get(device, set()) - {name[0]} for device in devices)
        after[name] = _highest(needed, floor[name]) if contended else _highest(needed, floor[name], before[name])
    return after


def _highest(*levels: Residency) -> Residency:
    return max(levels, key=LEVELS.index)
