"""What parsers' events add up to, and the tools of the recorded calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model.server.parsers import (
    Content,
    Parser,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
"""Messages with calls as the chat templates of these models render them (transformers' renderer,
templates of the hub), and the lines of the templates that write calls."""

BY_MODEL = {row["model"]: row for row in RECORDED}

CALLS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": "Zürich", "days": 3, "details": True},
    "save_note": {
        "text": 'a "b" <c>\n</x> {d}: 1\\',
        "tags": ["x", "y"],
        "where": {"k": [1, None]},
        "size": 1.5,
    },
}
"""What was rendered."""


def _tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": value} for key, value in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    _tool("get_weather", city="string", days="integer", details="boolean"),
    _tool("save_note", text="string", tags="array", where="object", size="number"),
]


def parse(
    parser: Parser, pieces: Iterable[str], prompt_tail: str = "", tools: Any = TOOLS
) -> dict[str, Any]:
    """The whole message; of each call its name, arguments, and whether it was completed."""
    stream = parser.stream(prompt_tail, tools)
    events = [event for piece in pieces for event in stream.feed(piece)] + stream.close()
    content = "".join(e.text for e in events if isinstance(e, Content))
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    calls: list[list[Any]] = []
    ids = set()
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(calls) and event.id not in ids
            ids.add(event.id)
            calls.append([event.name, "", False])
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(calls) - 1 and event.text and not calls[-1][2]
            calls[-1][1] += event.text
        elif isinstance(event, ToolCallEnd):
            calls[-1][2] = True
    return {"content": content, "reasoning": reasoning, "calls": calls}
