"""One node, as its router sees it."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx2

from pykernels.errors import PykernelsError
from runtime.engine import EngineStats
from runtime.kv_cache.prefix import Held
from runtime.kv_tiers.stats import Rate

from ..backend.messages import Routed, Told
from .addresses import Address
from .policy import Candidate
from .protocol import FACTS, PATH, VERSION, NodeFacts, Prefilled, news_of, stats_of

LOG = logging.getLogger("pykernels.server")
_CONNECT_SECONDS = 3.0
_SILENT_SECONDS = 10.0
"""A node that says nothing for so long is lost: it speaks once a second."""
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
TIMEOUT = httpx2.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS)
_AT_ONCE = httpx2.Timeout(3.0)
"""For what a node knows without computing anything."""


class NodeLost(Exception):
    """A node does not do what it was asked for; another one is to be asked."""


class Node:
    """A node: what is known of it, and what it is asked for.

    Attributes:
        facts: as it has told them last; ``up``: whether it answers, and takes requests.
        inside: outputs that this router has there; ``queued``: tokens of prompts likewise.
        rate: tokens of prompts that it reads a second; ``stats``: its engine's counts.
        requests, lost: how often it was asked for an output or a prompt, and did not end one.
    """

    def __init__(self, address: Address, facts: NodeFacts) -> None:
        self.address, self.facts = address, facts
        self.name, self.role = address.name, address.role
        self.up = facts.ready
        self.inside = self.queued = self.requests = self.lost = 0
        self.rate, self.stats = Rate(), EngineStats()
        self.http: httpx2.AsyncClient

    def candidate(self, held: int) -> Candidate:
        """It, for a prompt of which it has so many pages."""
        seats = self.facts.max_num_seqs
        return Candidate(self.name, held, self.inside, seats, self.queued, self.rate.value)

    @contextmanager
    def working(self, outputs: int, tokens: int = 0) -> Iterator[None]:
        """It is asked for so many outputs, or to read so many tokens."""
        self.requests += 1
        self.inside, self.queued = self.inside + outputs, self.queued + tokens
        try:
            yield
        except NodeLost as error:
            self.lost += 1
            self.is_down(str(error))
            raise
        finally:
            self.inside, self.queued = self.inside - outputs, self.queued - tokens

    def is_down(self, why: str) -> None:
        """It gets no requests until it says that it takes them."""
        if self.up:
            LOG.warning("the %s node %s is lost: %s", self.role, self.name, why)
        self.up = False

    async def look(self) -> None:
        """Finds whether it is up."""
        try:
            answer = await self.http.get(self.address.url + PATH, timeout=_AT_ONCE)
            facts = facts_of(self.address, answer)
            if facts.kv_model != self.facts.kv_model:
                raise NodeLost("it has another model now")
        except (NodeLost, PykernelsError, httpx2.HTTPError) as error:
            self.is_down(_why(error))
            return
        if facts.ready and not self.up:
            LOG.warning("the %s node %s takes requests", self.role, self.name)
        if facts.ways != self.facts.ways:
            ways = ", ".join(facts.ways) or "no way"
            LOG.warning("the %s node %s hands pages over by %s now", self.role, self.name, ways)
        self.facts, self.up = facts, facts.ready

    async def count(self) -> None:
        """Asks for its engine's counts; the last ones stay if it does not say them."""
        with suppress(httpx2.HTTPError, ValueError, KeyError, TypeError):
            answer = await self.http.get(f"{self.address.url}{PATH}/stats", timeout=_AT_ONCE)
            self.stats = stats_of(answer.raise_for_status().json())

    async def held(self, keys: Sequence[str]) -> Held:
        """What it has of a prompt. Raises NodeLost."""
        url = f"{self.address.url}{PATH}/held"
        try:
            answer = await self.http.post(url, json={"keys": keys}, timeout=_AT_ONCE)
            if answer.status_code != 200:
                raise NodeLost(f"it answers {answer.status_code}")
            return Held(**answer.json())
        except (httpx2.HTTPError, ValueError, TypeError) as error:
            raise NodeLost(_why(error)) from error

    async def prefill(self, body: Mapping[str, Any]) -> Prefilled:
        """Has it read a prompt, and share its pages. Raises NodeLost."""
        async for line in self._lines("prefill", body):
            told = json.loads(line)
            if "error" in told:
                raise NodeLost(told["error"])
            done = Prefilled(**told)
            self.rate.record(done.computed, done.seconds)
            return done
        raise NodeLost("it has not answered")

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[Told | Routed, None]:
        """Events of a prompt's outputs. Raises NodeLost; PykernelsError: it can never serve it."""
        async for line in self._lines("generate", body):
            try:
                yield news_of(line)
            except (ValueError, TypeError, KeyError) as error:
                raise NodeLost(f"it says what nobody understands: {error}") from error

    async def _lines(self, what: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """Lines of an answer."""
        url = f"{self.address.url}{PATH}/{what}"
        try:
            async with self.http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    _raise(answer)
                async for line in answer.aiter_lines():
                    if line and not line.startswith(":"):
                        yield line
        except httpx2.HTTPError as error:
            raise NodeLost(_why(error)) from error


def facts_of(address: Address, answer: httpx2.Response) -> NodeFacts:
    """What a node has told of itself.

    Raises:
        PykernelsError: it is no such node, or wants another key; NodeLost: not now.
    """
    where = f"the {address.role} node {address.name} at {address.url}"
    if answer.status_code == 401:
        raise PykernelsError(f"{where} has another key", "Give all of them one --api-key-file")
    if answer.status_code >= 500:
        raise NodeLost(f"it answers {answer.status_code}")
    try:
        body = answer.raise_for_status().json()
        if (version := body["version"]) != VERSION:
            raise PykernelsError(
                f"{where} speaks version {version}, and this router version {VERSION}",
                "Run the same release everywhere",
            )
        facts = FACTS.validate_python(body)
    except (ValueError, KeyError, TypeError, httpx2.HTTPStatusError) as error:
        raise PykernelsError(
            f"{where} is none", f"Start it there with `pykernels serve --role {address.role}`"
        ) from error
    if facts.role != address.role:
        raise PykernelsError(
            f"{where} is a {facts.role} node", f"Give it as --{facts.role}-node, or start it anew"
        )
    return facts


def _raise(answer: httpx2.Response) -> None:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    if answer.status_code == 400:
        raise PykernelsError(message.rstrip("."), "Change the request")
    raise NodeLost(f"it answers {answer.status_code}: {message}")


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
