"""Serves an application until a signal ends it."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from .http.connection import connections
from .http.settings import ServerSettings
from .serving.served import Served

_SWITCH_SECONDS = 0.0005
"""Longest wait of the engine for Python threads that render a template or read JSON. Python's
default of 5 ms is several steps of a small model."""


_LAST_SECONDS = 3
"""For the last words of those whose time to end is over."""


class _Server(uvicorn.Server):
    """Tells when clients can come, and drains before it closes anything: until then it says to
    whoever asks that it is not ready."""

    def __init__(
        self, config: uvicorn.Config, served: Served, started: Callable[[], object] | None
    ) -> None:
        super().__init__(config)
        self.served, self._tell_started = served, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._tell_started is not None:
            self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        seconds = self.served.settings.drain_seconds
        await self.served.drain(seconds, at_once=lambda: self.force_exit)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.served.draining = True
        super().handle_exit(sig, frame)


def server_of(
    app: FastAPI, settings: ServerSettings, started: Callable[[], object] | None = None
) -> uvicorn.Server:
    """A server of the application; its ``run`` takes a bound socket.

    Args:
        started: called when clients can come.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=connections(settings),  # type: ignore[arg-type]
        timeout_graceful_shutdown=_LAST_SECONDS,
        lifespan="on",
        ws="none",
        timeout_keep_alive=75,  # agents pause between turns, and a closed connection is an error
    )
    return _Server(config, app.state.served, started)


def serve(
    app: FastAPI, settings: ServerSettings, bound: socket.socket, started: Callable[[], object]
) -> None:
    """Runs until SIGTERM or Ctrl-C; then what runs has ``drain_seconds`` to end.

    Args:
        started: called when clients can come.

    Raises:
        KeyboardInterrupt: Ctrl-C; SystemExit: SIGTERM.
    """
    # uvicorn raises the signals again that it has caught: this ends the process in order.
    before = signal.signal(signal.SIGTERM, _exit)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        server_of(app, settings, started).run([bound])
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(sig: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
