"""Plain text of a parameter as JSON of the declared type, against jsonschema's words for types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from model.server.parsers import parser_for

from .streams import BY_MODEL, parse

ROW = BY_MODEL["zai-org/GLM-4.6"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, ' "a"\n', ' "a"\n'),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": "object"}, '{"a": [true]}', {"a": [True]}),
        ({"type": "object"}, "{a}", "{a}"),
        ({"type": "array"}, "[" * 10**5, "[" * 10**5),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/$defs/N"}, "7", 7),
        ({}, "7", 7),
        ({}, "seven", "seven"),
    ],
)
def test_a_value_has_the_type_that_the_tool_declares(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"N": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"

    message = parse(parser_for(ROW["model_type"], ROW["template"]), [call], tools=tools)

    assert json.loads(message["calls"][0][1]) == {"a": value}


def test_gemma_may_quote_as_json_and_write_python_s_none() -> None:
    text = (
        '<|tool_call>call:f{"city": "Z\\"ürich", days: 3 ,where:{k:None,l:[]},at:noon}<tool_call|>'
    )
    parser = parser_for("gemma4_text")
    message = parse(parser, text)
    [(name, arguments, complete)] = message["calls"]
    wanted = {"city": 'Z"ürich', "days": 3, "where": {"k": None, "l": []}, "at": "noon"}
    assert (name, json.loads(arguments), complete) == ("f", wanted, True)
    broken = parse(parser, "<|tool_call>call:f{city;<tool_call|> then")
    assert broken["calls"] == [["f", "{city;", True]] and broken["content"] == "then"
