"""Requests of an engine that is elsewhere: they are made here as it makes them, and grow by what it
tells."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from runtime.engine import AsyncRequestHandle, SamplingParams
from runtime.engine.requests.intake import Intake
from runtime.engine.requests.request import Event, Request, State
from runtime.engine.requests.text import MakeDetokenizer
from runtime.runner.sampling_params import MAX_SEED

from ...text.detokenize import Detokenizer
from ..structured import GrammarConstraint
from .messages import Told
from .telling import error_of


@dataclass(frozen=True)
class Mirror:
    """One submitted prompt.

    Attributes:
        requests: one an output.
        params: with a seed, and without a constraint; ``grammar``: of that, None: there is none.
    """

    requests: list[Request]
    params: SamplingParams
    grammar: str | None
    detokenizer: MakeDetokenizer | None
    queue: asyncio.Queue[Event]

    def handle(self, cancel: Callable[[Request], None]) -> AsyncRequestHandle:
        """For its consumer.

        Args:
            cancel: asks the engine to end a request.
        """
        return AsyncRequestHandle(self.requests, cancel, self.detokenizer, self.queue)


def mirrored(
    intake: Intake,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    special: Collection[str],
    drawn: Sequence[int] = (),
) -> Mirror:
    """The requests of a prompt; arguments as of ``ServedModel.asubmit``.

    Raises:
        PykernelsError: the engine can never serve it.
    """
    grammar = None
    if params.constraint is not None:
        assert isinstance(params.constraint, GrammarConstraint)
        grammar = params.constraint.grammar
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    params = replace(params, constraint=None, seed=seed)
    detokenizer = None if tokenizer is None else partial(Detokenizer, tokenizer, special)
    queue: asyncio.Queue[Event] = asyncio.Queue()
    # Nothing is counted here: the engine does.
    shown = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    requests = intake.requests(prompt_ids, shown, queue.put_nowait, True, None, detokenizer, drawn)
    return Mirror(requests, params, grammar, detokenizer, queue)


def grow(request: Request, told: Told) -> bool:
    """A request has got what was told, and its consumer hears of it; whether it has ended."""
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
    request.sink((request, told.token, told.logprob, told.text, told.reason))
    return told.reason is not None
