"""A model on several nodes: prompts are read by some, answers written by others.

A prompt's pages go from the node that reads it to the one that writes its answer by what both have:
their memory, ``--kv-store`` or ``--kv-disk``, by the keys of ``kv_cache.prefix``. A node that is
lost costs work and no answer: another one reads the prompt again, and goes on behind the tokens
that were told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

import httpx2
from transformers import PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.engine import AsyncRequestHandle, EngineBusy, SamplingParams
from runtime.engine.requests.intake import Intake
from runtime.engine.requests.request import Request, State
from runtime.kv_cache.prefix import Held, PageKey, extend_keys
from runtime.kv_tiers.transfer.endpoint import Peer

from ..backend.interface import Figures, ModelFacts, NodeFigures
from ..backend.messages import Routed, Told
from ..backend.mirror import grow, mirrored
from ..backend.telling import failure_of
from ..http.errors import LOG
from ..http.settings import DECODE, PREFILL
from .job import Job
from .node import LIMITS, TIMEOUT, Node, NodeLost
from .policy import Candidate, decode_node, is_read_elsewhere, prefill_node
from .protocol import summed

_LOOK_SECONDS = 1.0
_MOST_PEERS = 4
"""Whose memory a node is to look into for one prompt."""
_WAIT_SECONDS = 60.0
"""For a node to come up, while a request waits for one."""
_POLL_SECONDS = 0.05
_MOST_TRIES = 3
"""A request that so many nodes are lost with, one after another and without a token, is given up:
it may be what ends them."""


class ClusterModel:
    """See ``ServedModel``.

    Args:
        key: that the nodes ask for; None: none.
        max_ttft: seconds; a request is refused whose prompt would be read later than that.
    """

    trouble, recovers = "no decode node is up", True

    def __init__(
        self,
        nodes: Sequence[Node],
        facts: ModelFacts,
        tokenizer: PreTrainedTokenizerBase | None,
        key: str | None = None,
        max_ttft: float | None = None,
    ) -> None:
        self.facts, self.tokenizer, self.nodes = facts, tokenizer, nodes
        self._key, self._max_ttft = key, max_ttft
        self._intake = Intake(facts, facts.eos_token_ids, facts.ageing_seconds, clock=lambda: 0.0)
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def attach(self) -> None:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._http = httpx2.AsyncClient(headers=headers, timeout=TIMEOUT, limits=LIMITS)
        for node in self.nodes:
            node.http = self._http
        self._looking = asyncio.create_task(self._look())

    async def detach(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._http.aclose()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.gather(*(node.look() for node in self.nodes))

    @property
    def healthy(self) -> bool:
        return any(node.up for node in self._of(DECODE))

    def _of(self, role: str) -> list[Node]:
        return [node for node in self.nodes if node.role == role]

    def asubmit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        special: Collection[str],
        drawn: Sequence[int] = (),
    ) -> AsyncRequestHandle:
        assert not drawn, "a router is no node"
        self._check_wait()
        mirror = mirrored(self._intake, self.tokenizer, prompt_ids, params, special)
        page_keys: list[PageKey] = []
        size = self.facts.page_size
        extend_keys(page_keys, prompt_ids, (len(prompt_ids) - 1) // size, size)
        keys = [key.hex() for key, _ in page_keys]
        how = mirror.params, mirror.grammar, tuple(special)
        job = Job(list(prompt_ids), *how, mirror.requests, keys)
        self._tasks[job] = asyncio.create_task(self._run(job))
        return mirror.handle(partial(self._cancel, job))

    def _check_wait(self) -> None:
        """Raises EngineBusy where every prefill node has more to read than there is time for."""
        waits = [node.candidate(0).seconds(0) for node in self._of(PREFILL) if node.up]
        if self._max_ttft is not None and waits and min(waits) > self._max_ttft:
            raise EngineBusy(
                f"the first token would come after some {min(waits):.0f} seconds", "Try again later"
            )

    def _cancel(self, job: Job, request: Request) -> None:
        if request.state is State.FINISHED:
            return
        grow(request, Told(0, request.index, -1, None, "", "cancelled", stats=request.stats()))
        if not job.open(range(len(job.requests))) and (task := self._tasks.get(job)) is not None:
            task.cancel()  # which ends it on its node

    async def _run(self, job: Job) -> None:
        outputs = range(len(job.requests))
        try:
            await self._generate(job, outputs)
        except Exception as error:
            if not isinstance(error, PykernelsError):
                LOG.error("%s", error, exc_info=error)
            for output in job.open(outputs):
                told = Told(0, output, -1, None, "", "error", failure=failure_of(error))
                grow(job.requests[output], told)
        finally:
            self._tasks.pop(job, None)

    async def _generate(self, job: Job, outputs: Sequence[int]) -> None:
        """These outputs to their ends, on one node after another."""
        fruitless = 0
        while left := job.open(outputs):
            before = job.drawn(left)
            if len(left) > 1 and (before or len(left) < job.params.n):
                await asyncio.gather(*(self._generate(job, [output]) for output in left))
                return
            node = await self._placed(job)
            try:
                with node.working(len(left)):
                    await self._generate_on(node, job, left)
            except NodeLost as error:
                fruitless = 0 if job.drawn(left) > before else fruitless + 1
                if fruitless == _MOST_TRIES:
                    raise PykernelsError(
                        f"{fruitless} nodes were lost with this request: {error}",
                        "Look into the nodes' logs",
                    ) from error

    async def _generate_on(self, node: Node, job: Job, left: Sequence[int]) -> None:
        async with aclosing(node.generate(job.body(left))) as events:
            async for news in events:
                if isinstance(news, Told) and news.reason == "error":
                    await node.look()
                    if not node.up:  # its engine has failed, and not for what it was asked
                        raise NodeLost(news.failure.cause if news.failure else "its engine failed")
                at = left[0] if len(left) == 1 else news.output
                self._tell(job, job.requests[at], news._replace(output=at))
        if job.open(left):
            raise NodeLost("it has ended before its answer")

    def _tell(self, job: Job, request: Request, news: Told | Routed) -> None:
        if request.state is State.FINISHED:  # it was cancelled here
            return
        if isinstance(news, Routed):
            if request.routing is not None:
                request.routing.extend(news.experts)
            return
        if news.stats is not None and job.cached is not None:
            # What a prefill node has computed for it was in no cache.
            news = news._replace(stats=replace(news.stats, cached_tokens=job.cached))
        grow(request, news)

    async def _placed(self, job: Job) -> Node:
        """The node that is to write an answer; the prompt's pages are where it finds them, as far
        as a prefill node could be had.

        Raises:
            PykernelsError: no node came up.
        """
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            held = await self._held(job, await self._ups(end))
            writers = [node for node in held if node.role == DECODE]
            if not writers:
                continue
            pages, stored = len(job.keys), max(each.stored for each in held.values())
            job.peers = _peers(held)
            chosen, writer = best(writers, partial(decode_node, pages=pages), held)
            # Log-probabilities of the prompt's own tokens are computed where they are told.
            own = job.params.logprob_start is not None or not held[writer].takes
            if not own and is_read_elsewhere(chosen, stored, pages):
                await self._read(job, {n: h for n, h in held.items() if n.role == PREFILL}, stored)
            if writer.up:
                return writer

    async def _read(self, job: Job, held: dict[Node, Held], stored: int) -> None:
        """Has a prompt read by one of these nodes, another one where it is lost."""
        size, tokens = self.facts.page_size, len(job.prompt)
        held = {node: replace(each, cached=max(each.cached, stored)) for node, each in held.items()}
        choose = partial(prefill_node, tokens=tokens, page_size=size)
        for _ in range(min(_MOST_TRIES, len(held))):
            chosen, reader = best(list(held), choose, held)
            del held[reader]
            for other in held:  # which may have been slow but once
                other.rate.hope()
            with suppress(NodeLost), reader.working(0, tokens - chosen.held * size):
                done = await reader.prefill(job.prefill_body())
                if job.cached is None:
                    job.cached = done.cached
                if reader.facts.peer is not None:
                    job.peers = [reader.facts.peer, *job.peers][:_MOST_PEERS]
                return

    async def _ups(self, end: float) -> list[Node]:
        """Nodes that are up, a decode node among them. Raises PykernelsError at the end."""
        while not self.healthy:
            if time.monotonic() > end:
                names = ", ".join(node.name for node in self._of(DECODE))
                raise PykernelsError(
                    f"No decode node takes requests: {names}", "Look into the nodes' logs"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return [node for node in self.nodes if node.up]

    async def _held(self, job: Job, nodes: Sequence[Node]) -> dict[Node, Held]:
        """What nodes have of a prompt; those that do not say it are down."""

        async def one(node: Node) -> tuple[Node, Held] | None:
            try:
                return node, await node.held(job.keys)
            except NodeLost as error:
                node.is_down(str(error))
                return None

        return dict(filter(None, await asyncio.gather(*map(one, nodes))))

    async def held(self, keys: Sequence[bytes]) -> Held:
        return Held(0)

    def meet(self, peers: Sequence[Peer]) -> None:
        """A router has no memory for pages."""

    async def figures(self) -> Figures:
        await asyncio.gather(*(node.count() for node in self.nodes if node.up))
        nodes = tuple(
            NodeFigures(n.name, n.role, n.up, n.inside, n.requests, n.lost, n.rate.value)
            for n in self.nodes
        )
        return Figures(summed({node.name: node.stats for node in self.nodes}), 0, 0, 0, nodes=nodes)

    def observe(self, steps: int, title: str) -> tuple[Future[None], Callable[[], bytes]]:
        raise PykernelsError("A router computes no steps", "Ask one of its nodes")


def _peers(held: Mapping[Node, Held]) -> list[Peer]:
    """Memory of the nodes that have most of a prompt there."""
    have = [(each.stored, n.facts.peer) for n, each in held.items() if each.stored]
    have.sort(key=lambda each: each[0], reverse=True)
    return [peer for _, peer in have if peer is not None][:_MOST_PEERS]


def best(
    nodes: Sequence[Node],
    choose: Callable[[Sequence[Candidate]], Candidate],
    held: Mapping[Node, Held],
) -> tuple[Candidate, Node]:
    """The one of these nodes that is chosen by what they have of a prompt."""
    candidates = [node.candidate(held[node].cached) for node in nodes]
    chosen = choose(candidates)
    return chosen, nodes[candidates.index(chosen)]
