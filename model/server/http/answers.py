"""An answer as its client wants it: a stream of events, or one body of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from .disconnect import unless_gone
from .frames import json_bytes
from .settings import ServerSettings
from .sse import EventStream


class Answer(Protocol):
    """Writes the answer to one request in the shape of an API."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream's events; an error ends it as one of them."""
        ...

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        ...


async def respond(
    request: Request,
    answer: Answer,
    streamed: bool | None,
    settings: ServerSettings,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer's response; a client that goes away cancels it.

    Args:
        headers: what the response has besides its own.

    Raises:
        ApiError: the client has gone, or the answer cannot be made.
    """
    if streamed:
        stream = EventStream(answer.frames(), settings.silence_seconds, settings.send_seconds)
        stream.headers.update(headers or {})
        return stream
    whole = await unless_gone(request, answer.whole())
    return Response(json_bytes(whole), headers=headers, media_type="application/json")
