"""Parameters of an engine: seconds per step, cache size. Numbers only, for models and bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSpec:
    """The speed and the capacity of an engine."""

    base_s: float
    """Seconds of a step that do not depend on the batch: reading the weights, launching, scheduling."""
    per_sequence_s: float
    per_cached_token_s: float
    """Additional seconds of a step per token of context that attention reads."""
    prefill_tokens_per_s: float
    max_running: int
    kv_tokens: int
    """Capacity of the cache in tokens of prompts and responses."""
    reserve_tokens: int = 0
    """Tokens of the cache that admission leaves free, so that running requests can grow for a while."""

    def step_s(self, batch: int, cached_tokens: int = 0) -> float:
        return self.base_s + self.per_sequence_s * batch + self.per_cached_token_s * cached_tokens

    def alone_s(self, prompt_tokens: int, new_tokens: int) -> float:
        """Decoding seconds of a request that runs alone."""
        return new_tokens * self.step_s(1) + self._attention_s(prompt_tokens, new_tokens)

    def share_s(self, prompt_tokens: int, new_tokens: int) -> float:
        """A request's share of the engine's decoding seconds if every step has a full batch. No schedule needs less,
        because `base_s` is then shared by the most requests."""
        step_share_s = self.step_s(self.max_running) / self.max_running
        return new_tokens * step_share_s + self._attention_s(prompt_tokens, new_tokens)

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def _attention_s(self, prompt_tokens: int, new_tokens: int) -> float:
        """Seconds for reading its context: `prompt_tokens` in the first step, one more in each following step."""
        return self.per_cached_token_s * (prompt_tokens * new_tokens + new_tokens * (new_tokens - 1) / 2)
