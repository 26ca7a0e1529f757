"""Running a pipeline: everything checked first, then the folder, then the roles, then the loop."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from roll.cluster import Executor
from roll.cluster.errors import RemoteError
from roll.config import Config, UserError, changed_keys, dump_config, load_config
from roll.config.schema import SuperviseConfig
from roll.data.sources import TaskSet, TaskSource, load_tasks
from roll.data.task import Task
from roll.devices.plan import Plan, check_memory, make_plan
from roll.model.chat import ChatRenderer
from roll.model.loading import find_model, load_model_config, load_tokenizer
from roll.pipeline.recorder import Recorder
from roll.pipeline.report import PlainReporter, Reporter
from roll.pipeline.rlvr import RLVR, check_policies
from roll.pipeline.roles import Roles, executor_of, inventory_of, start_roles
from roll.pipeline.state import RunState
from roll.pipeline.supervision import supervised
from roll.pipeline.turns import Turns
from roll.reward import RewardFn, RewardSource
from roll.rollout.evaluate import Evaluation, Evaluator
from roll.run import Checkpoint, Checkpoints, RunFolder
from roll.workers.train import TrainWorker

MAY_CHANGE_ON_RESUME = (
    *("train.steps", "eval.", "run.", "reward.workers", "reward.deadline_s", "reward.tries"),
    *("executor", "devices", "offload", "roles.", "weights.", "ray.", "supervise.", "env."),
)


def train(
    config: Config,
    *,
    resume: bool = False,
    restart: bool = False,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Trains as the config says and returns the summary. `reward` and `tasks` replace those the config names.

    `resume` goes on from the run folder's newest checkpoint; `restart` moves an existing run folder aside first.
    """
    reporter = reporter or PlainReporter()
    task_set, judge = check(config, reward=reward, tasks=tasks)
    with executor_of(config) as executor:
        plan = make_plan(config, task_set, inventory_of(config, executor))
        check_memory(plan)
        place = Path(config.run.dir)
        if restart and not resume:
            RunFolder.move_aside(place)
        folder = RunFolder.open(place) if resume else RunFolder.create(place, dump_config(config))
        return _train_in(folder, config, reporter, executor, plan, task_set, judge, resume=resume)


def _train_in(
    folder: RunFolder,
    config: Config,
    reporter: Reporter,
    executor: Executor,
    plan: Plan,
    tasks: TaskSet,
    judge: RewardSource,
    *,
    resume: bool,
) -> dict[str, Any]:
    try:
        with folder.lock():
            checkpoint = _checkpoint_to_resume(config, folder) if resume else None
            with Recorder.open(config, folder, reporter) as recorder:
                return asyncio.run(_train(config, recorder, executor, plan, tasks, judge, checkpoint))
    except UserError:
        if not resume:
            shutil.rmtree(folder.path)  # refused while it started: nothing happened in it
        raise
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _train(
    config: Config,
    recorder: Recorder,
    executor: Executor,
    plan: Plan,
    tasks: TaskSet,
    judge: RewardSource,
    checkpoint: Checkpoint | None,
) -> dict[str, Any]:
    recorder.reporter.phase("loading the model" if config.executor == "local" else "starting the workers")
    executor.connect()  # before signals are ours: Ray would take them
    with _stopping(recorder):
        run = recorder.folder.path
        async with start_roles(config, judge, executor=executor, map=plan.map, stages=plan.stages, run=run) as roles:
            recorder.reporter.started(recorder.folder.path, config.train.steps, checkpoint.step if checkpoint else 0)
            state = await _train_with(roles, config, recorder, tasks, checkpoint)
        summary = recorder.finish(state)
        recorder.reporter.finished(summary)
    return summary


async def _train_with(
    roles: Roles, config: Config, recorder: Recorder, tasks: TaskSet, checkpoint: Checkpoint | None
) -> RunState:
    """The run, going back to its last checkpoint by itself as often as a trainer dies and may."""
    deaths: list[float] = []
    if checkpoint is not None:
        await roles.actor.call(TrainWorker.load, checkpoint.path)
    while True:
        state = recorder.resume(checkpoint) if checkpoint is not None else recorder.begin()
        async with supervised(roles, config, recorder) as (supervision, publisher):
            folder = None if checkpoint is None else checkpoint.path
            run = RLVR(config, roles, publisher, supervision, tasks, recorder, state, folder)
            try:
                return await supervision.race(run.run())
            except RemoteError as error:
                if not roles.trainer_died(error):
                    raise
                _count_death(deaths, config.supervise, error)
                recorder.reporter.warned(f"{str(error).splitlines()[0]}: going back to the last checkpoint")
        checkpoint = Checkpoints(recorder.folder).latest()
        await roles.restart_trainers(None if checkpoint is None else checkpoint.path)


