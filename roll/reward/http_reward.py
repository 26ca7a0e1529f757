"""`http`: an HTTP service judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roll.data.task import Response, Task
from roll.reward.base import Verdict, normalise
from roll.reward.http_client import HttpClient


@dataclass(frozen=True)
class HttpReward:
    """The answer of a service to a POST of the task and the response, as JSON.

    The request is `{"task": {"id", "domain", "messages", "answer", "info"}, "response": {"text", "tokens", "finish"}}`.
    The answer is a number, or named numbers, of which `reward` is the reward; without it, their sum.
    """

    url: str
    """Address of the service."""
    headers: dict[str, str] = field(default_factory=dict)
    """Additional headers."""
    token_env: str = ""
    """Environment variable with a token, sent as `Authorization: Bearer …`."""
    tries: int = 3
    """Attempts while the service cannot be reached or answers that it is busy or broken."""
    backoff_s: float = 0.2
    """Seconds before the next attempt; doubled each time."""
    timeout_s: float = 8.0
    """Timeout in seconds for all attempts together. Keep it below `reward.deadline_s`."""
    deterministic: bool = False
    """Whether the service always judges the same response the same, so that verdicts may be cached."""

    def __post_init__(self) -> None:
        self._client()

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        payload = {
            "task": {
                "id": task.id,
                "domain": task.domain,
                "messages": list(task.messages),
                "answer": task.answer,
                "info": dict(task.info),
            },
            "response": {"text": response.text, "tokens": response.tokens, "finish": response.finish},
        }
        verdict: Verdict = self._client().send(payload, normalise)
        return {"reward": verdict.reward, **verdict.parts}

    def _client(self) -> HttpClient:
        return HttpClient(self.url, self.headers, self.token_env, self.tries, self.backoff_s, self.timeout_s)
