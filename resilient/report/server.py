"""The page of a campaign on a loopback port, made anew while somebody looks at it.

Owns the socket, which is bound to 127.0.0.1 alone. The address has a random part, so that other users of the machine do not find
the page; names other than loopback's are refused, so that a web site cannot read it by a name of its own.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from resilient.exits import ForeseenError

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
RETRY_S = 5  # after which a browser asks again
_PATIENCE_S = 10.0  # with a client that says nothing


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error of the command."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class PageServer:
    """Serves until it is closed.

    Args:
        render: makes the page.
        fresh_s: a page is given out for so long before it is made anew, however many ask.
        port: 0: any that is free.
    """

    def __init__(self, render: Callable[[], bytes], *, fresh_s: float, port: int = 0) -> None:
        self._render = render
        self._fresh_s = fresh_s
        self._path = f"/{secrets.token_urlsafe(16)}/"
        self._lock = threading.Lock()  # one page is made at a time
        self._page = b""
        self._made_t: float | None = None
        self._server = _Server((HOST, port), _handler(self))

    @property
    def address(self) -> str:
        """For a browser of this machine."""
        return f"http://{HOST}:{self._server.server_port}{self._path}"

    def is_asked(self, path: str, host: str) -> bool:
        """Whether a request is for the page. Args: host: as the client has called this machine."""
        named = host.rpartition(":")[0] or host
        return secrets.compare_digest(path.encode(), self._path.encode()) and named in _NAMES

    def page(self) -> bytes:
        """The page, not older than it may be. Raises ForeseenError."""
        with self._lock:
            if self._made_t is None or time.monotonic() - self._made_t >= self._fresh_s:
                self._page = self._render()
                self._made_t = time.monotonic()
            return self._page

    def run(self) -> None:
        """Until `close`, or an exception in this thread."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def close(self) -> None:
        """End `run`, which another thread is in."""
        self._server.shutdown()


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            if not server.is_asked(self.path, self.headers.get("Host", "")):
                self._answer(HTTPStatus.NOT_FOUND, b"", "text/plain")
                return
            try:
                self._answer(HTTPStatus.OK, server.page(), "text/html; charset=utf-8")
            except ForeseenError as error:
                again = {"Refresh": str(RETRY_S)}  # the page that refreshes itself is gone
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), "text/plain; charset=utf-8", again)

        def _answer(self, status: HTTPStatus, body: bytes, kind: str, more: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (more or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the command says where the page is, and nothing else."""

    return Handler
