"""Calls as models write them when they stray from their template."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.server.parsers import parser_for

from .streams import BY_MODEL, RECORDED, parse


def parse_as(model: str, text: str, prompt_tail: str = "") -> dict[str, Any]:
    """What a model's parser makes of a text, in one piece and letter by letter."""
    row = next(row for name, row in BY_MODEL.items() if model in name)
    parser = parser_for(row["model_type"], row["template"])
    message = parse(parser, [text], prompt_tail)
    assert parse(parser, text, prompt_tail) == message
    return message


GOOD = {
    "Qwen3-30B": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "Coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "GLM-4.6": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "V3-0324": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "V3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "Kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "MiniMax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "Nemo": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "Small": '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}',
    "LFM2": "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
}


@pytest.mark.parametrize("model", GOOD)
def test_what_is_no_call_is_content_and_the_next_call_is_found(model: str) -> None:
    good = GOOD[model]
    broken = good[: len(good) // 4]
    text = f"One {broken} (no, wait)\n{good}\nTwo{good}"

    message = parse_as(model, text)

    assert message["content"] == f"One {broken} (no, wait)Two"
    assert message["calls"] == [["f", '{"a": 1}', True]] * 2


@pytest.mark.parametrize(
    ("model", "text", "arguments"),
    [
        ("Qwen3-30B", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
        ("Qwen3-30B", '<tool_call>{"name": "f", "arguments": "{}"}', "{}"),
        ("Qwen3-30B", '<tool_call>{"name": "f"}</tool_call>', "{}"),
        (
            "Qwen3-30B",
            '<tool_call>{"name": "f", "arguments": {"</tool_call>": "}"}}',
            '{"</tool_call>": "}"}',
        ),
        (  # control characters and half surrogates, which a client could not read
            "Qwen3-30B",
            '<tool_call>{"name": "f", "arguments": {"a": "1\n\t2"}}</tool_call>',
            '{"a": "1\\n\\t2"}',
        ),
        (
            "Qwen3-30B",
            '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
            '{"a": "\\ud800"}',
        ),
        (  # no JSON: given as it is
            "Qwen3-30B",
            """<tool_call>{"name": "f", "arguments": {'a': 1}}</tool_call>""",
            "{'a': 1}}",
        ),
        ("Coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", '{"a": 1}'),
        (
            "Coder",
            "<function=f>\n<parameter=a>\n1\n<parameter=b>\n\n</parameter></function>",
            '{"a": 1, "b": ""}',
        ),
        ("Coder", "<tool_call><function=f></function></tool_call>", "{}"),
        ("GLM-4.6", "<tool_call>f</tool_call>", "{}"),
        ("GLM-4.6", GOOD["GLM-4.6"].replace("\n", ""), '{"a": 1}'),
        ("V3-0324", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>", "{}"),
        ("V3.1", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "1<｜tool▁call▁end｜>', '{"a": "1'),
        ("Kimi", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "{}"),
        ("LFM2", "<|tool_call_start|>f(a = 1, )", '{"a": 1}'),
        ("LFM2", "<|tool_call_start|>[f()]<|tool_call_end|>", "{}"),
        (
            "LFM2",
            '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}]<|tool_call_end|>',
            '{"a": 1}',
        ),
        (  # an apostrophe without its backslash, Python's constants and JSON's
            "LFM2",
            """<|tool_call_start|>[f(a='it's (1, "me")', b=[1, {'k': None}], c=True, d=null)]""",
            '{"a": "it\'s (1, \\"me\\")", "b": [1, {"k": null}], "c": true, "d": null}',
        ),
        (
            "LFM2",
            r"""<|tool_call_start|>[f(a="1\n\"2\" \u00fc \d", b='<|x|>')]<|tool_call_end|>""",
            r'{"a": "1\n\"2\" ü \\d", "b": "<|x|>"}',
        ),
        ("Small", '[TOOL_CALLS]f{"a": 1}', '{"a": 1}'),
        ("Small", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "1"}]', '{"a": 1}'),
    ],
)
def test_a_call_that_strays_is_still_one(model: str, text: str, arguments: str) -> None:
    calls = [["f", arguments, True]]
    assert parse_as(model, text) == {"content": "", "reasoning": "", "calls": calls}


@pytest.mark.parametrize("model", ["Qwen3-30B", "Qwen3.5", "Kimi", "GLM-4.7", "LFM2"])
def test_a_call_may_end_reasoning_that_was_not_closed(model: str) -> None:
    good = GOOD.get(model) or GOOD["Coder" if model == "Qwen3.5" else "GLM-4.6"]
    message = parse_as(model, f"I call {good}", "<think>\n")
    calls = [["f", '{"a": 1}', True]]
    assert message == {"content": "", "reasoning": "I call", "calls": calls}


def test_calls_of_lfm2_stand_in_one_list_before_the_answer() -> None:
    """The first is the example of its model card."""
    first = 'get_candidate_status(candidate_id="12345")'
    marked = "<|tool_call_start|>[{}]<|tool_call_end|>Checking the status."
    message = parse_as("LFM2", marked.format(f"{first}, f(a=2), "))
    calls = [["get_candidate_status", '{"candidate_id": "12345"}', True], ["f", '{"a": 2}', True]]
    assert message == {"content": "Checking the status.", "reasoning": "", "calls": calls}
    cut = parse_as("LFM2", marked.format(f"{first}, f(a=2, 3)"))
    assert cut["calls"] == [calls[0], ["f", '{"a": 2', False]]
    assert cut["content"] == "Checking the status."


def test_the_channels_of_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>"
        "assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    )
    message = parse_as("gpt-oss", text + '{"a": "<|x|>"}', "<|end|><|start|>assistant")
    calls = [["f", '{"a": "<|x|>"}', True]]
    assert message == {"content": "I look.", "reasoning": "One.\nTwo.", "calls": calls}

    final = parse_as("gpt-oss", "Yes.\nNo.", "<|start|>assistant<|channel|>final<|message|>")
    assert final == {"content": "Yes.\nNo.", "reasoning": "", "calls": []}
    bare = parse_as("gpt-oss", "Yes.", "<|start|>assistant")
    assert bare == {"content": "Yes.", "reasoning": "", "calls": []}


@pytest.mark.parametrize("model", GOOD)
def test_a_name_without_end_is_content(model: str) -> None:
    text = re.sub(r'(?<=[">=.\[\]])f(?=[">\n<:\[(])', "f" * 5000, GOOD[model])
    assert len(text) > 5000
    assert parse_as(model, text) == {"content": text, "reasoning": "", "calls": []}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_markers_in_any_order_and_pieces_are_one_message(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(RECORDED))
    parser = parser_for(row["model_type"], row["template"])
    words = [*parser.special_tokens, '{"name": "f", "arguments": ', '{"a": [1', "}", "]", '"', "f"]
    words += ["<function=f>", "<parameter=a>", 'name="f">', " ", "\n", ":1", "</", "function", "="]
    words += [row["text"][i : i + 40] for i in range(0, len(row["text"]), 40)]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=30)))

    message = parse(parser, [text])

    assert parse(parser, text) == message
    size = data.draw(st.integers(2, 20))
    assert parse(parser, [text[i : i + size] for i in range(0, len(text), size)]) == message
