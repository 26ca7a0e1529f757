"""An environment with tools, apart from its tests: what plays it imports no more than it needs."""

from __future__ import annotations

from typing import Any


class Caller:
    """An environment whose tools depend on how it began."""

    def __init__(self, tools: Any = ()) -> None:
        self._tools, self._seed = tools, 0

    def reset(self, seed: int) -> str:
        self._seed = seed
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "end", 0.0, True, False, {}

    def tools(self) -> Any:
        return [{"name": f"act{self._seed}"}] if self._tools == () else self._tools
