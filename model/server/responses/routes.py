"""`/v1/responses`: an answer in items, whole or event by event."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from runtime.engine import TokenLogprob

from ..http.answers import respond
from ..http.errors import as_api_error
from ..http.frames import frame
from ..openai.logprobs import chat_logprobs
from ..parsers import Content
from ..serving.generation import Generation, OutputDelta, Usage
from ..serving.served import Served
from .convert import conversation, pictures
from .items import Items, Told
from .schema import ResponsesRequest
from .tools import Tools

PATH = "/v1/responses"


def response_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post(PATH)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        tools = Tools(body.tools or ())
        raw = (await request.json()).get("tools") or []
        answer = _Answer(served, body, tools, raw, await _submitted(served, body, request, tools))
        headers = _notes(body, tools)
        return await respond(request, answer, body.stream, served.settings, headers)

    return router


async def _submitted(
    served: Served, body: ResponsesRequest, request: Request, tools: Tools
) -> Generation:
    served.check_name(body.model)
    given = body.sampling() | {"priority": served.enter(request)}
    functions, choice = tools.chosen(body.tool_choice)
    effort = None if body.reasoning is None else body.reasoning.effort
    prompt = await served.prepared(served.prompts.chat, conversation(body), functions, None, effort)
    form = body.text and body.text.format
    given |= await served.constraint(
        prompt,
        None if form is None else form.model_dump(by_alias=True, exclude_none=True),
        functions,
        choice,
        body.parallel_tool_calls,
    )
    params = served.params(prompt, given)
    one_call = body.parallel_tool_calls is False
    return served.submit(request, prompt, params, True, functions, one_call)


def _notes(body: ResponsesRequest, tools: Tools) -> dict[str, str]:
    """What was left out of a request, as a header of its answer."""
    notes = [f"the tool {kind[:60]} is left out" for kind in tools.left_out]
    if count := pictures(body):
        notes.append(f"{count} images or files are left out")
    text = "".join(c if c.isprintable() and c.isascii() else "?" for c in "; ".join(notes))
    return {"X-Pykernels-Note": text} if notes else {}


class _Answer:
    """Writes one request's answer."""

    def __init__(
        self,
        served: Served,
        body: ResponsesRequest,
        tools: Tools,
        raw_tools: list[Any],
        generation: Generation,
    ) -> None:
        self.generation, self.items = generation, Items(tools)
        self.tokenizer = served.tokenizer
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text a parser still holds
        self.id, self.created = f"resp_{secrets.token_hex(12)}", int(time.time())
        effort = None if body.reasoning is None else body.reasoning.effort
        choice = body.tool_choice
        form: dict[str, Any] = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        self.settings: dict[str, Any] = {
            "model": body.model or served.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": generation.params.temperature,
            "text": {"format": form},
            "tool_choice": choice.model_dump(exclude_none=True)
            if isinstance(choice, BaseModel)
            else choice or "auto",
            "tools": raw_tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": generation.params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
        }

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream's events; an error ends it as one of them."""
        number = 0

        def event(kind: str, fields: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return frame({"type": kind, "sequence_number": number - 1, **fields}, kind)

        begun = self._response("in_progress")
        yield event("response.created", {"response": begun})
        yield event("response.in_progress", {"response": begun})
        try:
            async with self.generation as output_deltas:
                cut = None
                async for output_delta in output_deltas:
                    for told in self._told(output_delta):
                        yield event(*told)
                    cut = output_delta.finish_reason
                for told in self.items.close("completed" if cut == "stop" else "incomplete"):
                    yield event(*told)
                whole = self._ended(cut, await output_deltas.usage())
                yield event(f"response.{whole['status']}", {"response": whole})
        except Exception as error:
            told_error = as_api_error(error)
            failed = self._response("failed")
            failed["error"] = {"code": "server_error", "message": str(told_error.detail)}
            yield event("response.failed", {"response": failed})

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        cut = None
        async with self.generation as output_deltas:
            async for output_delta in output_deltas:
                for _ in self._told(output_delta):
                    pass
                cut = output_delta.finish_reason
            for _ in self.items.close("completed" if cut == "stop" else "incomplete"):
                pass
            return self._ended(cut, await output_deltas.usage())

    def _told(self, output_delta: OutputDelta) -> Iterator[Told]:
        """Yields what the client is told of a piece."""
        self._logprobs += output_delta.logprobs
        texts = [i for i, event in enumerate(output_delta.events) if isinstance(event, Content)]
        for i, event in enumerate(output_delta.events):
            logprobs = []
            if texts and i == texts[-1] and self._logprobs:
                logprobs = chat_logprobs(self.tokenizer, self._logprobs)["content"]
            yield from self.items.events(event, logprobs)
        if output_delta.events:  # those of reasoning and calls are not told
            self._logprobs = []

    def _ended(self, cut: str | None, usage: Usage) -> dict[str, Any]:
        whole = self._response("completed" if cut == "stop" else "incomplete")
        if cut != "stop":
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            whole["completed_at"] = int(time.time())
        whole["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return whole

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self.settings,
            "output": [*self.items.output],
            "usage": None,
        }
