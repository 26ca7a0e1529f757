"""A language model behind an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.data.task import Message
from roll.reward.http_client import HttpClient


@dataclass(frozen=True)
class OpenAIClient:
    """Sends conversations to a model. `url` is the server's, up to `/v1`."""

    url: str
    model: str
    temperature: float = 0.0
    max_tokens: int = 512
    token_env: str = ""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self._client()
        check_sampling(self.temperature, self.max_tokens)

    def ask(self, messages: Sequence[Message]) -> str:
        """The model's reply."""
        payload = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        reply: str = self._client().send(payload, _reply)
        return reply

    def _client(self) -> HttpClient:
        address = f"{self.url.rstrip('/')}/chat/completions"
        return HttpClient(address, token_env=self.token_env, deadline_s=self.timeout_s)


def check_sampling(temperature: float | None, max_tokens: int) -> None:
    """Raises `ValueError` for invalid sampling parameters."""
    if temperature is not None and temperature < 0:
        raise ValueError(f"temperature is {temperature:g}, but takes a number ≥ 0")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, but takes a whole number ≥ 1")


def _reply(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        raise ValueError(f"not a chat completion: {str(answer)[:200]}") from None
    if not isinstance(content, str | None):
        raise ValueError(f"the content of a chat completion is not text: {str(content)[:200]}")
    return content or ""
