"""The inference role: an engine that serves one version of the weights at a time."""

from __future__ import annotations

from collections.abc import Sequence

from roll.cluster import Dispatch, Place, Worker, parallel
from roll.config.schema import Config
from roll.engine.engine import EngineStats
from roll.engine.request import Completion, Request
from roll.model.loading import find_model, load_tokenizer
from roll.strategy.infer.base import InferStrategy
from roll.strategy.infer.native import NativeStrategy
from roll.transfer.weights import Weights
from roll.workers.setup import set_up_process


class InferWorker(Worker):
    def __init__(self, place: Place, config: Config) -> None:
        super().__init__(place)
        set_up_process(place, config.deterministic)
        tokenizer = load_tokenizer(find_model(config.model.path), config.model)
        self._strategy: InferStrategy = NativeStrategy(
            tokenizer, max_running=config.rollout.max_running, exact=config.deterministic
        )

    @parallel(Dispatch.ALL)
    def load_weights(self, weights: Weights) -> None:
        self._strategy.load_weights(weights)

    @parallel(Dispatch.ONE)
    def submit(self, requests: Sequence[Request]) -> None:
        self._strategy.submit(requests)

    @parallel(Dispatch.ONE)
    async def results(self) -> list[Completion]:
        return await self._strategy.results()

    @parallel(Dispatch.ALL)
    def abort(self, ids: Sequence[str]) -> None:
        self._strategy.abort(ids)

    @parallel(Dispatch.ALL)
    def pause(self) -> None:
        self._strategy.pause()

    @parallel(Dispatch.ALL)
    def resume(self) -> None:
        self._strategy.resume()

    @parallel(Dispatch.ALL)
    def sleep(self) -> None:
        self._strategy.sleep()

    @parallel(Dispatch.ALL)
    def wake(self) -> None:
        self._strategy.wake()

    @parallel(Dispatch.ONE)
    def stats(self) -> EngineStats:
        return self._strategy.stats()
