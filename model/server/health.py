"""`/health`, `/ready` and `/metrics`, for whatever watches over the server."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from .http.frames import json_bytes
from .serving.served import Served

HEALTH = "/health"
"""A path that needs no key."""
READY = "/ready"


def health_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get(HEALTH)
    async def health() -> Response:
        """200 while the model can serve anything, and 503 with the reason while it cannot."""
        return _state(served.alive, "ok", served.model.trouble)

    @router.get(READY)
    async def ready() -> Response:
        """200 while requests are taken: not while the server drains."""
        why = "draining" if served.draining else served.model.trouble
        return _state(served.ready, "ready", why)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Figures in Prometheus' text format."""
        text = served.metrics.text(await served.model.figures())
        return Response(text, media_type="text/plain; version=0.0.4")

    return router


def _state(good: bool, yes: str, no: str) -> Response:
    body = json_bytes({"status": yes if good else no})
    return Response(body, 200 if good else 503, media_type="application/json")
