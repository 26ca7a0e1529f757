"""Prepares a run: reports every error that can be found before anything is created or started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll.algorithm import make_algorithm
from roll.algorithm.losses import resolve_loss
from roll.cluster import Executor
from roll.config.errors import UserError
from roll.config.root import with_absolute_paths
from roll.config.schema import Config
from roll.data.chat_sources import ChatSet, ChatSource
from roll.data.sources import TaskSet, TaskSource
from roll.devices.plan import Plan
from roll.devices.run_requirements import RunRequirements, rlvr_requirements, rlvr_roles, sft_requirements
from roll.engine.routes import ExpertLayers
from roll.model.chat import ChatRenderer
from roll.model.find import find_model, steps_of
from roll.model.loading import load_model_config, load_tokenizer, stop_ids_of
from roll.model.lora import BaseModelRef
from roll.model.rope import longest_sequence
from roll.model.sft_dataset import EpochPermutation, SFTDataset, make_dataset
from roll.pipeline import rlvr_metrics, sft_metrics
from roll.pipeline.preflight import Found, find, find_tasks, rules_of
from roll.pipeline.prompt_filter import filter_prompts
from roll.pipeline.recorder import Recorder
from roll.pipeline.residency_manager import ResidencyManager
from roll.pipeline.reward_models import check_scorers
from roll.pipeline.rlvr import RLVR, make_evaluator
from roll.pipeline.roles import Roles, TrainRoles, start_roles, start_trainer
from roll.pipeline.run_warnings import run_warnings
from roll.pipeline.sft import SFT
from roll.pipeline.sft_eval import SFTEval, measure
from roll.pipeline.state import RLVRState, SFTState, State
from roll.pipeline.supervision import supervised, supervised_trainer
from roll.reward import RewardFn, RewardSpec
from roll.reward.answers import check_answers
from roll.rollout.transcript import Transcript
from roll.run import Panel
from roll.scheduler.evaluate import Evaluation
from roll.scheduler.generate_only import play
from roll.strategy.registry import engine_backend_of
from roll.strategy.train.optimizer import check_optimizer

R = TypeVar("R", bound=TrainRoles)
S = TypeVar("S", bound=State)
T = TypeVar("T")


class Pipeline(ABC, Generic[R, S]):
    """A run that is ready to start: its requirements, how to start its roles, and its loop."""

    config: Config
    """The config with all derived sizes filled in."""
    requirements: RunRequirements
    warnings: Sequence[str] = ()
    """Warnings to show before the run starts."""
    answer_check: str = ""
    """A sentence about the checks of the tasks' answers."""

    @abstractmethod
    def state(self, saved: Mapping[str, Any]) -> S:
        """The state saved in a checkpoint; without one, the initial state."""

    @abstractmethod
    def start(self, executor: Executor, plan: Plan, run: Path | None = None) -> AbstractAsyncContextManager[R]:
        """Starts the roles and stops them at the end of the block."""

    @abstractmethod
    async def train(self, roles: R, recorder: Recorder, state: S, checkpoint: Path | None) -> S:
        """Runs the loop from a state until the run ends or a trainer dies. `checkpoint` is the folder that the state was
        loaded from."""

    @abstractmethod
    def panels(self, state: S) -> Sequence[Panel]:
        """The panels of the run's curve."""

    @abstractmethod
    async def evaluate(self, roles: R) -> Evaluation | SFTEval:
        """Evaluates the model on held-out data."""


