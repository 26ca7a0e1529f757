"""Small runs of the whole program: their settings, processes to run them in, and what they leave behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fork_server import processes

from roll.ledger.log import is_gap
from roll.run import ROLLED_BACK, Checkpoint, Checkpoints, Ledger, Metrics, RunFolder, Transition, read_samples

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = str(Path(__file__).parent / "small_configs" / "tiny.yaml")
"""In a folder of its own, because what a config names is looked up beside it."""
REWARDS = Path(__file__).parent / "small_rewards" / "odd_rewards.py"
"""In a folder of its own, because a run records all loaded modules of the folder that its reward is in."""
SMALL = (
    "threads=1",
    "train.steps=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=4",
    "eval.samples=8",
    "eval.every=0",
    "run.checkpoint_every=0",
    "run.tensorboard=false",
    "run.curve=false",
    "fault_tolerance.spare_trainer=false",
    f"reward={REWARDS}:letters",
)
EXACT = (*SMALL, "deterministic=true", "train.steps=6", "eval.every=3", "run.checkpoint_every=2")
ONE = (*EXACT, "train.lr=1e-3", "model.dtype=fp32", "algorithm.kl_coef=0.05")
"""In fp32, where log-probs of ranks and of one process differ by roundings alone."""
RANKS = "roles.actor_train={strategy: sharded, replicas: 2}"
WAIT_S = 300.0


@dataclass
class Child:
    """`roll` in a process of its own."""

    process: BaseProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, what: Callable[[], object], every_s: float = 0.002) -> None:
        """Returns when `what` holds; the process must live until then."""
        deadline = time.monotonic() + WAIT_S
        while not what():
            assert self.process.is_alive(), f"the run ended with {self.process.exitcode}:\n{self.said}"
            assert time.monotonic() < deadline, f"waited {WAIT_S:g} s in vain:\n{self.said}"
            time.sleep(every_s)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.process.kill()
        self.process.join()

    def end(self) -> int:
        """The exit status."""
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, f"still running after {WAIT_S:g} s:\n{self.said}"
        return self.process.exitcode

    def graders(self) -> list[int]:
        """Living grader processes of this process, whether or not it lives itself."""
        return [pid for pid, arguments in commands() if _is_grader(arguments, of=self.pid)]


def start_roll(
    arguments: list[str],
    output: Path,
    environment: Mapping[str, str] | None = None,
    *,
    errors: Path | None = None,
    before: Callable[[], None] | None = None,
) -> Child:
    """`environment`: variables that all processes it starts have. `errors`: the file of its standard error, where that
    is not the file of its output. `before`: a function of a module that the process calls first.

    Ray's processes learn from a variable whether a token is required; the fork server may have started
    before this process learned it."""
    variables = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE"), **(environment or {})}
    files = (str(output), str(errors or output))
    process = processes.Process(target=_roll, args=(arguments, files, os.getcwd(), variables, before))
    for file in files:
        Path(file).touch()
    process.start()
    return Child(process, output)


def _roll(
    arguments: list[str],
    files: tuple[str, str],
    folder: str,
    environment: Mapping[str, str | None],
    before: Callable[[], None] | None,
) -> None:
    os.chdir(folder)
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    for number, name in enumerate(files, 1):
        with open(name, "ab") as file:
            os.dup2(file.fileno(), number)
    from roll.cli import main

    if before is not None:
        before()
    status = main(arguments)
    sys.stdout.flush()
    os._exit(status)


def commands() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue


def _is_grader(arguments: list[str], of: int) -> bool:
    code = next((i for i, argument in enumerate(arguments) if "roll.reward.grader_main" in argument), None)
    return code is not None and arguments[code + 2] == str(of)


@dataclass(frozen=True)
class Remains:
    """What a run left behind, without the clock's part in it."""

    path: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.path)

    @property
    def checkpoint(self) -> Checkpoint:
        newest = Checkpoints(self.folder).latest()
        assert newest is not None, f"{self.path} has no checkpoint"
        newest.verify()
        return newest

    def weights(self) -> bytes:
        return (self.checkpoint.path / "model" / "model.safetensors").read_bytes()

    def optimizer(self) -> bytes:
        return (self.checkpoint.path / "optimizer.safetensors").read_bytes()

    def shards(self) -> dict[str, bytes]:
        """What each rank of a sharded trainer saved, by file."""
        return {file.name: file.read_bytes() for file in (self.checkpoint.path / "shards").glob("*.distcp")}

    def steps(self) -> int:
        """Training steps on record."""
        file = self.path / "metrics.jsonl"
        rows = Metrics.read(file) if file.is_file() else []
        return max((row["step"] for row in rows if "time/step_s" in row), default=0)

    def samples(self) -> dict[int, list[dict[str, Any]]]:
        """The rows of every step."""
        steps = sorted({int(file.name[5:11]) for file in self.folder.samples_dir.iterdir()})
        return {step: [_timeless(row) for row in read_samples(self.folder, step)] for step in steps}

    def metrics(self) -> list[dict[str, Any]]:
        return [_timeless(row) for row in Metrics.read(self.folder.metrics_path)]

    def lineage(self) -> dict[str, tuple[str, str, str]]:
        """State, reason and details of every sample in the lineage of the final weights."""
        last = Ledger.lineage(self.folder.ledger_path)
        return {id: (t.state, t.reason, json.dumps(t.info, sort_keys=True)) for id, t in last.items()}

    def histories(self) -> dict[str, list[Transition]]:
        """Every transition of every sample, in order."""
        histories: dict[str, list[Transition]] = {}
        for transition in Ledger.read(self.folder.ledger_path):
            histories.setdefault(transition.sample, []).append(transition)
        return histories

    def lives(self) -> dict[str, list[str]]:
        """The states of every sample, from `new` on, without those that a return to a checkpoint undid."""
        lives: dict[str, list[tuple[int, str]]] = {}
        offset = 0
        for line in self.folder.ledger_path.read_bytes().splitlines(keepends=True):
            if is_gap(line):
                offset += len(line)
                continue
            transition = Transition.decode(line)
            life = lives.setdefault(transition.sample, [(-1, "new")])
            if transition.state == ROLLED_BACK:
                life[:] = [entry for entry in life if entry[0] < transition.info["position"]]
            else:
                life.append((offset, transition.state))
            offset += len(line)
        return {sample: [state for _, state in life] for sample, life in lives.items()}


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    clocks = ("time_s", "seconds", "response/tokens_per_s")
    timed = ("time/", "state/", "rollout/grader_backpressure_s", "graders/")
    return {key: value for key, value in row.items() if key not in clocks and not key.startswith(timed)}
