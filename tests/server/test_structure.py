"""Forms and tools that a request may ask for, in each API."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Running

MESSAGES = [{"role": "user", "content": "x"}]
ENDLESS = {"const": -(1 << 63)}
"""llguidance follows it until the stack ends."""


def forms(schema: Any) -> dict[str, dict[str, Any]]:
    """Bodies that ask for an answer by a schema, by API."""
    form = {"name": "x", "schema": schema}
    return {
        "chat/completions": {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": form},
        },
        "responses": {"input": "x", "text": {"format": {"type": "json_schema", **form}}},
        "messages": {
            "messages": MESSAGES,
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    }


def tools(name: str) -> dict[str, dict[str, Any]]:
    """Bodies with a tool, by API."""
    function = {"name": name, "parameters": {"type": "object"}}
    return {
        "chat/completions": {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": function}],
        },
        "responses": {"input": "x", "tools": [{"type": "function", **function}]},
        "messages": {
            "messages": MESSAGES,
            "max_tokens": 9,
            "tools": [{"name": name, "input_schema": {"type": "object"}}],
        },
    }


GRAMMAR = {"type": "grammar", "grammar": 'start: %json {"const": -9223372036854775808}'}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *forms(ENDLESS).items(),
        ("chat/completions", {"messages": MESSAGES, "response_format": GRAMMAR}),
    ],
)
def test_a_form_that_ends_its_compiler_ends_no_server(
    served: Running, path: str, body: dict[str, Any]
) -> None:
    with served.http() as http:
        answer = http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400
        assert "cannot be enforced" in answer.json()["error"]["message"]
        assert "\n" not in answer.json()["error"]["message"]
        digits = {"messages": MESSAGES, "response_format": {"type": "regex", "regex": "[0-9]{2}"}}
        good = http.post("/v1/chat/completions", json=digits).raise_for_status().json()
        assert good["choices"][0]["message"]["content"].isdecimal()


@pytest.mark.parametrize("path", tools(""))
def test_a_tool_has_a_name_that_the_api_allows(served: Running, path: str) -> None:
    """OpenAI's ``^[a-zA-Z0-9_-]{1,64}$``, Anthropic's with 128."""
    longest = 128 if path == "messages" else 64
    with served.http() as http:

        def refusal(name: str) -> str:
            answer = http.post(f"/v1/{path}", json=tools(name)[path])
            assert answer.status_code == 400  # at the latest by a template that knows no tools
            return str(answer.json()["error"]["message"])

        for name in ('a"b', "a b", "", "\u00e9", "a.b", "a\n", "a" * (longest + 1)):
            assert "name" in refusal(name) and "pattern" in refusal(name)
        for name in ("get_weather-2", "a" * longest):
            assert "template" in refusal(name)