class RLVRPipeline(Pipeline[Roles, RLVRState]):
    def __init__(self, config: Config, tasks: TaskSet, reward: RewardSpec) -> None:
        self.config = config
        self.warnings = run_warnings(config, tasks, rules_of(config) if reward.pickled is None else {})
        self.answer_check = tasks.answers
        self.requirements = rlvr_requirements(config, tasks)
        self._tasks = tasks
        self._reward = reward

    def state(self, saved: Mapping[str, Any]) -> RLVRState:
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
        return start_roles(self.config, self._reward, executor=executor, map=plan.map, residency=plan.residency, run=run)

    async def train(self, roles: Roles, recorder: Recorder, state: RLVRState, checkpoint: Path | None) -> RLVRState:
        async with supervised(roles, self.config, recorder) as (supervision, publisher):
            run = RLVR(self.config, roles, publisher, supervision, self._tasks, recorder, state, checkpoint)
            return await supervision.race(run.run())

    def panels(self, state: RLVRState) -> Sequence[Panel]:
        return rlvr_metrics.panels(state)

    async def evaluate(self, roles: Roles) -> Evaluation:
        if not self._tasks.held_out:
            source = f"the source {self.config.tasks.source!r} has"
            subject = "domains: they have" if self.config.domains else f"tasks: {source}"
            raise UserError(f"{subject} no held-out tasks to evaluate on")
        evaluation = await self._with_weights(roles, make_evaluator(self.config, self._tasks, roles).evaluate(0))
        assert evaluation is not None
        model = self.config.model.path
        return replace(evaluation, model=model, step=steps_of(model))

    async def play(self, roles: Roles, episodes: int) -> list[Transcript]:
        """Rolls out `episodes` attempts at training tasks."""
        return await self._with_weights(roles, play(self._tasks.train, roles.pool, self.config, episodes))

    async def _with_weights(self, roles: Roles, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run while the engines serve the model's current weights."""
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
    paths = {role: getattr(config.roles, role).model.path for role in config.scoring_roles}
    if "reference" in rlvr_roles(config):
        paths["reference"] = config.model.path
    return {role: find_model(path).base(config.seed) for role, path in paths.items()}


class SFTPipeline(Pipeline[TrainRoles, SFTState]):
    def __init__(self, config: Config, corpus: SFTDataset) -> None:
        self._corpus = corpus
        self._permutation = EpochPermutation.of(len(corpus.train), config.data, config.train.steps, config.seed)
        train = config.train.model_copy(update={"steps": self._permutation.steps})  # learning-rate schedules end there
        self.config = config.model_copy(update={"train": train})
        self.requirements = sft_requirements(self.config, corpus, self._permutation)

    def state(self, saved: Mapping[str, Any]) -> SFTState:
        state = SFTState(**{"corpus": self._corpus.digest(), **saved})
        if state.corpus != self._corpus.digest():
            raise UserError(
                f"the conversations of {self.config.data.source!r} are not those that the run in {self.config.run.dir} "
                "was started with: bring them back, or write run.dir=OTHER model=RUN for a new run from its weights"
            )
        return state

    def start(self, executor: Executor, plan: Plan, run: Path | None = None) -> AbstractAsyncContextManager[TrainRoles]:
        return start_trainer(self.config, executor=executor, map=plan.map, residency=plan.residency, run=run)

    async def train(self, roles: TrainRoles, recorder: Recorder, state: SFTState, checkpoint: Path | None) -> SFTState:
        async with supervised_trainer(roles, self.config, recorder) as supervision:
            run = SFT(self.config, roles, self._corpus, self._permutation, recorder, state)
            return await supervision.race(run.run())

    def panels(self, state: SFTState) -> Sequence[Panel]:
        return sft_metrics.PANELS

    async def evaluate(self, roles: TrainRoles) -> SFTEval:
        if self._corpus.held_out is None:
            raise UserError(f"data: the source {self.config.data.source!r} has no held-out conversations to measure")
        async with supervised_trainer(roles, self.config) as supervision:
            evaluation = await supervision.race(measure(roles, self._corpus.held_out, self.config.eval.samples))
        model = self.config.model.path
        return replace(evaluation, model=model, step=steps_of(model))


def prepare(
    config: Config,
    *,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    chats: ChatSource | None = None,
    found: Found | None = None,
) -> Pipeline[Any, Any]:
    """The pipeline that a config names; `reward`, `tasks` and `chats` replace those the config names. `found` is the
    result of an earlier `preflight.find`."""
    config = with_absolute_paths(config)
    found = find(config, reward=reward, tasks=tasks, chats=chats) if found is None else found
    if found.chats is not None:
        return SFTPipeline(config, _check_chats(config, found.chats))
    assert found.tasks is not None
    assert found.reward_spec is not None
    return RLVRPipeline(config, *_check_tasks(config, found.tasks, found.reward_spec))


def check(
    config: Config, *, reward: RewardFn | None = None, tasks: TaskSource | None = None
) -> tuple[TaskSet, RewardSpec]:
    """The tasks and the reward of a run with rollouts, checked together with the model."""
    config = with_absolute_paths(config)
    return _check_tasks(config, *find_tasks(config, reward, tasks))


def _check_tasks(config: Config, tasks: TaskSet, reward_spec: RewardSpec) -> tuple[TaskSet, RewardSpec]:
    check_optimizer(config.train.optimizer)
    engine_backend_of(config).check(config, "actor_infer")
    check_scorers(config)
    resolve_loss(make_algorithm(config).loss_to_send)  # imports user code that the config names
    answers = check_answers(reward_spec, (*tasks.train, *tasks.held_out), config.reward.deadline_s)
    source = find_model(config.model.path)
    shape = load_model_config(source)
    if config.rollout.router_replay:
        ExpertLayers.of(shape)  # raises for models that router replay cannot work with
    tokenizer = load_tokenizer(source, config.model)
    renderer = ChatRenderer(tokenizer, ())
    tasks = filter_prompts(tasks, renderer, config, longest_sequence(shape))
    return replace(tasks, answers=str(answers or "")), reward_spec


def _check_chats(config: Config, chat_set: ChatSet) -> SFTDataset:
    """The conversations to train on, tokenized and checked together with the model."""
    check_optimizer(config.train.optimizer)
    source = find_model(config.model.path)
    tokenizer = load_tokenizer(source, config.model)
    renderer = ChatRenderer(tokenizer, stop_ids_of(tokenizer, source))
    context = longest_sequence(load_model_config(source))
    corpus = make_dataset(chat_set, renderer, config.data, context)
    if 0 < config.train.micro_batch_tokens < corpus.longest_tokens:
        raise UserError(
            f"data: the longest conversation has {corpus.longest_tokens} tokens, but train.micro_batch_tokens is "
            f"{config.train.micro_batch_tokens}: write train.micro_batch_tokens={corpus.longest_tokens} or more, or "
            "data.max_tokens and data.too_long=drop or cut"
        )
    return corpus
