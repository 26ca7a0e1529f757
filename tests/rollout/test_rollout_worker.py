"""A rollout worker by itself: what it reports and when, what it keeps, and how it lets go."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from toys import END, Moves, Party, ToyRunner, go, party, rollouts, turns, until

import roll.rollout.worker
from roll.data import Sample, Task
from roll.data.batch import token_block
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.messages import Lease, Report
from roll.rollout.worker import RolloutWorker

TASK = Task.ask("t", "2+2", "4")


def lease(key: str, size: int = 2, engine: int = 0) -> Lease:
    return Lease(key, engine, TASK, int(key), 0.5, tuple(f"{key}.{i}" for i in range(size)))


async def worker_of(runner: ToyRunner) -> RolloutWorker:
    _, (worker,) = await rollouts(1)
    worker._runner = runner.of(worker)
    return worker


async def reports(worker: RolloutWorker, done: int) -> Report:
    """All that is reported until so many leases are done."""
    whole = Report()
    while len(whole.done) < done:
        report = await worker.report()
        whole.moves += report.moves
        whole.outcomes += report.outcomes
        whole.done += report.done
    return whole


def test_a_lease_is_reported_with_its_moves_and_outcomes_once() -> None:
    async def main() -> None:
        worker = await worker_of(ToyRunner(lambda s: "broken" if s.id == "1.1" else 2.0, lambda s: s.group))
        worker.take([lease("1"), lease("2", 1)])
        found = await reports(worker, 2)
        assert found.done == ["1", "2"]
        paths = {id: [m.state for m in found.moves if m.sample == id] for id in ("1.0", "1.1", "2.0")}
        scored = ["generating", "scoring", "scored"]
        assert paths == {"1.0": scored, "1.1": ["generating", "failed"], "2.0": scored}
        assert [(o.sample, o.reward, o.tokens, o.response_tokens, o.finish) for o in found.outcomes] == [
            ("1.0", 2.0, 4, 2, "stop"),
            ("1.1", 0.0, 0, 0, None),
            ("2.0", 2.0, 5, 3, "stop"),
        ]
        assert await worker.report() == Report()

    go(main())


def test_moves_wait_a_moment_for_company_and_a_done_lease_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        worker = await worker_of(ToyRunner(lambda s: 1.0, lambda s: 5))
        asking = asyncio.create_task(worker.report())
        await turns()
        worker.take([lease("1", 3)])
        found = await asyncio.wait_for(asking, 5)
        assert (len(found.moves), found.done) == (9, ["1"])

    monkeypatch.setattr(roll.rollout.worker, "GATHER_S", 10)
    monkeypatch.setattr(roll.rollout.worker, "POLL_S", 10)
    go(main())


def test_nothing_to_say_is_said_after_a_while() -> None:
    async def main() -> None:
        worker = await worker_of(ToyRunner(lambda s: 1.0))
        assert await asyncio.wait_for(worker.report(), 5) == Report()

    go(main())


def test_an_error_is_raised_once_and_ends_what_the_worker_holds() -> None:
    async def main() -> None:
        runner = ToyRunner(lambda s: OSError(f"by {s.id}"), lambda s: 3 if s.id in ("1.1", "2.0") else 100_000)
        worker = await worker_of(runner)
        worker.take([lease("1"), lease("2"), lease("3")])
        with pytest.raises(OSError, match=r"by (1\.1|2\.0)"):
            await worker.report()
        await turns()
        assert sorted(runner.cancelled) == ["1.0", "2.1", "3.0", "3.1"]
        assert await worker.report() == Report()
        await worker.close()
        assert not worker._held

    go(main())


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 30])
def test_a_cancelled_lease_is_forgotten_with_what_was_to_be_said_of_it(after: int) -> None:
    async def main() -> None:
        runner = ToyRunner(lambda s: 1.0, lambda s: 3)
        worker = await worker_of(runner)
        worker.take([lease("1"), lease("2")])
        await turns(after)
        await worker.cancel(["1", "unknown"])
        assert set(worker._held) == {"2"}
        assert set(worker._home) == {"2.0", "2.1"}
        found = await reports(worker, 1)
        assert (found.done, {m.sample for m in found.moves}) == (["2"], {"2.0", "2.1"})
        assert {outcome.sample for outcome in found.outcomes} == {"2.0", "2.1"}

    go(main())


def test_closing_ends_every_lease() -> None:
    async def main() -> None:
        runner = ToyRunner(lambda s: 1.0, lambda s: 100_000)
        worker = await worker_of(runner)
        worker.take([lease("1"), lease("2")])
        await turns()
        await worker.close()
        assert sorted(runner.cancelled) == ["1.0", "1.1", "2.0", "2.1"]
        assert not worker._home

    go(main())


def test_a_worker_that_is_not_connected_says_so() -> None:
    async def main() -> None:
        _, (worker,) = await rollouts(1)
        worker.take([lease("1")])
        with pytest.raises(AssertionError, match="connected before it takes leases"):
            await worker.report()

    go(main())


def test_columns_are_the_token_logs_a_block_a_group() -> None:
    async def main() -> None:
        run = await party()
        run.toys[0].says = lambda request: [int(request.id[0]) + 5, *[9] * int(request.id[-1]), END]
        (worker,) = run.workers
        worker.take([lease("1"), lease("2", 3)])
        await reports(worker, 2)
        blocks = worker.columns([["2.2", "2.0"], ["1.1"], []])
        assert len(blocks) == 3
        for names, block in zip([["2.2", "2.0"], ["1.1"], []], blocks, strict=True):
            logs = [worker._home[name].log for name in names]
            for column in ("ids", "loss_mask", "behaviour", "versions"):
                expected = [value for log in logs for value in getattr(log, column).tolist()]
                assert block.column(column).tolist() == expected
                assert block.column(column).dtype == getattr(Sample("", TASK, 0, 1.0).log, column).dtype
        assert worker.texts(["1.1"]) == [run.workers[0]._home["1.1"].response.text]  # type: ignore[union-attr]

    go(main())


def test_forgetting_frees_the_tokens() -> None:
    async def main() -> None:
        worker = await worker_of(ToyRunner(lambda s: 1.0))
        worker.take([lease("1"), lease("2")])
        await reports(worker, 2)
        worker.forget(["1", "unknown"])
        assert set(worker._home) == {"2.0", "2.1"}
        with pytest.raises(KeyError):
            worker.columns([["1.0"]])
        worker.forget(["2"])
        assert not worker._home
        assert not worker._held

    go(main())


async def _report_of(length: int) -> tuple[Report, Party]:
    run = await party(judge=lambda task, response: 0.5)
    run.toys[0].says = lambda request: [9] * length
    run.toys[0].context = 10**6
    run.workers[0].take([lease("1", 4)])
    found = await reports(run.workers[0], 1)
    assert [outcome.response_tokens for outcome in found.outcomes] == [length] * 4
    return found, run


def test_a_report_does_not_grow_with_the_responses() -> None:
    async def main() -> None:
        (short, _), (long, run) = await _report_of(10), await _report_of(10_000)
        assert abs(len(pickle.dumps(long)) - len(pickle.dumps(short))) < 64
        assert len(pickle.dumps(token_block(list(run.workers[0]._home.values())))) > 100_000

    go(main())


def test_a_leases_samples_are_what_it_says() -> None:
    async def main() -> None:
        seen: list[Sample] = []
        runner = ToyRunner(lambda s: seen.append(s) or 1.0)  # type: ignore[func-returns-value]
        worker = await worker_of(runner)
        worker.take([lease("7", 2)])
        await reports(worker, 1)
        assert [(s.id, s.task, s.group, s.temperature) for s in seen] == [("7.0", TASK, 7, 0.5), ("7.1", TASK, 7, 0.5)]
        assert np.array_equal(seen[0].log.ids, worker._home["7.0"].log.ids)

    go(main())


def test_what_is_reported_makes_the_same_ledger_as_carrying_them_here() -> None:
    async def main() -> None:
        run = await party(says="4")
        samples = run.group(0)
        await run.start(samples)
        direct: Any = Moves()
        life = Lifecycle(direct)
        assert run.workers[0]._runner is not None
        run.workers[0]._runner._lifecycle = life
        for sample in (Sample(s.id, s.task, 0, 0.5) for s in samples):
            life.move(sample, "queued")
            await run.workers[0]._runner.run(sample, 0)
        for id in ("0.0", "0.1"):
            told = [(r.state, r.reason, r.info) for r in run.moves.records if r.sample == id]
            assert told == [(r.state, r.reason, r.info) for r in direct.records if r.sample == id]

    go(main())


def test_requests_still_running_are_aborted_when_their_lease_is_cancelled() -> None:
    async def main() -> None:
        run = await party(2)
        (worker,) = run.workers
        worker.take([lease("1", engine=0), lease("2", engine=1)])
        await until(lambda: len(run.running) == 4)
        run.toys[0].finish("1.0", [END])
        await until(lambda: run.judges[0].judged)
        await worker.cancel(["1"])
        assert [sorted(toy.aborted) for toy in run.toys] == [["1.1"], []]
        await worker.close()
        assert not run.running

    go(main())
