"""`/v1/completions`: texts that go on from prompts."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..http.answers import respond
from ..http.errors import as_api_error, error_body
from ..http.frames import DONE, frame
from ..serving.generation import Generation, OutputDelta, Usage, merged
from ..serving.prompts import Prompt
from ..serving.served import Served
from .chat import running_usage, usage_body
from .completions_schema import CompletionRequest
from .logprobs import TextLogprobs

PATH = "/v1/completions"


def completion_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post(PATH)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        answer = await _submitted(served, body, request)
        return await respond(request, answer, body.stream, served.settings)

    return router


async def _submitted(served: Served, body: CompletionRequest, request: Request) -> _Answer:
    served.check_name(body.model)
    priority = served.enter(request, len(body.prompt) * (body.n or 1))
    given = body.sampling() | {"max_tokens": max(1, body.max_tokens or 0), "priority": priority}
    if body.max_tokens is None:
        given["max_tokens"] = None
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    prompts = [await served.prepared(_prompt, served, one) for one in body.prompt]
    all_params = []
    for prompt in prompts:
        echoed = body.echo and body.logprobs is not None and len(prompt.ids) > 1
        own = {"logprob_start": 1} if echoed else {}
        all_params.append(served.params(prompt, given | own))
    generations = [
        served.submit(request, prompt, params)
        for prompt, params in zip(prompts, all_params, strict=True)
    ]
    return _Answer(served, body, prompts, generations)


def _prompt(served: Served, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return served.prompts.text(prompt)
    return served.prompts.ids(prompt)


class _Answer:
    """Writes one request's answer in OpenAI's shape."""

    def __init__(
        self,
        served: Served,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        generations: Sequence[Generation],
    ) -> None:
        self.served, self.body, self.generations = served, body, generations
        self.n = body.n or 1
        self.outputs = [
            _Output(served, body, prompt, given, generation, output)
            for prompt, given, generation in zip(prompts, body.prompt, generations, strict=True)
            for output in range(self.n)
        ]
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or served.name,
        }

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream's events; an error ends it as one of them."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        head = self.head | ({"usage": None} if with_usage else {})
        try:
            async with aclosing(merged(self.generations)) as output_deltas:
                async for index, output_delta in output_deltas:
                    at = index * self.n + output_delta.output
                    text, logprobs = self.outputs[at].new(output_delta)
                    if text or logprobs or output_delta.finish_reason:
                        choice = _choice(at, text, logprobs, _reason(output_delta))
                        if running:
                            head["usage"] = running_usage(self.generations)
                        yield frame({**head, "choices": [choice]})
            if with_usage:
                yield frame({**head, "choices": [], "usage": usage_body(await self._usage())})
        except Exception as error:
            yield frame(error_body(PATH, as_api_error(error)))
        yield DONE

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        texts = ["" for _ in self.outputs]
        logprobs: list[dict[str, Any] | None] = [None for _ in self.outputs]
        reasons: list[str | None] = [None for _ in self.outputs]
        async with aclosing(merged(self.generations)) as output_deltas:
            async for index, output_delta in output_deltas:
                at = index * self.n + output_delta.output
                text, new = self.outputs[at].new(output_delta)
                texts[at] += text
                if new is not None:
                    old = logprobs[at]
                    logprobs[at] = new if old is None else {k: old[k] + new[k] for k in new}
                reasons[at] = _reason(output_delta)
        choices = [_choice(i, texts[i], logprobs[i], reasons[i]) for i in range(len(texts))]
        return {**self.head, "choices": choices, "usage": usage_body(await self._usage())}

    async def _usage(self) -> Usage:
        usage = Usage()
        for generation in self.generations:
            usage.add(await generation.usage())
        if self.body.max_tokens == 0:
            usage.completion_tokens = 0
        return usage


class _Output:
    """One of the outputs, as it grows."""

    def __init__(
        self,
        served: Served,
        body: CompletionRequest,
        prompt: Prompt,
        given: str | list[int],
        generation: Generation,
        output: int,
    ) -> None:
        self.body, self.prompt, self.generation, self.output = body, prompt, generation, output
        self.tokenizer = served.model.tokenizer
        self.echo = ""
        self.begun = not body.echo
        if body.echo:
            self.echo = given if isinstance(given, str) else self._decoded(given)
        self.logprobs: TextLogprobs | None = None
        if body.logprobs is not None and self.tokenizer is not None:
            self.logprobs = TextLogprobs(self.tokenizer)
            if body.echo:  # what the tokenizer puts in front of a text is no part of it
                size = sum(len(self.logprobs.token(token)) for token in prompt.ids)
                self.logprobs = TextLogprobs(self.tokenizer, len(self.echo) - size)

    def new(self, output_delta: OutputDelta) -> tuple[str, dict[str, Any] | None]:
        """What a piece adds: text, and log-probabilities if they are asked for."""
        text, lists = "", None
        if not self.begun:
            self.begun, text = True, self.echo
            lists = self._of_prompt()
        if self.body.max_tokens == 0:
            return text, lists
        if self.logprobs is not None and output_delta.logprobs:
            new = self.logprobs.lists(output_delta.logprobs, self.body.logprobs or 0)
            lists = new if lists is None else {k: lists[k] + new[k] for k in new}
        return text + output_delta.text, lists

    def _of_prompt(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        first = self.logprobs.first(self.prompt.ids[0])
        scored = self.generation.prompt_logprobs(self.output)
        rest = self.logprobs.lists(scored, self.body.logprobs or 0)
        return {k: first[k] + rest[k] for k in first}

    def _decoded(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _reason(output_delta: OutputDelta) -> str | None:
    if output_delta.finish_reason is None:
        return None
    return "stop" if output_delta.finish_reason == "stop" else "length"
