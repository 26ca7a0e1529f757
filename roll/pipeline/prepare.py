"""Preparing a run: everything that can be wrong is found out here, before anything is created or started."""

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
from roll.config.evaluation import domain_of, set_of
from roll.config.names import did_you_mean
from roll.config.reward import RewardRule
from roll.config.root import is_object, located
from roll.config.schema import Config
from roll.data.chat_sources import ChatSource, load_chats
from roll.data.domains import load_domains
from roll.data.eval_sets import with_eval_sets
from roll.data.formats import FORMATS
from roll.data.sources import TaskSet, TaskSource, load_tasks
from roll.data.task import Task
from roll.devices.job import Job, rlvr_job, rlvr_roles, sft_job
from roll.devices.plan import Plan
from roll.env.resolve import located as find_code
from roll.env.trial import check_seed, episodes, minds_values
from roll.model.chat import ChatRenderer
from roll.model.corpus import Corpus, Order, make_corpus
from roll.model.loading import find_model, load_model_config, load_tokenizer, steps_of, stop_ids_of
from roll.model.lora import Base
from roll.model.positions import longest_sequence
from roll.pipeline import rollout_record, sft_record
from roll.pipeline.held_out import HeldOut, measure
from roll.pipeline.prompts import fitting
from roll.pipeline.recorder import Recorder
from roll.pipeline.remarks import remarks
from roll.pipeline.rlvr import RLVR, check_policies, make_evaluator
from roll.pipeline.roles import Roles, TrainRoles, start_roles, start_trainer
from roll.pipeline.scoring import check_scorers
from roll.pipeline.sft import SFT
from roll.pipeline.state import RunState, SFTState, State
from roll.pipeline.supervision import supervised, supervised_trainer
from roll.pipeline.turns import Turns
from roll.reward import RewardFn, RewardSource
from roll.reward.answers import check_answers
from roll.reward.builtin import ASKS_OTHERS, BUILTINS, OF_SHAPE
from roll.rollout.evaluate import Evaluation
from roll.rollout.play import play
from roll.rollout.transcript import Transcript
from roll.run import Panel
from roll.run.code import load_object
from roll.strategy.infer.vllm_args import check_vllm
from roll.strategy.train.optimizer import check_optimizer

R = TypeVar("R", bound=TrainRoles)
S = TypeVar("S", bound=State)
T = TypeVar("T")


class Pipeline(ABC, Generic[R, S]):
    """A run that is ready to start: what it needs, how its roles are started, and its loop."""

    config: Config
    """With every size known."""
    job: Job
    remarks: Sequence[str] = ()
    """What the user should know before it starts."""
    checked: str = ""
    """What was checked of its tasks, in words."""

    @abstractmethod
    def state(self, saved: Mapping[str, Any]) -> S:
        """The state that a checkpoint holds; without one, that of the beginning."""

    @abstractmethod
    def start(self, executor: Executor, plan: Plan, run: Path | None = None) -> AbstractAsyncContextManager[R]:
        """Its roles, running."""

    @abstractmethod
    async def train(self, roles: R, recorder: Recorder, state: S, checkpoint: Path | None) -> S:
        """The loop, from a state to the end of the run or to the death of a trainer. `checkpoint` is the folder that the
        state is from."""

    @abstractmethod
    def panels(self, state: S) -> Sequence[Panel]:
        """What its curve shows."""

    @abstractmethod
    async def evaluate(self, roles: R) -> Evaluation | HeldOut:
        """Measures the model on held-out data."""


