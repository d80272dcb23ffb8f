"""OpenAI's Responses API as its own client, and Codex, use it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from .conftest import CALL, NAME, PARAMETERS, Running, Script

ADD: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
SETTINGS: Any = {"model": NAME, "store": False, "instructions": "Use tools."}


def test_calls_reasoning_and_text_are_items(scripted: Script) -> None:
    """And go back as the model wrote them, reasoning in what counts as encrypted."""
    told = "<think>Two.</think>See:" + CALL
    server = scripted([told, told, "Three."])
    responses, given = server.openai().responses, [{"role": "user", "content": "1 + 2?"}]
    whole = responses.create(**SETTINGS, input=given, tools=[ADD])  # type: ignore[arg-type]
    with responses.stream(**SETTINGS, input=given, tools=[ADD]) as stream:  # type: ignore[arg-type]
        events = list(stream)
        streamed = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    call = whole.output[2]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"a": 1, "b": [2, "x"]}
    assert whole.output_text == streamed.output_text == "See:"
    kept = [item.to_dict() for item in whole.output]
    del kept[0]["content"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    second = responses.create(**SETTINGS, input=[*given, *kept, result], tools=[ADD])  # type: ignore[list-item]
    assert second.output_text == "Three." and second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 100


def test_custom_tools_and_namespaces_as_codex_sends_them(scripted: Script) -> None:
    patch = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    look = '<tool_call>{"name": "mcp__files__look", "arguments": {}}</tool_call>'
    server = scripted([patch + look])
    look_tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    tools: Any = [
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "namespace", "name": "mcp__files", "description": "", "tools": [look_tool]},
        {"type": "web_search", "external_web_access": False},
    ]
    extra = {"client_metadata": {"a": "b"}}
    answer = server.openai().responses.with_raw_response.create(
        **SETTINGS,
        input="Go.",
        tools=tools,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        extra_body=extra,
    )
    first, second = answer.parse().output
    assert first.type == "custom_tool_call" and first.input == "*** Begin"
    assert second.type == "function_call" and second.name == "look"
    assert second.namespace == "mcp__files"
    assert "web_search" in answer.headers["X-Pykernels-Note"]


def test_one_call_where_calls_may_not_be_parallel(scripted: Script) -> None:
    server = scripted([CALL + CALL + "and more"])
    answer = server.openai().responses.create(
        **SETTINGS, input="Go.", tools=[ADD], parallel_tool_calls=False
    )
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.status == "completed" and server.idle()


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
def test_nothing_is_kept(served: Running, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="keeps no answers"):
        served.openai().responses.create(model=NAME, input="x", **{name: "resp_1"})  # type: ignore
