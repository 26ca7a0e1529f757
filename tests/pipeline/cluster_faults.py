"""Kills on a cluster of several nodes, all of them on this machine, while a run is known to be in a certain phase.

A `Layout` says on which node each worker lies, a `Cell` what is killed in which phase, a `Plan` which cells one run goes
through. `FaultyRun` holds the run at a gate of the phase, kills, waits until the run says what it lost, opens the gate,
and tells how long what took.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from local_ray import start_nodes
from small_runs import EXACT, TINY, Child, Remains, start_roll
from worker_gates import FOLDER, Gate, Gates

from roll.ledger.index import LedgerIndex

PHASES = ("generating", "training", "publishing", "saving")
WORKERS = {
    "engine": "actor_infer",
    "rollout worker": "rollout",
    "reward worker": "reward",
    "environment worker": "env",
    "trainer": "actor_train",
}
NODES = {
    f"node of {'an' if name[0] in 'aeiou' else 'a'} {name}": role for name, role in WORKERS.items() if name != "trainer"
}
TRAINER_NODE = "node of the trainer"
HEAD = "raylet of the head"
VICTIMS = (*WORKERS, *NODES, TRAINER_NODE, HEAD)
ENDS = (TRAINER_NODE, HEAD)
"""What no run goes on without."""
STOPS_WITHIN_S = 90.0
"""A run is to stop within 30 s, which `benchmarks/faults.py` measures; here other tests may run at the same time."""
_WAIT_S = 240.0
_UPDATE = ["actor_train[0].update"], False
_STEPS = {"generating": 3, "training": 4, "publishing": 4, "saving": 5}
"""That a run makes at most until a cell is over: one or two until all workers have samples, the one of the kill, for a
checkpoint perhaps the next, and the one after it."""
TASKS = Path(__file__).with_name("mixed_tasks.py")
SETTINGS = (
    *EXACT,
    f"tasks={TASKS}:mixed",
    "rollout.groups_per_step=4",
    "rollout.group_size=2",
    "rollout.max_new_tokens=2",
    "rollout.filter=none",
    "eval.every=0",
    "eval.samples=4",
    "fault_tolerance.restarts=100",
)


@dataclass(frozen=True)
class Cell:
    victim: str
    phase: str

    @property
    def role(self) -> str | None:
        """The role that loses a worker; none has one of its own on the head's raylet."""
        return "actor_train" if self.victim == TRAINER_NODE else (WORKERS | NODES).get(self.victim)


@dataclass(frozen=True)
class Layout:
    """The numbers of the nodes that the workers of each role lie on, by rank; node 0 is the head, with the run's own
    process. The last worker of a role is the one that is killed."""

    roles: Mapping[str, Sequence[int]]

    @property
    def settings(self) -> list[str]:
        """Neighbours on a node have different cores, as far as there are some."""
        written = []
        for number, (role, nodes) in enumerate(self.roles.items()):
            devices = ",".join(f"node{node}:{(number + node) % 2}" for node in nodes)
            written.append(f"roles.{role}={{devices: '{devices}', replicas: {len(nodes)}}}")
        return written

    def victim(self, role: str) -> str:
        return f"{role}[{len(self.roles[role]) - 1}]"

    def on(self, node: int) -> list[str]:
        """The workers of a node."""
        return [f"{role}[{rank}]" for role, nodes in self.roles.items() for rank, on in enumerate(nodes) if on == node]

    def calls(self, cell: Cell) -> tuple[list[str], bool]:
        """The calls in whose course the phase is, and whether they wait after their work: those of the victim where it
        has a part in the phase."""
        if cell.phase == "training":
            return _UPDATE
        if cell.phase == "saving":
            return ["actor_train[0].save"], True
        engines = range(len(self.roles["actor_infer"]))[-1 if cell.role == "actor_infer" else 0 :]
        if cell.phase == "publishing":
            by = ("receive_weights", "load_bucket")  # over the network, or on one node
            return [f"actor_infer[{rank}].{method}" for rank in engines for method in by], False
        if cell.role in (own := {"reward": "score", "env": "step"}):
            return [f"{self.victim(cell.role)}.{own[cell.role]}"], False
        return [f"actor_infer[{rank}].generate" for rank in engines], False