class RLVRPipeline(Pipeline[Roles, RunState]):
    def __init__(self, config: Config, tasks: TaskSet, reward: RewardSource) -> None:
        self.config = config
        self.remarks = remarks(config, tasks, _rules(config) if reward.pickled is None else {})
        self.checked = tasks.answers
        self.job = rlvr_job(config, tasks)
        self._tasks = tasks
        self._reward = reward

    def state(self, saved: Mapping[str, Any]) -> RunState:
        now = _models_beside(self.config)
        state = RunState.restored({"models": {role: asdict(base) for role, base in now.items()}, **saved})
        for role, found in state.models.items():
            if role in now and not now[role].is_now(was := Base(**found)):
                raise UserError(
                    f"the {role} of the run in {self.config.run.dir} was {was.path}, but is now {now[role].path}: bring "
                    "the former back, or write run.dir=OTHER model=RUN for a new run from its weights"
                )
        return state

    def start(self, executor: Executor, plan: Plan, run: Path | None = None) -> AbstractAsyncContextManager[Roles]:
        return start_roles(self.config, self._reward, executor=executor, map=plan.map, stages=plan.stages, run=run)

    async def train(self, roles: Roles, recorder: Recorder, state: RunState, checkpoint: Path | None) -> RunState:
        async with supervised(roles, self.config, recorder) as (supervision, publisher):
            run = RLVR(self.config, roles, publisher, supervision, self._tasks, recorder, state, checkpoint)
            return await supervision.race(run.run())

    def panels(self, state: RunState) -> Sequence[Panel]:
        return rollout_record.panels(state)

    async def evaluate(self, roles: Roles) -> Evaluation:
        if not self._tasks.held_out:
            source = f"the source {self.config.tasks.source!r} has"
            whose = "domains: they have" if self.config.domains else f"tasks: {source}"
            raise UserError(f"{whose} no held-out tasks to evaluate on")
        evaluation = await self._with_weights(roles, make_evaluator(self.config, self._tasks, roles).evaluate(0))
        assert evaluation is not None
        model = self.config.model.path
        return replace(evaluation, model=model, step=steps_of(model))

    async def play(self, roles: Roles, episodes: int) -> list[Transcript]:
        """Attempts at tasks that it would train on."""
        return await self._with_weights(roles, play(self._tasks.train, roles.pool, self.config, episodes))

    async def _with_weights(self, roles: Roles, work: Coroutine[Any, Any, T]) -> T:
        """What the work finds, with the engines serving the model as it is."""
        turns = Turns(roles)
        try:
            async with supervised(roles, self.config) as (supervision, publisher):
                await turns.enter("publish")
                async with publisher.changing():
                    await publisher.publish(0)
                await turns.enter("generate")
                return await supervision.race(work)
        finally:
            work.close()


def _models_beside(config: Config) -> dict[str, Base]:
    """By role, the models of which no checkpoint of the run holds the weights. A run's newest checkpoint may be another
    when it is asked for again."""
    paths = {role: getattr(config.roles, role).model.path for role in config.scoring_roles}
    if "reference" in rlvr_roles(config):
        paths["reference"] = config.model.path
    return {role: find_model(path).base(config.seed) for role, path in paths.items()}


class SFTPipeline(Pipeline[TrainRoles, SFTState]):
    def __init__(self, config: Config, corpus: Corpus) -> None:
        self._corpus = corpus
        self._order = Order.of(len(corpus.train), config.data, config.train.steps, config.seed)
        train = config.train.model_copy(update={"steps": self._order.steps})  # schedules of the learning rate end there
        self.config = config.model_copy(update={"train": train})
        self.job = sft_job(self.config, corpus, self._order)

    def state(self, saved: Mapping[str, Any]) -> SFTState:
        state = SFTState(**{"corpus": self._corpus.digest(), **saved})
        if state.corpus != self._corpus.digest():
            raise UserError(
                f"the conversations of {self.config.data.source!r} are not those that the run in {self.config.run.dir} "
                "was started with: bring them back, or write run.dir=OTHER model=RUN for a new run from its weights"
            )
        return state

    def start(self, executor: Executor, plan: Plan, run: Path | None = None) -> AbstractAsyncContextManager[TrainRoles]:
        return start_trainer(self.config, executor=executor, map=plan.map, stages=plan.stages, run=run)

    async def train(self, roles: TrainRoles, recorder: Recorder, state: SFTState, checkpoint: Path | None) -> SFTState:
        async with supervised_trainer(roles, self.config, recorder) as supervision:
            run = SFT(self.config, roles, self._corpus, self._order, recorder, state)
            return await supervision.race(run.run())

    def panels(self, state: SFTState) -> Sequence[Panel]:
        return sft_record.PANELS

    async def evaluate(self, roles: TrainRoles) -> HeldOut:
        if self._corpus.held_out is None:
            raise UserError(f"data: the source {self.config.data.source!r} has no held-out conversations to measure")
        async with supervised_trainer(roles, self.config) as supervision:
            found = await supervision.race(measure(roles, self._corpus.held_out, self.config.eval.samples))
        model = self.config.model.path
        return replace(found, model=model, step=steps_of(model))


def prepare(
    config: Config,
    *,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    chats: ChatSource | None = None,
) -> Pipeline[Any, Any]:
    """The pipeline that a config names; `reward`, `tasks` and `chats` replace those the config names."""
    config = located(config)
    given = {"reward": reward, "tasks": tasks, "chats": chats}
    unread = {"rlvr": ("chats",), "sft": ("reward", "tasks")}[config.pipeline]
    for name in unread:
        if given[name] is not None:
            raise UserError(f"{name} were given, but nothing reads them in pipeline {config.pipeline}: leave them out")
    if config.pipeline == "sft":
        return SFTPipeline(config, check_chats(config, chats))
    return RLVRPipeline(config, *check(config, reward=reward, tasks=tasks))


