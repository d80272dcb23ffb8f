"""What a server says while its model is being loaded: alive, and not ready.

Nothing heavy is imported here: the door is open long before torch is there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

from pykernels.errors import PykernelsError

from .http.settings import ServerSettings

_BACKLOG = 128
_POLL_SECONDS = 0.05


def bound_socket(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address, so that a port in use is known before a model is loaded.

    Raises:
        PykernelsError: it cannot be had.
    """
    host, port = settings.host, settings.port
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise PykernelsError(
            f"the server cannot listen at {host} port {port}: {error.strerror}",
            "Choose another --port, or an address of this machine as --host",
        ) from error
    return bound


@contextmanager
def told_to_wait(bound: socket.socket) -> Iterator[None]:
    """Answers who comes to the socket: 200 at ``/health``, 503 elsewhere. Who comes when this has
    ended waits for whoever accepts connections next."""
    bound.listen(_BACKLOG)
    server = ThreadingHTTPServer(("", 0), _Loading, bind_and_activate=False)
    server.socket.close()
    server.socket, server.daemon_threads = bound, True
    thread = Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class _Loading(BaseHTTPRequestHandler):
    timeout = 5  # seconds for a request's head

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path in ("/health", "/ready"):
            self._answer(200 if path == "/health" else 503, {"status": "loading"})
        else:
            self.do_POST()

    def do_POST(self) -> None:
        told = {
            "message": "The model is being loaded.",
            "type": "service_unavailable_error",
            "param": None,
            "code": "loading",
        }
        self._answer(503, {"type": "error", "error": told})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests are not logged."""
