"""Entry points: each checks everything first, then creates the run folder, starts the roles and runs the loop."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from roll.cluster import Executor
from roll.cluster.errors import NodeLost, RemoteError
from roll.config import Config, UserError, dump_config
from roll.config.schema import FaultToleranceConfig
from roll.data.chat_sources import ChatSource
from roll.data.sources import TaskSource
from roll.devices.disk_estimate import disk_warning
from roll.devices.plan import Plan, check_memory, make_plan
from roll.pipeline.base import Pipeline
from roll.pipeline.executors import executor_of
from roll.pipeline.preflight import check_folder, check_has_rollouts
from roll.pipeline.prepare import prepare
from roll.pipeline.recorder import Recorder
from roll.pipeline.report import PlainReporter, Reporter
from roll.pipeline.resume import ResumePoint, find_resume_point, newest_checkpoint, with_saved_precision
from roll.pipeline.roles import TrainRoles, inventory_of
from roll.pipeline.run_code import Chosen, Code, code_to_resume
from roll.pipeline.sft_eval import SFTEval
from roll.pipeline.signals import Stopped, cancelled_by_signals, signals_to
from roll.pipeline.state import State
from roll.process.gc_tuning import freeze_gc, freeze_libraries
from roll.reward import RewardFn
from roll.rollout.transcript import Transcript
from roll.run import Checkpoint, Checkpoints, RunFolder
from roll.run.code import Given, Recording, config_to_save
from roll.run.disk import explain, file_of, full_disk
from roll.run.folder import first_missing_folder
from roll.scheduler.evaluate import Evaluation


def train(
    config: Config,
    *,
    resume: bool = False,
    restart: bool = False,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    chats: ChatSource | None = None,
    reporter: Reporter | None = None,
    code: Code | None = None,
    found: Any = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Trains as the config says and returns the summary. `reward`, `tasks` and `chats` replace those the config names.

    `resume` continues from the newest checkpoint in the run folder; `restart` first moves an existing run folder aside.
    If code or data have changed, the run is resumed only if `code` says which to use: `run` is the copy kept in the run
    folder, `current` is what is on disk now. `found` is the result of `preflight.find` for the config of a new run.
    `executor`: the config's, which may be connecting already; its owner disconnects it.
    """
    reporter = reporter or PlainReporter()
    run_dir, given = Path(config.run.dir), {"reward": reward, "tasks": tasks, "chats": chats}
    if resume:
        chosen = _code_to_resume(config, given, run_dir, code)
    else:
        if code is not None:
            raise UserError(f"code is {code!r}, but a new run has only the code that is there now: leave it out")
        check_folder(config, resume=False, restart=restart)
        chosen = Chosen(config, given, config_to_save(config, given))
    for warning in chosen.messages:
        reporter.warned(warning)
    config = with_saved_precision(chosen.config, RunFolder.open(run_dir)) if resume else chosen.config
    pipeline = prepare(config, **chosen.given, found=None if resume else found)
    with executor_of(config) if executor is None else nullcontext(executor) as executor:
        plan = make_plan(pipeline.config, pipeline.requirements, inventory_of(config, executor))
        check_memory(plan)
        for warning in pipeline.warnings:
            reporter.warned(warning)
        if (full_warning := disk_warning(plan.writes, Path(config.run.dir))) is not None:
            reporter.warned(full_warning)
        recording = Recording.of(config, chosen.given, run_dir, chosen.recorded) if chosen.changed or not resume else None
        for warning in recording.warnings if recording else ():
            reporter.warned(warning)
        written = config_to_save(chosen.compared, chosen.given)
        with _signals_raise_stopped() as early:  # from here on there are files to delete if the run stops
            if resume:
                folder, restore_folder = RunFolder.open(run_dir), _nothing
            else:
                folder, restore_folder = _new_folder(run_dir, written, restart)
            recorder: Recorder | None = None
            with folder.lock():
                try:
                    early.release()
                    folder.set_mode(config.run.mode)
                    folder.delete_leftovers()
                    folder.write_format()
                    resume_point = find_resume_point(chosen.compared, folder) if resume else ResumePoint(None, ())
                    if not resume and recording is not None:
                        with _explaining_full_disk(folder):
                            recording.write(folder.path)
                    for warning in resume_point.warnings:
                        reporter.warned(warning)
                    with _explaining_full_disk(folder), Recorder.open(pipeline.config, folder, reporter) as recorder:
                        other_code = recording if resume else None
                        summary = asyncio.run(
                            _train(pipeline, recorder, executor, plan, written, resume_point, other_code)
                        )
                    folder.set_mode(config.run.mode)  # files that libraries wrote
                    return summary
                except UserError:
                    if not (recorder and recorder.steps):
                        restore_folder()  # refused while starting: the run has trained nothing
                    raise
                except (asyncio.CancelledError, KeyboardInterrupt):
                    if not (recorder and recorder.begun):
                        restore_folder()  # stopped while starting
                    stop_signal = (recorder and recorder.stop_signal) or next(iter(early.caught), signal.SIGINT)
                    raise Stopped(stop_signal) from None


