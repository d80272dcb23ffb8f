"""A response that sends server-sent events as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .disconnect import gone
from .frames import SILENT


class EventStream(Response):
    """Sends frames as they come.

    A client that goes away ends the generator (its ``finally`` runs), and so does one that accepts
    nothing for ``patience`` seconds. After ``silence`` seconds without a frame a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[bytes, None], silence: float, patience: float
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames, self._silence, self._patience = frames, silence, patience
        self._writing_since: float | None = None
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        watching = [asyncio.create_task(gone(receive)), asyncio.create_task(self._watch(send))]
        try:
            await asyncio.wait((sending, *watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, *watching):
                task.cancel()
            await asyncio.wait((sending, *watching))
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        self._last = now()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._frames:
                self._writing_since = now()
                await send(_body(data))
                self._writing_since, self._last = None, now()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._frames.aclose()

    async def _watch(self, send: Send) -> None:
        """Returns when the client has accepted nothing for too long."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(self._silence, self._patience) / 4)
            since = self._writing_since
            if since is not None and now() - since > self._patience:
                return
            if since is None and now() - self._last >= self._silence:
                self._last = now()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._patience):
                        await send(_body(SILENT))
                        continue
                return


def _body(data: bytes) -> Message:
    message: dict[str, Any] = {"type": "http.response.body", "body": data, "more_body": True}
    return message
