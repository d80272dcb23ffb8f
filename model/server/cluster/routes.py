"""A node's routes for its router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from pykernels.errors import PykernelsError
from runtime.engine import AsyncRequestHandle, EngineBusy, SamplingParams
from runtime.kv_tiers.transfer.endpoint import Peer

from ..backend.telling import Teller
from ..http.errors import ApiError, bad_request, of_ours
from ..http.frames import json_bytes
from ..http.sse import EventStream
from ..serving.fields import Body
from ..serving.served import Served
from .protocol import FACTS, PATH, VERSION, NodeFacts, Prefilled, line_of, params_of, stats_body

_SILENCE_SECONDS = 1.0
"""After which a node says that it is still there."""
_STORE_SECONDS = 30.0
"""For a prompt's pages to be written, once it is read."""
_POLL_SECONDS = 0.002


def _peer(given: object) -> Peer:
    try:
        return Peer(**given)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError("it is no node's memory") from error


_Peers = Annotated[list[Annotated[Peer, BeforeValidator(_peer)]], Field(max_length=64)]


class HeldRequest(Body):
    keys: list[str]


class PrefillRequest(Body):
    prompt: list[int] = Field(min_length=1)
    keys: list[str]
    priority: int = 0
    peers: _Peers = []


class GenerateRequest(Body):
    prompt: list[int] = Field(min_length=1)
    params: dict[str, Any]
    grammar: str | None = None
    special: list[str] = []
    drawn: list[int] = []
    peers: _Peers = []


def node_routes(served: Served) -> APIRouter:
    router, model = APIRouter(tags=["node"]), served.model

    @router.get(PATH)
    async def node() -> Response:
        """What this node is."""
        return Response(FACTS.dump_json(_facts(served)), media_type="application/json")

    @router.get(f"{PATH}/stats")
    async def stats() -> dict[str, Any]:
        return stats_body((await model.figures()).stats)

    @router.post(f"{PATH}/held")
    async def held(body: HeldRequest) -> dict[str, Any]:
        return asdict(await model.held(_keys(body.keys)))

    @router.post(f"{PATH}/prefill")
    async def prefill(body: PrefillRequest, request: Request) -> Response:
        """Reads a prompt, and answers when others may have its pages."""
        served.enter(request)
        keys = _keys(body.keys)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, priority=body.priority
        )
        model.meet(body.peers)
        handle = _submitted(served, body.prompt, params)
        return _lines(served, _prefilled(served, handle, keys))

    @router.post(f"{PATH}/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        try:
            params = params_of(body.params)
        except PykernelsError as error:
            raise of_ours(error) from error
        except (TypeError, ValueError) as error:
            raise bad_request(f"params: {error}.", "params") from error
        served.enter(request, params.n)
        if body.grammar is not None:
            params = replace(params, constraint=await served.grammar(body.grammar))
        model.meet(body.peers)
        handle = _submitted(served, body.prompt, params, body.special, body.drawn)
        return _lines(served, _told(handle))

    return router


def _facts(served: Served) -> NodeFacts:
    facts = served.facts
    return NodeFacts(
        version=VERSION,
        role=served.settings.role or "",
        ready=served.ready,
        model_type=facts.config.model_type,
        kv_model=facts.kv_model,
        longest=facts.longest,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        max_num_seqs=facts.max_num_seqs,
        num_pages=facts.num_pages,
        page_size=facts.page_size,
        workers=facts.workers,
        routed_layers=facts.routed_layers,
        parts=facts.parts,
        ways=facts.ways,
        peer=facts.peer,
    )


def _keys(given: list[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(key) for key in given]
    except ValueError as error:
        raise bad_request("keys: they are hexadecimal.", "keys") from error


def _submitted(
    served: Served,
    prompt: list[int],
    params: SamplingParams,
    special: list[str] | None = None,
    drawn: list[int] | None = None,
) -> AsyncRequestHandle:
    try:
        return served.model.asubmit(prompt, params, special or (), drawn or ())
    except EngineBusy as error:
        raise ApiError(429, str(error), retry_after=1) from error
    except PykernelsError as error:
        raise of_ours(error, 400 if served.model.healthy else 503) from error


def _lines(served: Served, lines: AsyncGenerator[bytes, None]) -> Response:
    stream = EventStream(lines, _SILENCE_SECONDS, served.settings.send_seconds)
    stream.headers["content-type"] = "application/x-ndjson"
    return stream


async def _prefilled(
    served: Served, handle: AsyncRequestHandle, keys: list[bytes]
) -> AsyncGenerator[bytes, None]:
    began = time.monotonic()
    try:
        async for _ in handle.events():
            pass
    finally:
        if not handle.finished:
            handle.cancel()
    seconds, request = time.monotonic() - began, handle.requests[0]
    if request.error is not None:
        yield json_bytes({"error": str(request.error)}) + b"\n"
        return
    end = time.monotonic() + _STORE_SECONDS
    while (held := await served.model.held(keys)).storing and held.stored < len(keys):
        if time.monotonic() > end:
            break
        await asyncio.sleep(_POLL_SECONDS)
    cached = request.stats().cached_tokens
    done = Prefilled(request.prompt_size - cached, cached, held.stored, seconds)
    yield json_bytes(asdict(done)) + b"\n"


async def _told(handle: AsyncRequestHandle) -> AsyncGenerator[bytes, None]:
    teller = Teller()
    try:
        async for event in handle.events():
            for news in teller.told(0, event):
                yield line_of(news)
    finally:
        if not handle.finished:
            handle.cancel()
