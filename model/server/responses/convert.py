"""The items of a request as a conversation that chat templates know."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from .schema import (
    CallOutputItem,
    Content,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    PicturePart,
    ReasoningItem,
    ResponsesRequest,
    TextPart,
)
from .tools import flat_name

_SEALED = "pykernels1."
"""Begins reasoning that a client keeps for us, as it keeps what OpenAI has encrypted."""


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages of a request. What the assistant did in a row is one message: its reasoning, its
    text and its calls."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    names: dict[str, str] = {}
    for item in body.input:
        if isinstance(item, MessageItem) and item.role != "assistant":
            _add_message(messages, item)
        elif isinstance(item, CallOutputItem):
            result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            if (name := names.get(item.call_id)) is not None:
                result["name"] = name
            messages.append(result)
        else:
            _add_to_assistant(messages, item, names)
    return messages


def sealed(reasoning: str) -> str:
    """Reasoning as a text that clients give back as it is."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unsealed(text: str) -> str:
    """The reasoning again; nothing of what others have encrypted."""
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _add_message(messages: list[dict[str, Any]], item: MessageItem) -> None:
    text, last = _text(item.content), messages[-1] if messages else None
    # Several instructions, or texts of the user's, in a row are one message: some templates want
    # turns to alternate, and allow instructions at the start only.
    if last is not None and last["role"] == item.role == "user":
        last["content"] += f"\n{text}"
    elif (
        item.role != "user" and len(messages) == 1 and last is not None and last["role"] == "system"
    ):
        last["content"] += f"\n\n{text}"
    else:
        role = "system" if item.role == "developer" and not messages else item.role
        messages.append({"role": role, "content": text})


def _add_to_assistant(messages: list[dict[str, Any]], item: Any, names: dict[str, str]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    if isinstance(item, MessageItem):
        message["content"] += _text(item.content)
    elif isinstance(item, ReasoningItem):
        if thought := _thought(item):
            message["reasoning_content"] = message["thinking"] = thought
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        name = flat_name(item.name, item.namespace)
        names[item.call_id] = name
        function = {"name": name, "arguments": _arguments(item)}
        calls = message.setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})


def _arguments(item: FunctionCallItem | CustomCallItem) -> Any:
    if isinstance(item, CustomCallItem):
        return {"input": item.input}
    try:
        value = json.loads(item.arguments or "{}")
    except (ValueError, RecursionError):
        return item.arguments
    return value if isinstance(value, dict) else item.arguments


def _thought(item: ReasoningItem) -> str:
    texts = [part.text for part in item.content or item.summary or ()]
    return "\n".join(texts) or unsealed(item.encrypted_content or "")


def _text(content: Content) -> str:
    return "\n".join(_part(part) for part in content)


def _part(part: TextPart | PicturePart) -> str:
    if isinstance(part, PicturePart):
        return f"[{part.type} left out: this model reads text only]"
    return part.text


def pictures(body: ResponsesRequest) -> int:
    """How many parts a note has replaced."""
    count = 0
    for item in body.input:
        if isinstance(item, MessageItem):
            content = item.content
        elif isinstance(item, CallOutputItem):
            content = item.output
        else:
            continue
        count += sum(isinstance(part, PicturePart) for part in content)
    return count
