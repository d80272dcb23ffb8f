"""A parser's events as items of the output, and as the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from ..parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from .convert import sealed
from .tools import Tools, custom_input

Told = tuple[str, dict[str, Any]]
"""The type of an event, and its fields."""


class Items:
    """Items that grow.

    Attributes:
        output: those that are done, and the open one.
    """

    def __init__(self, tools: Tools) -> None:
        self.output: list[dict[str, Any]] = []
        self._tools = tools
        self._open = False

    def events(self, event: Event, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Told]:
        """Yields what the client is told of an event.

        Args:
            logprobs: of a text's tokens.
        """
        if isinstance(event, Content):
            yield from self._add_text(event.text, logprobs)
        elif isinstance(event, Reasoning):
            yield from self._add_reasoning(event.text)
        elif isinstance(event, ToolCallStart):
            yield from self.close()
            yield self._begin(self._call(event))
        elif isinstance(event, ToolCallArguments):
            item = self.output[-1]
            if item["type"] == "function_call":
                item["arguments"] += event.text
                yield self._told("response.function_call_arguments.delta", delta=event.text)
            else:  # its text is known when all of it is there
                item["input"] += event.text
        elif isinstance(event, ToolCallEnd):
            yield from self.close()

    def close(self, status: str = "completed") -> Iterator[Told]:
        """Ends the open item.

        Args:
            status: "incomplete" of an answer that was cut off.
        """
        if not self._open:
            return
        self._open = False
        item = self.output[-1]
        item["status"] = status
        kind = item["type"]
        if kind == "message":
            part = item["content"][0]
            yield self._told(
                "response.output_text.done", 0, text=part["text"], logprobs=part["logprobs"]
            )
            yield self._told("response.content_part.done", 0, part=part)
        elif kind == "reasoning":
            text = item["content"][0]["text"]
            item["encrypted_content"] = sealed(text)
            yield self._told("response.reasoning_text.done", 0, text=text)
        elif kind == "function_call":
            yield self._told(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            item["input"] = custom_input(item["input"])
            name = "response.custom_tool_call_input"
            yield self._told(f"{name}.delta", delta=item["input"])
            yield self._told(f"{name}.done", input=item["input"])
        index = len(self.output) - 1
        yield "response.output_item.done", {"output_index": index, "item": item}

    def _add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Told]:
        if not self._is_open("message"):
            if not text.strip():  # between reasoning and calls
                return
            yield from self.close()
            item = {"id": _id("msg"), "type": "message", "role": "assistant", "content": []}
            yield self._begin(item)
            part: dict[str, Any] = {
                "type": "output_text",
                "text": "",
                "annotations": [],
                "logprobs": [],
            }
            self.output[-1]["content"].append(part)
            yield self._told("response.content_part.added", 0, part=part | {"logprobs": []})
        self.output[-1]["content"][0]["text"] += text
        self.output[-1]["content"][0]["logprobs"] += logprobs
        yield self._told("response.output_text.delta", 0, delta=text, logprobs=list(logprobs))

    def _add_reasoning(self, text: str) -> Iterator[Told]:
        if not self._is_open("reasoning"):
            yield from self.close()
            yield self._begin({"id": _id("rs"), "type": "reasoning", "summary": [], "content": []})
            self.output[-1]["content"].append({"type": "reasoning_text", "text": ""})
        self.output[-1]["content"][0]["text"] += text
        yield self._told("response.reasoning_text.delta", 0, delta=text)

    def _call(self, event: ToolCallStart) -> dict[str, Any]:
        named = self._tools.named(event.name)
        call: dict[str, Any] = {"call_id": event.id, "name": named.name}
        if named.namespace is not None:
            call["namespace"] = named.namespace
        if named.custom:
            return {"id": _id("ctc"), "type": "custom_tool_call", **call, "input": ""}
        return {"id": _id("fc"), "type": "function_call", **call, "arguments": ""}

    def _is_open(self, kind: str) -> bool:
        return self._open and bool(self.output[-1]["type"] == kind)

    def _begin(self, item: dict[str, Any]) -> Told:
        self._open = True
        item["status"] = "in_progress"
        self.output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        return "response.output_item.added", {"output_index": len(self.output) - 1, "item": shown}

    def _told(self, kind: str, content_index: int | None = None, **fields: Any) -> Told:
        at = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        if content_index is not None:
            at["content_index"] = content_index
        return kind, at | fields


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
