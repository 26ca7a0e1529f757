"""Exactly once, whatever dies: the real scheduler, router, pool, orders and ledger against simulated workers.

A state machine trains in small steps on a virtual clock and interferes at any moment, in any order: engines die and hang,
rollout workers die and hang, graders are gone, tokens are lost, groups and samples are dropped, requeued, ended, added,
updates are skipped, the trainer dies, and the controller is killed with its last records half written. In the end two
more steps are made, and the run is finished and saved, so that everything that was under way ends.

What must hold then, by the ledger's file and by which draw each group was issued for:

- every sample's path is one of `MOVES`, none is trained on twice, and going back to a checkpoint brings back exactly the
  states it had;
- every draw was trained on exactly once, or dropped for good with a reason, or is held by the order to come again, which
  its last group says (`roll/simulation/balance.py` defines which reasons mean what); no draw of an epoch is lost or
  doubled;
- at most `groups_per_step` × (`max_staleness` + 1) groups, and what is oversampled, are under way at any time;
- no sample is trained on more than `max_staleness` versions after the first of its tokens that count;
- no place on an engine, no lease, no want and no tokens are left behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from hypothesis_examples import ALL

from roll.config.errors import RunError
from roll.config.schema import RolloutConfig
from roll.data.sample import Group, Sample
from roll.data.task import Task
from roll.ledger.log import Ledger
from roll.rollout.lifecycle import ENDS
from roll.scheduler.long_tail import make_task_sampler
from roll.scheduler.task_sampler import BaseSampler, SamplerWrapper, TaskDraw
from roll.simulation import balance
from roll.simulation.clock import VirtualLoop
from roll.simulation.cluster import SimCluster
from roll.simulation.environments import EnvironmentSteps
from roll.simulation.failures import MortalLedger
from roll.simulation.lengths import Lengths, LogNormal, Solving, uniforms
from roll.simulation.spec import EngineSpec
from roll.simulation.training import TrainerDied, Training
from roll.simulation.workload import Workload

T = TypeVar("T")

ENGINE = EngineSpec(
    base_s=0.01,
    per_sequence_s=0.001,
    per_cached_token_s=0.0,
    prefill_tokens_per_s=10_000.0,
    max_running=4,
    kv_tokens=4_000,
    reserve_tokens=40,
)
STEP_S = 4 * 3600.0
"""No step takes longer, whatever died: everything is back after seconds."""
GROUPS = 3


def workload(engines: int, group_size: int, turns: int, replacements: float) -> Workload:
    return Workload(
        name="small",
        engines=engines,
        engine=ENGINE,
        groups_per_step=GROUPS,
        group_size=group_size,
        prompts=Lengths(mean_tokens=50, sigma=0.5, alike=1.0, max_tokens=100, min_tokens=5),
        responses=Lengths(mean_tokens=300, sigma=1.3, alike=0.5, max_tokens=1_200, min_tokens=1),
        solving=Solving(bias=0.3, spread=0.7, by_length=0.3),
        turns=(1, turns),
        observations=Lengths(mean_tokens=20, sigma=0.5, alike=0.3, max_tokens=50, min_tokens=1) if turns > 1 else None,
        environment=EnvironmentSteps(LogNormal(mean=1.0, sigma=0.3)) if turns > 1 else None,
        grading=LogNormal(mean=1.0, sigma=1.0),
        graders=3,
        train_tokens_per_s=1_000.0,
        publish_s=4.0,
        max_replacements=replacements,
    )


def shape(k: int, stale: str, cut: str, oversample: float, order: str) -> dict[str, Any]:
    return {
        "max_staleness": k,
        "staleness_policy": stale,
        "batch_selection": cut,
        "oversample": oversample,
        "task_order": order,
    }


ON_POLICY = [
    shape(0, "wait", "in_order", 0.0, "in_order"),
    shape(0, "wait", "in_order", 0.4, "longest_first"),
    shape(0, "wait", "in_order", 1.0, "in_order"),
    shape(0, "wait", "first_finished", 0.4, "in_order"),
    shape(0, "wait", "first_finished", 1.0, "longest_first"),
    shape(0, "wait", "first_finished", 0.4, "tail_batching"),
    shape(0, "wait", "first_finished", 1.0, "tail_batching"),
]
ASYNCHRONOUS = st.builds(
    shape,
    st.integers(1, 2),
    st.sampled_from(["wait", "mask", "drop"]),
    st.sampled_from(["in_order", "first_finished"]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from(["in_order", "longest_first"]),
)
CONFIGS = st.fixed_dictionaries(
    {
        "staleness_timeout_s": st.sampled_from([1.0, 30.0, 600.0]),
        "lookahead": st.integers(1, 4),
        "on_weight_update": st.sampled_from(["pause", "abort"]),
        "group_size": st.integers(2, 3),
        "max_replacements": st.sampled_from([0.0, 1.0, 2.0]),
        "max_attempts": st.integers(1, 4),
        "quarantine_after": st.integers(1, 3),
    }
)
SHORT_S = st.sampled_from([0.0, 0.1, 0.5, 2.0, 7.0])
READY_S = st.sampled_from([0.0, 10.0, 100.0])
"""Until groups of later steps are ready."""
BACK_S = st.sampled_from([0.5, 5.0, 60.0])
NUMBER = st.integers(0, 11)
EXTRA = [Task(f"x{number}", ()) for number in range(12)]
"""What is added beside the order's tasks."""