def _new_folder(run_dir: Path, config: Config, restart: bool) -> tuple[RunFolder, Callable[[], None]]:
    """The folder of a new run, and a function that restores the previous state if the run never begins."""
    aside = RunFolder.move_aside(run_dir) if restart else None
    first_created = first_missing_folder(run_dir)
    try:
        folder = RunFolder.create(run_dir, dump_config(config), config.run.mode)
    except UserError:
        if aside is not None:
            RunFolder.move_back(aside, run_dir)
        raise

    def restore_folder() -> None:
        folder.discard(first_created)
        if aside is not None:
            RunFolder.move_back(aside, run_dir)

    return folder, restore_folder


def _nothing() -> None:
    pass


def _code_to_resume(config: Config, given: Given, run_dir: Path, code: Code | None) -> Chosen:
    check_folder(config, resume=True, restart=False)
    return code_to_resume(config, given, RunFolder.open(run_dir).path, code)


@contextmanager
def _explaining_full_disk(folder: RunFolder) -> Iterator[None]:
    """Turns a full disk into one message, whichever write failed."""
    try:
        yield
    except Exception as error:
        cause = full_disk(error)
        if cause is None:
            raise
        latest = Checkpoints(folder).latest()
        what = file_of(error) or "what the run leaves behind"
        raise explain(folder.path, what, cause, None if latest is None else latest.step) from error


async def _train(
    pipeline: Pipeline[Any, Any],
    recorder: Recorder,
    executor: Executor,
    plan: Plan,
    written: Config,
    resume_point: ResumePoint,
    other_code: Recording | None,
) -> dict[str, Any]:
    """`written` is the config as the user wrote it, without the sizes that the pipeline derived. `other_code` is the code
    the run continues with, if it differs from the code it was trained with so far."""
    config, checkpoint = pipeline.config, resume_point.checkpoint
    freeze_libraries()
    with _stopped_as_cancelled():
        engine = plan.map.roles["actor_infer"].engine if "actor_infer" in plan.map.roles else None
        loading = "loading the model" + (f" and starting {engine.starting}" if engine and engine.starting else "")
        recorder.reporter.phase(loading if config.executor == "local" else "starting the workers")
        executor.connect()  # before our signal handlers: Ray would install its own over them
        with _stop_on_signals(recorder):
            async with pipeline.start(executor, plan, recorder.folder.path) as roles:
                if recorder.stop_signal is not None:  # outside the main thread the signal raised nothing
                    raise Stopped(recorder.stop_signal)
                recorder.begun = True
                freeze_gc()
                recorder.reporter.started(recorder.folder.path, config.train.steps, checkpoint.step if checkpoint else 0)
                state = await _train_with(roles, pipeline, recorder, written, resume_point, other_code)
            summary = recorder.finish(state, pipeline.panels(state))
            recorder.reporter.finished(summary)
        return summary


async def _train_with(
    roles: TrainRoles,
    pipeline: Pipeline[Any, Any],
    recorder: Recorder,
    written: Config,
    resume_point: ResumePoint,
    other_code: Recording | None,
) -> State:
    """Runs the pipeline. When a trainer dies, rolls the run back to its last checkpoint, as often as `fault_tolerance`
    allows."""
    deaths: list[float] = []
    checkpoint, changes = resume_point.checkpoint, resume_point.changes
    if checkpoint is not None:
        await roles.load(checkpoint.path, pipeline.config.fault_tolerance)
    while True:
        if checkpoint is None:
            recorder.begin()
        state: State = pipeline.state({} if checkpoint is None else recorder.resume(checkpoint))
        recorder.change(state.step, changes, written)
        if other_code is not None:
            recorder.change_code(state.step, other_code, written)
        changes, other_code = (), None
        state.seconds += recorder.lap()  # start-up time belongs to no step
        try:
            folder = None if checkpoint is None else checkpoint.path
            state = cast(State, await pipeline.train(roles, recorder, state, folder))
            await recorder.settle()
            return state
        except RemoteError as error:
            checkpoint = await _roll_back(roles, recorder, pipeline.config.fault_tolerance, deaths, error)


