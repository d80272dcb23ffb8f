"""Whatever a request holds, the answer is no failure of the server's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import Running

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "type", "content", "text", "name"]), inner)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("path", BODIES)
def test_no_field_makes_it_fail(served: Running, path: str) -> None:
    with served.http() as http:
        schemas = http.get("/openapi.json").json()
        body = schemas["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].rpartition("/")[2]
        fields = sorted(schemas["components"]["schemas"][name]["properties"])

        @settings(max_examples=25, deadline=None, derandomize=True)
        @given(st.sampled_from(fields), VALUES)
        def ask(field: str, value: Any) -> None:
            asked = json.dumps({**BODIES[path], field: value})
            limited = {"max_tokens", "max_output_tokens", "max_completion_tokens"}
            if field in limited and value is None:
                return  # to the end of the context
            status = http.post(path, content=asked).status_code
            assert status in (200, 400, 404), asked

        ask()
    assert served.idle()


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "regex", "regex": "\ud800"}}),
        ("/v1/responses", {"tools": [{"type": "function", "name": "\udfff"}]}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {"properties": {"\ud800": 1}}}]}),
        ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}),
    ],
)
def test_no_half_of_a_character_makes_it_fail(
    served: Running, path: str, inside: dict[str, Any]
) -> None:
    with served.http() as http:
        answer = http.post(path, content=json.dumps(BODIES[path] | inside))
    assert answer.status_code == 400 and "surrogate" in answer.text


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a":' * 9999, b"[1]", b"1" * 9999])
def test_no_broken_body_makes_it_fail(served: Running, body: bytes) -> None:
    with served.http() as http:
        assert {http.post(path, content=body).status_code for path in BODIES} == {400}
