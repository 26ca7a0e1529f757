"""The protocol of an inference engine. Requests are submitted and finish one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from roll.engine.request import Completion, Progress, Request
from roll.engine.slot_engine import EngineStats
from roll.strategy.offload import Residency
from roll.weight_sync.stream import WeightManifest
from roll.weight_sync.weights import Weights


class InferStrategy(Protocol):
    def submit(self, requests: Sequence[Request]) -> None:
        """Submits requests. Raises for a request that can never run, naming it."""
        ...

    async def results(self) -> list[Completion]:
        """The requests that finished since the last call. Waits for at least one while any request is submitted."""
        ...

    def progress(self, reported: Mapping[str, int]) -> list[Progress]:
        """New tokens of running requests. `reported` is the number of tokens already reported per request id."""
        ...

    def abort(self, ids: Sequence[str]) -> None:
        """Ends requests early; the tokens they have so far arrive among the results, with finish reason `abort`."""
        ...

    async def pause(self) -> None:
        """Stops generation. Requests keep their state, also while weights are loaded."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, weights: Weights) -> None:
        """Serves these weights, which are in this process, from now on, after verifying them."""
        ...

    def begin_loading(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The tensors that the new version is received into. Nothing is served until `end_loading`."""
        ...

    async def end_loading(self, manifest: WeightManifest) -> None:
        """Serves the version whose tensors were received, after the probe check."""
        ...

    async def set_residency(self, level: Residency) -> None:
        """Keeps the tensors named by `level` on the device and offloads the rest. Below `all` no request may be
        running."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Ends the engine, with all requests that are running."""
        ...