def check(
    config: Config, *, reward: RewardFn | None = None, tasks: TaskSource | None = None
) -> tuple[TaskSet, RewardSource]:
    """The tasks and the judge of a run with rollouts, found good together with the model."""
    config = located(config)
    check_optimizer(config.train.optimizer)
    check_vllm(config)
    check_scorers(config)
    reward = _kept(config.reward.name) if reward is None else reward
    tasks = _kept(config.tasks.source) if tasks is None else tasks
    task_set, judge = _tasks_and_judge(config, reward, tasks)
    task_set = _located(with_eval_sets(task_set, config.eval.sets, config.root), config.root)
    judge = judge.with_sets(_set_rewards(config))
    judge.check()
    check_policies(config, task_set)
    _check_limits(config, task_set)
    _check_rewards(config, task_set, reward is not None)
    if reward is None and tasks is None:
        _check_formats(config)
    _check_votes(config, task_set, judge)
    _check_algorithm(config, task_set)
    answers = check_answers(judge, (*task_set.train, *task_set.held_out), config.reward.deadline_s)
    source = find_model(config.model.path)
    shape = load_model_config(source)
    tokenizer = load_tokenizer(source, config.model)
    renderer = ChatRenderer(tokenizer, ())
    task_set = fitting(task_set, renderer, config, longest_sequence(shape))
    return replace(task_set, answers=str(answers or "")), judge


def _kept(name: str) -> Any:
    """The object that a name of a run's config means: one that the run was given in Python. None if it means none."""
    return load_object(name) if is_object(name) else None


def _tasks_and_judge(config: Config, reward: RewardFn | None, tasks: TaskSource | None) -> tuple[TaskSet, RewardSource]:
    if not config.domains:
        judge = (
            RewardSource.of(reward, config.root)
            if reward is not None
            else RewardSource.of_config(config.reward, config.root)
        )
        return load_tasks(config.tasks, tasks, config.root), judge
    for name, given in (("reward", reward), ("tasks", tasks)):
        if given is not None:
            raise UserError(f"{name} was given, but each of the config's domains has its own: leave it out, or domains")
    judge = RewardSource.of_domains({name: domain.reward for name, domain in config.domains.items()}, config.root)
    return load_domains(config.domains, config.root), judge


def _located(tasks: TaskSet, root: str) -> TaskSet:
    """The tasks with environments that every process finds; refuses those that are not there, or take other options."""
    checked: dict[tuple[str, str], tuple[str | bytes, int | None]] = {}

    def located(task: Task) -> Task:
        spec = task.environment
        if spec is None:
            return task
        spec = replace(spec, root=root)
        kind = (spec.name, repr(sorted(spec.options.items()) if minds_values(spec.name) else sorted(spec.options)))
        if kind not in checked:
            most = episodes(spec)
            checked[kind] = find_code(spec).code, most
        code, most = checked[kind]
        check_seed(spec, most)
        return replace(task, environment=replace(spec, code=code) if code else spec)

    return replace(tasks, train=tuple(map(located, tasks.train)), held_out=tuple(map(located, tasks.held_out)))


def _set_rewards(config: Config) -> dict[str, RewardRule]:
    """The rewards of sets to evaluate on that have their own, by the domain of their tasks."""
    return {domain_of(name): each.reward for name, each in config.eval.sets.items() if each.reward is not None}


def _rules(config: Config) -> dict[str, RewardRule]:
    """The rewards of the config, by the setting that each is under."""
    if not config.domains:
        return {"reward": config.reward}
    return {f"domains.{name}.reward": domain.reward for name, domain in config.domains.items()}


def _check_rewards(config: Config, tasks: TaskSet, given: bool) -> None:
    """Refuses a reward that would judge nothing, because the environments of the tasks say what an attempt is worth."""
    own = _set_rewards(config)
    for domain, rule in own.items():
        if all(task.environment is not None for task in tasks.held_out if task.domain == domain):
            raise UserError(
                f"eval.sets.{set_of(domain)}.reward is {rule.label!r}, but all its tasks are played in environments, "
                "whose steps say what an attempt is worth: leave it out"
            )
    asked = [task for task in (*tasks.train, *tasks.held_out) if task.environment is None and task.domain not in own]
    judged = {task.domain if config.domains else "" for task in asked}
    for name, (setting, rule) in zip(config.domains or [""], _rules(config).items(), strict=True):
        if name not in judged and (given or (rule.name, rule.options, rule.parts) != (RewardRule().name, {}, {})):
            raise UserError(
                f"{setting} is {'a function' if given else repr(rule.label)}, but all its tasks are played in "
                "environments, whose steps say what an attempt is worth: leave it out"
            )


