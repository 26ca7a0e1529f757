"""The plan of a run: roles, devices, sizes of a step and memory, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithm import make_algorithm
from roll.config.errors import UserError
from roll.config.schema import Config
from roll.data.sources import TaskSet
from roll.devices.memory import Part, available_bytes, count_parameters, estimate
from roll.model.chat import ChatRenderer
from roll.model.loading import choose_dtype, find_model, load_model_config, load_tokenizer


@dataclass(frozen=True)
class Plan:
    model: str
    parameters: int
    dtype: str
    roles: list[tuple[str, str, str]]
    """Role, device, strategy."""
    sizes: list[tuple[str, str]]
    parts: list[Part]
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def make_plan(config: Config, tasks: TaskSet) -> Plan:
    source = find_model(config.model.path)
    shape = load_model_config(source)
    renderer = ChatRenderer(load_tokenizer(source, config.model), ())
    dtype = choose_dtype(config.model.dtype)
    prompt_tokens = max(len(renderer.opening(task.messages)) for task in tasks.train[:256])
    rollout, train = config.rollout, config.train
    reference = make_algorithm(config.algorithm).needs_reference
    roles = [
        ("actor_train", "cpu", "single"),
        ("actor_infer", "cpu, the actor's parameters", f"native, {rollout.max_running} at once"),
        ("reward", f"{config.reward.workers} process(es)", config.reward.name),
    ]
    if reference:
        roles.append(("reference", "cpu", "single, frozen"))
    samples = rollout.groups_per_step * rollout.group_size
    sizes = [
        ("tasks", f"{len(tasks.train)} to train on, {len(tasks.held_out)} held out"),
        ("samples a step", f"{rollout.groups_per_step} groups × {rollout.group_size} = {samples}"),
        ("tokens a sample", f"prompt up to {prompt_tokens}, response up to {rollout.max_new_tokens}"),
        ("tokens a micro-batch", f"up to {train.micro_batch_tokens}, a shared prefix once"),
        ("updates a step", str(train.updates_per_step)),
        ("steps", f"{train.steps}, {train.steps * samples} samples in all"),
    ]
    parts = estimate(config, shape, dtype, prompt_tokens, reference)
    name = str(dtype).removeprefix("torch.")
    return Plan(config.model.path, count_parameters(shape), name, roles, sizes, parts, available_bytes())


def check_memory(plan: Plan) -> None:
    if plan.total_bytes > plan.available_bytes:
        need, have = plan.total_bytes / 2**30, plan.available_bytes / 2**30
        largest = max(plan.parts, key=lambda part: part.bytes)
        raise UserError(
            f"this run needs about {need:.1f} GiB and the machine has {have:.1f} GiB; the largest part is the "
            f"{largest.role}'s {largest.what} ({largest.bytes / 2**30:.1f} GiB): choose a smaller model, or smaller "
            "rollout.max_running, rollout.max_new_tokens or train.micro_batch_tokens"
        )
