"""What every request passes before a route sees it: the key, the size of its body, its pace."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from contextlib import ExitStack
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .health import HEALTH, READY
from .http.errors import ApiError, as_api_error, error_response
from .page.routes import FILES
from .serving.served import ENTERED, Served

LOG = logging.getLogger("pykernels.server.requests")


_OPEN = {HEALTH, *FILES}
"""Paths that need no key."""

_LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]", "")
"""Names of this machine for itself; a client of HTTP/1.0 gives none."""


class Guard:
    """ASGI middleware. It refuses a request without the key, one too many, and a body that is too
    large or comes too slowly; it counts answers, and writes a line for each if it is to."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self.app, self.served, self.settings = app, served, served.settings
        key = self.settings.api_key
        self._digest = None if key is None else _digest(key)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            error = await self._answered(scope, receive, counted)
            if error is not None and not status:
                await error_response(scope["path"], error)(scope, receive, counted)
        finally:
            self.served.metrics.responses.labels(str(status)).inc()
            if self.settings.log_requests:
                took = time.perf_counter() - begun
                LOG.info("%s %s %d %.3f s", scope["method"], scope["path"], status, took)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        """Lets the application answer; what kept it from that, if anything did."""
        if (refusal := self._refusal(scope)) is not None:
            return refusal
        apart = scope["path"] in (HEALTH, READY)
        if self._running >= self.settings.max_requests and not apart:
            why = f"The server is busy: {self._running} requests are being answered."
            return ApiError(503, why, code="busy", retry_after=1)
        self._running += not apart
        try:
            with ExitStack() as stack:  # what a route enters is left when its answer is sent
                inner = {**scope, ENTERED: stack, "headers": _of_json(scope["headers"])}
                if scope["method"] == "HEAD":  # a GET whose body is not sent
                    inner["method"] = "GET"
                await self.app(inner, _Limited(self, receive), send)
        except asyncio.CancelledError:  # by the server, which ends
            return self.served.ending()
        except Exception as error:
            return as_api_error(error)
        finally:
            self._running -= not apart
        return None

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._digest is not None and scope["path"] not in _OPEN and not self._has_key(headers):
            return ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
        if self._is_foreign(headers):
            return ApiError(403, "Web pages may not use this server: see --cors-origin.")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.settings.max_body_bytes:
            return self.too_large()
        return None

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a browser sends it for a page that is not the server's own. Browsers keep such
        pages from reading answers, but not from sending requests; and a name that leads to this
        machine makes a page look like the server's own."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if (
            self._digest is None
            and self.settings.host in _LOCAL
            and _name(host).lower() not in _LOCAL
        ):
            return True
        if origin is None or {origin, "*"} & {*self.settings.cors_origins}:
            return False
        return urlsplit(origin).netloc.lower() != host.lower()

    def _has_key(self, headers: Headers) -> bool:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(_digest(given), self._digest or b"")

    def too_large(self) -> ApiError:
        most = self.settings.max_body_bytes
        return ApiError(413, f"The body is larger than {most} bytes.", code="request_too_large")


class _Limited:
    """Receives for the application, no more and no slower than is allowed."""

    def __init__(self, guard: Guard, receive: Receive) -> None:
        self._guard, self._receive = guard, receive
        self._size, self._whole = 0, False

    async def __call__(self) -> Message:
        if self._whole:  # from now on it waits for the client to go away
            return await self._receive()
        seconds = self._guard.settings.body_seconds
        try:
            message = await asyncio.wait_for(self._receive(), seconds)
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {seconds:g} seconds.") from None
        self._size += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._size > self._guard.settings.max_body_bytes:
            raise self._guard.too_large()
        return message


def _of_json(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without the body's type: all bodies are JSON, and ``curl -d`` says that they are forms."""
    return [header for header in headers if header[0] != b"content-type"]


def _name(host: str) -> str:
    """The name in a ``Host`` header, without its port."""
    return host.rpartition(":")[0] if re.search(r":\d*$", host) else host


def _digest(key: str) -> bytes:
    # Of equal length whatever was given, so that comparing takes the same time.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
