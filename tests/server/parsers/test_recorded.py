"""Messages that real chat templates render are parsed back, however they are cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from model.server.parsers import Content, Reasoning, ToolCallStart, parser_for

from .streams import BY_MODEL, CALLS, RECORDED, TOOLS, parse

PARAMETERS = pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["model"].split("/")[1])


@PARAMETERS
def test_a_rendered_message_is_parsed_back(row: dict[str, Any]) -> None:
    parser = parser_for(row["model_type"], row["template"])
    text = row["text"]

    whole = parse(parser, [text], row["prompt_tail"])

    assert whole["reasoning"] == ("The user wants\nweather." if row["reasoning"] else "")
    assert whole["content"] == ("Let me look." if row["content"] else "")
    assert whole["calls"] and all(complete for *_, complete in whole["calls"])
    assert {name: json.loads(text) for name, text, _ in whole["calls"]} == {
        name: CALLS[name] for name in CALLS if name in text
    }
    for i in range(len(text)):
        assert parse(parser, [text[:i], text[i:]], row["prompt_tail"]) == whole
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), 30))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(parser, pieces, row["prompt_tail"]) == whole


@PARAMETERS
def test_without_tools_nothing_becomes_a_call(row: dict[str, Any]) -> None:
    parser = parser_for(row["model_type"], row["template"])

    message = parse(parser, row["text"], row["prompt_tail"], tools=None)

    assert not message["calls"] and "Zürich" in message["content"]
    assert ("The user wants" in message["reasoning"]) == row["reasoning"]


@PARAMETERS
def test_a_message_that_is_cut_off_completes_no_call_that_is_not(row: dict[str, Any]) -> None:
    parser = parser_for(row["model_type"], row["template"])
    text = row["text"]
    whole = parse(parser, [text], row["prompt_tail"])
    for i in range(len(text)):
        part = parse(parser, [text[:i]], row["prompt_tail"])
        for call, full in zip(part["calls"], whole["calls"], strict=False):
            assert call[0] == full[0]
            assert call == full or not call[2]


@PARAMETERS
def test_a_text_that_only_mentions_a_marker_is_content(row: dict[str, Any]) -> None:
    parser = parser_for(row["model_type"], row["template"])
    if row["model_type"] == "gpt_oss":
        markers, header = ["to=functions.get_weather"], "<|channel|>final<|message|>"
    else:
        markers, header = list(parser.special_tokens), ""
    tail = row["prompt_tail"].replace("<think>", "</think>")
    for marker in markers:
        text = f"It begins with {marker}, then {marker} comes.\n"
        assert parse(parser, header + text, tail) == {"content": text, "reasoning": "", "calls": []}


def test_arguments_are_given_as_they_come() -> None:
    row = BY_MODEL["deepseek-ai/DeepSeek-V3.1"]
    stream = parser_for("deepseek_v3", row["template"]).stream(row["prompt_tail"], TOOLS)
    before, _, after = row["text"].partition('{"city": "')

    assert isinstance(stream.feed(before + "{")[-2], ToolCallStart)
    assert [e.text for e in stream.feed('"city": "Zü')] == ['"city": "Zü']  # type: ignore[union-attr]
    assert stream.feed(after)


def test_text_is_given_at_once_but_for_what_may_be_a_marker() -> None:
    row = BY_MODEL["Qwen/Qwen3-30B-A3B"]
    stream = parser_for("qwen3_moe", row["template"]).stream("<think>\n", TOOLS)

    assert stream.feed("Is 1 <") == [Reasoning("Is 1")]
    assert stream.feed(" 2?") == [Reasoning(" < 2?")]
    assert stream.feed("</thi") == []
    assert stream.feed("nk>\n\nYes <tool") == [Content("Yes")]
    assert stream.close() == [Content(" <tool")]


def test_qwen_whose_template_shows_no_calls() -> None:
    """Qwen3-Next's calls are Qwen3's, Qwen3.6's those of Qwen3-Coder."""
    for like, model_type in (
        ("Qwen/Qwen3-30B-A3B", "qwen3_next"),
        ("Qwen/Qwen3.5-4B", "qwen3_5_moe_text"),
    ):
        row = BY_MODEL[like]
        found = parse(parser_for(model_type), [row["text"]], row["prompt_tail"])
        assert {name: json.loads(text) for name, text, _ in found["calls"]} == CALLS


def test_ids_have_the_form_that_the_template_wants_back() -> None:
    def first_id(model: str) -> str:
        row = BY_MODEL[model]
        stream = parser_for(row["model_type"], row["template"]).stream(row["prompt_tail"], TOOLS)
        return next(e.id for e in stream.feed(row["text"]) if isinstance(e, ToolCallStart))

    assert first_id("moonshotai/Kimi-K2-Instruct") == "functions.get_weather:0"
    assert first_id("mistralai/Mistral-Small-3.2-24B-Instruct-2506") == "call00000"
    nemo = first_id("mistralai/Mistral-Nemo-Instruct-2407")
    assert len(nemo) == 9 and nemo.isalnum()
