"""A model whose engine runs in another process."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.engine import AsyncRequestHandle, SamplingParams
from runtime.engine.requests.intake import Intake
from runtime.engine.requests.request import Event, Request, State
from runtime.runner.sampling_params import MAX_SEED

from ...text.detokenize import Detokenizer
from ..structured import GrammarConstraint
from .channel import Channel
from .interface import Figures, ModelFacts
from .messages import Ask, Batch, Cancel, Failure, Observe, Reply, Routed, Submit, Told


class RemoteModel:
    """See ``ServedModel``. Its requests are the engine's, told again: they grow by what comes.

    Args:
        lost: called when the other process has ended.
    """

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

    @property
    def healthy(self) -> bool:
        return self._healthy

    def asubmit(
        self, prompt_ids: Sequence[int], params: SamplingParams, special: Collection[str]
    ) -> AsyncRequestHandle:
        if not self._healthy:
            raise PykernelsError("The engine has failed", "Start the server again")
        grammar = None
        if params.constraint is not None:
            assert isinstance(params.constraint, GrammarConstraint)
            grammar = params.constraint.grammar
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        params = replace(params, constraint=None, seed=seed)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = partial(Detokenizer, self.tokenizer, special)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        # Nothing is counted here: the engine does.
        shown = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        requests = self._intake.requests(
            prompt_ids, shown, queue.put_nowait, True, None, detokenizer
        )
        key, name = next(self._keys), requests[0].name
        self._requests[key] = requests
        handle = AsyncRequestHandle(requests, partial(self._cancel, key), detokenizer, queue)
        ids = list(prompt_ids)
        self._channel.send(Submit(key, name, ids, params, grammar, tuple(special)))
        return handle

    def _cancel(self, key: int, request: Request) -> None:
        self._channel.send(Cancel(key, request.index))

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
                request = self._requests[news.key][news.output]
                if isinstance(news, Routed):
                    assert request.routing is not None
                    request.routing.extend(news.experts)
                else:
                    self._grow(request, news)

    def _answered(self, answer: Reply) -> None:
        future = self._answers.pop(answer.key)
        if not future.set_running_or_notify_cancel():
            return
        if answer.failure is not None:
            future.set_exception(error_of(answer.failure))
        else:
            future.set_result(answer.value)

    def _grow(self, request: Request, told: Told) -> None:
        if told.token >= 0:
            request.tokens.append(told.token)
        if told.logprob is not None:
            request.logprobs.append(told.logprob)
        request.prompt_logprobs += told.prompt_logprobs
        if request.text is not None and told.text:
            request.text.deltas.append(told.text)
        if told.reason is not None:
            request.state, request.reason = State.FINISHED, told.reason
            if told.failure is not None:
                request.error = error_of(told.failure)
            if (stats := told.stats) is not None:
                request.cached, request.preemptions = stats.cached_tokens, stats.preemptions
                request.submitted_at, request.admitted_at = 0.0, stats.queue_seconds
                request.last_at = stats.queue_seconds
                if stats.time_to_first_token is not None:
                    request.first_at = stats.time_to_first_token
                    request.last_at = request.first_at + stats.decode_seconds
            requests = self._requests[told.key]
            if told.stats is None or all(r.state is State.FINISHED for r in requests):
                del self._requests[told.key]
        request.sink((request, told.token, told.logprob, told.text, told.reason))


def error_of(failure: Failure) -> Exception:
    """The exception again, without its traceback."""
    if failure.kind == "PykernelsError":
        return PykernelsError(failure.cause, failure.hint)
    kind: type[Exception] = type(failure.kind, (RuntimeError,), {})
    return kind(failure.cause)
