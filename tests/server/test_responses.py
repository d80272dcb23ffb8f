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


def test_the_texts_logprobs_are_those_of_chat(served: Running) -> None:
    """Whole and streamed; without reasoning and calls each token of the text has one."""
    asked: Any = [{"role": "user", "content": "def quicksort(xs):"}]
    settings: Any = {"model": NAME, "temperature": 0}
    chat = served.openai().chat.completions.create(
        **settings, messages=asked, max_tokens=12, logprobs=True, top_logprobs=2
    )
    wanted = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    with_logprobs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    settings |= with_logprobs | {"input": asked, "max_output_tokens": 12}
    whole = served.openai().responses.create(**settings)
    message = whole.output[0]
    assert message.type == "message" and message.content[0].type == "output_text"
    found = message.content[0].logprobs
    assert found and wanted and [one.token for one in found] == [one.token for one in wanted]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in wanted])
    assert {len(one.top_logprobs) for one in found} == {2}
    told = list(served.openai().responses.create(**settings, stream=True))
    deltas = [event for event in told if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [o.token for o in wanted]


def test_some_tools_are_allowed_and_chats_are_told_apart(scripted: Script) -> None:
    server = scripted(["No."])
    create = server.openai().responses.create
    of_chat: Any = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(openai.BadRequestError, match="beside the type"):
        create(model=NAME, input="x", tools=of_chat)
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [ADD | {"name": "other"}]}
    with pytest.raises(openai.BadRequestError, match="'other' is none of the tools"):
        create(model=NAME, input="x", tools=[ADD], tool_choice=choice)
    choice["tools"] = [{"type": "function", "name": "add"}, {"type": "mcp", "server_label": "x"}]
    answer = create(model=NAME, input="x", tools=[ADD], tool_choice=choice)
    assert answer.output_text == "No."


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
def test_nothing_is_kept(served: Running, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="keeps no answers"):
        served.openai().responses.create(model=NAME, input="x", **{name: "resp_1"})  # type: ignore
