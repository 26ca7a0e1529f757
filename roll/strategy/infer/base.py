"""What an inference engine can do, whichever it is. Requests come and go one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from roll.engine.engine import EngineStats
from roll.engine.request import Completion, Request
from roll.transfer.weights import Weights


class InferStrategy(Protocol):
    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests in; a request that can never run is refused by name."""
        ...

    async def results(self) -> list[Completion]:
        """What finished since the last call: waits for at least one while anything is submitted."""
        ...

    def abort(self, ids: Sequence[str]) -> None:
        """Ends requests early; what they have so far arrives among the results, marked `abort`."""
        ...

    def pause(self) -> None:
        """Stops generating; requests stay where they are."""
        ...

    def resume(self) -> None: ...

    def load_weights(self, weights: Weights) -> None:
        """Serves these weights from now on, once they are verified."""
        ...

    def sleep(self) -> None:
        """Frees what is only needed while generating; nothing may be running."""
        ...

    def wake(self) -> None: ...

    def stats(self) -> EngineStats: ...
