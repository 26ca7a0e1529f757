"""What an inference engine can do, whichever it is. Requests come and go one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from roll.engine.request import Completion, Progress, Request
from roll.engine.slot_engine import EngineStats
from roll.strategy.offload import Level
from roll.weight_sync.stream import WeightManifest
from roll.weight_sync.weights import Weights


class InferStrategy(Protocol):
    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests in; a request that can never run is refused by name."""
        ...

    async def results(self) -> list[Completion]:
        """What finished since the last call: waits for at least one while anything is submitted."""
        ...

    def progress(self, heard: Mapping[str, int]) -> list[Progress]:
        """What running requests have drawn beyond the number of tokens that was heard of each."""
        ...

    def abort(self, ids: Sequence[str]) -> None:
        """Ends requests early; what they have so far arrives among the results, marked `abort`."""
        ...

    async def pause(self) -> None:
        """Stops generating; requests stay where they are, with what they have, also while weights are loaded."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, weights: Weights) -> None:
        """Serves these weights, which are in this process, from now on, once they are verified."""
        ...

    def begin_loading(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The tensors that the version is about to be received into; nothing is served until `end_loading`."""
        ...

    async def end_loading(self, manifest: WeightManifest) -> None:
        """Serves the version whose tensors were received, once the probe agrees."""
        ...

    async def hold(self, level: Level) -> None:
        """Keeps so much on the device and lays the rest aside; below `all` nothing may be running."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Ends the engine, with whatever it runs."""
        ...