SPREAD = Layout({role: [0, 2] for role in ("actor_infer", "rollout", "reward", "env")} | {"actor_train": [1]})
"""Two workers of every role but the trainer, the second ones together on one node."""
ENGINE_ROLLOUT = Layout({"actor_train": [1], "actor_infer": [0, 2], "rollout": [0, 3], "reward": [0], "env": [0]})
REWARD_ENV = Layout({"actor_train": [1], "actor_infer": [0], "rollout": [0], "reward": [0, 2], "env": [0, 3]})
"""Layouts in which a node holds one worker."""
ON_HEAD = Layout({role: [0] for role in SPREAD.roles})
"""What is left when there is no other node any more."""


@dataclass(frozen=True)
class Plan:
    """What one run goes through: a layout and its cells, and if those end the run, the layout it is resumed in and the
    next cells. In the end it is resumed in one process."""

    parts: Sequence[tuple[Layout, Sequence[Cell]]]

    @property
    def cells(self) -> list[Cell]:
        return [cell for _, cells in self.parts for cell in cells]

    @property
    def nodes(self) -> int:
        return 1 + max(node for layout, _ in self.parts for nodes in layout.roles.values() for node in nodes)

    @property
    def steps(self) -> int:
        """Enough for every cell to come."""
        return 4 + sum(_STEPS[cell.phase] for cell in self.cells)


def _through_phases(layout: Layout, *victims: str) -> Plan:
    return Plan([(layout, [Cell(victim, phase) for victim in victims for phase in PHASES])])


def _node_plans() -> dict[str, Plan]:
    """Two nodes and then what ends the run, in phases that differ: in four runs each comes to all of them."""
    plans = {}
    for number, phase in enumerate(PHASES):
        others = [PHASES[(number + by) % len(PHASES)] for by in (1, 2)]
        for name, layout, end in (("engine", ENGINE_ROLLOUT, TRAINER_NODE), ("reward", REWARD_ENV, HEAD)):
            victims = [victim for victim, role in NODES.items() if len(layout.roles[role]) > 1]
            cells = [*map(Cell, victims, others), Cell(end, phase)]
            plans[f"nodes, {name} while {others[0]}"] = Plan([(layout, cells)])
    return plans


PLANS = {
    "engine, trainer": _through_phases(SPREAD, "engine", "trainer"),
    "rollout, reward, environment": _through_phases(SPREAD, "rollout worker", "reward worker", "environment worker"),
    **_node_plans(),
}
"""Every victim in every phase."""


