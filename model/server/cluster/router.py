"""A model on several nodes: prompts are read by some, answers written by others.

A prompt's pages go from the node that reads it to the one that writes its answer by what both share
(``--kv-store``, ``--kv-disk``), by the keys of ``kv_cache.prefix``. A node that is lost costs work
and no answer: another one reads the prompt again, and goes on behind the tokens that were told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.engine import AsyncRequestHandle, EngineBusy, EngineStats, SamplingParams
from runtime.engine.requests.intake import Intake
from runtime.engine.requests.request import Request, State, fork_seed
from runtime.kv_cache.prefix import Held, PageKey, extend_keys

from ..backend.interface import Figures, ModelFacts, NodeFigures
from ..backend.messages import Routed, Told
from ..backend.mirror import grow, mirrored
from ..backend.telling import failure_of
from ..http.errors import LOG
from ..http.settings import DECODE, PREFILL
from .node import LIMITS, TIMEOUT, Node, NodeLost
from .policy import decode_node, is_read_elsewhere, prefill_node
from .protocol import params_body

_LOOK_SECONDS = 1.0
_WAIT_SECONDS = 60.0
"""For a node to come up, while a request waits for one."""
_POLL_SECONDS = 0.05


@dataclass(eq=False)
class _Job:
    """One prompt.

    Attributes:
        keys: of its full pages that may come from elsewhere.
        cached: tokens that nobody had to compute; None: the node that writes the answer knows.
        began: when it was submitted.
    """

    prompt: list[int]
    params: SamplingParams
    grammar: str | None
    special: tuple[str, ...]
    requests: list[Request]
    keys: list[str]
    began: float = field(default_factory=time.monotonic)
    cached: int | None = None

    def open(self, outputs: Sequence[int]) -> list[int]:
        """Those that have not ended."""
        return [o for o in outputs if self.requests[o].state is not State.FINISHED]

    def body(self, outputs: Sequence[int]) -> dict[str, Any]:
        """What a node is asked for: all outputs from their beginning, or one from where it is."""
        params, drawn = self.params, list[int]()
        if params.deadline is not None:
            left = params.deadline - (time.monotonic() - self.began)
            params = replace(params, deadline=max(left, 0.001))
        if len(outputs) < params.n or self.requests[outputs[0]].num_output_tokens:
            (output,) = outputs
            request = self.requests[output]
            drawn = list(request.output)
            seed = fork_seed(params.seed or 0, output)
            told = bool(request.prompt_logprobs)
            start = None if told else params.logprob_start
            params = replace(params, n=1, seed=seed, logprob_start=start)
        return {
            "prompt": self.prompt,
            "params": params_body(params),
            "grammar": self.grammar,
            "special": self.special,
            "drawn": drawn,
        }


class ClusterModel:
    """See ``ServedModel``.

    Args:
        key: that the nodes ask for; None: none.
        max_ttft: seconds; a request is refused whose prompt would be read later than that.
    """

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
        self._tasks: dict[_Job, asyncio.Task[None]] = {}
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
        job = _Job(list(prompt_ids), *how, mirror.requests, keys)
        self._tasks[job] = asyncio.create_task(self._run(job))
        return mirror.handle(partial(self._cancel, job))

    def _check_wait(self) -> None:
        """Raises EngineBusy where every prefill node has more to read than there is time for."""
        waits = [node.candidate(0).seconds(0) for node in self._of(PREFILL) if node.up]
        if self._max_ttft is not None and waits and min(waits) > self._max_ttft:
            raise EngineBusy(
                f"the first token would come after some {min(waits):.0f} seconds", "Try again later"
            )

    def _cancel(self, job: _Job, request: Request) -> None:
        if request.state is State.FINISHED:
            return
        grow(request, Told(0, request.index, -1, None, "", "cancelled", stats=request.stats()))
        if not job.open(range(len(job.requests))) and (task := self._tasks.get(job)) is not None:
            task.cancel()  # which ends it on its node

    async def _run(self, job: _Job) -> None:
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

    async def _generate(self, job: _Job, outputs: Sequence[int]) -> None:
        """These outputs to their ends, on one node after another."""
        while left := job.open(outputs):
            begun = any(job.requests[output].num_output_tokens for output in left)
            if len(left) > 1 and (begun or len(left) < job.params.n):
                await asyncio.gather(*(self._generate(job, [output]) for output in left))
                return
            node = await self._placed(job)
            with suppress(NodeLost), node.working(len(left)):
                async with aclosing(node.generate(job.body(left))) as events:
                    async for news in events:
                        at = left[0] if len(left) == 1 else news.output
                        self._tell(job, job.requests[at], news._replace(output=at))
                if job.open(left):
                    raise NodeLost("it has ended before its answer")

    def _tell(self, job: _Job, request: Request, news: Told | Routed) -> None:
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

    async def _placed(self, job: _Job) -> Node:
        """The node that is to write an answer; the prompt's pages are where it finds them, as far
        as a prefill node could be had.

        Raises:
            PykernelsError: no node came up.
        """
        pages, size = len(job.keys), self.facts.page_size
        ups = await self._ups()
        held = await self._held(job, ups)
        decode = [node.candidate(held[node].cached) for node in ups if node.role == DECODE]
        if not held or not decode:
            return await self._placed(job)
        chosen = decode_node(decode, pages)
        stored = max(each.stored for each in held.values())
        node = next(node for node in ups if node.name == chosen.name)
        if job.params.logprob_start is not None or not is_read_elsewhere(chosen, stored, pages):
            return node
        readers = [node for node in ups if node.role == PREFILL and node in held]
        while readers:
            each = [r.candidate(max(stored, held[r].cached)) for r in readers]
            best = prefill_node(each, len(job.prompt), size)
            reader = next(r for r in readers if r.name == best.name)
            readers.remove(reader)
            with suppress(NodeLost), reader.working(0, len(job.prompt) - best.held * size):
                done = await reader.prefill(job.prompt, job.keys, job.params.priority)
                if job.cached is None:
                    job.cached = done.cached
                break
        return node if node.up else await self._placed(job)

    async def _ups(self) -> list[Node]:
        """Nodes that are up, a decode node among them."""
        end = time.monotonic() + _WAIT_SECONDS
        while not self.healthy:
            if time.monotonic() > end:
                names = ", ".join(node.name for node in self._of(DECODE))
                raise PykernelsError(
                    f"No decode node takes requests: {names}", "Look into the nodes' logs"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return [node for node in self.nodes if node.up]

    async def _held(self, job: _Job, nodes: Sequence[Node]) -> dict[Node, Held]:
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

    async def figures(self) -> Figures:
        nodes = tuple(
            NodeFigures(n.name, n.role, n.up, n.inside, n.requests, n.lost, n.rate.value)
            for n in self.nodes
        )
        return Figures(EngineStats(), 0, 0, 0, nodes=nodes)

    def observe(self, steps: int, title: str) -> tuple[Future[None], Callable[[], bytes]]:
        raise PykernelsError("A router computes no steps", "Ask one of its nodes")
