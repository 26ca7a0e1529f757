"""`http`: a service elsewhere judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roll.data.task import Response, Task
from roll.reward.base import Verdict, normalise
from roll.reward.http_client import HttpClient


@dataclass(frozen=True)
class HttpReward:
    """What a service answers to a POST of the task and the response, as JSON.

    It is sent `{"task": {"id", "domain", "messages", "answer", "info"}, "response": {"text", "tokens", "finish"}}`, and
    answers with a number, or with named numbers, of which `reward` is the reward; without it, their sum.
    """

    url: str
    """Address that is posted to."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers sent along."""
    token_env: str = ""
    """Environment variable with a token, sent as `Authorization: Bearer …`."""
    tries: int = 3
    """Times it is asked while it cannot be reached or says that it is busy or broken."""
    backoff_s: float = 0.2
    """Seconds before it is asked again; doubled each time."""
    timeout_s: float = 8.0
    """Seconds all tries together may take. Keep it below `reward.deadline_s`."""
    deterministic: bool = False
    """Whether the service judges the same response the same every time, so that verdicts may be kept."""

    def __post_init__(self) -> None:
        self._post()

    def __call__(self, task: Task, response: Response) -> Mapping[str, float]:
        asked = {
            "task": {
                "id": task.id,
                "domain": task.domain,
                "messages": list(task.messages),
                "answer": task.answer,
                "info": dict(task.info),
            },
            "response": {"text": response.text, "tokens": response.tokens, "finish": response.finish},
        }
        verdict: Verdict = self._post().send(asked, normalise)
        return {"reward": verdict.reward, **verdict.parts}

    def _post(self) -> HttpClient:
        return HttpClient(self.url, self.headers, self.token_env, self.tries, self.backoff_s, self.timeout_s)
