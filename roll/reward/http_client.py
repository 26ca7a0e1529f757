"""Posts JSON to a server, with retries and a deadline: the client of the `http` and `judge` rewards."""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from roll.config.secrets import KNOWN, redacted

_MAX_ANSWER_BYTES = 2 << 20
"""Maximum size of an answer: parsed JSON may take forty times as much memory."""
_READ_BYTES = 1 << 16
_MAX_ERROR_BYTES = 8192
_RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a retry may succeed."""


_SERVER_ERRORS = (OSError, ValueError, RecursionError, http.client.HTTPException)
"""Exceptions for a server that cannot be reached or whose answer is invalid."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a redirected POST would become a GET, and send its token to a server that nobody
    configured."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class HttpFailure(Exception):
    """The server gave no usable answer."""


@dataclass(frozen=True)
class HttpClient:
    """Where JSON is posted, and the limits on attempts and time.

    If a server cannot be reached, or answers that it is busy or broken, the request is repeated after `backoff_s`,
    doubled each time, until the deadline; any other refusal is final.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    token_env: str = ""
    tries: int = 3
    backoff_s: float = 0.2
    deadline_s: float = 8.0

    def __post_init__(self) -> None:
        KNOWN.learn({"url": self.url, "headers": self.headers, "token_env": self.token_env})
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url is {redacted(self.url)!r}, but takes an address such as http://localhost:8000/score")
        if self.tries < 1:
            raise ValueError(f"tries is {self.tries}, but takes a whole number ≥ 1")
        for name in ("backoff_s", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name):g}, but takes a number > 0")

    def send(self, payload: Any, read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """The server's answer, converted by `read`; a `ValueError` of `read` counts as a broken server."""
        body = json.dumps(payload, default=str).encode()
        end_s = time.monotonic() + self.deadline_s
        wait_s = self.backoff_s
        for tries_left in reversed(range(self.tries)):
            try:
                return read(self._post_once(body, max(end_s - time.monotonic(), 0.01)))
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {_error_text(error)}"
                if error.code not in _RETRY_STATUSES:
                    raise HttpFailure(KNOWN.redact(f"{self.url} answered with {problem}")) from None
            except _SERVER_ERRORS as error:  # unreachable, late, not HTTP, not JSON, or not the expected answer
                problem = f"{type(error).__name__}: {error}"
            if not tries_left or time.monotonic() + wait_s >= end_s:
                break
            time.sleep(wait_s)
            wait_s *= 2
        attempts = self.tries - tries_left
        message = f"{self.url} gave no answer in {attempts} {'try' if attempts == 1 else 'tries'}: {problem}"
        raise HttpFailure(KNOWN.redact(message))

    def _post_once(self, body: bytes, timeout_s: float) -> Any:
        address, login = _without_login(self.url)
        headers = {"Content-Type": "application/json", **login, **self._headers()}
        request = urllib.request.Request(address, body, headers)
        end_s = time.monotonic() + timeout_s
        with _OPENER.open(request, timeout=timeout_s) as answer:
            content = _read_all(answer, end_s)
        return KNOWN.cleared(json.loads(content))

    def _headers(self) -> dict[str, str]:
        if not self.token_env:
            return dict(self.headers)
        if self.token_env not in os.environ:
            raise HttpFailure(f"the environment variable {self.token_env!r}, named by token_env, is not set")
        return {"Authorization": f"Bearer {os.environ[self.token_env]}", **self.headers}


def _read_all(answer: IO[bytes], end_s: float) -> bytes:
    """An answer's content. The socket timeout restarts with every byte, so the whole answer has a deadline too."""
    content = b""
    while piece := answer.read1(_READ_BYTES):  # type: ignore[attr-defined]
        content += piece
        if len(content) > _MAX_ANSWER_BYTES:
            raise ValueError(f"the answer is longer than {_MAX_ANSWER_BYTES >> 20} MiB")
        if time.monotonic() > end_s:
            raise TimeoutError("the answer did not end in time")
    return content


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """A URL without its user and password, and the header that sends them."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    encoded = base64.b64encode(unquote(login).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {encoded}"}


def _error_text(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(_MAX_ERROR_BYTES).decode(errors="replace").strip()
        # redacted before it is cut: a part of a secret would not be recognised
        return KNOWN.redact(text)[:500] or str(error.reason)
    except OSError:
        return str(error.reason)
