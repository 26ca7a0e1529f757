"""Groups that are ready at a checkpoint: they are in it, whole, and are trained on by whoever goes on from there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_toys import Moves, ToyRunner, go, tasks

from roll.config.schema import RolloutConfig
from roll.data import Response, Sample, Task
from roll.data.batch import LOG_COLUMNS
from roll.data.tokenlog import TokenLog
from roll.rollout.buffer_checkpoint import read_part, write_part
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import make_filter
from roll.scheduler.rollout_pool import RolloutPool
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import EpochSampler

TASKS = tasks(9)
SEGMENT = st.tuples(st.sampled_from(["response", "observation"]), st.lists(st.integers(0, 99), max_size=4))


def log_of(prompt: list[int], segments: list[tuple[str, list[int]]]) -> TokenLog:
    log = TokenLog()
    log.prompt(prompt)
    for number, (kind, ids) in enumerate(segments):
        if kind == "response":
            rows = max(log.context_tokens + len(ids) - 1 - log.routed_tokens, 0)
            routes = np.arange(rows * 2, dtype=np.uint8).reshape(rows, 2) + number
            log.respond(ids, [-0.1 * token for token in ids], [number] * len(ids), routes)
        else:
            log.observe(ids)
    return log


def assert_same(log: TokenLog, other: TokenLog) -> None:
    for name in LOG_COLUMNS:
        column = getattr(log, name)
        assert column.dtype == getattr(other, name).dtype
        np.testing.assert_array_equal(column, getattr(other, name))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(SEGMENT, max_size=6))
def test_a_log_made_of_the_columns_of_another_has_the_same(prompt: list[int], segments: list[Any]) -> None:
    log = log_of(prompt, segments)
    assert_same(TokenLog.from_columns(*(getattr(log, name) for name in LOG_COLUMNS)), log)


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = []
    for group in range(3):
        task = Task.ask(f"t{group}", "?")
        sample = Sample(f"{group}.0", task, group, 0.7, log_of([1], [("response", [group, 5])]), "scored", tries=2)
        sample.response = Response("wörd\n", 2, "stop")
        sample.reward, sample.parts, sample.oldest, sample.newest = 0.25, {"right": 1.0}, 3, 4
        sample.seconds = {"generating": 1.5}
        written += [sample, Sample(f"{group}.1", task, group, 0.7, state="failed", reason="its grader died")]
    write_part(tmp_path, 2, written)
    wanted = {0: written[0].task, 2: written[4].task}
    read = list(read_part(tmp_path, 2, wanted))
    for sample, original in zip(read, [*written[:2], *written[4:]], strict=True):
        assert_same(sample.log, original.log)
        sample.log, sample.entered_s = original.log, original.entered_s
        assert sample == original
    assert list(read_part(tmp_path, 1, wanted)) == []


class Run:
    """A scheduler that is one step ahead, over workers of its own."""

    def __init__(self, pool: RolloutPool, runner: ToyRunner, version: int, stale: Any, tries: int) -> None:
        config = RolloutConfig(
            groups_per_step=2, group_size=2, max_staleness=1, staleness_policy=stale, max_attempts=tries
        )
        ledger: Any = Moves()
        self.moves: Moves = ledger
        self.pool, self.runner = pool, runner
        order, keep = EpochSampler(TASKS.train, 5), make_filter(config.filter)
        self.scheduler = RolloutScheduler(order, pool, Lifecycle(ledger), config, keep, version=version)

    @classmethod
    async def begin(cls, workers: int = 2, version: int = 0, slow: int = 99, stale: Any = "wait", tries: int = 1) -> Run:
        runner = ToyRunner(
            lambda sample: float(sample.id.endswith(".0")),
            lambda sample: 500.0 if sample.group >= slow else 1.0,
            length=lambda sample: 2 + sample.group,
            version=lambda: version,
        )
        return cls(await runner.pool(workers, 1, tries), runner, version, stale, tries)

    async def step(self, version: int) -> list[int]:
        """Trains a step; the groups it was made of."""
        rollout = await self.scheduler.next_rollout()
        self.scheduler.before_publish(version)
        self.scheduler.commit(rollout, version)
        return [group.index for group in rollout.kept]

    async def save(self, folder: Path) -> dict[str, Any]:
        state = self.scheduler.state()
        await self.scheduler.save(folder, state)
        return dict(json.loads(json.dumps(state)))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_was_ready_is_trained_on_and_what_was_open_is_issued_again(tmp_path: Path, workers: int) -> None:
    async def main() -> None:
        before = await Run.begin(slow=4)
        assert await before.step(1) == [0, 1]
        await asyncio.sleep(10)
        ready = [sample for group in before.scheduler._group_table.ready_in_order() for sample in group.samples]
        assert [sample.id for sample in ready] == ["2.0", "2.1", "3.0", "3.1"]
        columns = (await before.pool.tokens.batch(ready)).columns
        state = await before.save(tmp_path)
        await before.scheduler.finish()

        after = await Run.begin(workers, version=1)
        await after.scheduler.restore(state, TASKS.train, tmp_path)
        assert {(r.sample, r.state, r.reason) for r in after.moves.records} == {
            (f"{group}.{number}", "dropped", "resumed: its group is issued again")
            for group in (4, 5)
            for number in (0, 1)
        }
        after.scheduler.after_publish(1)
        rollout = await after.scheduler.next_rollout()
        assert [group.index for group in rollout.kept] == [2, 3]
        assert rollout.ages == [1, 1, 1, 1]
        assert rollout.batch is not None
        for name in ("sample", "task", "group", "reward"):
            assert (rollout.batch[name] == columns[name]).all()
        for name in LOG_COLUMNS:
            for row, other in zip(rollout.batch.rows(name), ready, strict=True):
                assert len(row) == other.tokens
        assert await after.pool.tokens.texts(rollout.trained_samples) == [f"answer to {s.task.id}" for s in ready]
        assert not {sample.id for sample in ready} & set(after.runner.started)
        assert after.moves.of("2.0") == ["kept"]
        after.scheduler.mark_trained(rollout, 2)
        again = await after.scheduler.next_rollout()
        drawn = {(g["task"], g["epoch"]) for g in state["open"]}
        assert {(group.task.id, group.epoch) for group in again.kept} == drawn
        await after.scheduler.close()
        assert not after.pool.tokens._locations
        assert not any(worker._samples or worker._leases for worker in after.runner.crew.workers)

    go(main())


def test_what_is_too_old_by_then_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        before = await Run.begin()
        await before.step(1)
        await asyncio.sleep(10)
        state = await before.save(tmp_path)
        await before.scheduler.finish()
        after = await Run.begin(version=1)
        await after.scheduler.restore(state, TASKS.train, tmp_path)
        after.scheduler.before_publish(2)
        old = [f"{group['index']}.0" for group in state["ready"] if group["samples"][0]["oldest"] == 0]
        assert old
        for sample in old:
            assert after.moves.reasons(sample)[-1] == ("dropped", "stale: 2 versions old at version 2")
        await after.scheduler.close()

    go(main())


def test_what_a_dead_worker_could_not_write_or_take_is_issued_again(tmp_path: Path) -> None:
    async def main() -> None:
        before = await Run.begin()
        await before.step(1)
        await asyncio.sleep(10)
        before.runner.crew.kill(0)  # nobody has noticed yet
        state = await before.save(tmp_path)
        before.pool.worker_lost(0, "?")
        parts = {group["part"]: group["index"] for group in state["ready"]}
        assert set(parts) == {0, 1}
        after = await Run.begin(version=1)
        await after.scheduler.restore(state, TASKS.train, tmp_path)
        assert parts[1] in after.scheduler._group_table.ready
        assert parts[0] not in after.scheduler._group_table.ready
        assert after.moves.reasons(f"{parts[0]}.0") == [("dropped", "resumed: its group is issued again")]
        last = await Run.begin(version=1)
        last.runner.crew.kill(1)
        await last.scheduler.restore(state, TASKS.train, tmp_path)
        assert not last.scheduler._group_table.ready
        held = {(task, epoch) for task, epoch in last.scheduler.state()["order"]["returned"]}
        assert held == {(group["task"], group["epoch"]) for group in (*state["ready"], *state["open"])}
        for run in (before, after, last):
            await run.scheduler.close()

    go(main())


def test_a_restored_group_whose_worker_dies_runs_again(tmp_path: Path) -> None:
    async def main() -> None:
        before = await Run.begin(workers=1, tries=3)
        await before.step(1)
        await asyncio.sleep(10)
        state = await before.save(tmp_path)
        await before.scheduler.finish()
        after = await Run.begin(workers=2, version=1, tries=3)
        await after.scheduler.restore(state, TASKS.train, tmp_path)
        indices = sorted(after.scheduler._group_table.ready)
        after.runner.crew.kill(0)
        after.pool.worker_lost(0, "rollout worker died: rollout[0]")
        after.scheduler.worker_lost(0, "rollout worker died: rollout[0]")
        after.scheduler.after_publish(1)
        rollout = await after.scheduler.next_rollout()
        assert [group.index for group in rollout.kept] == indices[:2]
        assert {sample.tries for sample in rollout.trained_samples} == {2}
        await after.scheduler.close()

    go(main())


def test_a_group_of_a_task_that_nobody_knows_any_more_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        before = await Run.begin()
        group = before.scheduler.add(Task.ask("mine", "?"))
        await asyncio.sleep(10)
        state = await before.save(tmp_path)
        assert [said["task"] for said in state["ready"]] == ["mine"]
        await before.scheduler.finish()
        after = await Run.begin()
        await after.scheduler.restore(state, TASKS.train, tmp_path)
        assert not after.scheduler._group_table.ready
        assert after.moves.last() == {sample.id: "dropped" for sample in group.samples}

    go(main())
