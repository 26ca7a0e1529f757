"""A pipeline: what a run does, from the data that the config names to the loop that trains.

Importing this module imports neither torch nor transformers. `find` runs before they are imported, so that missing data
is refused in a second; the later methods import what they run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from roll.config.errors import UserError
from roll.config.schema import Config

if TYPE_CHECKING:
    from roll.cluster import Executor
    from roll.devices.plan import Plan
    from roll.devices.run_requirements import RunRequirements
    from roll.pipeline.recorder import Recorder
    from roll.pipeline.roles import TrainRoles
    from roll.pipeline.sft_eval import SFTEval
    from roll.pipeline.state import State
    from roll.rollout.transcript import Transcript
    from roll.run import Panel
    from roll.scheduler.evaluate import Evaluation

R = TypeVar("R", bound="TrainRoles")
S = TypeVar("S", bound="State")


class Pipeline(ABC, Generic[R, S]):
    """A run that is ready to start: its requirements, how to start its roles, and its loop."""

    objects: ClassVar[frozenset[str]] = frozenset()
    """The objects that a Python caller may give instead of names in the config: some of `reward`, `tasks` and `chats`."""
    has_rollouts: ClassVar[bool] = False
    """Whether `play` is there."""

    config: Config
    """The config with all derived sizes filled in."""
    requirements: RunRequirements
    warnings: Sequence[str] = ()
    """Warnings to show before the run starts."""
    answer_check: str = ""
    """A sentence about the checks of the tasks' answers."""

    @classmethod
    @abstractmethod
    def find(cls, config: Config, objects: Mapping[str, Any]) -> Any:
        """The data of the run, from what the config names and the objects given instead; checked as far as possible
        without the model."""

    @classmethod
    @abstractmethod
    def prepare(cls, config: Config, found: Any) -> Pipeline[R, S]:
        """The run with the data that `find` returned, checked together with the model."""

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

    async def play(self, roles: R, episodes: int) -> list[Transcript]:
        """Rolls out `episodes` attempts at training tasks."""
        raise UserError(f"pipeline {self.config.pipeline} makes no rollouts: write pipeline=rlvr")
