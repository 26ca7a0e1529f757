"""The pipeline `rlvr`: reinforcement learning from verifiable rewards, on tasks with a reward or an environment. Its loop
is in `rlvr.py`; a subclass may have another one."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from roll.config.errors import UserError
from roll.config.schema import Config
from roll.pipeline.base import Pipeline
from roll.pipeline.preflight import find_tasks, rules_of
from roll.pipeline.run_warnings import run_warnings

if TYPE_CHECKING:
    from roll.cluster import Executor
    from roll.data.sources import TaskSet
    from roll.devices.plan import Plan
    from roll.model.lora import BaseModelRef
    from roll.pipeline.recorder import Recorder
    from roll.pipeline.roles import Roles
    from roll.pipeline.state import RLVRState
    from roll.reward import RewardSpec
    from roll.rollout.transcript import Transcript
    from roll.run import Panel
    from roll.scheduler.evaluate import Evaluation

T = TypeVar("T")


class RLVRPipeline(Pipeline["Roles", "RLVRState"]):
    objects: ClassVar[frozenset[str]] = frozenset({"reward", "tasks"})
    has_rollouts: ClassVar[bool] = True

    def __init__(self, config: Config, tasks: TaskSet, reward: RewardSpec) -> None:
        from roll.devices.run_requirements import rlvr_requirements

        self.config = config
        self.warnings = run_warnings(config, tasks, rules_of(config) if reward.pickled is None else {})
        self.answer_check = tasks.answers
        self.requirements = rlvr_requirements(config, tasks)
        self.tasks = tasks
        self.reward = reward

    @classmethod
    def find(cls, config: Config, objects: Mapping[str, Any]) -> tuple[TaskSet, RewardSpec]:
        return find_tasks(config, objects.get("reward"), objects.get("tasks"))

    @classmethod
    def prepare(cls, config: Config, found: tuple[TaskSet, RewardSpec]) -> RLVRPipeline:
        from roll.pipeline.model_checks import check_tasks

        tasks, reward = found
        return cls(config, check_tasks(config, tasks, reward), reward)

    def state(self, saved: Mapping[str, Any]) -> RLVRState:
        from roll.model.lora import BaseModelRef
        from roll.pipeline.state import RLVRState

        current = _untrained_models(self.config)
        state = RLVRState.restored({"models": {role: asdict(base) for role, base in current.items()}, **saved})
        for role, saved_base in state.models.items():
            if role in current and not current[role].is_same_model(saved_model := BaseModelRef(**saved_base)):
                raise UserError(
                    f"the {role} of the run in {self.config.run.dir} was {saved_model.path}, but is now "
                    f"{current[role].path}: bring the former back, or write run.dir=OTHER model=RUN for a new run from "
                    "its weights"
                )
        return state

    def start(self, executor: Executor, plan: Plan, run: Path | None = None) -> AbstractAsyncContextManager[Roles]:
        from roll.pipeline.roles import start_roles

        return start_roles(self.config, self.reward, executor=executor, map=plan.map, residency=plan.residency, run=run)

    async def train(self, roles: Roles, recorder: Recorder, state: RLVRState, checkpoint: Path | None) -> RLVRState:
        from roll.pipeline.rlvr import RLVR
        from roll.pipeline.supervision import supervised

        async with supervised(roles, self.config, recorder) as (supervision, publisher):
            run = RLVR(self.config, roles, publisher, supervision, self.tasks, recorder, state, checkpoint)
            return await supervision.race(run.run())

    def panels(self, state: RLVRState) -> Sequence[Panel]:
        from roll.pipeline import rlvr_metrics

        return rlvr_metrics.panels(state)

    async def evaluate(self, roles: Roles) -> Evaluation:
        from roll.model.find import steps_of
        from roll.pipeline.rlvr import make_evaluator

        if not self.tasks.held_out:
            source = f"the source {self.config.tasks.source!r} has"
            subject = "domains: they have" if self.config.domains else f"tasks: {source}"
            raise UserError(f"{subject} no held-out tasks to evaluate on")
        evaluation = await self._with_weights(roles, make_evaluator(self.config, self.tasks, roles).evaluate(0))
        assert evaluation is not None
        model = self.config.model.path
        return replace(evaluation, model=model, step=steps_of(model))

    async def play(self, roles: Roles, episodes: int) -> list[Transcript]:
        from roll.scheduler.generate_only import play

        return await self._with_weights(roles, play(self.tasks.train, roles.pool, self.config, episodes))

    async def _with_weights(self, roles: Roles, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run while the engines serve the model's current weights."""
        from roll.pipeline.residency_manager import ResidencyManager
        from roll.pipeline.supervision import supervised

        residency_manager = ResidencyManager(roles)
        try:
            async with supervised(roles, self.config) as (supervision, publisher):
                await residency_manager.enter("publish")
                async with publisher.changing():
                    await publisher.publish(0)
                await residency_manager.enter("generate")
                return await supervision.race(work)
        finally:
            work.close()


def _untrained_models(config: Config) -> dict[str, BaseModelRef]:
    """By role, the models whose weights are in no checkpoint of the run. They are recorded because the newest checkpoint
    of a run used as a model may be another one later."""
    from roll.devices.run_requirements import rlvr_roles
    from roll.model.find import find_model

    paths = {role: getattr(config.roles, role).model.path for role in config.scoring_roles}
    if "reference" in rlvr_roles(config):
        paths["reference"] = config.model.path
    return {role: find_model(path).base(config.seed) for role, path in paths.items()}
