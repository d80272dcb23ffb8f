"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..http.answers import respond
from ..serving.prompts import Prompt
from ..serving.served import Served
from .answer import MessageAnswer
from .convert import conversation, effort, pictures
from .schema import MessagesRequest, PromptRequest, ServedTool, Tool

PATH = "/v1/messages"


def message_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])

    @router.post(PATH)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        answer = await _submitted(served, body, request)
        headers = _notes(body)
        return await respond(request, answer, body.stream, served.settings, headers)

    @router.post(f"{PATH}/count_tokens")
    async def count_tokens(body: PromptRequest) -> dict[str, int]:
        served.check_name(body.model)
        return {"input_tokens": len((await _prompt(served, body)).ids)}

    return router


async def _submitted(served: Served, body: MessagesRequest, request: Request) -> MessageAnswer:
    served.check_name(body.model)
    given = body.sampling() | {"priority": served.enter(request)}
    prompt = await _prompt(served, body)
    choice = body.tool_choice
    form = None if body.output_config is None else body.output_config.format
    one_call = choice is not None and choice.disable_parallel_tool_use is True
    given |= await served.constraint(
        prompt,
        None if form is None else {"type": "json_schema", "schema": form.schema_, "strict": True},
        _tools(body),
        None if choice is None else choice.plain(),
        not one_call,
    )
    params = served.params(prompt, given)
    generation = served.submit(request, prompt, params, True, _tools(body), one_call)
    return MessageAnswer(served, body, generation)


async def _prompt(served: Served, body: PromptRequest) -> Prompt:
    return await served.prepared(
        served.prompts.chat,
        conversation(body),
        _tools(body),
        None,
        effort(body),
        body.messages[-1].role == "assistant",
    )


def _tools(body: PromptRequest) -> list[dict[str, Any]]:
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    return [tool.plain() for tool in body.tools or () if isinstance(tool, Tool)]


def _notes(body: PromptRequest) -> dict[str, str]:
    """What was left out of a request, as a header of its answer."""
    left = [tool.type for tool in body.tools or () if isinstance(tool, ServedTool)]
    notes = [f"the tool {kind[:60]} is left out" for kind in left]
    if count := pictures(body.messages):
        notes.append(f"{count} images or documents are left out")
    text = "".join(c if c.isprintable() and c.isascii() else "?" for c in "; ".join(notes))
    return {"X-Pykernels-Note": text} if notes else {}
