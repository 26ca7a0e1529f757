"""A small HTTP server for tests: each answer to a POST is what a function makes of it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any], dict[str, str]], tuple[int, Any]]
"""From what was posted and the headers to a status and a body: text as it is, else JSON."""


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server that is there while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer({"path": self.path, **posted}, dict(self.headers))
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def completion(text: str | None) -> dict[str, Any]:
    """A chat completion that says the text."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