class Watched(SamplerWrapper):
    """An order whose draws come again if, and only if, they came before; and before anything new."""

    def __init__(self, base: BaseSampler, machine: ExactlyOnce) -> None:
        super().__init__(base)
        self._machine = machine

    def next(self) -> TaskDraw:
        draw = self.base.next()
        came_before = (draw.task.id, draw.epoch) in self._machine.training.draws.values()
        assert draw.again == came_before, f"{draw} came before: {came_before}"
        assert not (draw.again and draw.skip), f"{draw} is skipped though it came back"
        assert draw.again or not balance.returned_to(self.base.state()), f"{draw} comes before what came back"
        return draw


class ExactlyOnce(RuleBasedStateMachine):
    training: Training

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="exactly-once-"))
        self.loop = VirtualLoop()
        self.stepping: asyncio.Task[None] | None = None
        self.began_s = 0.0
        self.saved_states: dict[str, tuple[str, str]] = {}
        self.broken = False

    @initialize(
        config=CONFIGS,
        filling=st.sampled_from(ON_POLICY) | ASYNCHRONOUS,
        engines=st.integers(2, 3),
        workers=st.integers(2, 4),
        tasks=st.integers(7, 12),
        turns=st.sampled_from([1, 1, 3]),
        sampler=st.sampled_from(["epochs", "solve_rate"]),
        max_scoring=st.sampled_from([0, 2]),
        way_s=st.sampled_from([0.0, 0.002, 0.2]),
        deadly=st.sampled_from([0.0, 0.0, 0.5]),
        greedy=st.booleans(),
    )
    def begin(
        self,
        config: dict[str, Any],
        filling: dict[str, Any],
        engines: int,
        workers: int,
        tasks: int,
        turns: int,
        sampler: str,
        max_scoring: int,
        way_s: float,
        deadly: float,
        greedy: bool,
    ) -> None:
        self.config = RolloutConfig.model_validate({"groups_per_step": GROUPS, **config, **filling})
        self.tasks = [Task(f"t{number}", ()) for number in range(tasks)]
        work = workload(engines, self.config.group_size, turns, self.config.max_replacements)

        def fate(task: str, sample: str, tries: int) -> str:
            crashes = task in ("t0", "t1") and uniforms(7, f"{sample}/{tries}")[0] < deadly
            return "its grader crashed" if crashes else ""

        def make_world() -> SimCluster:
            return SimCluster(
                work, workers=workers, tries=self.config.max_attempts, max_scoring=max_scoring, way_s=way_s, fate=fate
            )

        def order() -> Watched:
            made = make_task_sampler(self.tasks, 0, self.config, sampler=sampler, weights={})
            return Watched(made, self)  # type: ignore[arg-type]

        async def start() -> None:
            self.training = Training(self.folder / "ledger", self.tasks, self.config, order, make_world, greedy)
            await self.training.begin()

        self.run(start())

    # Time

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the loop until this is done; a step that ended meanwhile is looked at."""
        try:
            result = self.loop.run_until_complete(work)
            self.look_at_step()
            return result
        except BaseException:
            self.broken = True
            raise

    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def look_at_step(self) -> None:
        if self.stepping is None:
            return
        if not self.stepping.done():
            assert self.loop.time() - self.began_s < STEP_S, f"a step takes longer than {STEP_S:g} s"
            return
        step, self.stepping = self.stepping, None
        try:
            step.result()
        except TrainerDied:
            self.run(self.training.lose_trainer())
            self.check_going_back()
        except RunError as error:  # what a user sees; the run is resumed then
            if "samples of the step failed" not in str(error):
                raise
            self.killed(1.0, 1.0)

    async def stepped(self) -> None:
        """A step. It tries something, and with `staleness_policy: mask` nothing older than it may be is left unmasked."""
        for rollouts in self.training.world.rollouts:
            rollouts.masked_below.clear()
        before = self.training.step
        await self.training.make_step()
        assert self.training.ended
        if self.config.staleness_policy == "mask" and self.training.step > before:
            masked = {below for rollouts in self.training.world.rollouts for below in rollouts.masked_below.values()}
            assert masked <= {before - self.config.max_staleness}

    def start_step(self) -> None:
        if self.stepping is None:
            self.began_s = self.loop.time()
            self.stepping = self.loop.create_task(self.stepped())

    def finish_step(self) -> None:
        """Waits for the step in progress, if there is one: also for those that follow because it was lost."""

        async def until_done() -> None:
            assert self.stepping is not None
            await asyncio.wait([self.stepping], timeout=STEP_S)

        while self.stepping is not None:
            self.run(until_done())

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 10.0, 60.0, 700.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.wait(seconds)

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0]))
    def begin_a_step(self, seconds: float) -> None:
        self.start_step()
        self.wait(seconds)

    @rule()
    def wait_for_new_weights(self) -> None:
        """Until they are on their way to the engines, or the step is over without."""
        self.start_step()

        async def until_published() -> None:
            assert self.stepping is not None
            published = asyncio.create_task(self.training.world.publishing.wait())
            await asyncio.wait([self.stepping, published], timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
            published.cancel()

        self.run(until_published())

    @rule(count=st.integers(1, 3))
    def make_steps(self, count: int) -> None:
        for _ in range(count):
            self.start_step()
            self.finish_step()

    @rule(count=st.integers(0, 2), after_s=READY_S)
    def take_a_checkpoint(self, count: int, after_s: float) -> None:
        self.make_steps(count)
        self.finish_step()
        self.wait(after_s)
        self.run(self.training.save())
        self.note_checkpoint()
        assert {id: (last.state, last.reason) for id, last in Ledger.lineage(self.training.path).items()} == (
            self.saved_states
        )

    def note_checkpoint(self) -> None:
        assert self.training.saved is not None
        self.saved_states = balance.SampleStory.read(self.training.path, until=self.training.saved.position).states()

    @rule(after_s=READY_S)
    def stop_and_go_on(self, after_s: float) -> None:
        """Everything has ended on record when a run has stopped; what its checkpoint holds goes on with it."""
        self.finish_step()
        self.wait(after_s)
        self.run(self.training.stop())
        self.note_checkpoint()
        assert {state for state, _ in balance.SampleStory.read(self.training.path).states().values()} <= ENDS
        self.killed(1.0, 1.0)

    # Deaths

    @rule(number=NUMBER, after_s=SHORT_S, back_s=BACK_S)
    def kill_an_engine(self, number: int, after_s: float, back_s: float) -> None:
        self.wait(after_s)
        world = self.training.world
        self.act(lambda: world.kill_engine(number % len(world.engines), back_s))

    @rule(number=NUMBER, after_s=SHORT_S, hang_s=st.sampled_from([1.0, 30.0]), back_s=BACK_S)
    def hang_an_engine(self, number: int, after_s: float, hang_s: float, back_s: float) -> None:
        self.wait(after_s)
        world = self.training.world
        self.act(lambda: world.hang_engine(number % len(world.engines), hang_s, back_s))

    @rule(number=NUMBER, after_s=SHORT_S, back_s=BACK_S)
    def kill_a_rollout_worker(self, number: int, after_s: float, back_s: float) -> None:
        self.wait(after_s)
        world = self.training.world
        self.act(lambda: world.kill_worker(number % len(world.handles), back_s))

    @rule(number=NUMBER, after_s=SHORT_S, hang_s=st.sampled_from([1.0, 30.0]), back_s=BACK_S)
    def hang_a_rollout_worker(self, number: int, after_s: float, hang_s: float, back_s: float) -> None:
        self.wait(after_s)
        world = self.training.world
        self.act(lambda: world.hang_worker(number % len(world.handles), hang_s, back_s))

    @rule(after_s=SHORT_S, back_s=BACK_S)
    def stop_the_graders(self, after_s: float, back_s: float) -> None:
        self.wait(after_s)
        self.act(lambda: self.training.world.stop_graders(back_s))

    @rule()
    def lose_tokens(self) -> None:
        self.training.tokens_lost = True

    @rule(groups=st.integers(1, GROUPS))
    def skip_updates(self, groups: int) -> None:
        self.training.not_finite = groups

    @rule(where=st.sampled_from(["train", "publish"]))
    def kill_the_trainer(self, where: str) -> None:
        self.start_step()
        self.training.trainer_died = where
        self.finish_step()

    @rule(after_s=SHORT_S, written=st.floats(0, 1), undone=st.sampled_from([1.0, 1.0, 0.0, 0.5]))
    def kill_the_controller(self, after_s: float, written: float, undone: float) -> None:
        self.wait(after_s)
        self.killed(written, undone)

    def killed(self, written: float, undone: float) -> None:
        """`undone` below 1: the process that resumed the run died too, with that share of its way back on disk."""
        self.stepping = None
        self.run(self.training.kill(written))
        if undone < 1:
            self.half_undo(undone)
        self.run(self.training.begin())
        self.check_going_back()
        self.check_buffer()

    def check_buffer(self) -> None:
        """What was ready at the checkpoint is, without being made again; but for what a dead worker could not write."""
        saved, table = self.training.saved, self.training.scheduler._group_table
        for group in json.loads(saved.scheduler)["ready"] if saved else ():
            part = saved.buffer / f"part-{group['part']}.json"
            known = group["task"] in {task.id for task in self.tasks}
            assert (group["index"] in table.ready) == (part.is_file() and known), group

    def half_undo(self, share: float) -> None:
        saved, path = self.training.saved, self.training.path
        with MortalLedger.open(path) as ledger:
            before = ledger.position
            ledger.roll_back(saved.position if saved else 0, saved.step if saved else 0)
            size = before + int((ledger.position - before) * share)
        with path.open("r+b") as file:
            file.truncate(size)

    def check_going_back(self) -> None:
        """On disk, where nothing new is before the next step ends, everything is as it was at the checkpoint."""
        assert balance.SampleStory.read(self.training.path).states() == self.saved_states

    # Interfering

    def act(self, interfere: Any) -> None:
        async def now() -> None:
            interfere()

        self.run(now())

    def some_group(self, number: int) -> Group | None:
        groups = self.training.scheduler.open_groups
        return groups[number % len(groups)] if groups else None

    def some_sample(self, number: int) -> Sample | None:
        samples = [sample for group in self.training.scheduler.open_groups for sample in group.samples]
        return samples[number % len(samples)] if samples else None

    @precondition(lambda self: self.training.scheduler.open_groups)
    @rule(number=NUMBER, after_s=SHORT_S)
    def drop_a_group(self, number: int, after_s: float) -> None:
        self.wait(after_s)
        if (group := self.some_group(number)) is not None:
            self.act(lambda: self.training.scheduler.drop(group, "a wish: away with it"))

    @precondition(lambda self: self.training.scheduler.open_groups)
    @rule(number=NUMBER, after_s=SHORT_S, how=st.sampled_from(["drop_sample", "end_response", "requeue"]))
    def interfere_with_a_sample(self, number: int, after_s: float, how: str) -> None:
        self.wait(after_s)
        if (sample := self.some_sample(number)) is not None:
            self.act(lambda: getattr(self.training.scheduler, how)(sample, f"a wish: {how}"))

    @precondition(lambda self: self.training.scheduler.open_groups)
    @rule(number=NUMBER, after_s=SHORT_S, priority=st.integers(-1, 2))
    def reprioritise_a_group(self, number: int, after_s: float, priority: int) -> None:
        self.wait(after_s)
        if (group := self.some_group(number)) is not None:
            self.act(lambda: self.training.scheduler.reprioritise(group, priority))

    @rule(number=NUMBER, after_s=SHORT_S, priority=st.integers(0, 1))
    def add_a_group(self, number: int, after_s: float, priority: int) -> None:
        self.wait(after_s)
        self.act(lambda: self.training.scheduler.add(EXTRA[number], priority))

    # The end

    def teardown(self) -> None:
        try:
            if not self.broken and hasattr(self, "training"):
                self.drain()
                self.check_nothing_left()
                self.check()
        finally:
            self.put_away()

    def put_away(self) -> None:
        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if hasattr(self, "training") and hasattr(self.training, "ledger"):
            self.training.ledger.kill(0.0)
        self.loop.run_until_complete(cancel_all())
        self.loop.close()
        shutil.rmtree(self.folder)

    def drain(self) -> None:
        """Two more steps, with everybody back; then the run ends and saves."""
        self.finish_step()
        self.training.tokens_lost, end = False, self.training.step + 2
        while self.training.step < end:
            self.start_step()
            self.finish_step()
        while not self.training.world.well:
            self.wait(10.0)
        self.wait(10.0)
        self.check_tokens()
        self.run(self.training.stop())
        self.wait(10.0)

    def check_tokens(self) -> None:
        """Workers keep the tokens of those groups only that may be trained on, or that the next step will free."""
        scheduler, pool = self.training.scheduler, self.training.world.pool
        known = {group.index for group in (*scheduler._group_table.waiting, *scheduler._counters.ended)}
        known |= {sample.group for sample in scheduler._committed}
        kept = {
            *pool.tokens._locations,
            *(sample for rollouts in self.training.world.rollouts for sample in rollouts.resident_samples),
        }
        assert {int(sample.partition(".")[0]) for sample in kept} <= known

    def check_nothing_left(self) -> None:
        world = self.training.world
        assert not world.pool.busy
        assert world.router.waiting == 0
        assert [world.router.running(engine) for engine in range(len(world.engines))] == [0] * len(world.engines)
        assert [engine.running + engine.waiting for engine in world.engines] == [0] * len(world.engines)
        assert world.graders.serving + world.graders.waiting == 0
        assert set().union(*(rollouts.running for rollouts in world.rollouts)) == set()
        assert set().union(*(rollouts.resident_samples for rollouts in world.rollouts)) == set()
        assert world.pool.tokens._locations == {}

    def check(self) -> None:
        path = self.training.path
        story = balance.SampleStory.read(path, frozenset(task.id for task in EXTRA))
        assert {id: last.state for id, last in Ledger.lineage(path).items()} == {
            id: state for id, (state, _) in story.states().items()
        }
        order = self.training.scheduler.state()["order"]
        k = self.config.max_staleness
        assert story.volume <= GROUPS * (k + 1) + int(GROUPS * self.config.oversample + 1e-9)
        none(balance.too_old(story, k, self.config.staleness_policy == "mask"))
        none(balance.invalid_paths(story))
        none(balance.wrong_baselines(story))
        none(balance.unbalanced(story, self.training.draws, balance.held_by(order)))
        none(balance.wrong_epochs(self.training.draws, order, [task.id for task in self.tasks]))


def none(wrong: list[str]) -> None:
    assert not wrong, "\n".join(wrong)


QUICK, AT_LENGTH = 40 if ALL else 15, 1600


def check_machine(examples: int) -> None:
    run_state_machine_as_test(
        ExactlyOnce,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="asyncio")


def test_every_draw_is_trained_on_or_dropped_exactly_once_whatever_dies() -> None:
    check_machine(QUICK)


@pytest.mark.slow
def test_every_draw_is_trained_on_or_dropped_exactly_once_whatever_dies_at_length() -> None:
    check_machine(AT_LENGTH)
