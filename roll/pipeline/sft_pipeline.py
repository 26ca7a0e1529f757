"""The pipeline `sft`: supervised fine-tuning on conversations. Its loop is in `sft.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from roll.config.errors import UserError
from roll.config.schema import Config
from roll.data.chat_sources import ChatSet, load_chats
from roll.pipeline.base import Pipeline
from roll.pipeline.preflight import object_given_in_python

if TYPE_CHECKING:
    from roll.cluster import Executor
    from roll.devices.plan import Plan
    from roll.model.sft_dataset import SFTDataset
    from roll.pipeline.recorder import Recorder
    from roll.pipeline.roles import TrainRoles
    from roll.pipeline.sft_eval import SFTEval
    from roll.pipeline.state import SFTState
    from roll.run import Panel


class SFTPipeline(Pipeline["TrainRoles", "SFTState"]):
    objects: ClassVar[frozenset[str]] = frozenset({"chats"})

    def __init__(self, config: Config, corpus: SFTDataset) -> None:
        from roll.devices.run_requirements import sft_requirements
        from roll.model.sft_dataset import EpochPermutation

        self._corpus = corpus
        self._permutation = EpochPermutation.of(len(corpus.train), config.data, config.train.steps, config.seed)
        train = config.train.model_copy(update={"steps": self._permutation.steps})  # learning-rate schedules end there
        self.config = config.model_copy(update={"train": train})
        self.requirements = sft_requirements(self.config, corpus, self._permutation)

    @classmethod
    def find(cls, config: Config, objects: Mapping[str, Any]) -> ChatSet:
        chats = objects.get("chats")
        return load_chats(
            config.data, object_given_in_python(config.data.source) if chats is None else chats, config.root
        )

    @classmethod
    def prepare(cls, config: Config, found: ChatSet) -> SFTPipeline:
        from roll.pipeline.model_checks import check_chats

        return cls(config, check_chats(config, found))

    def state(self, saved: Mapping[str, Any]) -> SFTState:
        from roll.pipeline.state import SFTState

        state = SFTState(**{"corpus": self._corpus.digest(), **saved})
        if state.corpus != self._corpus.digest():
            raise UserError(
                f"the conversations of {self.config.data.source!r} are not those that the run in {self.config.run.dir} "
                "was started with: bring them back, or write run.dir=OTHER model=RUN for a new run from its weights"
            )
        return state

    def start(self, executor: Executor, plan: Plan, run: Path | None = None) -> AbstractAsyncContextManager[TrainRoles]:
        from roll.pipeline.roles import start_trainer

        return start_trainer(self.config, executor=executor, map=plan.map, residency=plan.residency, run=run)

    async def train(self, roles: TrainRoles, recorder: Recorder, state: SFTState, checkpoint: Path | None) -> SFTState:
        from roll.pipeline.sft import SFT
        from roll.pipeline.supervision import supervised_trainer

        async with supervised_trainer(roles, self.config, recorder) as supervision:
            run = SFT(self.config, roles, self._corpus, self._permutation, recorder, state)
            return await supervision.race(run.run())

    def panels(self, state: SFTState) -> Sequence[Panel]:
        from roll.pipeline import sft_metrics

        return sft_metrics.PANELS

    async def evaluate(self, roles: TrainRoles) -> SFTEval:
        from roll.model.find import steps_of
        from roll.pipeline.sft_eval import measure
        from roll.pipeline.supervision import supervised_trainer

        if self._corpus.held_out is None:
            raise UserError(f"data: the source {self.config.data.source!r} has no held-out conversations to measure")
        async with supervised_trainer(roles, self.config) as supervision:
            evaluation = await supervision.race(measure(roles, self._corpus.held_out, self.config.eval.samples))
        model = self.config.model.path
        return replace(evaluation, model=model, step=steps_of(model))