async def _roll_back(
    roles: TrainRoles, recorder: Recorder, fault_tolerance: FaultToleranceConfig, deaths: list[float], error: RemoteError
) -> Checkpoint | None:
    """Restarts the trainers at the last checkpoint and returns it; tries again if another trainer dies meanwhile. Raises
    the error if it is not a trainer's, or if trainers die too often."""
    while True:
        now = time.monotonic()
        deaths.append(now)
        often = sum(now - death <= fault_tolerance.window_s for death in deaths) > fault_tolerance.restarts
        if often or not roles.trainer_died(error):
            raise error
        await roles.check_nodes()
        recorder.reporter.warned(f"{str(error).splitlines()[0]}: rolling back to the last checkpoint")
        await recorder.cancel_save()
        checkpoint = newest_checkpoint(recorder.folder)
        try:
            await roles.restart_trainers(None if checkpoint is None else checkpoint.path, fault_tolerance)
        except RemoteError as another:
            error = another
        except NodeLost:
            await roles.check_nodes()  # raises the error for the role
            raise
        else:
            return checkpoint


def evaluate(
    config: Config,
    *,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    chats: ChatSource | None = None,
    found: Any = None,
) -> Evaluation | SFTEval:
    """Evaluates the config's model on held-out data."""
    pipeline = prepare(config, reward=reward, tasks=tasks, chats=chats, found=found)
    with executor_of(config) as executor:
        plan = make_plan(pipeline.config, pipeline.requirements, inventory_of(config, executor))
        check_memory(plan)
        return asyncio.run(_evaluate(pipeline, executor, plan))


async def _evaluate(pipeline: Pipeline[Any, Any], executor: Executor, plan: Plan) -> Evaluation | SFTEval:
    executor.connect()  # before our signal handlers: Ray would install its own over them
    with cancelled_by_signals():
        async with pipeline.start(executor, plan) as roles:
            freeze_gc()
            evaluation: Evaluation | SFTEval = await pipeline.evaluate(roles)
        return evaluation


def play(
    config: Config,
    episodes: int,
    *,
    reward: RewardFn | None = None,
    tasks: TaskSource | None = None,
    found: Any = None,
) -> list[Transcript]:
    """Rolls out `episodes` attempts at the config's tasks with its model, for inspection; nothing is trained."""
    check_has_rollouts(config)
    pipeline = prepare(config, reward=reward, tasks=tasks, found=found)
    with executor_of(config) as executor:
        plan = make_plan(pipeline.config, pipeline.requirements, inventory_of(config, executor))
        check_memory(plan)
        return asyncio.run(_play(pipeline, executor, plan, episodes))


async def _play(pipeline: Pipeline[Any, Any], executor: Executor, plan: Plan, episodes: int) -> list[Transcript]:
    executor.connect()
    with cancelled_by_signals():
        async with pipeline.start(executor, plan) as roles:
            freeze_gc()
            return await pipeline.play(roles, episodes)


class _Early:
    """Signals that arrive before the run handles them itself. While the folder is being created they are kept until
    `release`, because a half-created folder cannot be undone."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self._deferring = True

    def stop(self, number: int) -> None:
        self.caught.append(number)
        if not self._deferring:
            raise Stopped(number)

    def release(self) -> None:
        """From now on a signal raises `Stopped`; a signal that was kept raises it at once."""
        self._deferring = False
        if self.caught:
            raise Stopped(self.caught[0])


@contextmanager
def _signals_raise_stopped() -> Iterator[_Early]:
    """Within the block, after `release`, a signal raises `Stopped` until the run handles signals itself. Outside the main
    thread, `outside_loop` keeps the signal until then."""
    early = _Early()
    if threading.current_thread() is threading.main_thread():
        with signals_to(early.stop):
            yield early
    else:
        yield early


@contextmanager
def _stopped_as_cancelled() -> Iterator[None]:
    """A signal's exception may be raised in any task, and asyncio ends its loop on it. If the run's own task ended with
    the same exception, asyncio would also print it as never retrieved; so that task ends as cancelled."""
    try:
        yield
    except Stopped:
        raise asyncio.CancelledError from None


@contextmanager
def _stop_on_signals(recorder: Recorder) -> Iterator[None]:
    """The first signal ends the step and saves; the second cancels the run and closes its roles in order; the third does
    not wait for them. Before the run has begun there is nothing to save, so the first signal ends it."""
    run = asyncio.current_task()
    assert run is not None
    cancelled = False

    def handle(number: int) -> None:
        nonlocal cancelled
        again = recorder.stop_requested
        recorder.stop_signal = signal.Signals(number)
        if cancelled or not recorder.begun:
            raise Stopped(number)
        if again:
            cancelled = True
            run.get_loop().call_soon_threadsafe(run.cancel)
        else:
            recorder.reporter.warned("stopping after this step and saving; again to stop at once")

    with signals_to(handle):
        yield
