"""`/v1/chat/completions`: a conversation's next message, whole or as it is written."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..http.answers import respond
from ..http.errors import as_api_error, bad_request, error_body
from ..http.frames import DONE, frame
from ..insight.experts import ExpertsTold
from ..parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from ..serving.generation import Generation, OutputDelta, Usage
from ..serving.served import Served
from .chat_schema import ChatRequest
from .logprobs import chat_logprobs
from .messages import chosen, plain

PATH = "/v1/chat/completions"


def chat_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post(PATH)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        generation = await _submitted(served, body, request)
        answer = _Answer(served, body, generation)
        return await respond(request, answer, body.stream, served.settings)

    return router


async def _submitted(served: Served, body: ChatRequest, request: Request) -> Generation:
    served.check_name(body.model)
    tools, choice = chosen(body.tools or (), body.tool_choice)
    given = body.sampling() | {"priority": served.enter(request, body.n or 1)}
    if body.pykernels is not None:
        given["routed_experts"] = body.pykernels.routed_experts
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    if body.most is not None:
        if body.most == 0:
            raise bad_request("max_tokens: an answer has at least one token.", "max_tokens")
        given["max_tokens"] = body.most
    prompt = await served.prepared(
        served.prompts.chat,
        plain(body.messages),
        tools,
        body.chat_template_kwargs,
        body.reasoning_effort,
        body.continue_final_message,
        body.add_generation_prompt,
    )
    form = body.response_format
    given |= await served.constraint(
        prompt,
        None if form is None else form.model_dump(by_alias=True, exclude_none=True),
        tools,
        choice,
        body.parallel_tool_calls,
    )
    params = served.params(prompt, given)
    return served.submit(request, prompt, params, True, tools, body.parallel_tool_calls is False)


class _Answer:
    """Writes one request's answer in OpenAI's shape."""

    def __init__(self, served: Served, body: ChatRequest, generation: Generation) -> None:
        self.served, self.body, self.generation = served, body, generation
        self.experts = ExpertsTold(served, body.pykernels)
        self.head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or served.name,
        }

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream's events; an error ends it as one of them."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        head = {**self.head, "object": "chat.completion.chunk"}
        if with_usage:
            head["usage"] = None

        def chunk(
            output: int, delta: Mapping[str, Any], output_delta: OutputDelta | None = None
        ) -> bytes:
            choice = {"index": output, "delta": delta, "logprobs": None, "finish_reason": None}
            if output_delta is not None:
                choice["logprobs"] = self._logprobs(output_delta)
                choice["finish_reason"] = self._reason(output_delta)
                told = self.experts.new(self.generation, output)
                if told is not None:
                    choice["pykernels"] = told
            if running:
                head["usage"] = running_usage([self.generation])
            return frame({**head, "choices": [choice]})

        try:
            async with self.generation as output_deltas:
                for output in range(len(output_deltas.parsers)):
                    yield chunk(output, {"role": "assistant", "content": ""})
                async for output_delta in output_deltas:
                    deltas = [delta for event in output_delta.events if (delta := _delta(event))]
                    asked = output_delta.logprobs or self.body.pykernels
                    last = output_delta if output_delta.finish_reason or asked else None
                    if last is not None and not deltas:
                        deltas = [{}]
                    for i, delta in enumerate(deltas, 1):
                        yield chunk(output_delta.output, delta, last if i == len(deltas) else None)
                if with_usage:
                    usage = usage_body(await output_deltas.usage())
                    yield frame({**head, "choices": [], "usage": usage})
        except Exception as error:
            yield frame(error_body(PATH, as_api_error(error)))
        yield DONE

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        messages = [_Message() for _ in self.generation.parsers]
        async with self.generation as output_deltas:
            async for output_delta in output_deltas:
                messages[output_delta.output].add(output_delta, self._logprobs(output_delta))
                if output_delta.finish_reason:
                    messages[output_delta.output].reason = self._reason(output_delta)
            usage = await output_deltas.usage()
        choices = [message.choice(i) for i, message in enumerate(messages)]
        for i, choice in enumerate(choices):
            if (told := self.experts.new(self.generation, i)) is not None:
                choice["pykernels"] = told
        body = {**self.head, "object": "chat.completion", "choices": choices}
        return {**body, "usage": usage_body(usage)}

    def _logprobs(self, output_delta: OutputDelta) -> dict[str, Any] | None:
        if not output_delta.logprobs or self.served.model.tokenizer is None:
            return None
        return chat_logprobs(self.served.model.tokenizer, output_delta.logprobs)

    def _reason(self, output_delta: OutputDelta) -> str | None:
        if output_delta.finish_reason is None:
            return None
        return reason_word(output_delta, self.generation)


class _Message:
    """One output, collected."""

    def __init__(self) -> None:
        self.content, self.reasoning = list[str](), list[str]()
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.reason: str | None = None

    def add(self, output_delta: OutputDelta, logprobs: dict[str, Any] | None) -> None:
        if logprobs is not None:
            self.logprobs += logprobs["content"]
        for event in output_delta.events:
            if isinstance(event, Content):
                self.content.append(event.text)
            elif isinstance(event, Reasoning):
                self.reasoning.append(event.text)
            elif isinstance(event, ToolCallStart):
                function = {"name": event.name, "arguments": ""}
                self.calls.append({"id": event.id, "type": "function", "function": function})
            elif isinstance(event, ToolCallArguments):
                self.calls[event.index]["function"]["arguments"] += event.text

    def choice(self, index: int) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        logprobs = {"content": self.logprobs, "refusal": None} if self.logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.reason,
        }


def _delta(event: Event) -> dict[str, Any] | None:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(event, ToolCallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def reason_word(output_delta: OutputDelta, generation: Generation) -> str:
    """Why an output ended, in OpenAI's words: it has none for a time limit but "length"."""
    if output_delta.finish_reason == "stop":
        return "tool_calls" if output_delta.output in generation.called else "stop"
    return "length"


def running_usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """The usage so far, which each chunk of a stream has if that is asked for."""
    prompt = sum(generation.prompt_tokens for generation in generations)
    written = sum(generation.completion_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
