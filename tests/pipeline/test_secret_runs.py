"""A run leaves no secret behind: not in its folder, not on the screen, whatever servers and rewards do with it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from small_runs import SMALL, TINY

from roll.cli import main

TOKEN = "Zq7-literal/tok+en9"
PASSWORD = "pW0rd-in-the-url"
FROM_ENVIRONMENT = "envTok3n-55-of-it"
LEAKY = """
import sys

def leaky(task, response, api_key=""):
    assert len(api_key) == 17
    print("my key is", api_key)
    print(f"it is {api_key!r}", file=sys.stderr)
    if len(response.text) % 2:
        raise RuntimeError(f"refused {api_key}")
    return {"reward": 0.5, f"of {api_key}": 1.0}
"""


class _Echo(BaseHTTPRequestHandler):
    """Sends its tokens back: in refusals, in the names of what it measures, and where a number should be."""

    asked = 0
    logins: set[str] = set()  # noqa: RUF012

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        _Echo.asked += 1
        _Echo.logins.add(self.headers["Authorization"])
        said: Any = {"reward": _Echo.asked % 2, f"asked by {TOKEN}": 1}
        if _Echo.asked % 4 == 0:
            said = {"reward": json.dumps([self.path, dict(self.headers)])}
        status, content = (403 if _Echo.asked % 4 == 1 else 200), json.dumps(said).encode()
        if status == 403:
            content = f"{'.' * 490}{dict(self.headers)} {self.path}".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _echoing() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _leaks(text: str) -> list[str]:
    found = []
    for secret in (TOKEN, PASSWORD, FROM_ENVIRONMENT):
        encoded = [
            base64.b64encode(before + secret.encode()).decode().rstrip("=") for before in (b"", b"bob:", b"Bearer ")
        ]
        parts = [secret[:10], secret[-10:]]  # also where a message was cut
        found += [form for form in (secret, quote(secret, safe=""), *encoded, *parts) if form in text]
    return found


def _check(folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    screen = "".join(capfd.readouterr())
    assert _leaks(screen) == []
    for file in (file for file in folder.rglob("*") if file.is_file()):
        assert _leaks(file.read_bytes().decode(errors="replace")) == [], f"in {file}"
    return screen


def test_a_run_leaves_no_secret_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", FROM_ENVIRONMENT)
    (tmp_path / "leaky.py").write_text(LEAKY)
    run = tmp_path / "run"
    with _echoing() as port:
        address = f"http://bob:{PASSWORD}@127.0.0.1:{port}/judge?api_key={quote(TOKEN, safe='')}"
        served = f"{{name: http, options: {{url: '{address}', headers: {{X-Api-Key: '{TOKEN}'}}, tries: 1}}}}"
        leaky = f"{{name: '{tmp_path}/leaky.py:leaky', options: {{api_key: '${{OF_THIS_TEST}}'}}}}"
        given = [f"reward.parts.a={served}", f"reward.parts.b={leaky}"]
        small = [setting for setting in SMALL if not setting.startswith("reward=")]
        start = ["train", TINY, *small, 'reward.name=""', "run.tensorboard=true", f"run={run}", "rollout.filter=none"]
        assert main([*start, *given]) == 0
        screen = _check(run, capfd)
        assert "<redacted-secret>" in screen
        for name in ("config.yaml", "graders.log", "ledger.log", "metrics.jsonl"):
            assert "<redacted-secret>" in (run / name).read_text(), name
        assert "${OF_THIS_TEST}" in (run / "config.yaml").read_text()
        assert _Echo.logins == {f"Basic {base64.b64encode(f'bob:{PASSWORD}'.encode()).decode()}"}

        saved = str(run / "config.yaml")
        assert main(["train", saved, "train.steps=3", "--resume"]) == 2
        assert "reward.parts.a.options.url is http://<redacted-secret>@127.0.0.1" in _check(run, capfd)
        assert main(["eval", str(run)]) == 2
        assert main(["ledger", str(run)]) == 0
        assert main([*start, *given, "train.steps=3", "--resume"]) == 0
        assert "from step 2 on train.steps is 3" in _check(run, capfd)
        assert main(["train", saved, given[0], "train.steps=4", "--resume"]) == 0
        assert "step 4" in _check(run, capfd)


def test_a_run_and_its_export_are_their_owners(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        start = ["train", TINY, *SMALL, "run.tensorboard=true", f"run={tmp_path / 'run'}"]
        assert main(start) == 0
        assert _others(tmp_path / "run") == []
        assert main(["ledger", str(tmp_path / "run")]) == 0
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
        assert _others(tmp_path / "out") == []
        for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        assert main([*start, "train.steps=3", "run.mode=0750", "--resume"]) == 0
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*")} == {0o750, 0o640}
    finally:
        os.umask(before)


def _others(folder: Path) -> list[Path]:
    """What others than the owner have any right to."""
    return [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]
