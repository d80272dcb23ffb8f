"""Connections before they have a request: how long they may take, how much they may send, how many
there may be."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .errors import ApiError, error_response
from .settings import ServerSettings

_OTHER_FILES = 256
"""Descriptors that are left for all but connections."""


class Idle:
    """Connections that wait for a request of theirs, each once, longest first.

    Those that have never had one are closed before those that have: an agent pauses between its
    turns, and whoever only connects may do so as often as he likes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: dict[Connection, None] = {}
        self._kept: dict[Connection, None] = {}

    def add(self, connection: Connection, new: bool) -> None:
        """One more; if they are too many, another one is closed."""
        (self._new if new else self._kept)[connection] = None
        if len(self._new) + len(self._kept) > self._most:
            first = next((one for one in (*self._new, *self._kept) if one is not connection), None)
            if first is not None:
                self.discard(first)
                first.transport.abort()

    def discard(self, connection: Connection) -> None:
        self._new.pop(connection, None)
        self._kept.pop(connection, None)


class Connection(HttpToolsProtocol):
    """uvicorn's, with limits on what comes before a request: its line and its headers.

    A connection that is too slow with them gets 408, one that sends too much 431; both are closed.
    Trailers and what else stands between the pieces of a body are limited in the same way.
    """

    def __init__(self, settings: ServerSettings, idle: Idle, **given: Any) -> None:
        super().__init__(**given)
        self._settings, self._idle = settings, idle
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes since the last that were of use
        self._within = False  # a request, of which not all has come

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle.add(self, new=True)
        self._begin_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.discard(self)
        self._end_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread > self._settings.max_head_bytes:
            most = self._settings.max_head_bytes
            self._refuse(ApiError(431, f"The headers have more than {most} bytes."))
        elif not self._answering:
            if not self._within:  # uvicorn has ended its own timer
                self._end_timer()
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            elif self._timer is None:
                self._begin_timer()

    def on_message_begin(self) -> None:
        self._within = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unread = 0
        self._idle.discard(self)
        self._end_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread, self._within = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self._answering:
            self._idle.add(self, new=False)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _begin_timer(self) -> None:
        self._timer = self.loop.call_later(self._settings.head_seconds, self._too_slow)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing() and not self._answering:
            seconds = self._settings.head_seconds
            self._refuse(ApiError(408, f"No headers came within {seconds:g} seconds."))

    def _refuse(self, error: ApiError) -> None:
        """Closes; says why where that cannot be taken for a part of another answer."""
        if not self._answering and self._unread:
            answer = error_response(getattr(self, "url", b"").decode("latin-1"), error)
            head = [STATUS_LINE[error.status_code], b"connection: close\r\n"]
            head += [name + b": " + value + b"\r\n" for name, value in answer.raw_headers]
            self.transport.write(b"".join((*head, b"\r\n", bytes(answer.body))))
        self.transport.close()


def connections(settings: ServerSettings) -> Callable[..., asyncio.Protocol]:
    """What makes a server's connections: as many without a request as it may have with one, if
    this process may open so many files."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * settings.max_requests + _OTHER_FILES
    if least < wanted:
        least = min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
    idle = Idle(max(8, min(settings.max_requests, (least - _OTHER_FILES) // 2)))

    def made(**given: Any) -> Connection:
        return Connection(settings, idle, **given)

    return made