def _count_death(deaths: list[float], config: SuperviseConfig, error: RemoteError) -> None:
    """Raises the error when trainers die too often."""
    now = time.monotonic()
    deaths.append(now)
    if sum(now - death <= config.window_s for death in deaths) > config.restarts:
        raise error


def evaluate(config: Config, *, reward: RewardFn | None = None, tasks: TaskSource | None = None) -> Evaluation:
    """Measures held-out accuracy of the config's model."""
    task_set, judge = check(config, reward=reward, tasks=tasks)
    if not task_set.held_out:
        raise UserError(f"tasks: the source {config.tasks.source!r} has no held-out tasks to evaluate on")
    with executor_of(config) as executor:
        plan = make_plan(config, task_set, inventory_of(config, executor))
        check_memory(plan)
        return asyncio.run(_evaluate(config, executor, plan, task_set, judge))


async def _evaluate(config: Config, executor: Executor, plan: Plan, tasks: TaskSet, judge: RewardSource) -> Evaluation:
    async with start_roles(config, judge, executor=executor, map=plan.map, stages=plan.stages) as roles:
        turns = Turns(roles)
        async with supervised(roles, config) as (supervision, publisher):
            await turns.enter("publish")
            async with publisher.changing():
                await publisher.publish(0)
            await turns.enter("generate")
            evaluator = Evaluator(tasks.held_out, roles.pool, config.eval)
            evaluation = await supervision.race(evaluator.evaluate(0))
    assert evaluation is not None
    return evaluation


def check(
    config: Config, *, reward: RewardFn | None = None, tasks: TaskSource | None = None
) -> tuple[TaskSet, RewardSource]:
    """Finds out everything that can be wrong before anything is created or started."""
    judge = RewardSource.of(reward if reward is not None else config.reward.name)
    judge.check()
    task_set = load_tasks(config.tasks, tasks)
    check_policies(config, task_set)
    source = find_model(config.model.path)
    shape = load_model_config(source)
    tokenizer = load_tokenizer(source, config.model)
    renderer = ChatRenderer(tokenizer, ())
    with_prompts = [t for t in (*task_set.train[:256], *task_set.held_out[:256]) if t.environment is None]
    lengths = [(_prompt_tokens(renderer, task, config), task.id) for task in with_prompts]
    longest, task = max(lengths, default=(0, ""))  # what an environment begins with is not known before
    context = int(shape.max_position_embeddings)
    if longest + config.rollout.max_new_tokens > context:
        most = context - longest
        remedy = f"write rollout.max_new_tokens={most} or less" if most > 0 else "leave out such tasks, or shorten them"
        raise UserError(
            f"rollout.max_new_tokens is {config.rollout.max_new_tokens} and the prompt of task {task!r} has {longest} "
            f"tokens, but the context of {config.model.path!r} is {context}: {remedy}"
        )
    return task_set, judge


def _prompt_tokens(renderer: ChatRenderer, task: Task, config: Config) -> int:
    try:
        return len(renderer.opening(task.messages))
    except (TemplateError, TypeError, ValueError) as error:
        template = config.model.chat_template or f"the chat template of {config.model.path!r}"
        raise UserError(
            f"{template} cannot render task {task.id!r} ({type(error).__name__}: {error}): "
            "change the task's messages, or write model.chat_template=FILE with a Jinja template that takes them"
        ) from error


def _checkpoint_to_resume(config: Config, folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint of the run, verified; None when the run died before its first."""
    saved = load_config(folder.config_path)
    changed = [key for key in changed_keys(saved, config) if not key.startswith(MAY_CHANGE_ON_RESUME)]
    if changed:
        raise UserError(
            f"the run in {config.run.dir} was started with other settings of {', '.join(changed)}: "
            f"resume it as it was (roll train {folder.config_path} --resume), or write run.dir=OTHER for a new run"
        )
    checkpoint = Checkpoints(folder).latest()
    if checkpoint is not None:
        checkpoint.verify()
    return checkpoint


@contextmanager
def _stopping(recorder: Recorder) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the step and saves; the second one cancels the run, whose roles are then closed
    in order; a third does not wait for that."""
    run = asyncio.current_task()
    assert run is not None
    cancelled = False

    def ask(number: int, frame: object) -> None:
        nonlocal cancelled
        if cancelled:
            raise KeyboardInterrupt
        if recorder.stop_requested:
            cancelled = True
            run.get_loop().call_soon_threadsafe(run.cancel)
        else:
            recorder.stop_requested = True
            recorder.reporter.warned("stopping after this step and saving; again to stop at once")

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [(number, signal.signal(number, ask)) for number in signals]
    except ValueError:  # not the main thread: whoever runs us handles signals
        before = []
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
