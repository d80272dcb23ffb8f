"""A call and its result, given back by each API's own client as it has them."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import CALL, NAME, PARAMETERS, Running, Script

ASKED: Any = [{"role": "user", "content": "1 + 2?"}]

TEXTS = {
    "Qwen3's first": "{% if m.content.startswith('<tool_response>') %}!{% endif %}{{ m.content }}",
    "QwQ": "{{ m.content.split('</think>')[-1].lstrip() }}",
    "LFM2": "{{ m.content if m.content is string else m.content | tojson }}",
    "Granite 3.3": "{{ m['content'] + '<|end_of_text|>' }}",
    "Devstral": "{% if not (m['content'] is string) %}{{ raise_exception('no text') }}{% endif %}",
}
"""What chat templates do with a text, also with that of a message which has calls beside it."""


@pytest.fixture(params=TEXTS)
def server(request: pytest.FixtureRequest, scripted: Script) -> Running:
    """Its model calls a tool, then answers."""
    server = scripted([CALL, "Three."])
    assert server.llm.tokenizer is not None
    text = TEXTS[request.param]
    server.llm.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]" + text + "{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}[assistant]"
        "{% if tools %}{% endif %}"
    )
    return server


def test_of_chat_completions(server: Running) -> None:
    create, messages = server.openai().chat.completions.create, list(ASKED)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    answer = create(model=NAME, messages=messages, tools=tools).choices[0].message
    (call,) = answer.tool_calls or ()
    assert answer.content is None
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    given: Any = [*messages, answer.model_dump(), result]
    assert create(model=NAME, messages=given, tools=tools).choices[0].message.content == "Three."


def test_of_responses(server: Running) -> None:
    """The items come back with all their fields, those that are null too."""
    create = server.openai().responses.create
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    answer = create(model=NAME, input=ASKED, tools=tools, metadata={"turn": "1"})
    assert answer.metadata == {"turn": "1"}
    (call,) = answer.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    given: Any = [*ASKED, *(item.model_dump() for item in answer.output), result]
    assert create(model=NAME, input=given, tools=tools).output_text == "Three."


def test_of_messages(server: Running) -> None:
    """By the client's own runner, which goes on without a thread where there are none."""
    from anthropic import beta_tool  # 2 s, for the worker that needs it

    @beta_tool
    def add(a: int, b: list[Any]) -> str:
        """Adds numbers."""
        return str(a + b[0])

    runner = server.anthropic().beta.messages.tool_runner(
        model=NAME, max_tokens=200, messages=ASKED, tools=[add]
    )
    last = runner.until_done().content[0]
    assert last.type == "text" and last.text == "Three."
