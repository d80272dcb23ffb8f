"""Which texts a request's constraint lets pass: the families' own calls, and JSON."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.server.parsers import parser_for
from model.server.structured import GrammarConstraint, constraint_for
from pykernels.errors import PykernelsError

from ..parsers.streams import BY_MODEL, RECORDED, TOOLS, parse
from .vocabularies import EOS, vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}

FAMILIES = pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["model"].split("/")[1])
SPECIAL = pytest.mark.parametrize("special", [True, False], ids=["special", "text"])


def passes(constraint: GrammarConstraint | None, ids: list[int]) -> bool:
    """Whether all tokens and then the end may come."""
    assert constraint is not None
    state = constraint.begin()
    for token in [*ids, EOS]:
        mask = np.zeros(4224 // 32, np.int32)
        state.allowed(mask)
        if not mask[token // 32] >> token % 32 & 1:
            return False
        state.accept(token)
    return state.finished


@SPECIAL
@FAMILIES
def test_a_call_that_the_template_writes_passes(row: dict[str, Any], special: bool) -> None:
    parser = parser_for(row["model_type"], row["template"])
    tokenizer, words = vocabulary(parser.special_tokens if special else ())
    wanted = {"tools": TOOLS, "tool_choice": "required", "prompt_tail": row["prompt_tail"]}
    constraint = constraint_for(words, parser, **wanted)
    # The order in which the call's name and channel are generated is not the template's.
    text = row["text"].replace("Let me look.", "").lstrip().removesuffix("<|call|>")
    text = text.replace(
        " to=functions.get_weather<|channel|>commentary json",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
    )

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert passes(constraint, ids(text))
    assert not passes(constraint, ids(text.replace("get_weather", "get_whether")))
    assert not passes(constraint, ids(text.replace("3", '"three"')))
    assert not passes(constraint, ids(text[:-12]))
    if not row["prompt_tail"].rstrip().endswith("<think>"):  # there any text may come first
        assert not passes(constraint, ids(f"No. {text}"))
    one = constraint_for(words, parser, **wanted, parallel_tool_calls=False)
    assert passes(one, ids(text)) == (text.count("city") == text.count("tags") + 1)
    for named in (
        {"type": "function", "function": {"name": "save_note"}},
        {"type": "tool", "name": "save_note"},
    ):
        other = constraint_for(words, parser, **wanted | {"tool_choice": named})
        assert not passes(other, ids(text))


@SPECIAL
@FAMILIES
def test_whatever_passes_is_parsed_as_a_call(row: dict[str, Any], special: bool) -> None:
    parser = parser_for(row["model_type"], row["template"])
    tokenizer, words = vocabulary(parser.special_tokens if special else ())
    properties = {
        "n": {"type": "integer", "minimum": -9, "maximum": 99},
        "kind": {"enum": ["one", "two words"]},
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "null"}, "maxItems": 3},
    }
    parameters = {"type": "object", "properties": properties, "required": ["n", "kind"]}
    tools = [{"type": "function", "function": {"name": "f.g", "parameters": parameters}}]
    think = getattr(parser.form, "think", None)
    tail = think[1] if think else row["prompt_tail"]
    constraint = constraint_for(
        words, parser, tools=tools, tool_choice="required", prompt_tail=tail
    )
    assert constraint is not None

    rng = random.Random(0)
    for _ in range(3):
        state, ids = constraint.begin(), []
        while not state.finished:
            mask = np.zeros(4224 // 32, np.int32)
            state.allowed(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            if bits.sum() > 2000:  # gpt-oss's reasoning: no more of it
                chosen = tokenizer.encode("<|end|>", add_special_tokens=False)
            else:
                chosen = [EOS if bits[EOS] else rng.choice(np.nonzero(bits)[0].tolist())]
            for token in chosen:
                state.accept(token)
            ids += chosen
            assert len(ids) < 4000
        text = tokenizer.decode([i for i in ids if i != EOS], skip_special_tokens=False)

        message = parse(parser, [text], tail, tools)

        assert message["content"] == "" and message["calls"]
        for name, arguments, complete in message["calls"]:
            found = json.loads(arguments)
            assert complete and name == "f.g"
            assert -9 <= found["n"] <= 99 and found["kind"] in ("one", "two words")
            assert set(found) <= set(properties)
            assert found.get("on", True) in (True, False)
            assert found.get("list", []) == [None] * len(found.get("list", []))


def of_plain_model(**wanted: Any) -> GrammarConstraint | None:
    """A constraint for a model without calls and reasoning."""
    return constraint_for(vocabulary()[1], parser_for("llama"), **wanted)


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"type": "json_object"}, ['{"a": [1, null]}', "{\n  \n}"], ["[1]", '{"a": 1', "{} {}"]),
        (
            JSON,
            ['{"a":1}', '{"a": 1, "b": ["ü\\n"]}', '{\n "a": 1\n}'],
            ['{"b": []}', '{"a": 1.5}', '{"a": 1, "c": 2}', '{"a":' + " " * 99 + "1}"],
        ),
        ({"type": "regex", "regex": r"\d+/[a-c]"}, ["12/b"], ["12/d", "12/", "x12/b"]),
        (
            {"type": "grammar", "grammar": 'start: "a" pair*\npair: "(" pair ")" | "b"'},
            ["a", "a((b))b"],
            ["a((b)", "b"],
        ),
    ],
    ids=["object", "schema", "regex", "grammar"],
)
def test_response_formats(wanted: dict[str, Any], good: list[str], bad: list[str]) -> None:
    tokenizer, _ = vocabulary()
    constraint = of_plain_model(response_format=wanted)
    for text in good:
        assert passes(constraint, tokenizer.encode(text, add_special_tokens=False)), text
    for text in bad:
        assert not passes(constraint, tokenizer.encode(text, add_special_tokens=False)), text


@SPECIAL
@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"])
def test_reasoning_is_free_and_the_answer_or_a_call_is_not(model: str, special: bool) -> None:
    row = BY_MODEL[model]
    parser = parser_for(row["model_type"], row["template"])
    tokenizer, words = vocabulary(parser.special_tokens if special else ())
    tail = row["prompt_tail"]
    constraint = constraint_for(words, parser, response_format=JSON, tools=TOOLS, prompt_tail=tail)
    answer, before = '{"a": 1}', "<think>\nLet me see: {}\n</think>\n\n"
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>'
    if model == "openai/gpt-oss-120b":
        answer = f"<|channel|>final<|message|>{answer}"
        before = "<|channel|>analysis<|message|>Let me see: {}<|end|><|start|>assistant"
        call = (
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "x"}'
        )

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for text in (answer, before + answer, before + call):
        assert passes(constraint, ids(text)), text
    for text in (before, f"{before}Yes. {answer}", "Yes."):
        assert not passes(constraint, ids(text)), text


def test_without_a_demand_there_is_no_constraint() -> None:
    assert of_plain_model(tools=TOOLS) is None
    assert of_plain_model(response_format={"type": "text"}) is None
    assert of_plain_model(tools=TOOLS, tool_choice="none") is None
    assert of_plain_model(tools=TOOLS, tool_choice={"type": "auto"}) is None


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "no schema"),
        ({"response_format": {"type": "regex", "regex": "(a"}}, "cannot be enforced"),
        ({"response_format": {"type": "grammar", "grammar": "start: x"}}, "cannot be enforced"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
            "cannot be enforced",
        ),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "h"}}}, "none of the tools"),
        ({"tools": TOOLS, "tool_choice": "h"}, "none of the tools"),
        ({"tool_choice": "required"}, "no tools"),
    ],
)
def test_what_cannot_be_is_one_line(wanted: dict[str, Any], named: str) -> None:
    with pytest.raises(PykernelsError, match=named) as caught:
        of_plain_model(**wanted)
    assert "\n" not in str(caught.value)


KEYWORDS = st.sampled_from(
    ["type", "properties", "required", "enum", "const", "anyOf", "items", "$ref", "$defs", "a"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_schema_is_used_or_refused(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from([BY_MODEL["zai-org/GLM-4.6"], BY_MODEL["Qwen/Qwen3-30B-A3B"]]))
    parameters = data.draw(st.dictionaries(KEYWORDS, _VALUES, max_size=4))
    if data.draw(st.booleans()):
        parameters["properties"] = {"a": data.draw(_VALUES)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = parser_for(row["model_type"], row["template"])
    with suppress(PykernelsError):
        constraint_for(vocabulary()[1], parser, tools=tools, tool_choice="required")
    call = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>"
    glm = BY_MODEL["zai-org/GLM-4.6"]
    message = parse(parser_for(glm["model_type"], glm["template"]), [call], tools=tools)
    assert json.loads(message["calls"][0][1])["a"] in ([1], "[1]")
