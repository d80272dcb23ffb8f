"""A client that goes away before its answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from .errors import ApiError

T = TypeVar("T")

CLIENT_CLOSED = 499
"""Status of an answer that nobody reads (nginx's)."""


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns; a client that goes away cancels it."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_CLOSED, "The client has closed the connection.")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))
