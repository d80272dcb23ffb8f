"""Which texts a JSON schema lets pass: none but its values, whatever llguidance does with it.

What is right stands in the specification (JSON Schema 2020-12, Validation).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.server.parsers import parser_for
from model.server.structured import constraint_for
from pykernels.errors import PykernelsError

from ..parsers.streams import BY_MODEL
from .test_grammars import of_plain_model, passes
from .vocabularies import vocabulary

NAMES = {"a": {"type": "string"}, "b": {"type": "string"}}
CLOSED = {"type": "object", "additionalProperties": False}
INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}


def wanted(schema: Any, strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (  # a pattern of names that are all declared: no more of them may follow
            {**CLOSED, "properties": NAMES, "patternProperties": {"^(a|b)$": {"maxLength": 2}}},
            ['{"a": "xy"}', '{"a": "", "b": ""}'],
            ['{"a": "xyz"}'],
        ),
        (
            {"type": "object", "properties": NAMES, "patternProperties": {"^a": {"maxLength": 2}}},
            ['{"a": "xy"}', '{"ab": 1}', '{"c": 1}'],
            ['{"a": "xyz"}', '{"ab": "xyz"}'],
        ),
        ({"properties": NAMES, "type": "object"}, ['{"c": 1}'], ['{"a": 1}', '{"\\u0061": 1}']),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.25"], ["1", "1.0"]),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, ["-0.5"], ["-0", "-0.0"]),
        ({"type": "integer", **INT64}, ["0", "-4503599627370497"], ["9223372036854775808"]),
        ({"type": "number", "maximum": 1e300}, ["1.5"], []),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"const": 1}]},
            ["[1]", "[1, 2]"],
            ["[2]"],
        ),
        ({"items": {"const": 1}, "uniqueItems": False}, ["[1, 1]"], ["[2]"]),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
            ['{"a": 1}'],
            ["{}"],
        ),
        ({**CLOSED, "properties": {"a": {"$ref": "#"}}}, ['{"a": {"a": {}}}'], ['{"a": 1}']),
    ],
)
def test_what_passes_a_strict_schema_is_valid(schema: Any, good: list[str], bad: list[str]) -> None:
    tokenizer, _ = vocabulary()
    constraint = of_plain_model(response_format=wanted(schema, True))
    for text in good:
        assert passes(constraint, tokenizer.encode(text, add_special_tokens=False)), text
    for text in bad:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert not passes(constraint, ids), text


def test_no_name_is_begun_where_all_are_used_up() -> None:
    """Else the answer ends there, in the middle."""
    tokenizer, _ = vocabulary()
    schema = {**CLOSED, "properties": NAMES, "patternProperties": {"^(a|b)$": {}}}
    constraint = of_plain_model(response_format=wanted(schema, True))
    assert constraint is not None
    state = constraint.begin()
    for token in tokenizer.encode('{"a": "x", "b": "y"', add_special_tokens=False):
        state.accept(token)
    mask = np.zeros(4224 // 32, np.int32)
    state.allowed(mask)
    comma, end = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ",}")
    assert [mask[token // 32] >> token % 32 & 1 for token in (comma, end)] == [0, 1]


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({key: value}, key)
        for key, value in {
            "uniqueItems": True,
            "contains": {"const": 1},
            "propertyNames": {"maxLength": 3},
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"a": {}},
            "if": {"const": 1},
            "not": {"const": 1},
            "unevaluatedProperties": False,
            "multipleOf": 0.07,
        }.items()
    ]
    + [
        # In draft 7 llguidance knows no such word, and says nothing.
        ({"minContains": 2, "$schema": "http://json-schema.org/draft-07/schema#"}, "minContains"),
        ({"type": "object", "minProperties": 2}, "minProperties"),  # one name twice is one
        ({"prefixItems": [{}], "additionalItems": False}, "additionalItems"),
        ({"items": [{}], "anyOf": [{}], "additionalItems": False}, "additionalItems"),
        ({"format": "unknown"}, "format"),
        ({"exclusiveMinimum": True, "minimum": 1}, "exclusiveMinimum"),
        ({"pattern": "^a\\x01$"}, "pattern"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "oneOf"),
    ],
)
def test_a_keyword_that_cannot_be_enforced(keywords: Any, named: str) -> None:
    """It is an error that names it where the schema is strict, and left out where it is not."""
    schema = {"type": "object", "properties": {"x": keywords}}
    with pytest.raises(PykernelsError, match=f"cannot be enforced: .*{named}"):
        of_plain_model(response_format=wanted(schema, True))
    assert of_plain_model(response_format=wanted(schema, False)) is not None


def test_counts_of_optional_names_are_ignored_unless_strict() -> None:
    tokenizer, _ = vocabulary()
    schema = {**CLOSED, "properties": NAMES, "minProperties": 2}
    constraint = of_plain_model(response_format=wanted(schema, False))
    assert passes(constraint, tokenizer.encode('{"a": ""}', add_special_tokens=False))
    with pytest.raises(PykernelsError, match="Properties only"):
        of_plain_model(response_format=wanted(schema, True))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": -(1 << 63)}, "beyond 2"),
        ({"enum": [{"a": [(1 << 53) + 1]}]}, "beyond 2"),
        ({"minimum": 1 << 60}, "beyond 2"),
        ({"const": "a\x00b"}, "control character"),
        ({"$ref": "#"}, "for ever"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "for ever"),
        ({**CLOSED, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "for ever"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "for ever"),
        (nested(500), "levels"),
        ({"enum": [1] * 60_000}, "values"),
    ],
)
def test_a_schema_that_cannot_be_is_one_line(schema: Any, named: str, strict: bool) -> None:
    with pytest.raises(PykernelsError, match=named) as caught:
        of_plain_model(response_format=wanted(schema, strict))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    if "$ref" not in str(schema):
        with pytest.raises(PykernelsError, match=named):
            of_plain_model(tools=[{"function": tool}], tool_choice="required")


def test_a_grammar_that_ends_its_process_ends_no_other() -> None:
    """llguidance 1.9 follows this one until the stack ends."""
    wanted = {"type": "grammar", "grammar": 'start: %json {"const": -9223372036854775808}'}
    for _ in range(2):
        with pytest.raises(PykernelsError, match="cannot be enforced") as caught:
            of_plain_model(response_format=wanted)
        assert "\n" not in str(caught.value)
        assert of_plain_model(response_format={"type": "regex", "regex": "[ab]+"}) is not None


def test_a_grammar_without_end_is_one_line() -> None:
    with pytest.raises(PykernelsError, match="cannot be enforced") as caught:
        of_plain_model(response_format={"type": "grammar", "grammar": 'start: start "a"'})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_named_tool_is_called_once() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokenizer, words = vocabulary()
    row = BY_MODEL["Qwen/Qwen3-30B-A3B"]
    parser = parser_for(row["model_type"], row["template"])
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for choice, twice in (("required", True), ({"function": {"name": "f"}}, False)):
        constraint = constraint_for(words, parser, tools=tools, tool_choice=choice)
        assert passes(constraint, ids(call))
        assert passes(constraint, ids(f"{call}\n{call}")) == twice