class FaultyCluster:
    """Nodes on this machine, which can be lost."""

    def __init__(self, nodes: int, folder: Path) -> None:
        self.gates = Gates(folder)
        folder.mkdir()
        here, path = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
        with _environment({FOLDER: str(folder), "PYTHONPATH": f"{here}:{path}", "OMP_NUM_THREADS": "1"}):
            self._cluster = start_nodes(nodes, num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False)
        # As a run counts them: its own first, which is the head, then by their ids.
        self._nodes = [self._cluster.head_node, *sorted(self._cluster.worker_nodes, key=lambda node: node.node_id)]

    def __enter__(self) -> FaultyCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cluster.shutdown()

    @property
    def settings(self) -> list[str]:
        return [
            *("executor=ray", f"ray.address={self._cluster.address}"),
            *("ray.start_deadline_s=600", "ray.call_deadline_s=600"),
            "ray.runtime_env={worker_process_setup_hook: worker_gates.install}",
        ]

    def lose(self, number: int) -> None:
        """A node and all its processes are gone at once."""
        node = self._nodes[number]
        raylet = psutil.Process(_raylet(node).pid)
        processes = [raylet, *raylet.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_head_raylet(self) -> None:
        process = _raylet(self._nodes[0])
        process.kill()
        process.wait()


def _raylet(node: Any) -> Any:
    return node.all_processes["raylet"][0].process


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Outcome:
    """What came of a kill, with the seconds from it."""

    cell: Cell
    noticed_s: float | None = None
    """Until the run said what it lost."""
    trains_s: float | None = None
    """Until the run's next update began, if it went on."""
    stopped_s: float | None = None
    """Until its process had ended, if it did not."""
    said: str = ""
    """Its first line about the loss, or its last words."""


@dataclass
class FaultyRun:
    """One run folder, and the processes that write it one after the other."""

    folder: Path
    steps: int
    outcomes: list[Outcome] = field(default_factory=list)
    child: Child | None = None
    _layout: Layout = SPREAD
    _cluster: FaultyCluster | None = None
    _rest: Gate | None = None

    @property
    def remains(self) -> Remains:
        return Remains(self.folder)

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.process.is_alive()

    @property
    def output(self) -> str:
        """Of its latest process."""
        return "" if self.child is None else self.child.said

    def start(self, cluster: FaultyCluster, layout: Layout, after_steps: int = 2) -> None:
        """Starts or resumes it on the cluster and lets it make some steps; then it rests."""
        self._cluster, self._layout = cluster, layout
        done = self.remains.steps() if self.folder.exists() else 0
        self.child = self._roll(*cluster.settings, *layout.settings)
        self.child.wait_for(lambda: self.folder.is_dir() and self.remains.steps() >= done + after_steps)
        self._let_rest()

    def finish(self) -> None:
        """Lets it make all its steps, resumed in one process if it has ended."""
        if not self.alive:
            self.child = self._roll("executor=local")
        elif self._rest is not None:
            self._rest.open()
        assert self.child.end() == 0, self.child.said

    def close(self) -> None:
        if self.alive:
            self._running.kill()

    def _roll(self, *settings: str) -> Child:
        resume = ["--resume"] if (self.folder / "config.yaml").exists() else []
        output = self.folder.with_name(f"{self.folder.name}-{len(list(self.folder.parent.glob('*.txt')))}.txt")
        every = [*SETTINGS, f"train.steps={self.steps}", f"run.dir={self.folder}"]
        return start_roll(["train", TINY, *every, *settings, *resume], output)

    def suffer(self, cell: Cell) -> Outcome:
        """Kills the victim in the phase, and holds the run to it that it goes on, or ends as it should."""
        gate = self._hold(cell)
        process = None if cell.victim not in WORKERS else self._process(self._layout.victim(WORKERS[cell.victim]))
        before, killed_s = len(self._running.said), time.time()
        self._kill(cell)
        outcome = self._stopped(cell, killed_s) if cell.victim in ENDS else self._went_on(cell, before, killed_s, gate)
        self.outcomes.append(outcome)
        gate.open()
        if process is not None:
            self._wait(lambda: self._process(self._layout.victim(WORKERS[cell.victim])) != process, "the worker is back")
        return outcome

    def _hold(self, cell: Cell) -> Gate:
        """The gate at which the run is held in the phase, with work for every worker: samples of the present step went to
        those that were there when it began, those of the next go to all."""
        assert self._cluster is not None
        close_at, held = self._cluster.gates.close_at, self._rest
        before = [_UPDATE] * (2 if cell.phase in ("publishing", "saving") else 1)
        for calls, after in (*before, self._layout.calls(cell)):
            gate = close_at(calls, after)
            if held is not None:
                held.open()
            self._wait(partial(getattr, gate, "reached_s"), f"it came to {calls[0]} to be killed while {cell.phase}")
            held = gate
        self._rest = None
        assert held is not None
        return held

    def _went_on(self, cell: Cell, before: int, killed_s: float, gate: Gate) -> Outcome:
        assert self._cluster is not None
        role = cell.role
        assert role is not None
        names = [self._layout.victim(role)]
        if cell.victim in NODES:
            node = self._layout.roles[role][-1]
            names = [*self._layout.on(node), f"node{node}"]
        found: list[str] = []

        def told() -> list[str]:
            found[:] = [line for line in self._running.said[before:].splitlines() if any(name in line for name in names)]
            return found

        self._wait(told, f"it has said that it lost {cell.victim}")
        noticed_s = time.time()
        again = self._cluster.gates.close_at(_UPDATE[0], holds=False)
        gate.open()
        self._wait(lambda: again.reached_s, "it trains again")
        assert again.reached_s is not None
        self._let_rest()
        return Outcome(cell, noticed_s - killed_s, again.reached_s - killed_s, said=found[0])

    def _stopped(self, cell: Cell, killed_s: float) -> Outcome:
        self._running.process.join(_WAIT_S)
        assert not self._running.process.is_alive(), f"{cell}: alive {_WAIT_S:g} s later:\n{self._running.said}"
        last = self._running.said.strip().splitlines()[-1]
        return Outcome(cell, stopped_s=time.time() - killed_s, said=last)

    def _kill(self, cell: Cell) -> None:
        assert self._cluster is not None
        if cell.victim == HEAD:
            self._cluster.lose_head_raylet()
            return
        assert cell.role is not None
        if cell.victim in WORKERS:
            os.kill(self._process(self._layout.victim(cell.role)), signal.SIGKILL)
        else:
            self._cluster.lose(self._layout.roles[cell.role][-1])

    def _let_rest(self) -> None:
        """The first engine takes nothing in, until the next cell: steps are not used up while workers are started."""
        assert self._cluster is not None
        self._rest = self._cluster.gates.close_at(["actor_infer[0].generate"])
        self._wait(lambda: self._rest is not None and self._rest.reached_s, "the next step begins")

    def _wait(self, what: Callable[[], object], saying: str) -> None:
        until = time.monotonic() + _WAIT_S
        while not what():
            assert self._running.process.is_alive(), f"the run ended before {saying}:\n{self._running.said}"
            assert time.monotonic() < until, f"{_WAIT_S:g} s went by before {saying}:\n{self._running.said}"
            time.sleep(0.01)

    @property
    def _running(self) -> Child:
        assert self.child is not None, "the run has not been started"
        return self.child

    def _process(self, worker: str) -> int:
        """The process a worker is, or was last when it was ready."""
        role, rank = worker.rstrip("]").split("[")
        log = (self.folder / "logs" / f"{role}-{rank}.log").read_text()
        return int(re.findall(r" is process (\d+) on .*?is ready", log, re.DOTALL)[-1])


def endure(plan: Plan, folder: Path, outcomes: list[Outcome]) -> None:
    """Has a run go through a plan and finish; it is left in `folder / "run"`, and what came of each cell in `outcomes`.
    Raises where it does not hold."""
    run = FaultyRun(folder / "run", plan.steps, outcomes)
    try:
        with FaultyCluster(plan.nodes, folder / "gates") as cluster:
            for layout, cells in plan.parts:
                run.start(cluster, layout)
                for cell in cells:
                    outcome = run.suffer(cell)
                    if cell.victim in ENDS:
                        assert_clear_stop(outcome, run.output)
            if run.alive:
                run.finish()
        if run.outcomes[-1].cell.victim in ENDS:
            run.finish()
    finally:
        run.close()


def undisturbed(steps: int, folder: Path) -> Remains:
    """The same run in one process, to which nothing happens."""
    run = FaultyRun(folder / "undisturbed", steps)
    try:
        run.finish()
    finally:
        run.close()
    return run.remains


def assert_clear_stop(outcome: Outcome, output: str) -> None:
    """It ended in time, with one sentence that names what was lost and says what to do."""
    assert outcome.stopped_s is not None
    assert outcome.stopped_s < STOPS_WITHIN_S, outcome
    assert "Traceback" not in output, output
    node = 0 if outcome.cell.victim == HEAD else 1  # in all layouts
    assert re.search(rf"the run failed: .*\bnode{node}\b", outcome.said), output
    assert "--resume" in outcome.said, output


def assert_same_ending(run: Remains, undisturbed: Remains) -> None:
    """Weights, optimizer, what was trained on and in which step are equal, and the ledger balances."""
    difference = _first_difference(_whatever_tries(run.samples()), _whatever_tries(undisturbed.samples()))
    assert difference is None, difference
    assert {id: end[0] for id, end in run.lineage().items()} == {id: end[0] for id, end in undisturbed.lineage().items()}
    assert run.weights() == undisturbed.weights()
    assert run.optimizer() == undisturbed.optimizer()
    with LedgerIndex.open(run.folder.ledger_path) as index:
        balance = index.balance()
    assert not balance.problems
    assert balance.groups.open == 0


def _first_difference(one: dict[int, list[dict[str, Any]]], other: dict[int, list[dict[str, Any]]]) -> str | None:
    """Where samples differ, for a message."""
    for step in sorted(one.keys() | other.keys()):
        rows, others = ({row["sample"]: row for row in samples.get(step, [])} for samples in (one, other))
        for sample in sorted(rows.keys() | others.keys()):
            row, another = rows.get(sample, {}), others.get(sample, {})
            if keys := [key for key in row.keys() | another.keys() if row.get(key) != another.get(key)]:
                values = {key: (row.get(key), another.get(key)) for key in sorted(keys)}
                return f"step {step}, sample {sample}: {values}"
    return None if one == other else "the samples are in another order"


def _whatever_tries(samples: dict[int, list[dict[str, Any]]]) -> dict[int, list[dict[str, Any]]]:
    return {step: [{**row, "tries": None} for row in rows] for step, rows in samples.items()}
