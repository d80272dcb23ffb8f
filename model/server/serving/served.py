"""The model that a server serves: names, prompts, parser, and how a request enters the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, TypeVar

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from pykernels.errors import PykernelsError
from runtime.engine import EngineBusy, SamplingParams

from ..backend.interface import ServedModel
from ..http.errors import ApiError, bad_request, of_ours
from ..http.settings import ServerSettings
from ..parsers import parser_for
from ..structured import GrammarConstraint, Vocabulary, constraint_for
from .admission import Admission
from .generation import Generation
from .metrics import Metrics
from .prompts import CONTEXT_CODE, Prompt, Prompts

T = TypeVar("T")

ENTERED = "pykernels.entered"
"""Scope key of the request's ``ExitStack``."""


_POLL_SECONDS = 0.05


class Served:
    """One model, for the event loop that the server runs in.

    Args:
        read_roof: GB/s that the workers read at most, for the metrics; None: unknown.

    Attributes:
        name: the first of its names; ``created``: Unix time at which it was made.
        draining: whether the server is about to end.
        read_roof: as given, if the CPU reads weights in each step.
    """

    def __init__(
        self, model: ServedModel, settings: ServerSettings, read_roof: float | None = None
    ) -> None:
        self.model, self.facts, self.settings = model, model.facts, settings
        self.name, self.created = settings.names[0], int(time.time())
        self.prompts = Prompts(model)
        self.parser = parser_for(self.facts.config.model_type, self.prompts.template)
        self.admission = Admission(self.facts.max_num_seqs, settings)
        # What a GPU reads is not measured by the roof of the CPU's workers.
        self.read_roof = read_roof if "cpu" in self.facts.devices else None
        self.metrics = Metrics(self.facts, lambda: self.admission.inside, self.read_roof)
        self.draining = False
        self._running: set[Generation] = set()
        self._stopped: ApiError | None = None
        # One thread: a tokenizer is not made for several, and the event loop must not wait for it.
        self._texts = ThreadPoolExecutor(1, "texts")
        # And one that compiles grammars, which may take seconds.
        self._grammars = ThreadPoolExecutor(1, "grammars")

    @property
    def alive(self) -> bool:
        """Whether the model can serve anything now."""
        return self.model.healthy

    @property
    def ready(self) -> bool:
        """Whether requests are served at once, as far as there is room."""
        return self.alive and not self.draining

    @property
    def failed(self) -> bool:
        """Whether nothing will be served any more."""
        return not self.alive and not self.model.recovers

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ApiError where the model has none."""
        if self.model.tokenizer is None:
            raise bad_request("This model has no tokenizer: give token ids.")
        return self.model.tokenizer

    def check_name(self, name: str | None) -> None:
        """Raises ApiError for the name of another model."""
        if name is not None and name not in self.settings.names:
            raise ApiError(
                404,
                f"There is no model {name}; this server has {', '.join(self.settings.names)}.",
                "model",
                "model_not_found",
            )

    def ending(self) -> ApiError:
        """What requests get from now on."""
        why = "has failed" if self.failed else "is about to end"
        return ApiError(503, f"The server {why}.", retry_after=None if self.failed else 5)

    async def drain(self, seconds: float, at_once: Callable[[], bool]) -> None:
        """Takes no more requests, and gives those that run so long; then they end with an error.

        Args:
            at_once: whether even that is too long.
        """
        self.draining, end = True, time.monotonic() + seconds
        while self.admission.inside and time.monotonic() < end and not at_once():
            await asyncio.sleep(_POLL_SECONDS)
        self._stopped = self.ending()
        for generation in tuple(self._running):
            generation.fail(self._stopped)

    def enter(self, request: Request, outputs: int = 1) -> int:
        """Takes a place until the request's answer is sent; its priority.

        Raises:
            ApiError: too many outputs, no place, or a server that drains or has failed.
        """
        if self.failed or self.draining:
            raise self.ending()
        most = self.settings.max_outputs
        if outputs > most:
            raise bad_request(f"n: a request may have {most} outputs, its prompts times n.", "n")
        client = request.client.host if request.client else ""
        stack: ExitStack = request.scope[ENTERED]
        return stack.enter_context(self.admission.entered(client, outputs))

    async def prepared(self, make: Callable[..., T], *args: Any, **named: Any) -> T:
        """``make(*args, **named)``, which handles texts, beside the event loop.

        Raises:
            ApiError: in place of PykernelsError.
        """
        return await self._done_in(self._texts, partial(make, *args, **named))

    async def _done_in(self, thread: ThreadPoolExecutor, do: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(thread, do)
        except PykernelsError as error:
            raise of_ours(error) from error

    async def constraint(
        self,
        prompt: Prompt,
        response_format: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> dict[str, Any]:
        """The field of ``SamplingParams`` that makes an answer keep to a form, if one is asked for.

        Args:
            response_format, tools, tool_choice: as OpenAI's.

        Raises:
            ApiError: a form that cannot be forced.
        """
        if response_format is None and tool_choice in (None, "none", "auto"):
            return {}
        vocabulary = await self.prepared(lambda: self._vocabulary)
        make = partial(
            constraint_for,
            vocabulary,
            self.parser,
            response_format=response_format,
            tools=tools,
            tool_choice=tool_choice or "auto",
            parallel_tool_calls=parallel_tool_calls is not False,
            prompt_tail=prompt.tail,
        )
        made = await self._done_in(self._grammars, make)
        return {} if made is None else {"constraint": made}

    async def grammar(self, grammar: str) -> GrammarConstraint:
        """A constraint as a router sends it. Raises ApiError: it is none."""
        vocabulary = await self.prepared(lambda: self._vocabulary)
        return await self._done_in(self._grammars, partial(GrammarConstraint, vocabulary, grammar))

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        facts = self.facts
        return Vocabulary(self.tokenizer, facts.vocab_size, facts.eos_token_ids)

    def params(self, prompt: Prompt, given: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters: those that are given, else the checkpoint's.

        ``max_tokens`` beyond what the context holds ends there.

        Raises:
            ApiError: a prompt that fills the context, a value out of range.
        """
        size, longest = len(prompt.ids), self.facts.longest
        if size >= longest:
            raise bad_request(
                f"The prompt has {size} tokens; with its answer it may have {longest}.",
                "prompt",
                CONTEXT_CODE,
            )
        given = dict(given)
        if given.get("max_tokens") is not None:
            given["max_tokens"] = min(given["max_tokens"], longest - size)
        if prompt.stop:
            own = given.get("stop") or ()
            given["stop"] = (*((own,) if isinstance(own, str) else own), *prompt.stop)
        if self.settings.max_seconds is not None:
            given["deadline"] = self.settings.max_seconds
        try:
            return self.facts.settings.params(size, longest, **given)
        except PykernelsError as error:
            raise of_ours(error) from error

    def submit(
        self,
        request: Request,
        prompt: Prompt,
        params: SamplingParams,
        parsed: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        one_call: bool = False,
    ) -> Generation:
        """Hands a prompt to the engine; if the request ends before its answer, so does the work.

        Args:
            parsed: the answer is a message: reasoning and calls of ``tools`` are taken out of it.
            one_call: it ends with its first call.

        Raises:
            ApiError: the engine refuses it, or is busy.
        """
        if self._stopped is not None:
            raise self._stopped
        parser = self.parser
        try:
            special = parser.special_tokens if parsed else ()
            handle = self.model.asubmit(prompt.ids, params, special)
        except EngineBusy as error:
            raise ApiError(429, str(error), retry_after=1) from error
        except PykernelsError as error:
            healthy = self.model.healthy
            raise of_ours(error, 400 if healthy else 503) from error
        streams = [parser.stream(prompt.tail, tools) for _ in range(params.n) if parsed]
        size, took = len(prompt.ids), self.admission.took
        generation = Generation(handle, params, streams, size, self.metrics, took, one_call)
        self._running.add(generation)
        stack: ExitStack = request.scope[ENTERED]
        stack.callback(self._running.discard, generation)
        stack.callback(generation.cancel)
        return generation

    def close(self) -> None:
        for thread in (self._texts, self._grammars):
            thread.shutdown(cancel_futures=True)
