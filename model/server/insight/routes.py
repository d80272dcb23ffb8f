"""`/v1/pykernels`: what this server runs on, and what its workers do in the next steps."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from pykernels.errors import PykernelsError

from ..http.disconnect import unless_gone
from ..http.errors import ApiError, of_ours
from ..serving.fields import Strict
from ..serving.served import Served

_POLL_SECONDS = 0.25


class StepsRequest(Strict):
    steps: Annotated[int, Field(ge=1, le=16)] = 2
    seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    """The time to wait for steps that have work."""


def insight_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["pykernels"])

    @router.get("/v1/pykernels")
    async def about() -> dict[str, Any]:
        """The model, its devices and what each computes, the layers that choose experts
        (``routed_layers``)."""
        facts = served.facts
        return {
            "model": served.name,
            "model_type": facts.config.model_type,
            "devices": facts.devices,
            "workers": facts.workers,
            "max_model_len": facts.longest,
            "chat_template": bool(served.prompts.template),
            "routed_layers": [asdict(layer) for layer in facts.routed_layers],
            "parts": [asdict(part) for part in facts.parts],
        }

    @router.get("/v1/pykernels/figures")
    async def figures() -> dict[str, Any]:
        """The engine's counts since its start: what lies between two of them belongs to the steps
        between, whoever asked for them. Bytes are those of weights that steps without prompts have
        read; ``read_roof`` is in bytes a second, null where the CPU reads none or it is unknown.
        ``kv_levels`` are what is behind the pages of the KV cache, ``nodes`` those of a router.
        ``speed`` is that of the first decode steps, in tokens a second, beside what was predicted
        for them; with a ``note`` where they differ by more than a fifth."""
        current = await served.model.figures()
        speed = current.speed
        note = None if speed is None or not speed.is_off else speed.line
        return {
            "running": current.stats.running,
            "decode_steps": sum(current.stats.decode_steps.values()),
            "decode_seconds": current.stats.decode_seconds,
            "read_bytes": current.read_bytes,
            "expert_bytes": current.expert_bytes,
            "read_roof": None if served.read_roof is None else served.read_roof * 1e9,
            "expert_cache": dict(current.cache) or None,
            "prompt_tokens": current.stats.prompt_tokens,
            "cached_tokens": current.stats.cached_tokens,
            "kv_levels": {name: asdict(level) for name, level in current.stats.kv_levels.items()},
            "nodes": [asdict(node) for node in current.nodes],
            "speed": None if speed is None else {**asdict(speed), "note": note},
        }

    @router.post("/v1/pykernels/steps")
    async def steps(body: StepsRequest, request: Request) -> Response:
        """Records the next steps that have work: what each worker and stream did when."""
        try:
            done, timeline = served.model.observe(body.steps, served.name)
            await unless_gone(request, _within(done, body.seconds, served))
        except TimeoutError:
            raise ApiError(
                408, f"There were no {body.steps} steps within {body.seconds:g} seconds."
            ) from None
        except PykernelsError as error:
            raise of_ours(error, 409) from error
        found = await served.prepared(timeline)
        return Response(found, media_type="application/json")

    return router


async def _within(done: Future[None], seconds: float, served: Served) -> None:
    """Waits for it, and cancels it if it does not come.

    Raises:
        TimeoutError: there is too little time; ApiError: the server is about to end.
    """
    waited, end = asyncio.wrap_future(done), time.monotonic() + seconds
    try:
        while not waited.done():
            if served.draining:
                raise served.ending()
            if time.monotonic() >= end:
                raise TimeoutError
            await asyncio.wait((waited,), timeout=min(seconds, _POLL_SECONDS))
        waited.result()
    finally:
        waited.cancel()