def _check_formats(config: Config) -> None:
    """Refuses built-in rewards that cannot judge the tasks of a named format."""
    sources = {f"domains.{name}.tasks": domain.tasks for name, domain in config.domains.items()} or {
        "tasks": config.tasks
    }
    judged = list(zip(sources.items(), _rules(config).items(), strict=True))
    for name, each in config.eval.sets.items():
        setting = "reward" if each.reward is None else f"eval.sets.{name}.reward"
        judged.append(((f"eval.sets.{name}", each), (setting, each.reward or config.reward)))
    for (within, source), (setting, rule) in judged:
        name = str(source.options.get("format"))
        format = FORMATS.get(name)
        names = {part.name for part in rule.parts.values() if part.weight or part.gate} or {rule.name}
        judging = names - OF_SHAPE
        if format is not None and judging and judging <= BUILTINS.keys() - {*format.rewards, *ASKS_OTHERS}:
            raise UserError(
                f"{within}.options.format is {name!r}, but {setting} is {rule.label!r}, which cannot judge its "
                f"tasks: write {setting}: {format.rewards[0]} (docs/tasks.md)"
            )


def _check_votes(config: Config, tasks: TaskSet, judge: RewardSource) -> None:
    """Refuses maj@k where nobody says which answer a response gives."""
    for task in {task.domain: task for task in tasks.held_out}.values():
        name = set_of(task.domain)
        if not config.eval.settings(name).majority_at:
            continue
        where = f"eval.sets.{name}" if name in config.eval.sets else "eval"
        if any(other.environment is not None for other in tasks.held_out if other.domain == task.domain):
            raise UserError(
                f"{where}.majority_at is set, but its tasks are played in environments, where there is no answer to vote "
                f"by: write {where}.majority_at=[]"
            )
        if not judge.reads_answers(task.domain):
            own = f"domains.{task.domain}.reward" if task.domain in config.domains else "the reward"
            own = f"{where}.reward" if name in config.eval.sets and config.eval.sets[name].reward is not None else own
            raise UserError(
                f"{where}.majority_at is set, but {own} does not say which answer a response gives: use number, math, "
                "choice or exact (of a composed reward, in one part only), give your own a method answer_of(task, "
                f"response), or write {where}.majority_at=[]"
            )


def _check_limits(config: Config, tasks: TaskSet) -> None:
    """Refuses a limit for an environment that no task is played in."""
    named = {task.environment.name for task in (*tasks.train, *tasks.held_out) if task.environment is not None}
    for name in config.env.limits:
        if name not in named:
            played = f"tasks are played in {', '.join(sorted(named))}" if named else "no task is played in an environment"
            raise UserError(f"env.limits names {name!r}, but {played}{did_you_mean(name, named)}")


def _check_algorithm(config: Config, tasks: TaskSet) -> None:
    """Loads code that the config names, and refuses an algorithm that these tasks have nothing for."""
    resolve_loss(make_algorithm(config).loss_to_send)
    if config.algorithm.turn_weight > 0 and not tasks.has_environments:
        raise UserError(
            f"algorithm.turn_weight is {config.algorithm.turn_weight:g}: it compares turns that began in the same state, "
            "but these tasks have no environment: write algorithm.turn_weight=0, or choose tasks with environments"
        )


def check_chats(config: Config, chats: ChatSource | None = None) -> Corpus:
    """The conversations to imitate, in tokens, found good together with the model."""
    config = located(config)
    check_optimizer(config.train.optimizer)
    chats = _kept(config.data.source) if chats is None else chats
    chat_set = load_chats(config.data, chats, config.root)
    source = find_model(config.model.path)
    tokenizer = load_tokenizer(source, config.model)
    renderer = ChatRenderer(tokenizer, stop_ids_of(tokenizer, source))
    context = longest_sequence(load_model_config(source))
    corpus = make_corpus(chat_set, renderer, config.data, context)
    if 0 < config.train.micro_batch_tokens < corpus.longest_tokens:
        raise UserError(
            f"data: the longest conversation has {corpus.longest_tokens} tokens, but train.micro_batch_tokens is "
            f"{config.train.micro_batch_tokens}: write train.micro_batch_tokens={corpus.longest_tokens} or more, or "
            "data.max_tokens and data.too_long=drop or cut"
        )
    return corpus
