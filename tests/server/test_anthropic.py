"""Anthropic's API as its own client sees it."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import CALL, NAME, PARAMETERS, Running, Script

ASKED: Any = [{"role": "user", "content": "def quicksort(xs):"}]
ADD: Any = {"name": "add", "description": "a + b", "input_schema": PARAMETERS}


def test_a_stream_is_the_answer_in_pieces(served: Running) -> None:
    client = served.anthropic()
    settings: Any = {
        "model": NAME,
        "messages": ASKED,
        "max_tokens": 16,
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert pieces == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 16
    count = client.messages.count_tokens(model=NAME, messages=ASKED).input_tokens
    assert count == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_named(served: Running) -> None:
    create = served.anthropic().messages.create
    settings: Any = {
        "model": NAME,
        "messages": ASKED,
        "max_tokens": 16,
        "extra_body": {"temperature": 0},
    }
    block = create(**settings).content[0]
    assert block.type == "text"
    end = block.text[3:5]
    stopped = create(**settings, stop_sequences=["\0", end])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", end)


def test_a_loop_of_tools(scripted: Script) -> None:
    """Twenty turns, each with a call; from the second on the prompt is in the cache, though Claude
    Code's first line is another each time."""
    told = "<think>Add.</think>Let me see." + CALL
    server = scripted([told] * 20 + ["Done."])
    client, messages = server.anthropic(), list(ASKED)
    for turn in range(20):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={turn};"},
            {"type": "text", "text": "Use tools.", "cache_control": {"type": "ephemeral"}},
        ]
        settings: Any = {"model": NAME, "max_tokens": 1000, "system": system, "tools": [ADD]}
        with client.messages.stream(**settings, messages=messages) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        call = answer.content[-1]
        assert call.type == "tool_use" and call.input == {"a": 1, "b": [2, "x"]}
        assert turn == 0 or (answer.usage.cache_read_input_tokens or 0) > 100
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text"} | {"text": str(turn)}],
        }
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    done = client.messages.create(**settings, messages=messages)
    assert done.content[0].type == "text" and done.content[0].text == "Done."
    assert done.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("settings", "kind", "named"),
    [
        ({"extra_body": {"max_token": 1}}, "invalid_request_error", "max_token"),
        ({"model": "claude"}, "not_found_error", "claude"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "invalid_request_error",
            r"messages\[0\].content\[0\].text",
        ),
    ],
)
def test_errors_have_its_shape(
    served: Running, settings: dict[str, Any], kind: str, named: str
) -> None:
    import anthropic  # 2 s, for the worker that needs it

    asked: Any = {"model": NAME, "messages": ASKED, "max_tokens": 4} | settings
    with pytest.raises(anthropic.APIStatusError, match=named) as raised:
        served.anthropic().messages.create(**asked)
    assert raised.value.body["error"]["type"] == kind  # type: ignore[index,call-overload]


def test_what_its_servers_would_do_is_left_out_with_a_note(served: Running) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    picture: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    asked: Any = [{"role": "user", "content": [picture, {"type": "text", "text": "x"}]}]
    answer = served.anthropic().messages.with_raw_response.create(
        model=NAME, messages=asked, max_tokens=1, tools=[search]
    )
    note = answer.headers["X-Pykernels-Note"]
    assert "web_search_20250305" in note and "1 images" in note
