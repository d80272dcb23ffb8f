"""A model whose engine runs in another process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.engine import AsyncRequestHandle, SamplingParams
from runtime.engine.requests.intake import Intake
from runtime.engine.requests.request import Request, State
from runtime.kv_cache.prefix import Held
from runtime.kv_tiers.transfer.endpoint import Peer

from .channel import Channel
from .interface import Figures, ModelFacts
from .messages import Ask, AskHeld, Batch, Cancel, Meet, Observe, Reply, Routed, Submit, Told
from .mirror import grow, mirrored
from .telling import error_of


class RemoteModel:
    """See ``ServedModel``. Its requests are the engine's, told again: they grow by what comes.

    Args:
        lost: called when the other process has ended.
    """

    trouble, recovers = "the engine has failed", False

    def __init__(
        self,
        channel: Channel,
        facts: ModelFacts,
        tokenizer: PreTrainedTokenizerBase | None,
        lost: Callable[[], None],
    ) -> None:
        self.facts, self.tokenizer = facts, tokenizer
        self._channel, self._lost = channel, lost
        self._healthy = True
        self._intake = Intake(facts, facts.eos_token_ids, facts.ageing_seconds, clock=lambda: 0.0)
        self._keys = itertools.count(1)
        self._requests: dict[int, list[Request]] = {}
        self._answers: dict[int, Future[Any]] = {}

    def attach(self) -> None:
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive)

    async def detach(self) -> None:
        """The other process ends when the channel does."""

    @property
    def healthy(self) -> bool:
        return self._healthy

    def asubmit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        special: Collection[str],
        drawn: Sequence[int] = (),
    ) -> AsyncRequestHandle:
        if not self._healthy:
            raise PykernelsError("The engine has failed", "Start the server again")
        key = next(self._keys)
        mirror = mirrored(self._intake, self.tokenizer, prompt_ids, params, special, drawn)
        self._requests[key] = mirror.requests
        name, ids = mirror.requests[0].name, list(prompt_ids)
        how = mirror.params, mirror.grammar, tuple(special), tuple(drawn)
        self._channel.send(Submit(key, name, ids, *how))
        return mirror.handle(partial(self._cancel, key))

    def _cancel(self, key: int, request: Request) -> None:
        self._channel.send(Cancel(key, request.index))

    async def held(self, keys: Sequence[bytes]) -> Held:
        key, answer = self._asked()
        self._channel.send(AskHeld(key, keys))
        found: Held = await asyncio.wrap_future(answer)
        return found

    def meet(self, peers: Sequence[Peer]) -> None:
        self._channel.send(Meet(tuple(peers)))

    async def figures(self) -> Figures:
        key, answer = self._asked()
        self._channel.send(Ask(key))
        found: Figures = await asyncio.wrap_future(answer)
        return found

    def observe(self, steps: int, title: str) -> tuple[Future[None], Callable[[], bytes]]:
        key, done = self._asked()

        def ended(done: Future[Any]) -> None:
            if done.cancelled():
                self._channel.send(Observe(key, 0, title))

        done.add_done_callback(ended)
        self._channel.send(Observe(key, steps, title))
        return done, done.result

    def _asked(self) -> tuple[int, Future[Any]]:
        key, answer = next(self._keys), Future[Any]()
        self._answers[key] = answer
        return key, answer

    def _receive(self) -> None:
        """One batch has come, or the other process has ended."""
        batch: Batch | None = self._channel.receive()
        if batch is None:
            self._lost()
            return
        self._healthy = batch.healthy
        for news in batch.news:
            if isinstance(news, Reply):
                self._answered(news)
            elif news.key in self._requests:
                if isinstance(news, Routed):
                    routing = self._requests[news.key][news.output].routing
                    assert routing is not None
                    routing.extend(news.experts)
                else:
                    self._told(news)

    def _answered(self, answer: Reply) -> None:
        future = self._answers.pop(answer.key)
        if not future.set_running_or_notify_cancel():
            return
        if answer.failure is not None:
            future.set_exception(error_of(answer.failure))
        else:
            future.set_result(answer.value)

    def _told(self, told: Told) -> None:
        requests = self._requests[told.key]
        ended = grow(requests[told.output], told)
        if ended and (told.stats is None or all(r.state is State.FINISHED for r in requests)):
            del self._requests[told.key]
